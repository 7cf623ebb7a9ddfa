"""All uses of Flower beyond its public interface (flwr.app, flwr.clientapp, flwr.serverapp).

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
"""Two clocks count as equal if they differ by at most this many seconds."""
Node = node_pb2.Node
NodeInfo = node_pb2.NodeInfo
CHUNK = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
"""The largest part, in bytes, in which an array is sent."""
RUN = "x-ssfl-run"
"""The header in which the centre names its run."""
SERVER = Node(node_id=1)
"""Flower's node for the SuperLink itself."""
LATE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Flower's error codes for an answer that did not arrive completely before its message expired."""
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
"""The types of the requests and of their responses, by path."""
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
"""Flower needs an app bundle to start a run. This one is never executed: centre and sites have ssfl."""


@dataclass(frozen=True)
class Task:
    """What Flower's handlers need to know about the centre: the number of its run."""

    run_id: int


class CannotCarry(Exception):
    """A message could not be sent, or did not arrive completely."""


class Caller:
    """Sends requests in Flower's protocol, which is protobuf over HTTP. Failed requests are retried for
    `patience` seconds."""

    def __init__(
        self, http: httpx.Client, base: str, headers: Callable[[], Mapping[str, str]], patience: float = 0.0
    ) -> None:
        self.http, self.base, self.headers, self.patience = http, base, headers, patience
        self.connecting = 0.0
        """Seconds for which a request is tried again if there is no connection, so that it was never sent."""
        self.check: Callable[[], None] = lambda: None
        """Called after a request that failed; raises if it is useless to try again."""

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
        """Sends a request and returns the body of the response; raises httpx's errors."""
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

    Requests are signed with a time, and messages expire. The centre checks both by its own clock, so the site
    uses that clock too. It reads the time from the `Date` header that every response has. TLS guarantees that
    the response comes from the centre.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        """The seconds by which the centre's clock is ahead of this machine's."""

    def learn(self, response: httpx.Response) -> None:
        """Compares the clocks; ignores small differences, because `Date` has whole seconds."""
        try:
            ahead = (parsedate_to_datetime(response.headers["date"]) - now()).total_seconds()
        except (KeyError, ValueError, TypeError):  # there is no date, or it cannot be read
            return
        if abs(ahead - self.ahead) > CLOCKS_AGREE:
            self.ahead = ahead

    def now(self) -> datetime:
        """Returns the time at the centre."""
        return now() + timedelta(seconds=self.ahead)

    def stamp(self, reply: Message) -> None:
        """Dates a reply by the centre's clock; it expires together with the message that it answers."""
        created, facts = self.now().timestamp(), reply.metadata
        facts.ttl = facts.created_at + facts.ttl - created
        facts.created_at = created


def signed(private: ec.EllipticCurvePrivateKey, at: datetime) -> dict[str, str]:
    """Returns the headers that identify a site: its public key, the time, and a signature of the time."""
    time = at.isoformat()
    signature = sign_message(private, time.encode())
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(private.public_key())).decode(),
        TIMESTAMP_HEADER: time,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
    }


def signer(headers: Mapping[bytes, bytes], known: Callable[[bytes], bool]) -> bytes | str:
    """Returns the public key that signed a request; if there is none, a text that says why. It reads only the
    headers."""
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
    """Sets the task, run and node that this process's messages carry as their sender."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, node


def register(call: Caller, name: str, key: ec.EllipticCurvePublicKey) -> int:
    """Registers a site with its key; returns its node number."""
    return int(call("control/register-node", public_key=public_key_to_bytes(key), name=name).node_id)


def begin(call: Caller, sites: Mapping[str, ec.EllipticCurvePublicKey]) -> dict[str, int]:
    """Registers the sites and starts the centre's run; returns the sites' node numbers."""
    numbers = {name: register(call, name, key) for name, key in sites.items()}
    bundle, _ = build_fab_from_files({"pyproject.toml": BUNDLE})
    call("control/start-run", fab=fab_pb2.Fab(content=bundle))
    return numbers


def take_task(call: Caller) -> int:
    """Makes this process the run's ServerApp; returns the run's number.

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
    """Marks a site's node as connected and returns it. A `new` key is registered first. The site promises a
    heartbeat every `beat` seconds."""
    public_key = public_key_to_bytes(private.public_key())
    if new:
        call("fleet/register-node", public_key=public_key)
    taken = call("fleet/activate-node", public_key=public_key, heartbeat_interval=beat)
    return Node(node_id=taken.node_id)


def send(call: Caller, api: str, node: Any, message: Message, **options: Any) -> str:
    """Announces a message and sends its parts; returns its name."""
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
    """Fetches the parts of an announced message within `patience` seconds, confirms it and returns it."""
    end, contents = time.monotonic() + patience, {}
    for part in {each.object_id for each in iterate_object_tree(tree)}:
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


def count_parts(tree: Any) -> int:
    """Returns the number of a message's parts."""
    return sum(1 for _ in iterate_object_tree(tree))


def is_intact(name: str, content: bytes) -> bool:
    """Returns whether a part of a message matches its name, which is its hash."""
    return bool(get_object_id(content) == name)


def array_chunks(content: bytes) -> bytes | None:
    """Returns the list of an array's chunks as JSON, if this part of a message describes an array; otherwise
    None."""
    if get_object_head_values_from_object_content(content)[0] != "Array":
        return None
    body: bytes = get_object_body(content, Array)
    return body


@dataclass(frozen=True)
class SuperLink:
    """Flower's message exchange, running in this process."""

    app: Any
    """An ASGI application."""
    node_of: Callable[[bytes], int | None]
    """Returns the number of the node that has a public key."""
    alive: Callable[[int, float], bool]
    """Marks a node as connected for twice this many seconds; returns whether there is such a node."""
    handlers: Mapping[str, Callable[..., Any]]
    """The functions that answer requests about messages, by path. Those of the centre take its run as `task`.
    `app` calls the same functions, but through layers that cost more time than the functions themselves. The
    caller must have checked who sent the request."""


def superlink(keys_only: bool) -> SuperLink:
    """Returns Flower's SuperLink; with `keys_only` no site can register itself.

    Its state is kept in memory: it is not needed after the process ends, and SQLite would take most of a
    round's time.
    """
    os.environ["FLWR_DATABASE"] = FLWR_IN_MEMORY_DB_NAME
    try:
        return _superlink(keys_only)
    except (ImportError, AttributeError) as error:
        raise SsflError(f"{OTHER_FLOWER} ({error}): {INSTALL_FLOWER}") from error


def _superlink(keys_only: bool) -> SuperLink:
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
    return SuperLink(app, state.get_node_id_by_public_key, state.acknowledge_node_heartbeat, direct)
