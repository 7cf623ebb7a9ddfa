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
from select import PIPE_BUF
from typing import Any, Protocol

import anyio.to_thread

from ssfl.deploy import internals
from ssfl.deploy.answers import ROOM, AnswerChecks, BrokenOff, Refused, SecondAnswer, parsed
from ssfl.deploy.notes import Notes
from ssfl.deploy.presence import Presence

SECRET = "x-ssfl-secret"
FLEET = "/v1/fleet/"
VISIT = "ssfl.visit"
"""A key of the state (a dict) of an ASGI request. Its value is the request's connection (`port.Visit`).
Requests over the centre's own socket do not have this key."""
ENDLESS = "headers that are too long"
"""The reason that is reported if a connection is closed because its headers are too long."""
FROM_CENTRE = 1 << 30
"""The largest size of a request that the centre itself sends, in bytes."""
STALLED = 60.0
"""A request is given up if no more bytes of its body arrive for this many seconds."""
FAREWELL = 40
"""How many requests an excluded site may still send. It needs them to fetch the message that says that it is
excluded."""
WAKE, EXCLUDE, FORGET = "/ssfl/wake", "/ssfl/exclude", "/ssfl/forget"
"""Three paths to which the centre posts a JSON list. /ssfl/wake: messages are waiting for these nodes.
/ssfl/exclude: the sites of these nodes are excluded. /ssfl/forget: the centre no longer waits for answers to
the messages with these identifiers."""
TWICE = 25.0
"""Seconds after which a site that still counts as connected, but asks to join, must be a second one with the
same key. A killed site counts as connected for 20 s. A second one gives up after 30 s."""
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Report = Callable[[dict[str, Any]], None]


def teller(descriptor: int) -> Report:
    """Returns a function that sends a report to the centre as one line of JSON, over the pipe with this file
    descriptor.

    The function never blocks: if the centre does not read the pipe, the report is lost. A report that is too
    long to be written as a whole is lost, too.
    """
    os.set_blocking(descriptor, False)

    def tell(note: dict[str, Any]) -> None:
        line = json.dumps(note).encode() + b"\n"
        if len(line) <= PIPE_BUF:
            with suppress(OSError):  # the centre is busy, or gone; then this process ends soon
                os.write(descriptor, line)

    return tell


class Connections(Protocol):
    """The methods of `port.Port` that the filter calls."""

    def admit(self, visit: Any, node: int) -> bool: ...


