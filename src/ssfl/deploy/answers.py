"""The checks of answers at the centre's port. An answer must belong to the site that sends it, be the first
to its message, and not be too large. Flower itself checks none of this."""

import json
from typing import Any

from google.protobuf.message import DecodeError

from ssfl.deploy import internals

ROOM = 65_536
"""The number of bytes that an answer may have in addition to its model: names, metrics, and what Flower adds.
It is also the largest size of requests that carry no model."""
PARTS = 8
"""How many parts an answer may have in addition to the chunks of its model. These are the message, each of
its records, and the description of the array."""


class Refused(Exception):
    """Raised if a request is refused. Its text is what the sender sent, for example "a request without its
    length"."""


class SecondAnswer(Refused):
    """Raised if a site answers the same message twice. The centre may still use the first answer."""


class BrokenOff(Refused):
    """Raised if the connection ends or stalls in the middle of a request. Networks fail, so this does not
    count against the site."""


class AnswerChecks:
    """Checks the answers of all sites, and follows which of their parts have arrived. `model_bytes` is the
    size of the largest model that a site may send."""

    def __init__(self, model_bytes: int) -> None:
        self.most = model_bytes + ROOM
        """The largest size of an answer, in bytes."""
        self.most_at_once = min(self.most, internals.CHUNK + ROOM)
        """The largest size of a request that carries a part of an answer, in bytes."""
        self._chunks = -(-self.most // internals.CHUNK)
        self._answered: dict[int, tuple[str, str]] = {}
        """For each node: the identifiers of the last message that it answered, and of that answer. They
        reveal second answers."""
        self._left: dict[int, int] = {}
        """For each node: how many more bytes its current answer may have."""
        self._coming: dict[int, tuple[str, set[str]]] = {}
        """For each node that is sending an answer: the identifier of the message that it answers, and the
        identifiers of the parts that have not arrived yet."""

    def check_message(self, node: int, body: bytes) -> None:
        """Raises unless the request announces exactly one answer that is allowed. The answer must come from
        the site that sent the request, be the first answer to its message, and have few parts."""
        request = parsed("fleet/push-messages", body)
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(f"{len(request.messages_list)} answers in one request instead of one")
        facts = request.messages_list[0].metadata
        if facts.src_node_id != node or not facts.reply_to_message_id:
            raise Refused("an answer in the name of another site, or to no message")
        parts = internals.count_parts(request.message_object_trees[0])
        if parts > self._chunks + PARTS:
            raise Refused(
                f"an answer in {parts} parts, which are too many: at most {self._chunks + PARTS} are accepted"
            )
        answered, answer = self._answered.get(node, ("", ""))
        if answered == facts.reply_to_message_id and answer != facts.message_id:
            raise SecondAnswer("a second answer to the same message")
        self._answered[node] = facts.reply_to_message_id, facts.message_id
        self._left[node] = self.most

    def check_part(self, node: int, body: bytes) -> None:
        """Raises if a part of an answer cannot be read, does not match its hash, or describes an array with
        too many chunks. Also raises if the parts of the answer so far are together too large."""
        request = parsed("fleet/push-object", body)
        content = request.object_content
        self._left[node] = self._left.get(node, 0) - len(content)
        if self._left[node] < 0:
            raise Refused(f"an answer of more than {self.most} bytes")
        if not internals.is_intact(request.object_id, content):
            raise Refused("a truncated or altered part of an answer")
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

    def announced(self, node: int, response: bytes) -> str | None:
        """Records which parts of a node's answer are missing. `response` is Flower's response to the request
        that announced the answer. Returns the identifier of the answered message if no part is missing, and
        None otherwise."""
        missing = parsed("fleet/push-messages", response, 1).objects_to_push
        self._coming[node] = self._answered[node][0], set(missing)
        return self._completed(node)

    def arrived(self, node: int, body: bytes) -> str | None:
        """Records that a part of a node's answer has arrived. `body` is the request that carried it. Returns
        the identifier of the answered message if this was the last missing part, and None otherwise."""
        if node in self._coming:
            self._coming[node][1].discard(parsed("fleet/push-object", body).object_id)
        return self._completed(node)

    def _completed(self, node: int) -> str | None:
        """Returns the identifier of the message whose answer is complete, once, or None."""
        if node not in self._coming or self._coming[node][1]:
            return None
        return self._coming.pop(node)[0]


def parsed(path: str, body: bytes, which: int = 0) -> Any:
    """Returns `body` as a protobuf message. It is the body of a request to this path (`which` = 0), or of the
    response to such a request (`which` = 1). Raises `Refused` if the body cannot be read."""
    request = internals.TYPES[path][which]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise Refused("a message that cannot be read") from None
    return request
