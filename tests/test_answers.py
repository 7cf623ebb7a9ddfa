"""Answers at the centre's port: what a site may announce, and that nothing fills the centre's memory."""

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs Flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2

import light
import test_port
from ssfl.deploy import connection
from test_port import memory, scene, signed, statuses
from waiting import wait_until


def announcement(reply: Message) -> Any:
    return message_to_proto(remove_content_from_message(reply))


def tree(root: str, *parts: str) -> Any:
    return message_pb2.ObjectTree(
        object_id=root, children=[message_pb2.ObjectTree(object_id=part) for part in parts]
    )


def announced(there: connection.Connection, proto: Any, listed: Any) -> Any:
    """The centre's response to an announcement, or the reason for which it was refused."""
    try:
        return there.call(
            "fleet/push-messages", node=there.node, messages_list=[proto], message_object_trees=[listed]
        )
    except httpx.HTTPStatusError as error:
        return error.response.text


def test_an_impossible_identifier_is_refused_and_the_port_is_still_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[connection.Connection, Message]] = []
    before = connection.Connection.send

    def send(self: connection.Connection, reply: Message, seconds: float) -> None:
        before(self, reply, seconds)
        sent.append((self, reply))

    monkeypatch.setattr(connection.Connection, "send", send)
    with scene(tmp_path) as made:
        assert made.round() == 3
        there, reply = sent[-1]
        proto = announcement(reply)
        proto.metadata.message_id = 64 * "f"
        proto.metadata.reply_to_message_id = 100_000 * "x"
        assert "identifier" in announced(there, proto, tree(64 * "f"))
        proto.metadata.reply_to_message_id = 64 * "a"  # no message has this identifier, so nothing is stored
        assert not announced(there, proto, tree(64 * "f")).objects_to_push
        wait_until(made.refused, "the refusal was not told")
        began = time.monotonic()
        assert made.round() == 3
        assert time.monotonic() - began < 20  # the answers were reported, not found by asking every 30 s
        heard = len(made.refused())
        assert set(statuses(signed(made, "aachen"), "push-object", b"\xff" * 1000, 5)) == {400}
        wait_until(lambda: len(made.refused()) > heard, "refusals were not told any more")


def test_the_parts_of_an_answer_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site announces one answer twice, with other parts each time, and uploads all parts but the last."""
    monkeypatch.setattr(test_port, "NUMBERS", 1_000_000)
    before, found = connection.Connection.send, list[Any]()

    def send(self: connection.Connection, reply: Message, seconds: float) -> None:
        if found or "model" not in reply.content:
            before(self, reply, seconds)
            return
        found.append(None)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.clock.stamp(reply)
        proto = announcement(reply)
        for _ in range(2):
            chunks = {
                c.object_id: c.deflate()
                for c in (ArrayChunk(memoryview(os.urandom(900_000))) for _ in range(4))
            }
            proto.metadata.message_id = reply.object_id
            answer = announced(self, proto, tree(reply.object_id, *chunks))
            found.append(answer)
            if isinstance(answer, str):
                continue
            for name, content in chunks.items():
                for _ in range(2):  # a request may be repeated, because its response may be lost
                    self.call(
                        "fleet/push-object", node=self.node, run_id=reply.metadata.run_id, object_id=name,
                        object_content=content, session_id=answer.session_id,
                    )  # fmt: skip
        other = ArrayChunk(memoryview(os.urandom(900_000)))
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            self.call(
                "fleet/push-object", node=self.node, run_id=reply.metadata.run_id, object_id=other.object_id,
                object_content=other.deflate(), session_id=found[1].session_id,
            )  # fmt: skip
        proto.metadata.message_id = hashlib.sha256(b"another").hexdigest()
        found.append(announced(self, proto, tree(proto.metadata.message_id)))

    monkeypatch.setattr(connection.Connection, "send", send)
    with scene(tmp_path) as made:
        assert made.round() == 2
        wait_until(lambda: len(made.refused()) == 3, lambda: f"not all refusals were told: {made.refused()}")
        assert len(found[1].objects_to_push) == 5
        assert "parts" in found[2]
        assert "second answer" in found[3]
        assert made.round() == 3


@pytest.mark.slow
def test_what_no_site_fetches_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_port, "NUMBERS", 2_000_000)
    hangs, before = threading.Event(), connection.Connection.receive

    def receive(self: connection.Connection) -> Message | None:
        if hangs.is_set():
            time.sleep(0.1)
            return None
        return before(self)

    monkeypatch.setattr(connection.Connection, "receive", receive)
    with scene(tmp_path) as made:
        nodes = list(made.fleet.connected().values())
        made.fleet.exchange({node: light.model(2_000_000) for node in nodes}, "train", 60.0)
        hangs.set()
        time.sleep(2)  # requests for work that are still open end
        start = memory()
        for _ in range(7):
            model = RecordDict({"config": ConfigRecord({"ask": "train"})})
            row = np.frombuffer(os.urandom(8_000_000), np.uint8)
            model["model"] = ArrayRecord({"row": Array(row)})
            assert not made.fleet.exchange(dict.fromkeys(nodes, model), "train", 2.0)
        assert memory() - start < 24 * 2**20  # seven models have 56 MB
