"""The sites, as the centre reaches them: who is there, what they are sent, what comes back in time."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ssfl.deploy import wire
from ssfl.deploy.keys import NAME
from ssfl.errors import DataError, RunError

POLL = 0.25
"""Seconds between two looks for answers."""
LINE_EVERY = 10.0
"""Seconds between two lines about who is missing."""
Tell = Callable[[str], None]


@dataclass
class Fleet:
    """The sites, as the centre reaches them."""

    grid: Grid
    names: list[str]
    """In the order of the users' numbers."""
    needed: int
    """How many sites must be there when a round begins."""
    deadline: float
    """Seconds that sites have for a round."""
    patience: float
    """Seconds to wait for missing sites."""
    tell: Tell
    asked: bool = False
    """Whether sites tell their names themselves, for want of keys."""
    images: dict[str, int] = field(default_factory=dict)
    """How many images each site has."""
    _nodes: dict[int, str] = field(default_factory=dict)
    """Who is behind a number of Flower's."""
    _turned_away: set[int] = field(default_factory=set)

    def connected(self) -> dict[int, int]:
        """Flower's number of each user that is there."""
        online = {node.node_id: node.name for node in self.grid.get_nodes()}
        self._nodes = {node: name for node, name in self._nodes.items() if node in online}
        known = self._nodes.keys() | self._turned_away
        self._greet({node: name for node, name in online.items() if node not in known})
        found = {name: node for node, name in self._nodes.items()}
        return {user: found[name] for user, name in enumerate(self.names) if name in found}

    def _greet(self, strangers: Mapping[int, str]) -> None:
        """Ask new sites who they are and how many images they have."""
        asked = {node: RecordDict({"config": ConfigRecord({"ask": "who"})}) for node in strangers}
        for node, content in self.exchange(asked, "query", 30.0).items():
            try:
                name = str(content["config"]["name"]) if self.asked else strangers[node]
                count = int(content["told"]["images"])
            except (KeyError, ValueError, TypeError):
                continue
            free = self.asked and len(self.names) < self.needed and NAME.fullmatch(name)
            if free and name not in self.names:
                self.names = sorted([*self.names, name])
            if name not in self.names or name in self._nodes.values():
                why = "another site has that name" if name in self.names else "no such site is expected"
                self.tell(f"{name} is turned away: {why}")
                self._turned_away.add(node)
                continue
            self._nodes[node], self.images[name] = name, count
            self.tell(f"{name} is connected with {count} images")

    def gather(self) -> dict[int, int]:
        """Wait until enough sites are there."""
        end, told = time.monotonic() + self.patience, 0.0
        while True:
            there = self.connected()
            if len(there) >= self.needed:
                return there
            missing = [name for user, name in enumerate(self.names) if user not in there]
            line = f"{len(there)} of {self.needed} sites are there"
            line += f", {', '.join(missing[:10])} not" if missing else ""
            if time.monotonic() > end:
                raise RunError(
                    f"{line}, after {self.patience:.0f} s: get them to join, or ask for fewer with --sites"
                )
            if time.monotonic() - told > LINE_EVERY:
                told = time.monotonic()
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
        end, inbox = time.monotonic() + deadline, Queue[tuple[int, Message | Exception]]()
        pause = POLL * max(1, len(contents) / 10)

        def fetch(node: int, name: str) -> None:
            """One thread for each: a site that stops in the middle of its answer holds up nobody else."""
            try:
                while time.monotonic() < end:
                    for reply in self.grid.pull_messages([name]):
                        return inbox.put((node, reply))
                    time.sleep(pause)
            except Exception as error:
                inbox.put((node, error))

        for node, content in contents.items():
            message = Message(content, dst_node_id=node, message_type=kind, ttl=deadline)
            for name in self.grid.push_messages([message]):
                threading.Thread(target=fetch, args=(node, name), daemon=True).start()
        meanwhile()
        answers: dict[int, RecordDict] = {}
        missing = set(contents)
        with suppress(Empty):
            while missing:
                node, reply = inbox.get(timeout=max(end - time.monotonic(), 0.01))
                missing.discard(node)
                if isinstance(reply, Message) and reply.has_content():
                    answers[node] = reply.content
                else:
                    why = reply.error.reason if isinstance(reply, Message) else reply
                    self.tell(f"{self._nodes.get(node, node)} has no answer: {why}")
        for node in missing:
            self.tell(f"{self._nodes.get(node, node)} did not answer within {deadline:.0f} s")
        return answers

    def train(
        self, rows: Mapping[int, Tensor], terms: str, round: int, meanwhile: Callable[[], None]
    ) -> tuple[Collection[int], dict[int, tuple[Tensor, dict[str, float]]]]:
        """Who was sent a model, and the models and numbers of those that came back in time."""
        nodes = self.gather()
        users = {nodes[user]: user for user in rows if user in nodes}
        contents = {
            node: wire.pack(rows[user], terms=terms, user=user, round=round) for node, user in users.items()
        }
        came = {}
        for node, content in self.exchange(contents, "train", self.deadline, meanwhile).items():
            try:
                came[users[node]] = wire.unpack(content, rows[users[node]].numel()), wire.read_told(content)
            except DataError as error:
                self.tell(f"{self._nodes.get(node, node)} is left out of round {round + 1}: it sent {error}")
        return list(users.values()), came

    def dismiss(self, why: str) -> None:
        """Tell everybody that all rounds are played; who leaves at once need not answer."""
        self.tell = lambda line: None
        end = {"ask": "end", "why": why}
        self.exchange(
            {node: RecordDict({"config": ConfigRecord(end)}) for node in self._nodes}, "query", 10.0
        )
