"""A site that has a key and speaks Flower's protocol, and whose answers are wrong, each in another way.

python bad_site.py HOST:PORT SITE_FILE IMAGE_FOLDER FAULT,FAULT,...
"""

import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

from ssfl.data import sources
from ssfl.deploy import keys
from ssfl.deploy.connection import Connection, connected
from ssfl.deploy.images import ImageFiles
from ssfl.deploy.site import Site, client_app
from ssfl.runs.surroundings import reproducible


def with_row(reply: Message, change: Callable[[np.ndarray], np.ndarray], name: str = "row") -> Message:
    """The answer with another model in it."""
    row = change(reply.content.array_records["model"]["row"].numpy())
    content = RecordDict(dict(reply.content))
    content["model"] = ArrayRecord({name: Array(row)})
    return Message(content, reply_to=QUESTION[0])


def with_told(reply: Message, **told: float) -> Message:
    """The answer with other numbers."""
    content = RecordDict(dict(reply.content))
    content["metrics"] = MetricRecord(dict(content.metric_records["metrics"]) | told)
    return Message(content, reply_to=QUESTION[0])


def ascent(row: np.ndarray) -> np.ndarray:
    """An update that increases the loss, nearly three tenths of the model long."""
    sent = QUESTION[0].content.array_records["model"]["row"].numpy()
    update = sent - row
    long = 0.29 * np.linalg.norm(sent) / max(float(np.linalg.norm(update)), 1e-30)
    changed: np.ndarray = (sent + np.float32(long) * update).astype(np.float32)
    return changed


QUESTION: list[Message] = []
CONTENTS: dict[str, Callable[[Message], Message]] = {
    "nan": lambda reply: with_row(reply, lambda row: row * np.float32("nan")),
    "infinite": lambda reply: with_row(reply, lambda row: row + np.float32("inf")),
    "shape": lambda reply: with_row(reply, lambda row: row[:-1].copy()),
    "name": lambda reply: with_row(reply, lambda row: row, "weights"),
    "round": lambda reply: with_told(reply, round=99),
    "norm": lambda reply: with_row(reply, lambda row: row * np.float32(50)),
    "ascent": lambda reply: with_row(reply, ascent),
    "large": lambda reply: with_row(reply, lambda row: np.tile(row, 60)),
}


class Change(httpx.BaseTransport):
    """Spoils the largest part of an answer on its way, or sends half of it and hangs up."""

    def __init__(self, address: str, authority: bytes, stock: httpx.BaseTransport) -> None:
        host, _, port = address.rpartition(":")
        self.place, self.authority, self.fault, self.stock = (host, int(port)), authority, "", stock

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/push-object") and len(request.content) > 10_000:
            if self.fault == "truncated":
                self._half(request)
                raise httpx.WriteError("hung up")
            if self.fault == "altered":
                part = PushObjectRequest.FromString(request.content)
                part.object_content = part.object_content[: len(part.object_content) // 2]
                changed = part.SerializeToString()
                headers = dict(request.headers) | {"content-length": str(len(changed))}
                request = httpx.Request("POST", request.url, headers=headers, content=changed)
        return self.stock.handle_request(request)

    def _half(self, request: httpx.Request) -> None:
        trust = ssl.create_default_context(cadata=self.authority.decode())
        head = f"POST {request.url.path} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with (
            socket.create_connection(self.place) as plain,
            trust.wrap_socket(plain, server_hostname=self.place[0]) as stream,
        ):
            stream.sendall(head.encode() + b"\r\n" + request.content[: len(request.content) // 2])


class Bomb(Array):
    """An array that names its one chunk ten thousand times."""

    __qualname__ = "Array"

    def deflate(self) -> bytes:
        body = super().deflate().split(b"\0", 1)[1]
        return add_header_to_object_body(body.replace(b"[0]", b"[" + b"0, " * 9999 + b"0]"), self)


def bomb(reply: Message) -> Message:
    content = RecordDict(dict(reply.content))
    content["model"] = ArrayRecord({"row": Array(reply.content.array_records["model"]["row"].numpy())})
    content.array_records["model"]["row"].__class__ = Bomb
    return Message(content, reply_to=QUESTION[0])


def answer(connection: Connection, fault: str, reply: Message, change: Change) -> None:
    """Send an answer with a fault."""
    change.fault = fault
    if fault == "bomb":
        reply = bomb(reply)
    elif fault in CONTENTS:
        reply = CONTENTS[fault](reply)
    try:
        connection.send(reply, 1.0)
        if fault == "twice":
            connection.send(with_told(reply, loss=0.5), 1.0)
    except httpx.HTTPError as error:
        print(f"{fault}: {error} {getattr(getattr(error, 'response', None), 'text', '')}", flush=True)


def main() -> None:
    address, file, folder, faults = sys.argv[1:]
    key = keys.read_site(Path(file))
    site = Site(key.name, ImageFiles(sources.image_files([folder])), "cpu", 1)
    app, left = client_app(lambda context: site), faults.split(",")
    with reproducible(), connected(address, key, 60) as connection:
        http = connection.call.http
        change = http._transport = Change(address, key.authority, http._transport)
        while not site.done:
            message = connection.receive()
            if message is None:
                time.sleep(0.3)
                continue
            QUESTION[:] = [message]
            node = connection.node.node_id
            reply = app(message, Context(message.metadata.run_id, node, {}, RecordDict(), {}))
            training = "model" in reply.content
            answer(connection, left.pop(0) if training and left else "", reply, change)


if __name__ == "__main__":
    main()
