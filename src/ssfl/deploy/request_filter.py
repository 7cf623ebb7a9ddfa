"""The filter for requests to the centre's port. It passes on only requests that come from sites and are
not too large. It refuses a second answer to the same message.

Flower itself reads requests of any size, trusts the size that an array claims, and does not report second
answers. The filter refuses such requests before any of their content is stored, and tells the centre who sent
them and why they were refused. A request without a signature of a known key is refused as soon as its headers
have arrived. Its body is not read.
"""

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import anyio.to_thread
from google.protobuf.message import DecodeError

from ssfl.deploy import internals
from ssfl.deploy.notes import Notes

SECRET = "x-ssfl-secret"
FLEET = "/v1/fleet/"
VISIT = "ssfl.visit"
"""A key of the state (a dict) of an ASGI request. Its value is the request's connection (`port.Visit`).
Requests over the centre's own socket do not have this key."""
ROOM = 65_536
"""The number of bytes that an answer may have in addition to its model: names, metrics, and what Flower adds.
It is also the largest size of requests that carry no model."""
PARTS = 8
"""How many parts an answer may have in addition to the chunks of its model. These are the message, each of
its records, and the description of the array."""
ENDLESS = "headers that are too long"
"""The reason that is reported if a connection is closed because its headers are too long."""
FROM_CENTRE = 1 << 30
"""The largest size of a request that the centre itself sends, in bytes."""
STALLED = 60.0
"""A request is given up if no more bytes of its body arrive for this many seconds."""
HOLD = 15.0
"""Seconds for which a site's request for work is held open if there is no work. A site may be silent for 20 s
before it counts as disconnected, and each request is a sign of life. So this time is shorter than 20 s."""
BEATS = 10.0, 60.0
"""The shortest and the longest heartbeat interval of a site, in seconds. If a site announces a shorter or
longer interval, the nearest of these two values is used."""
ALIVE = 5.0
"""Every request shows that its site is alive. To save time, Flower is told so at most once in this many
seconds per site."""
STALLED_PORT = 5.0
"""If this process was paused for more than this many seconds, it could not read heartbeats. The pause then
does not count as silence of the sites."""
FAREWELL = 40
"""How many requests an excluded site may still send. It needs them to fetch the message that says that it is
excluded."""
WAKE, EXCLUDE = "/ssfl/wake", "/ssfl/exclude"
"""Two paths to which the centre posts a JSON list of node numbers. /ssfl/wake: a message is waiting for these
nodes. /ssfl/exclude: the sites of these nodes are excluded."""
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Report = Callable[[dict[str, Any]], None]


def teller(descriptor: int) -> Report:
    """Returns a function that sends a report to the centre as one line of JSON, over the pipe with this file
    descriptor.

    The function never blocks: if the centre does not read the pipe, the report is lost.
    """
    os.set_blocking(descriptor, False)

    def tell(note: dict[str, Any]) -> None:
        with suppress(OSError):  # the centre is busy, or gone; then this process ends soon
            os.write(descriptor, json.dumps(note).encode() + b"\n")

    return tell


class Connections(Protocol):
    """The methods of `port.Port` that the filter calls."""

    def admit(self, visit: Any, node: int) -> bool: ...


class Refused(Exception):
    """Raised if a request is refused. Its text is what the sender sent, for example "a request without its
    length"."""


class SecondAnswer(Refused):
    """Raised if a site answers the same message twice. The centre may still use the first answer."""


class BrokenOff(Refused):
    """Raised if the connection ends or stalls in the middle of a request. Networks fail, so this does not
    count against the site."""


