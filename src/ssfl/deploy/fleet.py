"""The sites, as the centre reaches them: who is there, what they are sent, what comes back in time.

A round goes on with a quorum of the sites. Where fewer answer, those that did not are asked again; a site's
work depends on nothing but the round, so that it does not matter at which time it was asked.
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
from ssfl.deploy.keys import NAME
from ssfl.errors import DataError, RunError

LINE_EVERY = 10.0
"""Seconds between two lines about who is missing."""
GREETING = 10.0
"""Seconds to wait for sites that were asked who they are, after the last of them answered."""
LATER = 30.0
"""Seconds until a site that did not say who it is, but something else, is asked again."""
SOON = 10.0
"""Seconds until a site whose name is taken is asked again: the other may be gone without our knowing yet."""
SHARE = 2 / 3
"""The quorum, as a share of the sites that have joined."""
FEWEST = 2
"""No quorum is less, where there are so many sites: one site's update alone is no average."""


@dataclass(frozen=True)
class Answers:
    """What came of a round's messages."""

    sent: Collection[int]
    """The users that were sent a model."""
    came: Mapping[int, tuple[Tensor, dict[str, float]]]
    """The models and numbers of those that came back in time, by user."""
    refused: Mapping[int, str]
    """Why a user was refused something; its model may have come all the same."""
    traffic: Mapping[str, int]
    """Bytes that went over the port meanwhile, Flower's own included: `wire_up`, `wire_down`."""
    missing: list[str] = field(default_factory=list)
    """The sites that should have taken part, gave no model and were refused none."""
    again: list[int] = field(default_factory=list)
    """The users that were sent a model once more, each as often as that."""


