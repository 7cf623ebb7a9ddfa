"""The checks of answers at the centre's port. An answer must belong to the site that sends it, be the first
to its message, and not be too large. Flower itself checks none of this."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from ssfl.deploy import internals

ROOM = 65_536
"""The number of bytes that an answer may have in addition to its model: names, metrics, and what Flower adds.
It is also the largest size of requests that carry no model."""
PARTS = 8
"""How many parts an answer may have in addition to the chunks of its model. These are the message, each of
its records, and the description of the array."""
IDENTIFIER = re.compile("[0-9a-f]{64}")
"""The form of Flower's identifiers of messages and their parts: SHA-256 in hexadecimal digits."""


class Refused(Exception):
    """Raised if a request is refused. Its text is what the sender sent, for example "a request without its
    length"."""


class SecondAnswer(Refused):
    """Raised if a site answers the same message twice. The centre may still use the first answer."""


class BrokenOff(Refused):
    """Raised if the connection ends or stalls in the middle of a request. Networks fail, so this does not
    count against the site."""


@dataclass
class Upload:
    """The answer that a site is sending, or has sent last. `message` is the identifier of the message that it
    answers, `answer` its own. `parts` are the identifiers of all its parts, and `missing` of those that have
    not arrived yet. `sizes` has the number of bytes of each part that was received here."""

    message: str
    answer: str
    parts: frozenset[str]
    missing: set[str]
    sizes: dict[str, int] = field(default_factory=dict)


class AnswerChecks:
    """Checks the answers of all sites, and follows which of their parts have arrived. `model_bytes` is the
    size of the largest model that a site may send.

    A site may repeat its requests, because a connection may break before it hears the response. But it may
    not change what it has announced. Otherwise it could fill the centre's memory with parts of answers that
    never become complete.
    """

    def __init__(self, flower: internals.SuperLink, model_bytes: int) -> None:
        self.flower = flower
        self.most = model_bytes + ROOM
        """The largest size of an answer, in bytes."""
        self.most_at_once = min(self.most, internals.CHUNK + ROOM)
        """The largest size of a request that carries a part of an answer, in bytes."""
        self._chunks = -(-self.most // internals.CHUNK)
        self._uploads: dict[int, Upload] = {}
        """The last answer of each node."""

    def check_message(self, node: int, body: bytes) -> None:
        """Raises unless the request announces exactly one answer that is allowed. The answer must come from
        the site that sent the request, be the first answer to its message, and have few parts."""
        request = parsed("fleet/push-messages", body)
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(f"{len(request.messages_list)} answers in one request instead of one")
        facts, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if facts.src_node_id != node or not facts.reply_to_message_id:
            raise Refused("an answer in the name of another site, or to no message")
        parts = internals.parts(tree)
        if len(parts) > self._chunks + PARTS:
            raise Refused(
                f"an answer in {len(parts)} parts, which are too many: at most {self._chunks + PARTS} are "
                "accepted"
            )
        identifiers = (facts.reply_to_message_id, facts.message_id, *parts)
        if tree.object_id != facts.message_id or not all(map(IDENTIFIER.fullmatch, identifiers)):
            raise Refused("an answer with a wrong identifier")
        new = Upload(facts.reply_to_message_id, facts.message_id, frozenset(parts), set(parts))
        old = self._uploads.get(node)
        if old is None or old.message != new.message:
            if old is not None:  # the centre has fetched it, or no longer waits for it
                self.flower.delete(old.answer)
            self._uploads[node] = new
        elif old.answer != new.answer:
            raise SecondAnswer("a second answer to the same message")
        elif old.parts != new.parts:
            raise Refused("an answer whose list of parts has changed")

    def check_part(self, node: int, body: bytes) -> None:
        """Raises if a part of an answer was not announced, cannot be read, does not match its hash, or
        describes an array with too many chunks. Also raises if the parts of the answer so far are together
        too large."""
        request = parsed("fleet/push-object", body)
        content, upload = request.object_content, self._uploads.get(node)
        if not internals.is_intact(request.object_id, content):
            raise Refused("a truncated or altered part of an answer")
        if upload is None or request.object_id not in upload.parts:
            raise Refused("a part of an answer that was not announced")
        if request.object_id not in upload.missing:  # a repeated request
            return
        upload.sizes[request.object_id] = len(content)
        if sum(upload.sizes.values()) > self.most:
            raise Refused(f"an answer of more than {self.most} bytes")
        try:
            # an array may list the same chunk many times, and so become arbitrarily large when assembled
            array = internals.array_chunks(content)
            if array is not None:
                chunks = json.loads(array)["arraychunk_ids"]
                if len(chunks) > self._chunks:
                    raise Refused(
                        f"an array of {len(chunks)} chunks, which are too many: at most {self._chunks} are "
                        "accepted"
                    )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused("an unreadable part of an answer") from None

    def forget(self, messages: Iterable[str]) -> None:
        """Deletes what has arrived of the answers to these messages, and the messages themselves. The centre
        no longer waits for the answers."""
        names = set(messages)
        for name in names | {upload.answer for upload in self._uploads.values() if upload.message in names}:
            self.flower.delete(name)

    def announced(self, node: int, response: bytes) -> str | None:
        """Records which parts of a node's answer are missing. `response` is Flower's response to the request
        that announced the answer. Returns the identifier of the answered message if no part is missing, and
        None otherwise. Also returns None if Flower did not accept the answer."""
        upload = self._uploads[node]
        if not self.flower.has(upload.answer):
            return None
        upload.missing = set(parsed("fleet/push-messages", response, 1).objects_to_push) & upload.parts
        return None if upload.missing else upload.message

    def arrived(self, node: int, body: bytes) -> str | None:
        """Records that a part of a node's answer has arrived. `body` is the request that carried it. Returns
        the identifier of the answered message if this was the last missing part, and None otherwise."""
        upload, part = self._uploads[node], parsed("fleet/push-object", body).object_id
        if part not in upload.missing:
            return None
        upload.missing.discard(part)
        return None if upload.missing else upload.message


def parsed(path: str, body: bytes, which: int = 0) -> Any:
    """Returns `body` as a protobuf message. It is the body of a request to this path (`which` = 0), or of the
    response to such a request (`which` = 1). Raises `Refused` if the body cannot be read."""
    request = internals.TYPES[path][which]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise Refused("a message that cannot be read") from None
    return request