class RequestFilter:
    """An ASGI application in front of Flower's own application. It passes on only the requests that are
    allowed."""

    port: Connections

    def __init__(
        self, flower: internals.SuperLink, secret: str, model_bytes: int, tell: Report, keys_only: bool
    ) -> None:
        self.flower, self.secret, self.tell, self.keys_only = flower, secret.encode(), tell, keys_only
        self.answers, self.presence = AnswerChecks(flower, model_bytes), Presence(flower)
        self.ready = False
        """Whether the centre has registered its sites and started its run. Until then every site's request is
        answered with 503, because no key is known yet."""
        self.up = self.down = 0
        self.nodes: dict[bytes, int | None] = {}
        """A cache of Flower's node number for each public key. It is cleared when sites are registered or
        removed."""
        self.excluded: dict[int, int] = {}
        """For each node of an excluded site: how many more of its requests are answered."""
        self._turned_away: dict[int, float] = {}
        """For each node that may not join because it counts as connected: since when (`time.monotonic`)."""
        self.notes = Notes(tell)

    def tick(self) -> None:
        """Sends due summaries of refused requests to the centre, and checks whether this process was paused.
        The port calls it every second."""
        self.notes.flush()
        self.presence.catch_up()

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
        self.presence.catch_up()
        if scope["path"] in (WAKE, EXCLUDE, FORGET):
            listed = json.loads(await self._read(headers, receive, FROM_CENTRE))
            if scope["path"] == FORGET:
                self.answers.forget(listed)
            else:
                if scope["path"] == EXCLUDE:
                    self.excluded |= {node: FAREWELL for node in listed if node not in self.excluded}
                self.presence.wake(listed)
            await _answer(send, 200, b"", close=False)
            return
        path, run = scope["path"].removeprefix("/v1/"), headers.get(internals.RUN.encode())
        if path in self.flower.handlers and run is not None:
            body = await self._read(headers, receive, FROM_CENTRE)
            call = partial(self.flower.handlers[path], parsed(path, body), task=internals.Task(int(run)))
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
            await self.presence.alive(node, path)
        pushing = path.endswith(("/push-object", "/push-messages"))
        try:
            body = await self._read(headers, receive, self.answers.most_at_once if pushing else ROOM)
            self.up += len(body)
            if path.endswith("/push-messages"):
                self.answers.check_message(node or 0, body)
            elif pushing:
                self.answers.check_part(node or 0, body)
            elif path.endswith("/send-node-heartbeat") and node is not None:
                beat = await self.presence.beat(node, body)
                if beat is not None:
                    await _answer(send, 200, beat, close=False)
                    return
        except BrokenOff as broken:
            self.notes.add(node, host, str(broken), lost=True, broken=True)
            await _answer(send, 400, str(broken).encode())
            return
        except Refused as refused:
            self._note(node, host, str(refused), lost=not isinstance(refused, SecondAnswer))
            await _answer(send, 400, str(refused).encode())
            return
        pulling = path.endswith("/pull-messages")
        if pulling and node is not None and not await self.presence.has_work(node, receive):
            await _answer(send, 200, b"", close=False)
            return
        if pushing:
            self._traffic()
        if node is not None and path.removeprefix("/v1/") in self.flower.handlers:
            answer = await self._handled(path, body, node, host, send)
        else:
            answer = await self._passed_on(scope, body, receive, send)
            if node is not None and path.endswith("/activate-node"):
                self._activated(node, host, answer is not None)
        if joining:
            self.nodes.pop(key, None)
        if node is not None and answer is not None:
            self._follow(node, path, body, answer)

    async def _handled(self, path: str, body: bytes, node: int, host: str, send: Send) -> bytes | None:
        """AnswerChecks a request about messages by calling Flower's handler directly, which is faster than
        Flower's application. Returns the body of the answer, or None if the request was refused."""
        try:
            request = parsed(path.removeprefix("/v1/"), body)
            if request.node.node_id != node:  # the centre was restarted while this site was busy
                await _answer(send, 401, b"the centre was restarted: connect again")
                return None
            if path.endswith("/pull-messages"):
                self.presence.quiet.add(node)  # a message that arrives from now on wakes it
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

    def _activated(self, node: int, host: str, accepted: bool) -> None:
        """Handles whether Flower let a site join. Reports to the centre if it has not for `TWICE` seconds,
        because the site counts as connected. A site that was killed comes back sooner."""
        if accepted:
            self._turned_away.pop(node, None)
        elif time.monotonic() - self._turned_away.setdefault(node, time.monotonic()) > TWICE:
            del self._turned_away[node]
            why = f"a request to join from {host} with the key of a connected site: is it used twice?"
            self._note(node, host, why, lost=False)

    def _follow(self, node: int, path: str, body: bytes, answer: bytes) -> None:
        """Updates what is known about a node after a request was answered: whether messages may be waiting
        for the node, and which parts of its answer are still missing. Tells the centre when an answer is
        complete."""
        if path.endswith("/activate-node") or (path.endswith("/pull-messages") and answer):
            self.presence.quiet.discard(node)
        elif path.endswith("/push-messages"):
            self._complete(self.answers.announced(node, answer))
        elif path.endswith("/push-object"):
            self._complete(self.answers.arrived(node, body))

    def _complete(self, message: str | None) -> None:
        """Tells the centre that the answer to the message with this identifier is complete, and deletes the
        message. None: no answer was completed."""
        if message is not None:
            self.flower.delete(message)
            self.tell({"answered": message})

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


async def _answer(send: Send, status: int, body: bytes, close: bool = True) -> None:
    """Sends an HTTP response. If `close` is true, the body is plain text, and the connection is closed
    afterwards. Otherwise the body is a protobuf message, and the connection stays open."""
    headers = [(b"content-type", b"application/protobuf"), (b"content-length", str(len(body)).encode())]
    if close:
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
