"""All uses of Flower's internals, that is, of anything beyond its public interface (flwr.app, flwr.clientapp,
flwr.serverapp).

No other module imports Flower's internals, and `tests/test_flower_internals.py` lists those used here. So if
a new release of Flower differs, only this file breaks, with one message that says so.
"""

import os
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, Message
from google.protobuf.message import DecodeError

from ssfl.errors import SsflError

OTHER_FLOWER = "the installed version of Flower does not work with ssfl"
INSTALL_FLOWER = "install the right one with `pip install 'ssfl[flower]'`"
try:
    from flwr.app.message import remove_content_from_message
    from flwr.cli.build import build_fab_from_files
    from flwr.common.constant import (
        FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
        SYSTEM_TIME_TOLERANCE,
        TIMESTAMP_HEADER,
        TIMESTAMP_TOLERANCE,
        ErrorCode,
    )
    from flwr.common.serde import message_to_proto
    from flwr.proto import control_pb2, fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, runtime_pb2
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        FLWR_IN_MEMORY_DB_NAME,
        TASK_TOKEN_HEADER,
        TaskType,
    )
    from flwr.supercore.date import now
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_body,
        get_object_head_values_from_object_content,
        get_object_id,
        get_object_tree,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.primitives.asymmetric import (
        bytes_to_public_key,
        public_key_to_bytes,
        sign_message,
        verify_signature,
    )
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise SsflError(f"{OTHER_FLOWER} ({error}): {INSTALL_FLOWER}") from error

CLOCKS_AGREE = 2.0
"""A site corrects its estimate of the centre's time only if the estimate is wrong by more than this many
seconds."""
Node = node_pb2.Node
NodeInfo = node_pb2.NodeInfo
CHUNK = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
"""The largest size, in bytes, of one chunk of an array. Flower sends a larger array in several chunks."""
RUN = "x-ssfl-run"
"""The name of the HTTP header in which the centre sends the number of its run."""
SERVER = Node(node_id=1)
"""The node number under which Flower knows the SuperLink itself; the centre sends its messages as this
node."""
LATE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Flower's error codes for an answer that did not arrive completely before its time ran out."""
KEY_IN_USE = 412
"""The HTTP status of Flower's answer to a site that connects with the key of a connected site."""
TYPES: dict[str, tuple[Any, Any]] = {
    "control/register-node": (control_pb2.RegisterNodeRequest, control_pb2.RegisterNodeResponse),
    "control/unregister-node": (control_pb2.UnregisterNodeRequest, control_pb2.UnregisterNodeResponse),
    "control/start-run": (control_pb2.StartRunRequest, control_pb2.StartRunResponse),
    "runtime/acquire-task": (runtime_pb2.AcquireTaskRequest, runtime_pb2.AcquireTaskResponse),
    "runtime/pull-task-input": (runtime_pb2.PullTaskInputRequest, runtime_pb2.PullTaskInputResponse),
    "runtime/push-task-output": (runtime_pb2.PushTaskOutputRequest, runtime_pb2.PushTaskOutputResponse),
    "runtime/send-task-heartbeat": (
        runtime_pb2.SendTaskHeartbeatRequest,
        runtime_pb2.SendTaskHeartbeatResponse,
    ),
    "runtime/get-nodes": (runtime_pb2.GetNodesRequest, runtime_pb2.GetNodesResponse),
    "runtime/push-messages": (runtime_pb2.PushAppMessagesRequest, runtime_pb2.PushAppMessagesResponse),
    "runtime/pull-messages": (runtime_pb2.PullAppMessagesRequest, runtime_pb2.PullAppMessagesResponse),
    "fleet/register-node": (fleet_pb2.RegisterNodeFleetRequest, fleet_pb2.RegisterNodeFleetResponse),
    "fleet/activate-node": (fleet_pb2.ActivateNodeRequest, fleet_pb2.ActivateNodeResponse),
    "fleet/deactivate-node": (fleet_pb2.DeactivateNodeRequest, fleet_pb2.DeactivateNodeResponse),
    "fleet/send-node-heartbeat": (
        heartbeat_pb2.SendNodeHeartbeatRequest,
        heartbeat_pb2.SendNodeHeartbeatResponse,
    ),
    "fleet/pull-messages": (fleet_pb2.PullMessagesRequest, fleet_pb2.PullMessagesResponse),
    "fleet/push-messages": (fleet_pb2.PushMessagesRequest, fleet_pb2.PushMessagesResponse),
}
"""The protobuf types of each request and of its response, by path."""
for _api in ("fleet", "runtime"):
    TYPES[f"{_api}/push-object"] = message_pb2.PushObjectRequest, message_pb2.PushObjectResponse
    TYPES[f"{_api}/pull-object"] = message_pb2.PullObjectRequest, message_pb2.PullObjectResponse
    TYPES[f"{_api}/confirm-message-received"] = (
        message_pb2.ConfirmMessageReceivedRequest,
        message_pb2.ConfirmMessageReceivedResponse,
    )
