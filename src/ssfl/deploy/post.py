"""Sends messages to the sites and collects their answers, over Flower's Grid or a test's stand-in."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import Empty, Queue
from typing import Protocol

import httpx
from flwr.app import Message, RecordDict

from ssfl.deploy import Tell
from ssfl.deploy.internals import LATE as LATE
from ssfl.deploy.internals import CannotCarry, NodeInfo

POLL = 0.25
"""Seconds between two checks for answers."""
TROUBLE = (httpx.HTTPError, OSError, CannotCarry)
"""Errors of the connection. They cost one message, and the federation goes on."""
ATTEMPTS = 3
"""The number of attempts to send a message."""
LONGEST = 300
"""The number of characters of a text from somebody else that are shown and logged."""


def short(text: object) -> str:
    """Returns text that somebody else sent as one line of limited length."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


class Exchange(Protocol):
    """The part of Flower's Grid that this package uses."""

    def get_nodes(self) -> Iterable[NodeInfo]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


def send(
    grid: Exchange,
    contents: Mapping[int, RecordDict],
    kind: str,
    holds: float,
    tell: Tell,
    called: Callable[[int], str],
) -> Iterator[tuple[int, str]]:
    """Sends each node its content, to be answered within `holds` seconds. Yields each node with the name of
    its message."""
    for node, content in contents.items():
        for attempt in range(ATTEMPTS):
            message = Message(content, dst_node_id=node, message_type=kind, ttl=holds)
            try:
                yield from ((node, name) for name in grid.push_messages([message]) if name)
                break
            except TROUBLE as error:
                tell(f"a message to {called(node)} could not be sent: {short(error)}")
                time.sleep(POLL * 2**attempt)


def exchange(
    grid: Exchange,
    contents: Mapping[int, RecordDict],
    kind: str,
    deadline: float,
    tell: Tell,
    called: Callable[[int], str],
    lost: Callable[[], set[int]],
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[int, RecordDict]:
    """Sends each node its content, and returns the answers that arrive within `deadline` seconds.

    `lost` returns nodes whose answers can no longer arrive. `meanwhile` is called while the sites work.
    """
    if not contents:
        return {}
    inbox = Queue[tuple[int, Message | Exception]]()
    pause = getattr(grid, "pause", POLL * max(1, len(contents) / 10))
    sent = list(send(grid, contents, kind, deadline, tell, called))
    end = time.monotonic() + deadline

    def fetch(node: int, name: str) -> None:
        """Waits for one answer.

        It runs in its own thread, so that a site that stops in the middle of an answer delays no other.
        """
        while time.monotonic() < end:
            try:
                for reply in grid.pull_messages([name]):
                    inbox.put((node, reply))
                    return
            except TROUBLE:  # the next attempt may succeed
                pass
            except Exception as error:
                inbox.put((node, error))
                return
            time.sleep(pause)

    for node, name in sent:
        threading.Thread(target=fetch, args=(node, name), daemon=True).start()
    meanwhile()
    answers: dict[int, RecordDict] = {}
    missing, late = {node for node, _ in sent}, set(contents) - {node for node, _ in sent}
    while missing:
        missing -= lost()
        left = end - time.monotonic()
        try:
            node, reply = inbox.get(timeout=min(max(left, 0.01), POLL))
        except Empty:
            if left > 0:
                continue
            break  # answers that came while this process was busy are handled by now
        missing.discard(node)
        if isinstance(reply, Message) and reply.has_content():
            answers[node] = reply.content
        elif isinstance(reply, Message) and reply.error.code in LATE:
            late.add(node)
        else:
            why = reply.error.reason if isinstance(reply, Message) else reply
            tell(f"{called(node)} answered with an error: {short(why)}")
    for node in (missing | late) - lost():
        tell(f"{called(node)} did not answer within {deadline:.0f} s")
    return answers
