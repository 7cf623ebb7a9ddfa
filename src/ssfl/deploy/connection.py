"""A site's connection to the centre: Flower's Fleet protocol, as a SuperNode speaks it.

Flower's own loop ends its process when the centre was started anew; here the site connects again.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_protobuf_utils as carrying
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from ssfl.deploy.keys import SiteKey
from ssfl.errors import SsflError

BEAT = 10.0
"""Seconds; after twice as many without a sign of life a site counts as gone, and may connect again."""
GRACE = 30.0
"""Seconds after which a centre that does not let a key in is believed: one that just started knows none yet,
and one whose site was killed believes it to be there still."""
HALFWAY = 120.0
"""Seconds after which a message that stopped halfway is given up."""


@dataclass(frozen=True)
class Connection:
    """Messages in and out."""

    client: FleetHttpClient
    node: Node

    def receive(self) -> Message | None:
        """The next message, if there is one."""
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        run, tree = found.messages_list[0].metadata.run_id, found.message_object_trees[0]
        pull = carrying.make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
        parts = [part.object_id for part in iterate_object_tree(tree)]
        contents = pull_objects(parts, pull, max_time=HALFWAY, initial_backoff=0.1)
        carrying.make_confirm_message_received_fn_protobuf(
            self.client.ConfirmMessageReceived, self.node, run
        )(tree.object_id)
        message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise SsflError(f"the centre sent no message but {type(message).__name__}: ask its keeper")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def send(self, reply: Message, seconds: float) -> None:
        """An answer, after so many seconds of work."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run, objects = reply.metadata.run_id, get_all_nested_objects(reply)
        pushed = self.client.PushMessages(
            PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
        )
        push = carrying.make_push_object_fn_protobuf(
            self.client.PushObject, self.node, run, pushed.session_id
        )
        for name in pushed.objects_to_push:
            push(name, objects[name].deflate())


@contextmanager
def connected(address: str, key: SiteKey | None, patience: float) -> Iterator[Connection]:
    """A connection to HOST:PORT, tried for `patience` seconds; without a key it is not encrypted."""
    pair = generate_key_pairs() if key is None else (key.private, key.private.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    with FleetHttpClient.from_server_address(
        address, key is None, None if key is None else key.authority,
        interceptors=[version, NodeAuthHttpInterceptor(*pair)],
    ) as client:  # fmt: skip
        began = time.monotonic()
        node = None
        while node is None:
            try:
                node = _activate(client, pair[1], new=key is None)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500 and time.monotonic() > began + min(patience, GRACE):
                    raise SsflError(_refused(address, error.response.text)) from error
            except httpx.TransportError as error:
                if "certificate has expired" in str(error):
                    raise SsflError(
                        f"the certificate of {address} has expired: ask the centre's keeper for new keys"
                    ) from error
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise SsflError(
                        f"{address} shows another certificate than this key trusts: name that host in "
                        "`ssfl keys init --host`, or ask the centre's keeper for a new site file"
                    ) from error
                if time.monotonic() > began + patience:
                    raise SsflError(
                        f"nothing answers at {address} ({error}): is the centre running, and does a firewall "
                        "let it be reached?"
                    ) from error
            if node is None:
                time.sleep(1)
        gone = threading.Event()
        heart = threading.Thread(target=_beat, args=(client, node, gone), daemon=True)
        heart.start()
        try:
            yield Connection(client, node)
        finally:
            gone.set()
            heart.join()
            with suppress(httpx.HTTPError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def _activate(client: FleetHttpClient, public: ec.EllipticCurvePublicKey, new: bool) -> Node:
    own = public_key_to_bytes(public)
    if new:
        client.RegisterNode(RegisterNodeFleetRequest(public_key=own))
    request = ActivateNodeRequest(public_key=own, heartbeat_interval=BEAT)
    return Node(node_id=client.ActivateNode(request).node_id)


def _beat(client: FleetHttpClient, node: Node, gone: threading.Event) -> None:
    """Signs of life; whether the centre is still the same is found out by the next message."""
    while not gone.wait(BEAT / 2):
        with suppress(httpx.HTTPError):
            client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=BEAT))


def _refused(address: str, said: str) -> str:
    return (
        f"{address} does not know this site's key, or it is in use ({' '.join(said.split())[:150]}): "
        "ask the centre's keeper; a key that was added after the centre began counts from its next "
        "`ssfl serve --resume` on"
    )