BUNDLE = b"""
[project]
name = "ssfl"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "ssfl"
fab-format-version = 0
[tool.flwr.app.components]
serverapp = "ssfl:none"
clientapp = "ssfl:none"
"""
"""The app bundle that Flower needs to start a run. It has no code, because the centre and the sites run ssfl
itself."""


@dataclass(frozen=True)
class Task:
    """The number of the centre's run, in the form that Flower's request handlers expect."""

    run_id: int


class CannotCarry(Exception):
    """Raised if a message could not be sent, or did not arrive completely."""


class Caller:
    """Sends requests to Flower's SuperLink, as protobuf messages over HTTP. Calling it with a path and the
    request's fields returns the response.

    A failed request is repeated for up to `patience` seconds, unless the SuperLink refused it (HTTP status
    4xx). `headers` is a function that returns the headers of the next request.
    """

    def __init__(
        self, http: httpx.Client, base: str, headers: Callable[[], Mapping[str, str]], patience: float = 0.0
    ) -> None:
        self.http, self.base, self.headers, self.patience = http, base, headers, patience
        self.connecting = 0.0
        """If no connection could be opened, a request is repeated for this many seconds, or for `patience`
        seconds if that is longer. Repeating such a request is safe, because it was never sent."""
        self.check: Callable[[], None] = lambda: None
        """Called after each failed request. It raises if repeating the request is useless."""

    def __call__(self, path: str, **fields: Any) -> Any:
        asked, answer = TYPES[path]
        content = asked(**fields).SerializeToString()
        parsed, reply = answer(), self.post(f"v1/{path}", content)
        try:
            parsed.ParseFromString(reply)
        except DecodeError:
            raise CannotCarry("the answer is not in Flower's protocol") from None
        return parsed

    def post(self, path: str, content: bytes) -> bytes:
        """Sends `content` to a path and returns the body of the response. Raises httpx's errors if no attempt
        succeeds."""
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                response = self.http.post(
                    f"{self.base}/{path}", content=content,
                    headers={"content-type": "application/protobuf", **self.headers()},
                )  # fmt: skip
                response.raise_for_status()
                return response.content
            except httpx.HTTPError as error:
                self.check()
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                patience = max(self.patience, self.connecting) if unsent else self.patience
                if refused or time.monotonic() + pause > began + patience:
                    raise
            time.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, 2.0)


class CentreClock:
    """A site's estimate of the centre's time, because the clocks of two machines may differ by hours.

    Requests are signed with a time, and messages expire at a time. The centre checks both times by its own
    clock, so the site must use the centre's time. The site reads it from the `Date` header of the centre's
    responses. TLS guarantees that a response comes from the centre.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        """How many seconds the centre's clock is ahead of this machine's clock."""

    def learn(self, response: httpx.Response) -> None:
        """Updates `ahead` from the `Date` header of a response of the centre. Small differences are ignored,
        because `Date` has only whole seconds."""
        try:
            ahead = (parsedate_to_datetime(response.headers["date"]) - now()).total_seconds()
        except (KeyError, ValueError, TypeError):  # there is no date, or it cannot be read
            return
        if abs(ahead - self.ahead) > CLOCKS_AGREE:
            self.ahead = ahead

    def now(self) -> datetime:
        """Returns the current time by the centre's clock."""
        return now() + timedelta(seconds=self.ahead)

    def stamp(self, reply: Message) -> None:
        """Sets a reply's creation time to the centre's current time. The reply still expires together with
        the message that it answers."""
        created, facts = self.now().timestamp(), reply.metadata
        facts.ttl = facts.created_at + facts.ttl - created
        facts.created_at = created


def signed(private: ec.EllipticCurvePrivateKey, at: datetime) -> dict[str, str]:
    """Returns the HTTP headers with which a site identifies itself: its public key, the time `at`, and a
    signature of this time."""
    time = at.isoformat()
    signature = sign_message(private, time.encode())
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(private.public_key())).decode(),
        TIMESTAMP_HEADER: time,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
    }


