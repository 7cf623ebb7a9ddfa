"""Sends messages to the sites and collects their answers, through Flower's Grid, the centre's `Link`, or a
test's replacement."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from queue import Empty, Queue
from typing import Protocol

import httpx
from flwr.app import Message, RecordDict

from ssfl.deploy import Tell
from ssfl.deploy.internals import LATE as LATE
from ssfl.deploy.internals import CannotCarry, NodeInfo

POLL = 0.25
"""Seconds between two checks whether an answer has arrived."""
TROUBLE = (httpx.HTTPError, OSError, CannotCarry)
"""Errors of the connection. If one occurs, only one message is lost, and the federation continues."""
ATTEMPTS = 3
"""How often the centre tries to send a message."""
LONGEST = 300
"""How many characters of a text from a site or a stranger are shown and logged."""


def short(text: object) -> str:
    """Returns the text as one line of at most `LONGEST` characters. It is used for texts from sites and
    strangers, which may be long."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


class Exchange(Protocol):
    """The methods of Flower's Grid that this package uses. `link.Link` has them too."""

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
    """Sends each node its content. Yields the node and the identifier of its message, for each message that
    was accepted.

    `kind` is "query" or "train". A message must be answered within `holds` seconds. `tell` prints errors.
    `called` returns the name of a node's site, which the printed errors contain.
    """
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
    """Sends each node its content, and returns the contents of the answers that arrive within `deadline`
    seconds, by node.

    `kind` is "query" or "train". `lost` returns the nodes whose answers can no longer arrive. `meanwhile` is
    called once while the sites work; the centre trains in it. It is not called if `contents` is empty. `tell`
    prints errors. `called` returns the name of a node's site, which the printed errors contain.
    """
    if not contents:
        return {}
    inbox = Queue[tuple[int, Message | Exception]]()
    pause = getattr(grid, "pause", POLL * max(1, len(contents) / 10))
    sent = list(send(grid, contents, kind, deadline, tell, called))
    end = time.monotonic() + deadline

    def fetch(node: int, name: str) -> None:
        """Waits for the answer to the message with the identifier `name`, which was sent to `node`. Puts the
        answer, or an error, into `inbox`.

        Each answer is fetched in its own thread. So a site that stops in the middle of its answer does not
        delay the others.
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
    forget: Callable[[list[str]], None] | None = getattr(grid, "forget", None)
    if forget is not None:
        with suppress(*TROUBLE):
            forget([name for node, name in sent if node not in answers])
    for node in (missing | late) - lost():
        tell(f"{called(node)} did not answer within {deadline:.0f} s")
    return answers
