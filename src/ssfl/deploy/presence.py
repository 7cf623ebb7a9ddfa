"""Which sites are alive, and which of them wait for work. The centre's port uses this module to answer the
sites' heartbeats and requests for work, because Flower's own application is slower."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio.to_thread

from ssfl.deploy import internals
from ssfl.deploy.answers import parsed

HOLD = 15.0
"""Seconds for which a site's request for work is held open if there is no work. A site may be silent for 20 s
before it counts as disconnected, and each request is a sign of life. So this time is shorter than 20 s."""
BEATS = 10.0, 60.0
"""The shortest and the longest heartbeat interval of a site, in seconds. If a site announces a shorter or
longer interval, the nearest of these two values is used."""
ALIVE = 5.0
"""Every request shows that its site is alive. To save time, Flower is told so at most once in this many
seconds per site."""
PAUSE = 5.0
"""If this process was paused for more than this many seconds, it could not read heartbeats. The pause then
does not count as silence of the sites."""
Receive = Callable[[], Awaitable[Any]]


class Presence:
    """Records the sites' signs of life, and holds their requests for work open until there is work."""

    def __init__(self, flower: internals.SuperLink) -> None:
        self.flower = flower
        self.quiet: set[int] = set()
        """The nodes for which no message is waiting, as far as this process knows. Their requests for work
        are held open."""
        self._waiting: dict[int, set[asyncio.Event]] = {}
        """For each node, one event for every request for work that is held open. Setting the event ends the
        wait."""
        self._seen: dict[int, float] = {}
        """For each node: the time of its last recorded sign of life (`time.monotonic`)."""
        self._ticked = time.monotonic()
        """The last time at which this process was certainly running (`time.monotonic`)."""

    def catch_up(self) -> None:
        """If this process was paused for more than `PAUSE` seconds, tells Flower that all sites that
        were alive before the pause are still alive. During the pause, their heartbeats could not be read."""
        before, self._ticked = self._ticked, time.monotonic()
        if self._ticked - before > PAUSE:
            for node, seen in self._seen.items():
                if before - seen < 2 * BEATS[0]:
                    self.flower.alive(node, BEATS[0])

    def wake(self, nodes: Iterable[int]) -> None:
        """Ends the wait of these nodes, because messages are waiting for them."""
        for node in nodes:
            self.quiet.discard(node)
            for event in self._waiting.get(node, ()):
                event.set()

    async def has_work(self, node: int, receive: Receive) -> bool:
        """Returns True if a message may be waiting for the node. If there is none, waits for one. Returns
        False if there is still none after `HOLD` seconds, or if the site closes the connection.

        So an idle site asks only a few times a minute, and still gets its work at once. `receive` is that of
        the site's ASGI request for work.
        """
        if node not in self.quiet:
            return True
        event = asyncio.Event()
        self._waiting.setdefault(node, set()).add(event)
        tasks = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(receive())]
        try:
            await asyncio.wait(tasks, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting[node].discard(event)
            for task in tasks:
                task.cancel()
        return event.is_set()

    async def alive(self, node: int, path: str) -> None:
        """Records a request of a node as a sign of life, like a heartbeat. So a busy site is not treated as
        disconnected because one heartbeat is late. If `path` is that of a request to disconnect, the record
        is deleted instead."""
        now = time.monotonic()
        if path.endswith("/deactivate-node"):
            self._seen.pop(node, None)
        elif path.endswith(("/activate-node", "/send-node-heartbeat")):
            self._seen[node] = now
        elif now - self._seen.get(node, now) > ALIVE:
            self._seen[node] = now
            await anyio.to_thread.run_sync(self.flower.alive, node, BEATS[0])

    async def beat(self, node: int, body: bytes) -> bytes | None:
        """Records a heartbeat, and returns the body of the response. `body` is that of the request. Returns
        None if the heartbeat is not from the site that it names. Then Flower's application must answer."""
        request = parsed("fleet/send-node-heartbeat", body)
        if request.node.node_id != node:
            return None
        seconds = min(max(request.heartbeat_interval, BEATS[0]), BEATS[1])
        there = await anyio.to_thread.run_sync(self.flower.alive, node, seconds)
        response: bytes = internals.TYPES["fleet/send-node-heartbeat"][1](success=there).SerializeToString()
        return response