def signer(headers: Mapping[bytes, bytes], known: Callable[[bytes], bool]) -> bytes | str:
    """Returns the public key that signed a request. If the signature is missing or invalid, returns a text
    that says why.

    `known` says whether a public key belongs to a site. Only the headers are needed, so a bad request is
    refused before its body is read.
    """
    try:
        public, signature = (
            b64decode(headers[name.lower().encode()], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        time = headers[TIMESTAMP_HEADER.lower().encode()]
        age = (now() - datetime.fromisoformat(time.decode())).total_seconds()
        if not known(public):
            return "a request signed with an unknown key"
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return f"a signature with a wrong time: the clocks differ by {abs(age):.0f} s"
        if verify_signature(bytes_to_public_key(public), time, signature):
            return public
    except KeyError:
        return "a request without a signature"
    except (ValueError, TypeError):
        pass
    return "a request with an invalid signature"


def identity(task: int, run: int, node: int) -> None:
    """Sets the task, run and node numbers that Flower writes into this process's messages as their sender."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, node


def register(call: Caller, name: str, key: ec.EllipticCurvePublicKey) -> int:
    """Registers a site's public key with Flower, under the site's name. Returns Flower's node number of the
    site."""
    return int(call("control/register-node", public_key=public_key_to_bytes(key), name=name).node_id)


def begin(call: Caller, sites: Mapping[str, ec.EllipticCurvePublicKey]) -> dict[str, int]:
    """Registers the sites with Flower and starts the centre's run. Returns Flower's node number of each site,
    by name."""
    numbers = {name: register(call, name, key) for name, key in sites.items()}
    bundle, _ = build_fab_from_files({"pyproject.toml": BUNDLE})
    call("control/start-run", fab=fab_pb2.Fab(content=bundle))
    return numbers


def take_task(call: Caller) -> int:
    """Makes this process the ServerApp of the run, and returns the run's number.

    From now on `call` sends the ServerApp's token and the run's number in its headers.
    """
    task = call("runtime/acquire-task", supported_task_types=[TaskType.SERVER_APP])
    before = call.headers
    call.headers = lambda: {**before(), TASK_TOKEN_HEADER: task.token}
    task_input = call("runtime/pull-task-input")
    call.headers = lambda: {**before(), TASK_TOKEN_HEADER: task.token, RUN: str(task_input.run.run_id)}
    identity(task_input.task_id, task_input.run.run_id, task_input.context.node_id)
    run: int = task_input.run.run_id
    return run


def activate(call: Caller, private: ec.EllipticCurvePrivateKey, beat: float, new: bool) -> Node:
    """Tells Flower that the site with the key `private` is connected, and returns the site's node. If `new`
    is true, the site's public key is registered first. `beat` is the site's heartbeat interval in seconds."""
    public_key = public_key_to_bytes(private.public_key())
    if new:
        call("fleet/register-node", public_key=public_key)
    taken = call("fleet/activate-node", public_key=public_key, heartbeat_interval=beat)
    return Node(node_id=taken.node_id)


def send(call: Caller, api: str, node: Any, message: Message, **options: Any) -> str:
    """Announces a message to Flower and uploads its parts. Returns the message's identifier.

    `api` is "runtime" at the centre and "fleet" at a site. `node` is the sender. `options` are additional
    fields of the request that announces the message. Raises `CannotCarry` if Flower does not accept the
    message.
    """
    name: str = message.object_id
    message.metadata.__dict__["_message_id"] = name
    objects = get_all_nested_objects(message)
    fields: dict[str, Any] = options if api == "runtime" else options | {"node": node}
    announced = call(
        f"{api}/push-messages", messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)], **fields,
    )  # fmt: skip
    if api == "runtime" and list(announced.message_ids) != [name]:
        raise CannotCarry("Flower did not accept the message, because the site has disconnected")
    for part in announced.objects_to_push:
        stored = call(
            f"{api}/push-object", node=node, run_id=message.metadata.run_id, object_id=part,
            object_content=objects[part].deflate(), session_id=announced.session_id,
        )  # fmt: skip
        if not stored.stored:
            raise CannotCarry("a part of the message was not accepted: the message may have expired")
    return name


def receive(call: Caller, api: str, node: Any, run: int, tree: Any, patience: float) -> Message:
    """Downloads the parts of an announced message, confirms that they arrived, and returns the message.

    `api` is "runtime" at the centre and "fleet" at a site; `tree` lists the parts. Raises `CannotCarry` if
    not all parts are available within `patience` seconds.
    """
    end, contents = time.monotonic() + patience, {}
    for part in set(parts(tree)):
        pause = 0.05
        while True:
            pulled = call(f"{api}/pull-object", node=node, run_id=run, object_id=part)
            if pulled.object_available:
                break
            if not pulled.object_found or time.monotonic() > end:
                raise CannotCarry("a message did not arrive completely")
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        contents[part] = pulled.object_content
    call(f"{api}/confirm-message-received", node=node, run_id=run, message_object_id=tree.object_id)
    message = inflate_object_from_contents(tree.object_id, contents)
    if not isinstance(message, Message):
        raise CannotCarry(f"expected a message, but received {type(message).__name__}")
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def parts(tree: Any) -> list[str]:
    """Returns the identifiers of a message's parts. `tree` is Flower's list of them."""
    return [each.object_id for each in iterate_object_tree(tree)]


def is_intact(name: str, content: bytes) -> bool:
    """Returns whether a part of a message has the right hash. The part's name is its hash."""
    return bool(get_object_id(content) == name)


def array_chunks(content: bytes) -> bytes | None:
    """Returns the description of an array if `content`, one part of a message, is such a description.
    Otherwise returns None. The description is a JSON object that lists the chunks in which the array is
    sent."""
    if get_object_head_values_from_object_content(content)[0] != "Array":
        return None
    body: bytes = get_object_body(content, Array)
    return body


@dataclass(frozen=True)
class SuperLink:
    """Flower's SuperLink in this process: it stores messages and forwards them."""

    app: Any
    """Flower's ASGI application, which answers all requests."""
    node_of: Callable[[bytes], int | None]
    """Returns the node number that belongs to a public key, or None if the key is unknown."""
    alive: Callable[[int, float], bool]
    """Takes a node number and a number of seconds. Marks the node as connected for twice this time, and
    returns whether the node exists."""
    has: Callable[[str], bool]
    """Takes the identifier of a message. Returns whether the message is stored, complete or not."""
    delete: Callable[[str], None]
    """Takes the identifier of a message, and deletes the message and those of its parts that no other message
    has. Without this, Flower keeps a message that nobody fetches until the run ends."""
    handlers: Mapping[str, Callable[..., Any]]
    """Flower's functions that answer requests about messages, by path. Calling them directly is faster than
    going through `app`, but skips the checks of `app`. So the caller must already have checked who sent the
    request. Functions for requests of the centre ("runtime/...") have an additional argument `task`. It is
    the number of the centre's run (a `Task`)."""


def superlink(keys_only: bool) -> SuperLink:
    """Returns Flower's SuperLink. With `keys_only`, a site cannot register a key itself, so only known sites
    can connect.

    The SuperLink's state is kept in memory, because nobody needs it after the process ends. A database
    (SQLite) would take most of a round's time.
    """
    os.environ["FLWR_DATABASE"] = FLWR_IN_MEMORY_DB_NAME
    try:
        return _superlink(keys_only)
    except (ImportError, AttributeError) as error:
        raise SsflError(f"{OTHER_FLOWER} ({error}): {INSTALL_FLOWER}") from error


def _superlink(keys_only: bool) -> SuperLink:
    """Imports Flower's server code and builds the `SuperLink`. Raises ImportError or AttributeError if
    Flower's internals have changed."""
    from flwr.superlink.main import create_app
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers

    app = create_app()
    app.state.enable_supernode_auth = keys_only
    state = app.state.linkstate_factory.state()
    direct: dict[str, Callable[..., Any]] = {}
    for name in ("push-messages", "pull-messages", "push-object", "pull-object", "confirm-message-received"):
        of_fleet, of_runtime = (
            getattr(handlers, name.replace("-", "_")) for handlers in (fleet_handlers, runtime_handlers)
        )
        stored = name in ("pull-messages", "confirm-message-received")
        options: dict[str, Any] = {"store": state.object_store} if stored else {}
        direct[f"fleet/{name}"] = partial(of_fleet, state=state, **options)
        direct[f"runtime/{name}"] = partial(of_runtime, state=state)
    store = state.object_store
    return SuperLink(
        app, state.get_node_id_by_public_key, state.acknowledge_node_heartbeat,
        store.__contains__, store.delete, direct,
    )  # fmt: skip
