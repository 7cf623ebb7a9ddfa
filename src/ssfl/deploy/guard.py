"""What the centre's port lets through: sites' requests, of the right size, one answer to each message.

Flower reads a request of any size, takes an array at its word and keeps silent about a second answer. Here
such requests are refused before anything of them is stored, and the centre is told by whom and why.
"""

import asyncio
import hmac
import json
import os
import ssl
import time
from asyncio import sslproto
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any

from flwr.app import Array
from flwr.common.constant import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    get_object_id,
    iterate_object_tree,
)
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError

SECRET = "x-ssfl-secret"
OPEN = ("/v1/fleet/", "/health")
FLEET = "/v1/fleet/"
ROOM = 65_536
"""Bytes that an answer may have besides its model: names, numbers, Flower's own. Others have less."""
PARTS = 8
"""Objects of an answer besides the chunks of its model: the message, its records, the array."""
AGAIN = 60.0
"""Seconds in which the same stranger is told of once."""
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Tell = Callable[[dict[str, Any]], None]
NodeOf = Callable[[bytes], int | None]


def teller(descriptor: int) -> Tell:
    """Tells the centre, a JSON object a line; nothing waits for a centre that does not listen."""
    os.set_blocking(descriptor, False)

    def tell(note: dict[str, Any]) -> None:
        with suppress(OSError):  # it is busy, or gone: then this process ends soon
            os.write(descriptor, json.dumps(note).encode() + b"\n")

    return tell


class Refused(Exception):
    """A request that goes no further."""