class RequestFilter:
    """An ASGI application in front of Flower's own application. It passes on only the requests that are
    allowed."""

    port: Connections

    def __init__(
        self, flower: internals.SuperLink, secret: str, model_bytes: int, tell: Report, keys_only: bool
    ) -> None:
        self.flower, self.secret, self.tell, self.keys_only = flower, secret.encode(), tell, keys_only
        self.most = model_bytes + ROOM
        self.chunks = -(-self.most // internals.CHUNK)
        self.most_at_once = min(self.most, internals.CHUNK + ROOM)
        self.ready = False
        """Whether the centre has registered its sites and started its run. Until then every site's request is
        answered with 503, because no key is known yet."""
        self.up = self.down = 0
        self.nodes: dict[bytes, int | None] = {}
        """A cache of Flower's node number for each public key. It is cleared when sites are registered or
        removed."""
        self.answered: dict[int, tuple[str, str]] = {}
        """For each node: the identifiers of the last message that it answered, and of that answer. They
        reveal second answers."""
        self.left: dict[int, int] = {}
        """For each node: how many more bytes its current answer may have."""
        self.quiet: set[int] = set()
        """The nodes for which no message is waiting, as far as this process knows. Their requests for work
        are held open."""
        self.waiting: dict[int | None, set[asyncio.Event]] = {}
        """For each node, one event for every request for work that is held open. Setting the event ends the
        wait."""
        self.coming: dict[int, tuple[str, set[str]]] = {}
        """For each node that is sending an answer: the identifier of the message that it answers, and the
        identifiers of the parts that have not arrived yet."""
        self.excluded: dict[int, int] = {}
        """For each node of an excluded site: how many more of its requests are answered."""
        self.seen: dict[int, float] = {}
        """For each node: the time of its last recorded sign of life (`time.monotonic`)."""
        self.ticked = time.monotonic()
        """The last time at which this process was certainly running (`time.monotonic`)."""
        self.notes = Notes(tell)

    def tick(self) -> None:
        """Sends due summaries of refused requests to the centre, and checks whether this process was paused.
        The port calls it every second."""
        self.notes.flush()
        self._catch_up()

    def _catch_up(self) -> None:
        """If this process was paused for more than `STALLED_PORT` seconds, tells Flower that all sites that
        were alive before the pause are still alive. During the pause, their heartbeats could not be read."""
        before, self.ticked = self.ticked, time.monotonic()
        if self.ticked - before > STALLED_PORT:
            for node, seen in self.seen.items():
                if before - seen < 2 * BEATS[0]:
                    self.flower.alive(node, BEATS[0])

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.flower.app(scope, receive, send)
            return
        headers, path, visit = dict(scope["headers"]), scope["path"], scope["state"].pop(VISIT, None)
        if visit is None:
            await self._private(scope, headers, receive, send)
            return
        visit.busy, visit.since, visit.unread = True, time.monotonic(), 0
        try:
            if not path.startswith(FLEET):
                self._note(None, visit.host, "a request that only the centre may make")
                await _answer(send, 403, b"only the centre may make this request")
            elif not self.ready:
                await _answer(send, 503, b"the centre is not ready yet")
            else:
                await self._fleet(scope, headers, visit, receive, send)
        finally:
            visit.busy, visit.since, visit.unread = False, time.monotonic(), 0

    async def _private(self, scope: Any, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Answers a request that came over the centre's own socket. Requests without the centre's secret are
        refused."""
        if not hmac.compare_digest(headers.get(SECRET.encode(), b""), self.secret):
            await _answer(send, 403, b"only the centre may make this request")
            return
        self._catch_up()
        if scope["path"] in (WAKE, EXCLUDE):
            nodes = json.loads(await self._read(headers, receive, self.most))
            if scope["path"] == EXCLUDE:
                self.excluded |= {node: FAREWELL for node in nodes if node not in self.excluded}
            for node in nodes:
                self.quiet.discard(node)
                for event in self.waiting.get(node, ()):
                    event.set()
            await _answer(send, 200, b"", close=False)
            return
        path, run = scope["path"].removeprefix("/v1/"), headers.get(internals.RUN.encode())
        if path in self.flower.handlers and run is not None:
            body = await self._read(headers, receive, FROM_CENTRE)
            call = partial(self.flower.handlers[path], _parsed(path, body), task=internals.Task(int(run)))
            reply = await anyio.to_thread.run_sync(call)
            await _answer(send, 200, reply.SerializeToString(), close=False)
            return
        await self.flower.app(scope, receive, send)
        self.ready = self.ready or scope["path"].endswith("/start-run")
        if "/control/" in scope["path"]:
            self.nodes.clear()

    def _node(self, public: bytes) -> int | None:
        """Returns Flower's node number of the site with this public key, or None if the key is unknown."""
        if public not in self.nodes:
            if len(self.nodes) > 10_000:
                self.nodes.clear()
            self.nodes[public] = self.flower.node_of(public)
        return self.nodes[public]

    async def _fleet(
        self, scope: Any, headers: dict[bytes, bytes], visit: Any, receive: Receive, send: Send
    ) -> None:
        """Checks a site's request and answers it, or refuses it and reports the refusal."""
        path, host = scope["path"], visit.host
        joining = not self.keys_only and path.endswith(("/register-node", "/activate-node"))
        key = internals.signer(headers, lambda public: joining or self._node(public) is not None)
        if isinstance(key, str):
            self._note(None, host, key)
            await _answer(send, 401, key.encode())
            return
        node = self._node(key)
        if node is not None and not self.port.admit(visit, node):
            self._note(node, host, "a request over one connection too many", lost=False)
            await _answer(send, 429, b"this site has too many open connections")
            return
        if node in self.excluded:
            self.excluded[node] -= 1
            if self.excluded[node] < 0:
                self.notes.count(node, host, "a request although it is excluded")
                await _answer(send, 403, b"the centre has excluded this site: ask its operator why")
                return
        if node is not None:
            await self._alive(node, path)
        pushing = path.endswith(("/push-object", "/push-messages"))
        try:
            body = await self._read(headers, receive, self.most_at_once if pushing else ROOM)
            self.up += len(body)
            if path.endswith("/push-messages"):
                self._check_message(node or 0, body)
            elif pushing:
                self._check_object(node or 0, body)
            elif path.endswith("/send-node-heartbeat") and await self._beat(node, body, send):
                return
        except BrokenOff as broken:
            self.notes.add(node, host, str(broken), lost=True, broken=True)
            await _answer(send, 400, str(broken).encode())
            return
        except Refused as refused:
            self._note(node, host, str(refused), lost=not isinstance(refused, SecondAnswer))
            await _answer(send, 400, str(refused).encode())
            return
        if path.endswith("/pull-messages") and node in self.quiet and not await self._held(node, receive):
            await _answer(send, 200, b"", close=False)
            return
        if pushing:
            self._traffic()
        if node is not None and path.removeprefix("/v1/") in self.flower.handlers:
            answer = await self._handled(path, body, node, host, send)
        else:
            answer = await self._passed_on(scope, body, receive, send)
        if joining:
            self.nodes.pop(key, None)
        if node is not None and answer is not None:
            self._follow(node, path, body, answer)

    async def _handled(self, path: str, body: bytes, node: int, host: str, send: Send) -> bytes | None:
        """Answers a request about messages by calling Flower's handler directly, which is faster than
        Flower's application. Returns the body of the answer, or None if the request was refused."""
        try:
            request = _parsed(path.removeprefix("/v1/"), body)
            if request.node.node_id != node:  # the centre was restarted while this site was busy
                await _answer(send, 401, b"the centre was restarted: connect again")
                return None
            if path.endswith("/pull-messages"):
                self.quiet.add(node)  # a message that arrives from now on wakes it
            reply = await anyio.to_thread.run_sync(self.flower.handlers[path.removeprefix("/v1/")], request)
        except Exception:  # Flower raises several kinds of errors
            if path.endswith(("/push-object", "/push-messages")):
                self._note(node, host, "a message that cannot be read")
            await _answer(send, 400, b"the request cannot be read")
            return None
        answer: bytes = reply.SerializeToString()
        self.down += len(answer)
        if path.endswith(("/pull-object", "/pull-messages")) and answer:
            self._traffic()
        await _answer(send, 200, answer, close=False)
        return answer

    async def _passed_on(self, scope: Any, body: bytes, receive: Receive, send: Send) -> bytes | None:
        """Passes a request on to Flower's application, which sends the answer. Returns b"" on success, and
        None if Flower refused the request."""
        good, waiting = False, [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return waiting.pop() if waiting else await receive()

        async def watch(message: Any) -> None:
            nonlocal good
            good = good or message.get("status", 500) < 400
            self.down += len(message.get("body", b""))
            await send(message)

        await self.flower.app(scope, replay, watch)
        return b"" if good else None

    def _follow(self, node: int, path: str, body: bytes, answer: bytes) -> None:
        """Updates what is known about a node after a request was answered: whether messages may be waiting
        for the node, and which parts of its answer are still missing. Tells the centre when an answer is
        complete."""
        if path.endswith("/activate-node") or (path.endswith("/pull-messages") and answer):
            self.quiet.discard(node)
        elif path.endswith("/push-messages"):
            missing = _parsed("fleet/push-messages", answer, 1).objects_to_push
            self.coming[node] = self.answered[node][0], set(missing)
        elif path.endswith("/push-object") and node in self.coming:
            self.coming[node][1].discard(_parsed("fleet/push-object", body).object_id)
        else:
            return
        if node in self.coming and not self.coming[node][1]:
            self.tell({"answered": self.coming.pop(node)[0]})

    async def _held(self, node: int | None, receive: Receive) -> bool:
        """Holds a request for work open until there is a message for the node, and then returns True. Returns
        False if there is none after `HOLD` seconds, or if the site closes the connection.

        So an idle site asks only a few times a minute, and still gets its work at once.
        """
        event = asyncio.Event()
        self.waiting.setdefault(node, set()).add(event)
        tasks = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(receive())]
        try:
            await asyncio.wait(tasks, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.waiting[node].discard(event)
            for task in tasks:
                task.cancel()
        return event.is_set()

    async def _alive(self, node: int, path: str) -> None:
        """Records a request of a node as a sign of life, like a heartbeat. So a busy site is not treated as
        disconnected because one heartbeat is late. If `path` is that of a request to disconnect, the record
        is deleted instead."""
        now = time.monotonic()
        if path.endswith("/deactivate-node"):
            self.seen.pop(node, None)
        elif path.endswith(("/activate-node", "/send-node-heartbeat")):
            self.seen[node] = now
        elif now - self.seen.get(node, now) > ALIVE:
            self.seen[node] = now
            await anyio.to_thread.run_sync(self.flower.alive, node, BEATS[0])

    async def _beat(self, node: int | None, body: bytes, send: Send) -> bool:
        """Answers a heartbeat directly, because Flower's application is slower, and returns True. If the
        heartbeat is not from the site that it names, returns False, and Flower's application must answer."""
        request = _parsed("fleet/send-node-heartbeat", body)
        if node is None or request.node.node_id != node:
            return False
        seconds = min(max(request.heartbeat_interval, BEATS[0]), BEATS[1])
        there = await anyio.to_thread.run_sync(self.flower.alive, node, seconds)
        answer = internals.TYPES["fleet/send-node-heartbeat"][1](success=there)
        await _answer(send, 200, answer.SerializeToString(), close=False)
        return True

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
        """Returns the body of a request. Raises `Refused` if its length is missing or above `most` bytes, and
        `BrokenOff` if it does not arrive completely."""
        try:
            size = int(headers[b"content-length"])
        except (KeyError, ValueError):
            raise Refused("a request without its length") from None
        if size > most:
            raise Refused(f"a request of {size} bytes, which is too large: at most {most} are accepted")
        body = bytearray()
        while True:
            try:
                message = await asyncio.wait_for(receive(), STALLED)
            except TimeoutError:
                raise BrokenOff(
                    f"only {len(body)} of {size} bytes of a request, and no more for {STALLED:.0f} s"
                ) from None
            if message["type"] == "http.disconnect":
                raise BrokenOff(f"only {len(body)} of {size} bytes of a request")
            body += message.get("body", b"")
            if not message.get("more_body"):
                return bytes(body)

    def _check_message(self, node: int, body: bytes) -> None:
        """Raises unless the request announces exactly one answer that is allowed. The answer must come from
        the site that sent the request, be the first answer to its message, and have few parts."""
        request = _parsed("fleet/push-messages", body)
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(f"{len(request.messages_list)} answers in one request instead of one")
        facts = request.messages_list[0].metadata
        if facts.src_node_id != node or not facts.reply_to_message_id:
            raise Refused("an answer in the name of another site, or to no message")
        parts = internals.count_parts(request.message_object_trees[0])
        if parts > self.chunks + PARTS:
            raise Refused(
                f"an answer in {parts} parts, which are too many: at most {self.chunks + PARTS} are accepted"
            )
        answered, answer = self.answered.get(node, ("", ""))
        if answered == facts.reply_to_message_id and answer != facts.message_id:
            raise SecondAnswer("a second answer to the same message")
        self.answered[node] = facts.reply_to_message_id, facts.message_id
        self.left[node] = self.most

    def _check_object(self, node: int, body: bytes) -> None:
        """Raises if a part of an answer cannot be read, does not match its hash, or describes an array with
        too many chunks. Also raises if the parts of the answer so far are together too large."""
        request = _parsed("fleet/push-object", body)
        content = request.object_content
        self.left[node] = self.left.get(node, 0) - len(content)
        if self.left[node] < 0:
            raise Refused(f"an answer of more than {self.most} bytes")
        if not internals.is_intact(request.object_id, content):
            raise Refused("a truncated or altered part of an answer")
        try:
            # an array may list the same chunk many times, and so become arbitrarily large when assembled
            array = internals.array_chunks(content)
            if array is not None:
                chunks = json.loads(array)["arraychunk_ids"]
                if len(chunks) > self.chunks:
                    raise Refused(
                        f"an array of {len(chunks)} chunks, which are too many: at most {self.chunks} are "
                        "accepted"
                    )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused("an unreadable part of an answer") from None

    def _note(self, node: int | None, host: str, why: str, lost: bool = True) -> None:
        """Reports to the centre that a request was refused, and why. `node` is the node number of the site
        that sent it. If `node` is None, a stranger at the address `host` sent it. `lost` says whether the
        answer that the centre waits for can no longer arrive."""
        self.notes.add(node, host, why, lost)

    def failed(self, host: str, reason: str) -> None:
        """Reports to the centre that a connection failed: its TLS handshake failed, or the headers of a
        request are too long. A handshake fails, for example, if the sender uses plain HTTP or does not trust
        the centre's certificate."""
        self._note(None, host, _handshake(reason))

    def _traffic(self) -> None:
        """Reports to the centre how many bytes the sites have sent (`up`) and received (`down`) so far."""
        self.tell({"up": self.up, "down": self.down})


def _handshake(reason: str) -> str:
    """Returns a readable reason for a failed TLS handshake, made from OpenSSL's reason code."""
    if reason == ENDLESS:
        return reason
    if "HTTP" in reason:
        return "plain HTTP instead of TLS"
    if "ALERT" in reason and ("CERT" in reason or "CA" in reason):
        return f"a TLS alert: it does not trust the centre's certificate ({reason.lower().replace('_', ' ')})"
    return f"invalid TLS ({reason.lower().replace('_', ' ')})"


def _parsed(path: str, body: bytes, which: int = 0) -> Any:
    """Returns `body` as a protobuf message. It is the body of a request to this path (`which` = 0), or of the
    response to such a request (`which` = 1). Raises `Refused` if the body cannot be read."""
    request = internals.TYPES[path][which]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise Refused("a message that cannot be read") from None
    return request


async def _answer(send: Send, status: int, body: bytes, close: bool = True) -> None:
    """Sends an HTTP response. If `close` is true, the body is plain text, and the connection is closed
    afterwards. Otherwise the body is a protobuf message, and the connection stays open."""
    headers = [(b"content-type", b"application/protobuf"), (b"content-length", str(len(body)).encode())]
    if close:
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
