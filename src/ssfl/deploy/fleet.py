"""The rounds of a federation as the centre sees them: what the sites are sent, and which answers arrive in
time.

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
from ssfl.deploy import post, wire
from ssfl.deploy.sites import EXCLUDED, Sites
from ssfl.errors import DataError, RunError

LINE_EVERY, SELDOM = 10.0, 600.0
"""Seconds after which an unchanged line about missing sites is printed again, the first time and at most. The
time doubles with each repetition."""
SHARE = 2 / 3
"""The default quorum, as a fraction of the sites that have joined."""
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


@dataclass(kw_only=True)
class Fleet(Sites):
    """The sites of a federation, to which the centre sends models. It waits for sites, and collects their
    answers."""

    patience: float
    """The run stops with an error if too few sites are connected for this many seconds, or if no site answers
    for this many seconds."""
    notes: Queue[dict[str, Any]] = field(default_factory=Queue)
    """Reports from the process at the centre's port: refused requests, and numbers of bytes. Another thread
    puts them here."""
    look: Callable[[], None] = lambda: None
    """Applies changes in the keys folder: keys that were replaced, removed or added."""
    quorum: int | None = None
    """How many sites must take part in a round. None: two thirds of the sites that have joined, within the
    bounds that `least` describes."""
    log: list[Event] = field(default_factory=list)
    """Events that have not yet been written to the run folder. They report refused messages, and updates that
    got a lower weight."""
    _without: list[str] = field(default_factory=list)
    """The sites that were missing (not connected) at the last call of `_tell_missing`. If the same sites are
    missing at the next call, nothing is printed."""
    _traffic: dict[str, int] = field(default_factory=dict)
    """The latest counts of bytes at the centre's port, `up` and `down`; empty if they are not reported."""
    _refused: dict[str, str] = field(default_factory=dict)
    """For each site, why one of its messages was refused. It is cleared after each attempt to collect
    models."""
    _limits: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often a site's update was limited, by the site's name and the kind of limit. "cut": the update was
    scaled down. "weakened": the update got a lower weight."""

    def least(self, sites: int) -> int:
        """Returns the quorum of `sites` sites: how many of them must be connected to start a round, and must
        answer to finish it.

        If the field `quorum` is None, the quorum is two thirds of these sites, but at least `FEWEST` and at
        most `needed` sites. The quorum is never larger than `sites`.
        """
        usual = min(self.needed, max(FEWEST, math.ceil(SHARE * sites)))
        return min(sites, usual if self.quorum is None else self.quorum)

    def refuse(self, name: str | None, why: str, host: str | None = None, counts: bool = True) -> None:
        """Prints and logs that a message was refused, and why.

        `name` is the site that sent the message. If `name` is None, a stranger at the address `host` sent it.
        `counts` says whether this refusal counts against the site. It does not if it was counted already, or
        if no answer was refused. A site is excluded after three refusals that count.
        """
        why = post.short(why)
        event: Event = {"event": "refused", "site": name, "reason": why}
        self.log.append(event if host is None else event | {"from": host})
        if name is None:
            self.tell(f"refused: {host} sent {why}")
            return
        self.doing[name] = f"refused: {why}"
        if counts:
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
                name = self.nodes.get(note["node"])
                if note["lost"]:
                    lost.add(note["node"])
                if name and note.get("broken"):
                    self.tell(f"the connection of {name} failed: {post.short(note['reason'])}")
                else:
                    # only what costs the round an answer counts against a site, not a summary, for example
                    self.refuse(name, note["reason"], None if name else note["from"], note["lost"])
        return lost

    def gather(self, first: bool = False) -> dict[int, int]:
        """Waits until enough sites are connected. Returns Flower's node number of each connected user; the
        keys are the users' numbers.

        Before the first round (`first` is true), enough means `needed` sites; later it means a quorum. If
        there are too few sites after `patience` seconds, an error is raised. There is one exception: if the
        sites have keys, a quorum is then enough to start the first round.
        """
        end, shown_at, shown, pause = time.monotonic() + self.patience, 0.0, "", LINE_EVERY
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
            quorum = max(1, self.least(needed if first else len(self.joined - self.left_out)))
            if len(nodes) >= (needed if first else quorum):
                return nodes
            expected = self.names if first else sorted(self.joined)
            missing = [n for n in expected if n not in self.nodes.values() and n not in self.left_out]
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
            if line != shown or time.monotonic() - shown_at > pause:
                pause = LINE_EVERY if line != shown else min(2 * pause, SELDOM)
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
            self.grid, contents, kind, deadline, self.tell, self.called, self.listen, meanwhile
        )

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
        self.dismiss_nodes([node for node, name in self.nodes.items() if name in new], EXCLUDED)

    def dismiss(self, why: str, model: Tensor | None = None, card: str = "") -> None:
        """Tells all sites that the run is over, and why. If `model` is given, each site that is not excluded
        also gets this final model and its model card `card` (a JSON text).

        A site may disconnect without answering; this is not an error.
        """
        self.tell = lambda line: None
        contents = {}
        for node, name in self.nodes.items():
            if model is not None and name not in self.left_out:
                contents[node] = wire.pack(model, ask="end", why=why, card=card)
            else:
                contents[node] = RecordDict({"config": ConfigRecord({"ask": "end", "why": why})})
        self.exchange(contents, "query", 10.0 if model is None else self.deadline)


def _nothing() -> None:
    """Does nothing. It replaces `meanwhile` when sites are asked again, because the centre trains only once
    in a round."""
