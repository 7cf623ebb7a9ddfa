"""The sites, as the centre reaches them: who is there, what they are sent, what comes back in time."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from ssfl.core.events import Event
from ssfl.deploy import wire
from ssfl.deploy.internals import LATE, NodeInfo
from ssfl.deploy.keys import NAME
from ssfl.errors import DataError, RunError

POLL = 0.25
"""Seconds between two looks for answers."""
LINE_EVERY = 10.0
"""Seconds between two lines about who is missing."""
GREETING = 10.0
"""Seconds to wait for sites that were asked who they are, after the last of them answered."""
LATER = 30.0
"""Seconds until a site that did not say who it is, but something else, is asked again."""
SOON = 10.0
"""Seconds until a site whose name is taken is asked again: the other may be gone without our knowing yet."""
LONGEST = 300
"""Letters of what somebody else said that are shown and written down."""
Tell = Callable[[str], None]


def short(text: object) -> str:
    """What somebody else said, as long as a line may be."""
    said = " ".join(str(text).split())
    return said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."


class Exchange(Protocol):
    """What is used of Flower's Grid."""

    def get_nodes(self) -> Iterable[NodeInfo]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


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


@dataclass
class Fleet:
    """The sites, as the centre reaches them."""

    grid: Exchange
    names: list[str]
    """In the order of the users' numbers."""
    needed: int
    """How many sites must be there when a round begins."""
    deadline: float
    """Seconds that sites have for a round."""
    patience: float
    """Seconds to wait for missing sites."""
    tell: Tell
    notes: Queue[dict[str, Any]] = field(default_factory=Queue)
    """What the port tells, from whatever thread: something refused, or how much has travelled."""
    exclude: Callable[[Collection[int]], None] = lambda nodes: None
    """Has the port drop nodes that are left out."""
    asked: bool = False
    """Whether sites tell their names themselves, for want of keys."""
    images: dict[str, int] = field(default_factory=dict)
    """How many images each site says that it has."""
    doing: dict[str, str] = field(default_factory=dict)
    """What each site is doing, in words."""
    left_out: set[str] = field(default_factory=set)
    """Who takes no part any more."""
    log: list[Event] = field(default_factory=list)
    """What was refused and has not been written down yet."""
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

    def refuse(self, name: str | None, why: str, host: str | None = None, counted: bool = False) -> None:
        """Somebody's message goes no further, without a name a stranger's; it may be counted already."""
        why = short(why)
        event: Event = {"event": "refused", "site": name, "reason": why}
        self.log.append(event if host is None else event | {"from": host})
        if name is None:
            self.tell(f"refused: {host} sent {why}")
            return
        self.doing[name] = f"refused: {why}"
        if not counted:
            self._refused[name] = why
        self.tell(f"refused: {name} sent {why}")

    def listen(self) -> set[int]:
        """Take in what the port told; gives the nodes whose answer cannot come any more."""
        lost = set()
        with suppress(Empty):
            while True:
                note = self.notes.get_nowait()
                if "reason" not in note:
                    self._traffic = note
                    continue
                name = self._nodes.get(note["node"])
                self.refuse(name, note["reason"], None if name else note["from"])
                if note["lost"]:
                    lost.add(note["node"])
        return lost

    def connected(self) -> dict[int, int]:
        """Flower's number of each user that is there and takes part."""
        online = {node.node_id: node for node in self.grid.get_nodes()}
        for node, name in list(self._nodes.items()):
            if node not in online:
                del self._nodes[node]
                self.doing[name] = "away"
                self.tell(f"{name} is away")
        now = time.monotonic()
        known = self._nodes.keys() | {node for node, until in self._turned_away.items() if now < until}
        self._greet({number: node for number, node in online.items() if number not in known})
        found = {name: node for node, name in self._nodes.items() if name not in self.left_out}
        return {user: found[name] for user, name in enumerate(self.names) if name in found}

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
        for node, name in self._send(new, "query", self.deadline):
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
            time.sleep(getattr(self.grid, "pause", POLL))

    def _greetings(self) -> dict[int, RecordDict]:
        """What sites have answered that were asked who they are."""
        found = {}
        for node, (name, _) in list(self._greeted.items()):
            try:
                replies = list(self.grid.pull_messages([name]))
            except Exception as error:  # it stopped in the middle, or is gone: it is asked again
                self.tell(f"{node} did not say who it is: {short(error)}")
                self._turned_away[node] = time.monotonic() + SOON
                del self._greeted[node]
                continue
            for reply in replies:
                del self._greeted[node]
                if reply.has_content():
                    found[node] = reply.content
                elif reply.error.code not in LATE:
                    self.tell(f"{node} did not say who it is, but {short(reply.error.reason)}")
                    self._turned_away[node] = time.monotonic() + LATER
        return found

    def _introduce(self, node: int, content: RecordDict, info: NodeInfo) -> None:
        """A site said who it is."""
        try:
            told, count = wire.read_who(content)
        except DataError as error:
            self.tell(f"{info.name or node} did not say who it is, but {short(error)}")
            self._turned_away[node] = time.monotonic() + LATER
            return
        name = told if self.asked else info.name
        free = self.asked and len(self.names) < self.needed and NAME.fullmatch(name)
        if free and name not in self.names:
            self.names = sorted([*self.names, name])
        if name not in self.names or name in self._nodes.values():
            taken = name in self.names
            why = "another site has that name" if taken else "no such site is expected"
            self.tell(f"{short(name)} is turned away: {why}")
            self._turned_away[node] = time.monotonic() + SOON if taken else float("inf")
            return
        self._nodes[node], self.images[name] = name, count
        self.doing[name] = "connected"
        self.tell(f"{name} is connected with {count} images")
        if name in self.left_out:
            self._send_away([node])

    def gather(self) -> dict[int, int]:
        """Wait until enough sites are there."""
        end, told, said = time.monotonic() + self.patience, 0.0, ""
        needed = min(self.needed, len(self.names) - len(self.left_out)) if self.names else self.needed
        if needed < 1:
            raise RunError("every site is left out after three refusals: look at the sites")
        while True:
            self.listen()
            there = self.connected()
            if len(there) >= needed:
                return there
            missing = [
                name
                for user, name in enumerate(self.names)
                if user not in there and name not in self.left_out
            ]
            line = f"{len(there)} of {needed} sites are there, {needed - len(there)} missing"
            line += f" ({', '.join(missing[:10])})" if missing else ""
            if time.monotonic() > end:
                raise RunError(
                    f"{line}, after {self.patience:.0f} s: get them to join, or ask for fewer with --sites"
                )
            if line != said or time.monotonic() - told > LINE_EVERY:
                told, said = time.monotonic(), line
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
        if not contents:
            return {}
        inbox = Queue[tuple[int, Message | Exception]]()
        pause = getattr(self.grid, "pause", POLL * max(1, len(contents) / 10))
        sent = list(self._send(contents, kind, deadline))
        end = time.monotonic() + deadline

        def fetch(node: int, name: str) -> None:
            """One thread for each: a site that stops in the middle of its answer holds up nobody else."""
            try:
                while time.monotonic() < end:
                    for reply in self.grid.pull_messages([name]):
                        return inbox.put((node, reply))
                    time.sleep(pause)
            except Exception as error:
                inbox.put((node, error))

        for node, name in sent:
            threading.Thread(target=fetch, args=(node, name), daemon=True).start()
        meanwhile()
        answers: dict[int, RecordDict] = {}
        missing, late = {node for node, _ in sent}, set(contents) - {node for node, _ in sent}
        while missing:
            missing -= self.listen()
            left = end - time.monotonic()
            try:
                node, reply = inbox.get(timeout=min(max(left, 0.01), POLL))
            except Empty:
                if left > 0:
                    continue
                break  # what came while this process was busy has been taken in
            missing.discard(node)
            if isinstance(reply, Message) and reply.has_content():
                answers[node] = reply.content
            elif isinstance(reply, Message) and reply.error.code in LATE:
                late.add(node)
            else:
                why = reply.error.reason if isinstance(reply, Message) else reply
                self.tell(f"{self._nodes.get(node, node)} has no answer: {short(why)}")
        for node in (missing | late) - self.listen():
            self.tell(f"{self._nodes.get(node, node)} did not answer within {deadline:.0f} s")
        return answers

    def _send(self, contents: Mapping[int, RecordDict], kind: str, holds: float) -> Iterator[tuple[int, str]]:
        """Send each node its content; gives the messages' names."""
        for node, content in contents.items():
            message = Message(content, dst_node_id=node, message_type=kind, ttl=holds)
            for name in self.grid.push_messages([message]):
                yield node, name

    def train(
        self, rows: Mapping[int, Tensor], terms: str, round: int, meanwhile: Callable[[], None]
    ) -> Answers:
        """Send the users that are there a model each; what comes back."""
        before = dict(self._traffic)
        nodes = self.gather()
        users = {nodes[user]: user for user in rows if user in nodes}
        contents = {
            node: wire.pack(rows[user], terms=terms, user=user, round=round) for node, user in users.items()
        }
        self.doing |= {self.names[user]: "training" for user in users.values()}
        came = {}
        for node, content in self.exchange(contents, "train", self.deadline, meanwhile).items():
            user = users[node]
            try:
                came[user] = wire.read_trained(content, rows[user].numel(), round)
                self.doing[self.names[user]] = "answered"
            except DataError as error:
                self.refuse(self.names[user], str(error))
        for user in users.values():
            if self.doing[self.names[user]] == "training":
                self.doing[self.names[user]] = "no answer"
        numbers = {name: user for user, name in enumerate(self.names)}
        refused = {numbers[name]: why for name, why in self._refused.items()}
        self._refused.clear()
        traffic = {f"wire_{way}": total - before.get(way, 0) for way, total in self._traffic.items()}
        return Answers(list(users.values()), came, refused, traffic)

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
        list(self._send({node: RecordDict({"config": end}) for node in nodes}, "query", self.deadline))
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
