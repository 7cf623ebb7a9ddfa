"""A site's connection to the centre. It speaks Flower's Fleet protocol, as a SuperNode does.

Flower's own loop ends its process after the centre was restarted. Here the site connects again.
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
"""The heartbeat interval that is announced to the centre, in seconds. Heartbeats are sent twice as often.
After two intervals without one, the site counts as disconnected and may connect again."""
GRACE = 30.0
"""Seconds after which a refused key is an error. Before that the refusal may be temporary: a centre that has
just started knows no keys yet, and a site that was killed still counts as connected for a while."""
RETRY = 1.0
"""Seconds until a heartbeat that failed is sent again."""
RECONNECT = 5.0
"""Seconds for which a request that finds no connection is tried again, before the site starts anew."""
IDLE = 60.0
"""Seconds after which an idle connection is closed. The centre would close it later."""
HALFWAY = 120.0
"""Seconds after which a message that arrived only in part is given up."""


@dataclass(frozen=True)
class Connection:
    """Receives messages from the centre and sends answers."""

    call: internals.Caller
    node: internals.Node
    clock: internals.CentreClock

    def receive(self) -> Message | None:
        """Returns the next message, or None if there is none."""
        announced = self.call("fleet/pull-messages", node=self.node)
        if not announced.messages_list:
            return None
        run, tree = announced.messages_list[0].metadata.run_id, announced.message_object_trees[0]
        return internals.receive(self.call, "fleet", self.node, run, tree, HALFWAY)

    def send(self, reply: Message, seconds: float) -> None:
        """Sends an answer that took this many seconds of work."""
        self.clock.stamp(reply)
        internals.send(self.call, "fleet", self.node, reply, clientapp_runtime_list=[seconds])


@contextmanager
def connected(address: str, key: SiteKey | None, patience: float) -> Iterator[Connection]:
    """Connects to HOST:PORT, trying for `patience` seconds; without a key nothing is encrypted."""
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
                if error.response.status_code == 403:
                    raise SsflError(
                        f"{address} has excluded this site: ask the operator of the centre why"
                    ) from error
                if error.response.status_code < 500 and time.monotonic() > began + min(patience, GRACE):
                    raise SsflError(_refused(address, error.response.text)) from error
            except httpx.TransportError as error:
                if "certificate has expired" in str(error):
                    raise SsflError(
                        f"the certificate of {address} has expired by this machine's clock "
                        f"({datetime.now():%Y-%m-%d %H:%M}): correct the clock, or ask the operator of the "
                        "centre for a new site file"
                    ) from error
                if "certificate is not yet valid" in str(error):
                    raise SsflError(
                        f"the certificate of {address} is not valid yet by this machine's clock "
                        f"({datetime.now():%Y-%m-%d %H:%M}): correct the clock"
                    ) from error
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise SsflError(
                        f"the certificate of {address} does not match this site file: check the address, or "
                        "ask the operator of the centre for a new site file. The operator must list this "
                        "host in `ssfl keys init --host`"
                    ) from error
                if time.monotonic() > began + patience:
                    raise SsflError(
                        f"no answer from {address} after {patience:.0f} s ({error}): check that the centre "
                        "is running and that no firewall blocks the port"
                    ) from error
            if node is None:
                time.sleep(1)
        call.connecting = RECONNECT
        gone = threading.Event()
        heart = threading.Thread(target=_beat, args=(call, node, gone), daemon=True)
        heart.start()
        try:
            yield Connection(call, node, clock)
        finally:
            gone.set()
            call.connecting = 0.0
            heart.join()
            with suppress(httpx.HTTPError):
                call("fleet/deactivate-node", node_id=node.node_id)


def _beat(call: internals.Caller, node: internals.Node, gone: threading.Event) -> None:
    """Sends heartbeats until `gone` is set.

    Errors are ignored: if the centre was restarted, the next message shows it.
    """
    pause = BEAT / 2
    while not gone.wait(pause):
        pause = RETRY
        with suppress(httpx.HTTPError):
            call("fleet/send-node-heartbeat", node=node, heartbeat_interval=BEAT)
            pause = BEAT / 2


def _refused(address: str, reply: str) -> str:
    return (
        f"{address} does not accept this site's key ({' '.join(reply.split())[:150]}): the key is unknown, "
        "revoked or in use. If it was added after the centre started, ask its operator to stop the centre "
        "and continue with `ssfl serve --resume`"
    )