@dataclass
class Fleet:
    """The sites, as the centre reaches them."""

    grid: post.Exchange
    names: list[str]
    """In the order of the users' numbers."""
    needed: int
    """How many sites are waited for before the first round."""
    deadline: float
    """Seconds that sites have for a round."""
    patience: float
    """Seconds without any answer after which the run stops."""
    tell: Tell
    notes: Queue[dict[str, Any]] = field(default_factory=Queue)
    """What the port tells, from whatever thread: something refused, or how much has travelled."""
    exclude: Callable[[Collection[int]], None] = lambda nodes: None
    """Has the port drop nodes that are left out."""
    asked: bool = False
    """Whether sites tell their names themselves, for want of keys."""
    look: Callable[[], None] = lambda: None
    """Looks for keys that were replaced or taken away."""
    quorum: int | None = None
    """How many sites must take part in a round; by default two thirds of those that have joined."""
    images: dict[str, int] = field(default_factory=dict)
    """How many images each site says that it has."""
    doing: dict[str, str] = field(default_factory=dict)
    """What each site is doing, in words."""
    left_out: set[str] = field(default_factory=set)
    """Who takes no part any more."""
    log: list[Event] = field(default_factory=list)
    """What was refused and has not been written down yet."""
    _joined: set[str] = field(default_factory=set)
    """Who has been there, and counts for the quorum."""
    _without: list[str] = field(default_factory=list)
    """Who was missing when that was last told."""
    _traffic: dict[str, int] = field(default_factory=dict)
    """Bytes that have gone over the port, if it tells."""
    _refused: dict[str, str] = field(default_factory=dict)
    """Who was refused what since this was last looked at."""
    _nodes: dict[int, str] = field(default_factory=dict)
    """Who is behind a number of Flower's."""
    _greeted: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Nodes that were asked who they are, in which message, and until when they may answer."""
    _turned_away: dict[int, float] = field(default_factory=dict)
    """Nodes that are not asked who they are, and until when."""
    _limits: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often a site's update was "cut" or "weakened"."""
    _reached: bool = True
    """Whether the exchange itself could be reached when it was last asked."""

    def least(self, sites: int) -> int:
        """The quorum of so many sites."""
        usual = min(self.needed, max(FEWEST, math.ceil(SHARE * sites)))
        return min(sites, usual if self.quorum is None else self.quorum)

    def refuse(self, name: str | None, why: str, host: str | None = None, counted: bool = False) -> None:
        """Somebody's message goes no further, without a name a stranger's; it may be counted already."""
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
        """Name a site whose update was cut."""
        self._limited(name, "cut", f"an update {times:.3g} times as long as is usual: it was cut")

    def weakened(self, name: str, weight: float) -> None:
        """Name a site that counts less or not at all because it works against the centre's labels."""
        how = f"this one counts {weight:.0%}" if weight else "this one was dropped"
        self._limited(name, "weakened", f"updates that work against the centre's labels: {how}")

    def _limited(self, name: str, what: str, why: str) -> None:
        """A line and an event; who goes on with it is named ever less often: the 1st, 2nd, 4th, ... time."""
        count = self._limits[name, what] = self._limits.get((name, what), 0) + 1
        if count & (count - 1) == 0:
            if what == "weakened":  # a cut is in the round's own event
                self.log.append({"event": "limited", "site": name, "reason": f"{why} ({count} so far)"})
            self.tell(f"{name} sent {why} ({count} so far)")

    def listen(self) -> set[int]:
        """Take in what the port told; gives the nodes whose answer cannot come any more."""
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
                    self.tell(f"the connection of {name} broke: {post.short(note['reason'])}")
                else:
                    self.refuse(name, note["reason"], None if name else note["from"])
        return lost

    def connected(self) -> dict[int, int]:
        """Flower's number of each user that is there and takes part."""
        try:
            online = {node.node_id: node for node in self.grid.get_nodes()}
        except post.TROUBLE as error:
            if self._reached:
                self.tell(f"the sites cannot be reached ({post.short(error)}): trying again")
            self._reached = False
            return {}
        self._reached = True
        for node, name in list(self._nodes.items()):
            if node not in online:
                del self._nodes[node]
                self.doing[name] = "away"
                self.tell(f"{name} is away")
        now = time.monotonic()
        known = self._nodes.keys() | {node for node, until in self._turned_away.items() if now < until}
        new = {number: node for number, node in online.items() if number not in known}
        self._greet(new)
        nodes = {name: node for node, name in self._nodes.items() if name not in self.left_out}
        return {user: nodes[name] for user, name in enumerate(self.names) if name in nodes}

    def _greet(self, strangers: Mapping[int, NodeInfo]) -> None:
        """Ask new sites who they are and how many images they have.

        Who is slow holds nobody up for long: its answer is taken in whenever it comes.
        """
        now = time.monotonic()
        self._greeted = {
            node: asked for node, asked in self._greeted.items() if node in strangers and now < asked[1]
        }
        new = {
            node: RecordDict({"config": ConfigRecord({"ask": "who"})})
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
        """What sites have answered that were asked who they are."""
        answers = {}
        for node, (name, _) in list(self._greeted.items()):
            try:
                replies = list(self.grid.pull_messages([name]))
            except Exception as error:  # it stopped in the middle, or is gone: it is asked again
                self.tell(f"{node} did not say who it is: {post.short(error)}")
                self._turned_away[node] = time.monotonic() + SOON
                del self._greeted[node]
                continue
            for reply in replies:
                del self._greeted[node]
                if reply.has_content():
                    answers[node] = reply.content
                elif reply.error.code not in post.LATE:
                    self.tell(f"{node} did not say who it is, but {post.short(reply.error.reason)}")
                    self._turned_away[node] = time.monotonic() + LATER
        return answers

    def _introduce(self, node: int, content: RecordDict, info: NodeInfo) -> None:
        """A site said who it is."""
        try:
            claimed, count = wire.read_who(content)
        except DataError as error:
            self.tell(f"{info.name or node} did not say who it is, but {post.short(error)}")
            self._turned_away[node] = time.monotonic() + LATER
            return
        name = claimed if self.asked else info.name
        free = self.asked and len(self.names) < self.needed and NAME.fullmatch(name)
        if free and name not in self.names:
            self.names = sorted([*self.names, name])
        if name not in self.names or name in self._nodes.values():
            taken = name in self.names
            why = "another site has that name" if taken else "no such site is expected"
            self.tell(f"{post.short(name)} is turned away: {why}")
            self._turned_away[node] = time.monotonic() + SOON if taken else float("inf")
            return
        self._nodes[node], self.images[name] = name, count
        self._joined.add(name)
        self.doing[name] = "connected"
        self.tell(f"{name} is connected with {count} images")
        if name in self.left_out:
            self._send_away([node])

    def gather(self, first: bool = False) -> dict[int, int]:
        """Wait for a quorum of the sites; before the `first` round for all, as long as there is patience."""
        end, shown_at, shown = time.monotonic() + self.patience, 0.0, ""
        while True:
            self.look()
            self.listen()
            there = self.connected()
            most = len(self.names) - len(self.left_out) if self.names else self.needed
            if most < 1:
                raise RunError("every site is left out after three refusals: look at the sites")
            needed = min(self.needed, most)
            quorum = max(1, self.least(needed if first else len(self._joined - self.left_out)))
            if len(there) >= (needed if first else quorum):
                return there
            expected = self.names if first else sorted(self._joined)
            missing = [n for n in expected if n not in self._nodes.values() and n not in self.left_out]
            wanted = needed if first else quorum
            line = f"{len(there)} of {wanted} sites are there, {wanted - len(there)} missing"
            line += f" ({', '.join(missing[:10])})" if missing else ""
            if time.monotonic() > end:
                # where sites say their names themselves, all must have been there to be numbered
                if first and not self.asked and len(there) >= quorum:
                    return there
                raise RunError(
                    f"{line}, after {self.patience:.0f} s: get them to join, or ask for fewer with "
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
        """Send each node its content; the answers that come in time."""
        return post.exchange(
            self.grid, contents, kind, deadline, self.tell, self._called, self.listen, meanwhile
        )

    def _called(self, node: int) -> str:
        return self._nodes.get(node, str(node))

    def train(
        self,
        models: Mapping[int, wire.Sent],
        terms: str,
        round: int,
        meanwhile: Callable[[], None],
        alone: bool = True,
    ) -> Answers:
        """Send the users that are there a model each; what comes back.

        Who does not answer is asked again until there is a quorum; where none of these users is there, the
        server may go on `alone`.
        """
        before, heard, wait = dict(self._traffic), time.monotonic(), self.deadline
        came: dict[int, tuple[Tensor, dict[str, float]]] = {}
        refused: dict[int, str] = {}
        sent: list[int] = []
        while True:
            nodes = self.gather()
            left = [user for user in models if self.names[user] not in self.left_out]
            users = {
                nodes[user]: user for user in left if user in nodes and not (user in came or user in refused)
            }
            self._tell_missing([self.names[user] for user in left if user not in nodes])
            sent += users.values()
            new = self._ask(users, models, terms, round, wait, meanwhile)
            numbers = {name: user for user, name in enumerate(self.names)}
            refused |= {numbers[name]: why for name, why in self._refused.items()}
            heard = time.monotonic() if new or self._refused else heard
            self._refused.clear()
            came |= new
            asked = set(sent)
            if len(came.keys() | refused.keys() & asked) >= min(len(asked), self.least(len(left))) and (
                asked or alone or not left
            ):
                break
            if time.monotonic() - heard > self.patience:
                raise RunError(
                    f"no site gave a model in round {round + 1} for {self.patience:.0f} s: look at the "
                    "sites, or give them longer with --deadline"
                )
            late = [self.names[user] for user in sent if not (user in came or user in refused)]
            self.tell(
                f"round {round + 1} has {len(came)} of {len(asked)} models: asking again "
                f"{', '.join(dict.fromkeys(late))}"
            )
            wait, meanwhile = min(2 * wait, max(self.patience, self.deadline)), _nothing
            if not users:
                time.sleep(1)
        missing = [self.names[user] for user in left if not (user in came or user in refused)]
        traffic = {f"wire_{way}": total - before.get(way, 0) for way, total in self._traffic.items()}
        once = list(dict.fromkeys(sent))
        again = [user for user in once for _ in range(sent.count(user) - 1)]
        return Answers(once, came, refused, traffic, missing, again)

    def _ask(
        self,
        users: Mapping[int, int],
        models: Mapping[int, wire.Sent],
        terms: str,
        round: int,
        wait: float,
        meanwhile: Callable[[], None],
    ) -> dict[int, tuple[Tensor, dict[str, float]]]:
        """Send a model to these nodes; the models and numbers that come back in time, by user."""
        contents = {
            node: wire.pack_work(models[user], terms=terms, user=user, round=round)
            for node, user in users.items()
        }
        self.doing |= {self.names[user]: "training" for user in users.values()}
        came = {}
        for node, content in self.exchange(contents, "train", wait, meanwhile).items():
            user = users[node]
            try:
                came[user] = wire.read_trained(content, models[user].row.numel(), round)
                self.doing[self.names[user]] = "answered"
                self.images[self.names[user]] = wire.read_images(content)
            except DataError as error:
                self.refuse(self.names[user], str(error))
        for user in users.values():
            if self.doing[self.names[user]] == "training":
                self.doing[self.names[user]] = "no answer"
        return came

    def _tell_missing(self, missing: list[str]) -> None:
        """Name the sites that a round goes on without, once for as long as they are the same."""
        if missing and missing != self._without:
            self.tell(f"going on without {', '.join(missing[:10])}{', ...' if missing[10:] else ''}")
        self._without = missing

    def leave_out(self, users: Collection[int]) -> None:
        """Send these users no model any more, and say so to them."""
        new = {self.names[user] for user in users} - self.left_out
        for name in sorted(new):
            self.tell(f"{name} is left out from here on: it was refused three times")
            self.doing[name] = "left out"
        self.left_out |= new
        self._send_away([node for node, name in self._nodes.items() if name in new])

    def _send_away(self, nodes: Collection[int]) -> None:
        """Tell sites that they are left out; nobody waits for what they say to that."""
        why = "the centre refused three of this site's answers and leaves it out: ask its keeper"
        end = ConfigRecord({"ask": "end", "why": why})
        contents = {node: RecordDict({"config": end}) for node in nodes}
        list(post.send(self.grid, contents, "query", self.deadline, self.tell, self._called))
        self.exclude(nodes)

    def dismiss(self, why: str, model: Tensor | None = None, card: str = "") -> None:
        """Tell everybody that all rounds are played, with the model that they may keep; who leaves at once
        need not answer."""
        self.tell = lambda line: None
        contents = {}
        for node, name in self._nodes.items():
            if model is not None and name not in self.left_out:
                contents[node] = wire.pack(model, ask="end", why=why, card=card)
            else:
                contents[node] = RecordDict({"config": ConfigRecord({"ask": "end", "why": why})})
        self.exchange(contents, "query", 10.0 if model is None else self.deadline)


def _nothing() -> None:
    """What the centre does while sites train once more."""
