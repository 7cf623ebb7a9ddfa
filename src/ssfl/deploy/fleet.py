"""The sites as the centre sees them: which sites are connected, what they are sent, and which answers arrive
in time.

A round needs answers from a quorum of the sites. If too few sites answer, those that have not answered are
asked again. A site's training depends only on the round and the model it is sent, not on when it is asked.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from ssfl.core.events import Event
from ssfl.deploy import Tell, post, wire
from ssfl.deploy.internals import NodeInfo
from ssfl.deploy.keys import NAME, NAME_RULE
from ssfl.errors import DataError, RunError

LINE_EVERY = 10.0
"""Seconds between two output lines about missing sites."""
GREETING = 10.0
"""The centre asks new sites for their names. It stops waiting after this many seconds without an answer;
later answers are still handled."""
LATER = 30.0
"""Seconds until the centre asks a site for its name again, if its answer was not valid."""
SOON = 10.0
"""Seconds until the centre asks a site for its name again, if the name was taken or the answer did not arrive
completely. The other site of that name may have disconnected without the centre knowing it yet."""
TAKEN = 30.0
"""Seconds for which a site without a key, whose name is taken, is asked for its name again. Then it is told
that the name is taken, and has to leave. A site with a key is asked again without a limit."""
SHARE = 2 / 3
"""The default quorum, as a fraction of the sites that have joined."""
EXCLUDED = "the centre has excluded this site after refusing three of its answers: ask its operator why"
"""The text that an excluded site is sent."""
FEWEST = 2
"""The smallest default quorum: with a single update there would be nothing to average. If there are fewer
sites than this, the quorum is all of them."""


@dataclass(frozen=True)
class Answers:
    """The result of one round's communication: which users were sent a model and what came back."""

    sent: Collection[int]
    """The numbers of the users that were sent a model."""
    returned: Mapping[int, tuple[Tensor, dict[str, float]]]
    """The model (all weights as one vector) and the metrics of each user whose answer came in time and was
    accepted."""
    refused: Mapping[int, str]
    """For each user that sent a message that was refused: the reason. If the same user also sent an answer
    that was accepted, the user is in `returned` too."""
    traffic: Mapping[str, int]
    """Bytes sent and received at the centre's port during the round, including those that Flower adds:
    `wire_up` to the centre, `wire_down` to the sites."""
    missing: list[str] = field(default_factory=list)
    """The names of the sites that should have taken part but sent no model, neither an accepted nor a refused
    one."""
    again: list[int] = field(default_factory=list)
    """The users that were sent their model more than once in this round. A user that was sent the model three
    times is listed twice."""