class Guard:
    """An ASGI application around Flower's."""

    def __init__(self, app: Any, secret: str, model_bytes: int, tell: Tell, node_of: NodeOf) -> None:
        self.app, self.secret, self.tell, self.node_of = app, secret.encode(), tell, node_of
        self.most = model_bytes + ROOM
        self.chunks = -(-(model_bytes + ROOM) // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
        self.most_at_once = min(self.most, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + ROOM)
        self.ready = False
        """Whether the centre has registered its sites and begun its run: until then all keys are unknown."""
        self.up = self.down = 0
        self.answered: dict[int, tuple[str, str]] = {}
        """The message that each node answered last, and its answer."""
        self.left: dict[int, int] = {}
        """How many bytes each node's answer may still have."""
        self.strangers: dict[tuple[str, str], float] = {}
        """When a stranger was last told of."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope["path"]
        if not path.startswith(OPEN) and not hmac.compare_digest(
            headers.get(SECRET.encode(), b""), self.secret
        ):
            await _answer(send, 403, b"for the centre alone")
        elif not path.startswith(FLEET):
            self.ready = self.ready or path.endswith("/start-run")
            await self.app(scope, receive, send)
        elif not self.ready:
            await _answer(send, 503, b"the centre is not ready yet")
        else:
            await self._fleet(scope, headers, receive, send)

    async def _fleet(self, scope: Any, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """A site's request."""
        path, host = scope["path"], (scope.get("client") or ("?", 0))[0]
        pushing = path.endswith(("/push-object", "/push-messages"))
        node = await asyncio.to_thread(self._sender, headers) if pushing else None
        try:
            body = await self._read(headers, receive, self.most_at_once if pushing else ROOM)
            self.up += len(body)
            if node is not None and path.endswith("/push-messages"):
                self._check_message(node, body)
            elif node is not None and pushing:
                self._check_object(node, body)
        except Refused as refused:
            self._note(node, host, str(refused), lost=not str(refused).startswith("a second"))
            await _answer(send, 400, str(refused).encode())
            return
        if pushing:
            self._traffic()
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return waiting.pop() if waiting else await receive()

        async def watch(message: Any) -> None:
            if message["type"] == "http.response.body":
                self.down += len(message.get("body", b""))
            elif message["status"] == 401 and not await asyncio.to_thread(self._sender, headers):
                # (a site that was busy while the centre was started anew has its number of before)
                self._note(None, host, "a wrong signature")
            elif message["status"] >= 400 and path.endswith("/activate-node"):
                if not await asyncio.to_thread(self._known, body):  # or else it is in use already
                    self._note(None, host, "an unknown key")
            elif message["status"] >= 400 and pushing:
                self._note(node, host, "a message that cannot be read")
            await send(message)

        await self.app(scope, replay, watch)
        if path.endswith(("/pull-object", "/pull-messages")):
            self._traffic()

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
        """The body, no longer than it may be."""
        try:
            size = int(headers[b"content-length"])
        except (KeyError, ValueError):
            raise Refused("a body of unknown length") from None
        if size > most:
            raise Refused(f"a body of {size} bytes, far too large: at most {most} were expected")
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(f"a truncated body: {len(body)} of {size} bytes")
            body += message.get("body", b"")
            if not message.get("more_body"):
                return bytes(body)

    def _sender(self, headers: dict[bytes, bytes]) -> int | None:
        """The node that signed a request; Flower checks that as well, but does not tell."""
        try:
            public, signature = (
                b64decode(headers[name.encode()], validate=True)
                for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
            )
            signed = headers[TIMESTAMP_HEADER.encode()]
            age = (now() - datetime.fromisoformat(signed.decode())).total_seconds()
            fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            if fresh and verify_signature(bytes_to_public_key(public), signed, signature):
                return self.node_of(public)
        except (KeyError, ValueError, TypeError):
            pass
        return None

    def _known(self, body: bytes) -> bool:
        """Whether the key is registered that a site wants to take its place with."""
        try:
            return self.node_of(_parsed(ActivateNodeRequest(), body).public_key) is not None
        except Refused:
            return False

    def _check_message(self, node: int, body: bytes) -> None:
        """The announcement of an answer: one, its sender's own, to one message, of few parts."""
        request = _parsed(PushMessagesRequest(), body)
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(f"{len(request.messages_list)} answers at once")
        told = request.messages_list[0].metadata
        if told.src_node_id != node or not told.reply_to_message_id:
            raise Refused("an answer in another's name, or to nothing")
        parts = sum(1 for _ in iterate_object_tree(request.message_object_trees[0]))
        if parts > self.chunks + PARTS:
            raise Refused(f"an answer of {parts} parts, far too many")
        answered, answer = self.answered.get(node, ("", ""))
        if answered == told.reply_to_message_id and answer != told.message_id:
            raise Refused("a second answer to the same message")
        self.answered[node] = told.reply_to_message_id, told.message_id
        self.left[node] = self.most

    def _check_object(self, node: int, body: bytes) -> None:
        """A part of an answer: what it says it is, and together with the others no more than a model."""
        request = _parsed(PushObjectRequest(), body)
        content = request.object_content
        self.left[node] = self.left.get(node, 0) - len(content)
        if self.left[node] < 0:
            raise Refused(f"more than the {self.most} bytes of an answer")
        if get_object_id(content) != request.object_id:
            raise Refused("a truncated or altered part of an answer")
        try:
            kind = get_object_head_values_from_object_content(content)[0]
            # an array may name a chunk again and again, and be as large as it likes when it is put together
            if kind == "Array":
                chunks = json.loads(get_object_body(content, Array))["arraychunk_ids"]
                if len(chunks) > self.chunks:
                    raise Refused(f"an array of {len(chunks)} chunks, far too many")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused("a part that cannot be read") from None

    def _note(self, node: int | None, host: str, why: str, lost: bool = True) -> None:
        """Tell the centre; `lost` is whether the answer that it waits for cannot come any more."""
        if node is None and not self._fresh(host, why):
            return
        self.tell({"node": node, "from": host, "reason": why, "lost": lost})

    def _fresh(self, host: str, why: str) -> bool:
        """Whether a stranger's fault has not been told lately: whoever knocks often fills no log."""
        current = time.monotonic()
        self.strangers = {key: at for key, at in self.strangers.items() if current - at < AGAIN}
        if (host, why) in self.strangers or len(self.strangers) >= 100:
            return False
        self.strangers[host, why] = current
        return True

    def _traffic(self) -> None:
        self.tell({"up": self.up, "down": self.down})

    def watch_handshakes(self) -> None:
        """Tell of connections that fail before there is a request: plain HTTP, distrusted certificates.

        asyncio closes them without a word and has no hook for it.
        """
        stock = sslproto.SSLProtocol._on_handshake_complete

        def complete(protocol: Any, error: BaseException | None) -> None:
            if isinstance(error, ssl.SSLError) and error.reason:
                host = (protocol._get_extra_info("peername") or ("?", 0))[0]
                self._note(None, host, _handshake(error.reason))
            stock(protocol, error)

        setattr(sslproto.SSLProtocol, stock.__name__, complete)


def _handshake(reason: str) -> str:
    if "HTTP" in reason:
        return "plain HTTP: this port speaks TLS"
    if "ALERT" in reason and ("CERT" in reason or "CA" in reason):
        return f"an alert: it does not trust the centre's certificate ({reason.lower().replace('_', ' ')})"
    return f"no TLS that can be understood ({reason.lower().replace('_', ' ')})"


def _parsed(request: Any, body: bytes) -> Any:
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise Refused("a message that cannot be read") from None
    return request


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers: Iterable[tuple[bytes, bytes]] = [(b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
