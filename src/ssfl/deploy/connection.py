"""A site's connection to the centre. It uses Flower's Fleet protocol, as Flower's SuperNode does.

Flower's own loop ends the process when the centre was restarted. Here the site connects again.
"""

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from ssfl.deploy import Tell, internals
from ssfl.deploy.keys import SiteKey
from ssfl.errors import SsflError, one_line

BEAT = 10.0
"""The heartbeat interval in seconds that the site announces to the centre. The site sends heartbeats twice as
often. After two intervals without a heartbeat, the centre treats the site as disconnected. The site may then
connect again."""
GRACE = 30.0
"""Seconds for which a refusal of this site's key is not yet an error, because it may be temporary. A centre
that has just started knows no keys yet. A site that was killed still counts as connected for a while."""
RETRY = 1.0
"""Seconds to wait after a failed heartbeat or a failed connection, before the next attempt."""
RECONNECT = 5.0
"""Seconds for which one request is repeated if the centre cannot be reached. After that, the site opens a new
connection."""
IDLE = 60.0
"""Seconds after which the site closes a connection that is not used. This is sooner than the centre would
close it."""
HALFWAY = 120.0
"""Seconds after which a message from the centre is given up if only a part of it has arrived."""
SHOWN = 150
"""How many characters of an error's text are shown, at most."""


@dataclass(frozen=True)
class Connection:
    """A site's open connection to the centre: receives messages and sends answers."""

    call: internals.Caller
    node: internals.Node
    clock: internals.CentreClock

    def receive(self) -> Message | None:
        """Returns the centre's next message to this site, or None if no message is waiting."""
        announced = self.call("fleet/pull-messages", node=self.node)
        if not announced.messages_list:
            return None
        run, tree = announced.messages_list[0].metadata.run_id, announced.message_object_trees[0]
        return internals.receive(self.call, "fleet", self.node, run, tree, HALFWAY)

    def send(self, reply: Message, seconds: float) -> None:
        """Sends an answer to the centre. `seconds` is how long the site worked on it; Flower records this
        time."""
        self.clock.stamp(reply)
        internals.send(self.call, "fleet", self.node, reply, clientapp_runtime_list=[seconds])


@contextmanager
def connected(
    address: str, key: SiteKey | None, patience: float, tell: Tell = lambda line: None
) -> Iterator[Connection]:
    """Yields a connection from a site to the centre at `address` (HOST:PORT), and closes it at the end of the
    block.

    If connecting fails, it tries again for up to `patience` seconds, then raises. `tell` shows the first
    failure. If `key` is None, nothing is encrypted.
    """
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
        attempts = _Attempts(address, key is not None, patience, tell)
        node = None
        while node is None:
            try:
                node = internals.activate(call, private, BEAT, new=key is None)
            except (httpx.HTTPError, internals.CannotCarry) as error:
                attempts.failed(error)
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
            with suppress(httpx.HTTPError, internals.CannotCarry):
                call("fleet/deactivate-node", node_id=node.node_id)


def _beat(call: internals.Caller, node: internals.Node, gone: threading.Event) -> None:
    """Sends heartbeats to the centre until `gone` is set.

    Errors are ignored, because the site's next request for work fails in the same way and is handled there.
    """
    pause = BEAT / 2
    while not gone.wait(pause):
        pause = RETRY
        with suppress(httpx.HTTPError, internals.CannotCarry):
            call("fleet/send-node-heartbeat", node=node, heartbeat_interval=BEAT)
            pause = BEAT / 2


def connection_error(error: Exception) -> str:
    """Returns the text of a failed request as one short line. If a server refused the request, the line has
    the HTTP status and the server's text."""
    if isinstance(error, httpx.HTTPStatusError):
        text = " ".join(error.response.text.split())[:SHOWN]
        return f"{error.response.status_code} {text or error.response.reason_phrase}"
    return one_line(error, SHOWN)


@dataclass
class _Attempts:
    """Counts how long a site has been trying to connect to `address`, and decides whether it may try
    again."""

    address: str
    has_key: bool
    patience: float
    tell: Tell
    began: float = field(default_factory=time.monotonic)
    said: bool = False

    def failed(self, error: Exception) -> None:
        """Handles a failed attempt to connect. Raises if more attempts are useless or if the time is used up.
        Otherwise it returns, and shows the error if this is the first failure."""
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        unreachable, why = isinstance(error, httpx.TransportError), connection_error(error)
        if status == 403:
            raise SsflError(
                f"{self.address} has excluded this site: ask the operator of the centre why"
            ) from error
        if unreachable:
            _check_certificate(self.address, error)
        seconds = self.patience if unreachable or status >= 500 else min(self.patience, GRACE)
        if unreachable:
            what = f"cannot connect to {self.address}"
            plain = " (and not with --insecure)" if self.has_key else ""
            fix = (
                f"check the address, that the centre is running{plain}, and that no firewall blocks the port"
            )
        elif status >= 500:
            what = f"{self.address} answers with an error"
            fix = "check that it is the address of the centre, and ask the operator of the centre for help"
        elif status == internals.KEY_IN_USE:
            what = f"{self.address} does not let this site join"
            why = "a connected site uses this key"
            fix = (
                "stop the other `ssfl join` with this key. If it is not yours, ask the operator of the "
                "centre for a key of your own"
            )
        else:
            what = f"{self.address} does not let this site join"
            fix = "check that it is the address of the centre"
            if self.has_key:
                fix += (
                    ". If it is, this site's key is unknown there, or revoked. If the key was added after "
                    "the centre started, ask its operator to stop the centre and continue with `ssfl serve "
                    "--resume RUN --keys FOLDER`"
                )
        if time.monotonic() > self.began + seconds:
            raise SsflError(f"{what} ({why}), also after {seconds:.0f} s: {fix}") from error
        if not self.said:
            self.tell(f"{what} ({why}): trying again for {seconds:.0f} s")
            self.said = True


def _check_certificate(address: str, error: Exception) -> None:
    """Raises if the connection failed because of the centre's certificate, since more attempts would not
    help."""
    now = f"{datetime.now():%Y-%m-%d %H:%M}"
    if "certificate has expired" in str(error):
        raise SsflError(
            f"the certificate of {address} has expired by this machine's clock ({now}): correct the clock, "
            "or ask the operator of the centre for a new site file"
        ) from error
    if "certificate is not yet valid" in str(error):
        raise SsflError(
            f"the certificate of {address} is not valid yet by this machine's clock ({now}): correct the "
            "clock"
        ) from error
    if "mismatch, certificate is not valid for" in str(error):
        host = address.rpartition(":")[0].strip("[]")
        raise SsflError(
            f"the centre's certificate is not valid for {host}: check the address, or ask the operator of "
            f"the centre to run `ssfl keys init --host {host}`, to stop the centre and to continue the run. "
            "This site's key stays valid"
        ) from error
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        raise SsflError(
            f"the certificate of {address} does not match this site file: check the address, or ask the "
            "operator of the centre for a new site file"
        ) from error