@dataclass
class Fleet:
    """All sites of a federation as the centre sees them. It waits for sites, sends them models, and collects
    their answers."""

    grid: post.Exchange
    """The connection to Flower that sends and receives messages."""
    names: list[str]
    """The names of the sites. Site `names[i]` is user i."""
    needed: int
    """How many sites the centre waits for before the first round."""
    deadline: float
    """How many seconds a site has to answer in a round."""
    patience: float
    """The run stops with an error if too few sites are connected for this many seconds, or if no site answers
    for this many seconds."""
    tell: Tell
    notes: Queue[dict[str, Any]] = field(default_factory=Queue)
    """Reports from the process at the centre's port: refused requests, and numbers of bytes. Another thread
    puts them here."""
    exclude: Callable[[Collection[int]], None] = lambda nodes: None
    """A function that takes Flower's node numbers of excluded sites. It tells the process at the centre's
    port to refuse the requests of these nodes."""
    asked: bool = False
    """Whether sites choose their own names. Otherwise each site is known by its key."""
    look: Callable[[], None] = lambda: None
    """Applies changes in the keys folder: keys that were replaced, removed or added."""
    quorum: int | None = None
    """How many sites must take part in a round. None: two thirds of the sites that have joined, within the
    bounds that `least` describes."""
    images: dict[str, int] = field(default_factory=dict)
    """The number of images that each site reports."""
    doing: dict[str, str] = field(default_factory=dict)
    """For each site, a text that says what the site is doing. The centre shows it on the terminal, in a table
    of the sites."""
    left_out: set[str] = field(default_factory=set)
    """The names of the sites that are excluded from the run."""
    log: list[Event] = field(default_factory=list)
    """Events that have not yet been written to the run folder. They report refused messages, and updates that
    got a lower weight."""
    _joined: set[str] = field(default_factory=set)
    """The names of all sites that have connected at least once. The default quorum is a fraction of their
    number."""
    _without: list[str] = field(default_factory=list)
    """The sites that were missing (not connected) at the last call of `_tell_missing`. If the same sites are
    missing at the next call, nothing is printed."""
    _traffic: dict[str, int] = field(default_factory=dict)
    """The latest counts of bytes at the centre's port, `up` and `down`; empty if they are not reported."""
    _refused: dict[str, str] = field(default_factory=dict)
    """For each site, why one of its messages was refused. It is cleared after each attempt to collect
    models."""
    _nodes: dict[int, str] = field(default_factory=dict)
    """The name of the site behind each node. Flower numbers its nodes, and a site gets a new number when its
    key changes."""
    _greeted: dict[int, tuple[str, float]] = field(default_factory=dict)
    """For each node that was asked for its name: the identifier of the message that asked, and the time until
    which the node may answer (`time.monotonic`)."""
    _rejected: dict[int, float] = field(default_factory=dict)
    """For each node that may not join: the time before which the centre does not ask for its name again
    (`time.monotonic`)."""
    _taken: dict[int, float] = field(default_factory=dict)
    """For each node that sent the name of another connected site: when the node first sent this name
    (`time.monotonic`)."""
    _limits: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often a site's update was limited, by the site's name and the kind of limit. "cut": the update was
    scaled down. "weakened": the update got a lower weight."""
    _reached: bool = True
    """Whether Flower's SuperLink answered at the last attempt. It is used to report a failure only once."""

    def least(self, sites: int) -> int:
        """Returns the quorum of `sites` sites: how many of them must be connected to start a round, and must
        answer to finish it.

        If the field `quorum` is None, the quorum is two thirds of these sites, but at least `FEWEST` and at
        most `needed` sites. The quorum is never larger than `sites`.
        """
        usual = min(self.needed, max(FEWEST, math.ceil(SHARE * sites)))
        return min(sites, usual if self.quorum is None else self.quorum)

    def refuse(self, name: str | None, why: str, host: str | None = None, counted: bool = False) -> None:
        """Prints and logs that a message was refused, and why.

        `name` is the site that sent the message. If `name` is None, a stranger at the address `host` sent it.
        A site is excluded after three of its answers were refused. If `counted` is true, this refusal was
        already counted against the site, and is not counted again.
        """
        why = post.short(why)
        event: Event = {"event": "refused", "site": name, "reason": why}
        self.log.append(event if host is None else event | {"from": host})
        if name is None:
            self.tell(f"refused: {host} sent {why}")
            return
        self.doing[name] = f"refused: {why}"
        if not counted:
            self._refused[name] = why
        self.tell(f"refused: {name} sent {why}")

    def cut(self, name: str, times: float) -> None:
        """Reports that a site's update was scaled down, because it was `times` times as long as allowed (see
        `GateResult.times`)."""
        self._limited(
            name,
            "cut",
            f"an update that is {times:.3g} times as long as the gate allows, so it was scaled down",
        )

    def weakened(self, name: str, weight: float) -> None:
        """Reports that a site's update gets only the fraction `weight` of its usual weight in the average; 0
        means that it is not used. The reason: updates of this site tend to increase the loss on the centre's
        labelled images."""
        how = f"its weight in this round is {weight:.0%}" if weight else "it is not used in this round"
        self._limited(
            name, "weakened", f"updates that tend to increase the loss on the centre's labels: {how}"
        )

    def _limited(self, name: str, what: str, why: str) -> None:
        """Prints that a site's update was limited. `what` is the kind of limit: "cut" (the update was scaled
        down) or "weakened" (it got a lower weight). `why` is the text to print.

        A "weakened" update is also logged here; a "cut" update is already in the round's event. To keep the
        output and the log short, only the 1st, 2nd, 4th, 8th, ... limit of the same site and kind is
        reported.
        """
        count = self._limits[name, what] = self._limits.get((name, what), 0) + 1
        if count & (count - 1) == 0:
            told = f"{why} ({count} such update{'s' * (count > 1)} so far)"
            if what == "weakened":  # cuts are already in the round's event
                self.log.append({"event": "limited", "site": name, "reason": told})
            self.tell(f"{name} sent {told}")

    def listen(self) -> set[int]:
        """Handles the reports that have arrived from the process at the centre's port, such as refused
        requests. Returns the nodes whose answers can no longer arrive."""
        lost = set()
        with suppress(Empty):
            while True:
                note = self.notes.get_nowait()
                if "up" in note:
                    self._traffic = note
                    continue
                name = self._nodes.get(note["node"])
                if note["lost"]:
                    lost.add(note["node"])
                if name and note.get("broken"):
                    self.tell(f"the connection of {name} failed: {post.short(note['reason'])}")
                else:
                    self.refuse(name, note["reason"], None if name else note["from"])
        return lost

    def connected(self) -> dict[int, int]:
        """Finds out which sites are connected, and lets new sites join. Returns Flower's node number of each
        connected user that is not excluded. The keys are the users' numbers."""
        try:
            online = {node.node_id: node for node in self.grid.get_nodes()}
        except post.TROUBLE as error:
            if self._reached:
                self.tell(
                    "the process of this centre that exchanges messages with the sites (Flower's SuperLink) "
                    f"does not answer ({post.short(error)}): trying again"
                )
            self._reached = False
            return {}
        self._reached = True
        for node, name in list(self._nodes.items()):
            if node not in online:
                del self._nodes[node]
                self.doing[name] = "disconnected"
                self.tell(f"{name} has disconnected")
        now = time.monotonic()
        known = self._nodes.keys() | {node for node, until in self._rejected.items() if now < until}
        new = {number: node for number, node in online.items() if number not in known}
        self._greet(new)
        nodes = {name: node for node, name in self._nodes.items() if name not in self.left_out}
        return {user: nodes[name] for user, name in enumerate(self.names) if name in nodes}

    def _greet(self, strangers: Mapping[int, NodeInfo]) -> None:
        """Asks new sites for their names and numbers of images, and handles the answers.

        It waits only a few seconds for slow sites. Their answers are handled in a later call.
        """
        now = time.monotonic()
        self._greeted = {
            node: asked for node, asked in self._greeted.items() if node in strangers and now < asked[1]
        }
        new = {
            node: RecordDict({"config": ConfigRecord({"ask": "name"})})
            for node in strangers
            if node not in self._greeted
        }
        for node, name in post.send(self.grid, new, "query", self.deadline, self.tell, self._called):
            self._greeted[node] = name, now + self.deadline
        end, waiting = time.monotonic() + GREETING, set(new)
        while True:
            for node, content in self._greetings().items():
                self._introduce(node, content, strangers[node])
                waiting.discard(node)
                end = time.monotonic() + GREETING
            waiting &= self._greeted.keys()
            if not waiting or time.monotonic() > end:
                return
            time.sleep(getattr(self.grid, "pause", post.POLL))

    def _greetings(self) -> dict[int, RecordDict]:
        """Returns the answers that have arrived from sites that were asked for their names, by node."""
        answers = {}
        for node, (name, _) in list(self._greeted.items()):
            try:
                replies = list(self.grid.pull_messages([name]))
            except Exception as error:  # the answer is incomplete, or the site is gone: ask again
                self.tell(f"a site (node {node}) did not send its name: {post.short(error)}; asking again")
                self._rejected[node] = time.monotonic() + SOON
                del self._greeted[node]
                continue
            for reply in replies:
                del self._greeted[node]
                if reply.has_content():
                    answers[node] = reply.content
                elif reply.error.code not in post.LATE:
                    self.tell(
                        f"site {node} sent an error instead of its name: {post.short(reply.error.reason)}"
                    )
                    self._rejected[node] = time.monotonic() + LATER
        return answers

    def _introduce(self, node: int, content: RecordDict, info: NodeInfo) -> None:
        """Handles the answer of a site that was asked for its name: lets the site join, or turns it away."""
        try:
            claimed, count = wire.read_identity(content)
        except DataError as error:
            self.tell(f"site {info.name or node} sent {post.short(error)} instead of its name")
            self._rejected[node] = time.monotonic() + LATER
            return
        name = claimed if self.asked else info.name
        free = self.asked and len(self.names) < self.needed and NAME.fullmatch(name)
        if free and name not in self.names:
            self.names = sorted([*self.names, name])
        if name not in self.names or name in self._nodes.values():
            self._turn_away(node, name)
            return
        self._nodes[node], self.images[name] = name, count
        self._joined.add(name)
        self.doing[name] = "connected"
        self.tell(f"{name} has connected, with {count} images")
        if name in self.left_out:
            self._dismiss_nodes([node], EXCLUDED)

    def _turn_away(self, node: int, name: str) -> None:
        """Refuses to let a site join: its name is taken or not allowed, or the centre does not expect this
        site.

        If sites have keys, a site whose name is taken is asked again later. The other site of that name may
        have disconnected by then. A site that is not expected is not asked again.

        If sites choose their own names, a site whose name is taken is asked again for `TAKEN` seconds. Then
        the site is told why it may not join. A site that is not expected, or whose name is not allowed, is
        told so at once. After that, the site is not asked again.
        """
        now, taken = time.monotonic(), name in self.names
        if taken:
            why = "a connected site has this name" + (": start it with another --name" if self.asked else "")
        elif not self.asked:
            why = "no site of this name is expected"
        elif not NAME.fullmatch(name):
            why = f"its name must have {NAME_RULE}"
        else:
            why = f"the centre waits for {self.needed} sites, and as many others have joined already"
        name = post.short(name)
        self.tell(f"{name} may not join: {why}")
        if taken and now - self._taken.setdefault(node, now) < TAKEN:
            self._rejected[node] = now + SOON
            return
        self._rejected[node] = float("inf") if self.asked or not taken else now + SOON
        if self.asked:
            self._dismiss_nodes([node], f"the centre does not let {name} join: {why}")

    def gather(self, first: bool = False) -> dict[int, int]:
        """Waits until enough sites are connected. Returns Flower's node number of each connected user; the
        keys are the users' numbers.

        Before the first round (`first` is true), enough means `needed` sites; later it means a quorum. If
        there are too few sites after `patience` seconds, an error is raised. There is one exception: if the
        sites have keys, a quorum is then enough to start the first round.
        """
        end, shown_at, shown = time.monotonic() + self.patience, 0.0, ""
        while True:
            try:
                self.look()
            except post.TROUBLE as error:
                self.tell(f"the changed keys are not in use yet ({post.short(error)}): trying again")
            self.listen()
            nodes = self.connected()
            # sites that choose their own names are known one by one as they connect
            expected_sites = self.needed if self.asked or not self.names else len(self.names)
            most = expected_sites - len(self.left_out)
            if most < 1:
                raise RunError(
                    "no site is left: each was excluded, because three of its answers were refused or its "
                    "key was removed. See the reasons above, and check the sites and the keys folder"
                )
            needed = min(self.needed, most)
            quorum = max(1, self.least(needed if first else len(self._joined - self.left_out)))
            if len(nodes) >= (needed if first else quorum):
                return nodes
            expected = self.names if first else sorted(self._joined)
            missing = [n for n in expected if n not in self._nodes.values() and n not in self.left_out]
            wanted = needed if first else quorum
            line = f"{len(nodes)} of {wanted} sites are connected"
            line += (
                f" (missing: {', '.join(missing[:10])}{', ...' if missing[10:] else ''})" if missing else ""
            )
            if time.monotonic() > end:
                # if sites choose their own names, users can be numbered only when all have connected
                if first and not self.asked and len(nodes) >= quorum:
                    return nodes
                raise RunError(
                    f"{line} after {self.patience:.0f} s: start the missing sites, or wait for fewer with "
                    f"{'--sites' if first else '--quorum'}"
                )
            if line != shown or time.monotonic() - shown_at > LINE_EVERY:
                shown_at, shown = time.monotonic(), line
                self.tell(f"waiting: {line}")
            time.sleep(1)

    def exchange(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, RecordDict]:
        """Sends each node its content, and returns the contents of the answers that arrive within `deadline`
        seconds, by node. `kind` is "query" or "train". `meanwhile` is called once while the sites work. It is
        not called if `contents` is empty."""
        return post.exchange(
            self.grid, contents, kind, deadline, self.tell, self._called, self.listen, meanwhile
        )

    def _called(self, node: int) -> str:
        """Returns the name of a node's site for messages, or the node's number if the name is unknown."""
        return self._nodes.get(node, str(node))

    def train(
        self,
        models: Mapping[int, wire.Sent],
        terms: str,
        round: int,
        meanwhile: Callable[[], None],
        alone: bool = True,
    ) -> Answers:
        """Sends each connected user its model and returns the trained models that come back in time.

        Users that do not answer are asked again until there is a quorum. `terms` is the text with the
        settings that all sites must share. `meanwhile` trains the server's model while the sites train.
        `alone` says whether the round may continue with the server alone if none of the users is connected.
        """
        before, heard, wait = dict(self._traffic), time.monotonic(), self.deadline
        returned: dict[int, tuple[Tensor, dict[str, float]]] = {}
        refused: dict[int, str] = {}
        sent: list[int] = []
        while True:
            nodes = self.gather()
            left = [user for user in models if self.names[user] not in self.left_out]
            users = {
                nodes[user]: user
                for user in left
                if user in nodes and not (user in returned or user in refused)
            }
            self._tell_missing([self.names[user] for user in left if user not in nodes])
            sent += users.values()
            new = self._ask(users, models, terms, round, wait, meanwhile)
            numbers = {name: user for user, name in enumerate(self.names)}
            refused |= {numbers[name]: why for name, why in self._refused.items()}
            heard = time.monotonic() if new or self._refused else heard
            self._refused.clear()
            returned |= new
            asked = set(sent)
            if len(returned.keys() | refused.keys() & asked) >= min(len(asked), self.least(len(left))) and (
                asked or alone or not left
            ):
                break
            if time.monotonic() - heard > self.patience:
                raise RunError(
                    f"no site has sent a model in round {round + 1} for {self.patience:.0f} s: check the "
                    "sites, or give them more time with --deadline"
                )
            late = [self.names[user] for user in sent if not (user in returned or user in refused)]
            self.tell(
                f"round {round + 1}: {len(returned)} of {len(asked)} models have arrived; asking again: "
                f"{', '.join(dict.fromkeys(late))}"
            )
            wait, meanwhile = min(2 * wait, max(self.patience, self.deadline)), _nothing
            if not users:
                time.sleep(1)
        missing = [self.names[user] for user in left if not (user in returned or user in refused)]
        traffic = {f"wire_{way}": total - before.get(way, 0) for way, total in self._traffic.items()}
        once = list(dict.fromkeys(sent))
        again = [user for user in once for _ in range(sent.count(user) - 1)]
        return Answers(once, returned, refused, traffic, missing, again)

    def _ask(
        self,
        users: Mapping[int, int],
        models: Mapping[int, wire.Sent],
        terms: str,
        round: int,
        wait: float,
        meanwhile: Callable[[], None],
    ) -> dict[int, tuple[Tensor, dict[str, float]]]:
        """Sends each user its model once, and calls `meanwhile` while the sites train. `users` maps Flower's
        node numbers to users. Returns the valid models and metrics that arrive within `wait` seconds, by
        user."""
        contents = {
            node: wire.pack_work(models[user], terms=terms, user=user, round=round)
            for node, user in users.items()
        }
        self.doing |= {self.names[user]: "training" for user in users.values()}
        returned = {}
        for node, content in self.exchange(contents, "train", wait, meanwhile).items():
            user = users[node]
            try:
                returned[user] = wire.read_trained(content, models[user].row.numel(), round)
                self.doing[self.names[user]] = "answered"
                self.images[self.names[user]] = wire.read_images(content)
            except DataError as error:
                self.refuse(self.names[user], str(error))
        for user in users.values():
            if self.doing[self.names[user]] == "training":
                self.doing[self.names[user]] = "no answer"
        return returned

    def _tell_missing(self, missing: list[str]) -> None:
        """Prints the sites that are missing from a round, unless they are the same as last time."""
        if missing and missing != self._without:
            self.tell(
                "not connected, so not in this round: "
                f"{', '.join(missing[:10])}{', ...' if missing[10:] else ''}"
            )
        self._without = missing

    def leave_out(self, users: Collection[int]) -> None:
        """Excludes these users from the rest of the run, and tells their sites so."""
        new = {self.names[user] for user in users} - self.left_out
        for name in sorted(new):
            self.tell(f"{name} is excluded from now on: three of its answers were refused")
            self.doing[name] = "excluded"
        self.left_out |= new
        self._dismiss_nodes([node for node, name in self._nodes.items() if name in new], EXCLUDED)

    def _dismiss_nodes(self, nodes: Collection[int], why: str) -> None:
        """Tells these nodes why they may not take part, and lets the centre's port refuse their further
        requests. Does not wait for answers."""
        end = ConfigRecord({"ask": "end", "why": why, "refused": True})
        contents = {node: RecordDict({"config": end}) for node in nodes}
        list(post.send(self.grid, contents, "query", self.deadline, self.tell, self._called))
        try:
            self.exclude(nodes)
        except post.TROUBLE as error:  # they stay excluded: the centre sends them nothing
            self.tell(
                f"refused sites could not be disconnected ({post.short(error)}); they get no more models, "
                "and their answers are not used"
            )

    def dismiss(self, why: str, model: Tensor | None = None, card: str = "") -> None:
        """Tells all sites that the run is over, and why. If `model` is given, each site that is not excluded
        also gets this final model and its model card `card` (a JSON text).

        A site may disconnect without answering; this is not an error.
        """
        self.tell = lambda line: None
        contents = {}
        for node, name in self._nodes.items():
            if model is not None and name not in self.left_out:
                contents[node] = wire.pack(model, ask="end", why=why, card=card)
            else:
                contents[node] = RecordDict({"config": ConfigRecord({"ask": "end", "why": why})})
        self.exchange(contents, "query", 10.0 if model is None else self.deadline)


def _nothing() -> None:
    """Does nothing. It replaces `meanwhile` when sites are asked again, because the centre trains only once
    in a round."""
