"""A site's connection to the centre: Flower's Fleet protocol, as a SuperNode speaks it.

Flower's own loop ends its process when the centre was started anew; here the site connects again.
"""

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from ssfl.deploy import internals
from ssfl.deploy.keys import SiteKey
from ssfl.errors import SsflError

BEAT = 10.0
"""Seconds; after twice as many without a sign of life a site counts as gone, and may connect again."""
GRACE = 30.0
"""Seconds after which a centre that does not let a key in is believed: one that just started knows none yet,
and one whose site was killed believes it to be there still."""
IDLE = 60.0
"""Seconds after which an idle connection is closed, before the centre would."""
HALFWAY = 120.0
"""Seconds after which a message that stopped halfway is given up."""


@dataclass(frozen=True)
class Connection:
    """Messages in and out."""

    call: internals.Caller
    node: internals.Node
    clock: internals.CentreClock

    def receive(self) -> Message | None:
        """The next message, if there is one."""
        announced = self.call("fleet/pull-messages", node=self.node)
        if not announced.messages_list:
            return None
        run, tree = announced.messages_list[0].metadata.run_id, announced.message_object_trees[0]
        return internals.receive(self.call, "fleet", self.node, run, tree, HALFWAY)

    def send(self, reply: Message, seconds: float) -> None:
        """An answer, after so many seconds of work."""
        self.clock.stamp(reply)
        internals.send(self.call, "fleet", self.node, reply, clientapp_runtime_list=[seconds])


@contextmanager
def connected(address: str, key: SiteKey | None, patience: float) -> Iterator[Connection]:
    """A connection to HOST:PORT, tried for `patience` seconds; without a key it is not encrypted."""
    private = ec.generate_private_key(ec.SECP384R1()) if key is None else key.private
    trust: ssl.SSLContext | bool = False
    if key is not None:
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trust.load_verify_locations(cadata=key.authority.decode("ascii"))
    limits, clock = httpx.Limits(max_connections=4, keepalive_expiry=IDLE), internals.CentreClock()
    hooks = {"response": [clock.learn]}
    with httpx.Client(verify=trust, timeout=30.0, limits=limits, event_hooks=hooks) as http:
        base = f"{'http' if key is None else 'https'}://{address}"
        call = internals.Caller(http, base, lambda: internals.signed(private, clock.now()))
        began = time.monotonic()
        node = None
        while node is None:
            try:
                node = internals.activate(call, private, BEAT, new=key is None)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500 and time.monotonic() > began + min(patience, GRACE):
                    raise SsflError(_refused(address, error.response.text)) from error
            except httpx.TransportError as error:
                if "certificate has expired" in str(error):
                    raise SsflError(
                        f"the certificate of {address} has expired by this machine's clock "
                        f"({datetime.now():%Y-%m-%d %H:%M}): set the clock, or ask the centre's keeper for "
                        "new keys"
                    ) from error
                if "certificate is not yet valid" in str(error):
                    raise SsflError(
                        f"the certificate of {address} is not valid yet by this machine's clock "
                        f"({datetime.now():%Y-%m-%d %H:%M}): set the clock"
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
        heart = threading.Thread(target=_beat, args=(call, node, gone), daemon=True)
        heart.start()
        try:
            yield Connection(call, node, clock)
        finally:
            gone.set()
            heart.join()
            with suppress(httpx.HTTPError):
                call("fleet/deactivate-node", node_id=node.node_id)


def _beat(call: internals.Caller, node: internals.Node, gone: threading.Event) -> None:
    """Signs of life; whether the centre is still the same is found out by the next message."""
    while not gone.wait(BEAT / 2):
        with suppress(httpx.HTTPError):
            call("fleet/send-node-heartbeat", node=node, heartbeat_interval=BEAT)


def _refused(address: str, reply: str) -> str:
    return (
        f"{address} does not know this site's key, or it is in use ({' '.join(reply.split())[:150]}): "
        "ask the centre's keeper; a key that was added after the centre began counts from its next "
        "`ssfl serve --resume` on"
    )
