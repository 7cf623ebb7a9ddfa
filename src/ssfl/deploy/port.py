"""The process that owns the centre's port. It limits the number of connections, how long they last, and how
much memory they use.

Strangers (senders without a known key) connect to this port, and their requests reach only
`request_filter.py`. The centre has its own Unix socket in a folder that only its user may enter. So the
centre always reaches Flower, whatever strangers do to the port.
"""

import asyncio
import ipaddress
import os
import random
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import uvicorn

from ssfl.deploy import internals, request_filter
from ssfl.errors import SsflError

HANDSHAKE = 20.0
"""How many seconds a TLS handshake may take."""
HEADERS = 20.0
"""A new connection must send a signed request within this many seconds. On a site's connection, the headers
of each later request must be complete within this many seconds after their first byte."""
IDLE = 75.0
"""How many seconds a site's connection may stay open without a request."""
ANSWER = 900.0
"""A request that takes longer than this many seconds is given up."""
HEAD = 65_536
"""How many bytes a connection may send before the headers of its request are complete."""
STRANGERS = 64
"""How many connections without a known key are allowed from one address. Two more are allowed for each site,
because many sites may share one address."""
CHANCE = 1.0
"""If strangers (senders without a known key) have too many connections, one of these connections is closed.
The oldest one is closed if it has been open for more than this many seconds. Otherwise a random one is
closed. A site is a stranger until its first signed request. During a flood of connections, the random choice
leaves a slow site a chance to send this request."""
PER_SITE = 8
"""How many connections one site may have open."""
SPARE = 128
"""How many open files are reserved for everything but the port: logs, threads, the centre's own socket."""
FILES = 65_536
"""The limit on open files that this process asks the system for."""
HANDLERS = 4
"""How many requests Flower handles at the same time."""
LOG = 4 << 20
"""The largest size of the log in bytes. When it is exceeded, only the end of the log is kept."""


@dataclass(eq=False)
class Visit:
    """A connection to the port, and its state."""

    host: str
    since: float
    """The time from which the connection's current time limit is counted (`time.monotonic`). It is set when
    the handshake ends, when a request begins, and when a request has been answered."""
    began: float = field(default_factory=time.monotonic)
    node: int | None = None
    """Flower's node number of the site, once a request was signed with the site's key. None for a
    stranger."""
    unread: int = 0
    """How many bytes have arrived since the last request on this connection was answered. They belong to the
    headers of the next request. When these headers are complete, the count starts again at 0."""
    shaken: bool = False
    """Whether the TLS handshake is over. The handshake has its own time limit."""
    busy: bool = False
    """Whether a request on this connection is being answered now."""
    close: Callable[[], Any] = lambda: None


@dataclass
class Port:
    """Accepts connections to the port and passes them to uvicorn. It closes connections if there are too
    many."""

    listening: socket.socket
    trust: ssl.SSLContext | None
    sites: int
    failed: Callable[[str, str], None]
    """Called with the sender's address and a reason. The reason is that the TLS handshake failed, or that the
    headers of a request are too long."""
    tick: Callable[[], None] = lambda: None
    """Called every second, so that the request filter can send its reports."""
    visits: dict[Visit, None] = field(default_factory=dict)
    """All open connections, the oldest first. It is a dict because a dict keeps its order; its values are
    unused."""

    def __post_init__(self) -> None:
        most = raised_limit() - SPARE
        self.most_of_one = min(STRANGERS + 2 * self.sites, most // 4)
        self.most_strangers = min(2 * self.most_of_one, most // 2)
        self.most = most

    async def run(self, make: Callable[[Visit], asyncio.Protocol]) -> None:
        """Accepts connections until this task is cancelled. `make` returns the HTTP protocol object that
        handles a connection."""
        loop, tasks = asyncio.get_running_loop(), set()
        sweeping = asyncio.create_task(self.sweep())
        tasks.add(sweeping)
        while True:
            try:
                accepted, address = await loop.sock_accept(self.listening)
            except OSError:  # too many open files, or the peer is already gone
                await asyncio.sleep(0.1)
                continue
            visit = Visit(str(address[0]), time.monotonic())
            self.make_room(visit.host)
            self.visits[visit] = None
            task = asyncio.create_task(self._receive(accepted, visit, make))
            visit.close = task.cancel
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)  # lets handshakes continue even if many connections wait to be accepted

    async def _receive(
        self, accepted: socket.socket, visit: Visit, make: Callable[[Visit], asyncio.Protocol]
    ) -> None:
        """Does the TLS handshake of a new connection, then hands the connection to the HTTP protocol object
        that `make` returns."""
        options: dict[str, Any] = {} if self.trust is None else {"ssl_handshake_timeout": HANDSHAKE}
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: make(visit), accepted, ssl=self.trust, **options
            )
        except ssl.SSLError as error:
            self.visits.pop(visit, None)
            if error.reason:
                self.failed(visit.host, error.reason)
        except (OSError, TimeoutError, asyncio.CancelledError):
            self.visits.pop(visit, None)
            accepted.close()
        else:
            visit.close, visit.since, visit.shaken = transport.abort, time.monotonic(), True

    def make_room(self, host: str) -> None:
        """Closes one connection if there are too many, so that a new connection from the address `host` can
        be accepted.

        Strangers are senders without a known key. If strangers at `host` have too many connections, one of
        these is closed. Otherwise, all strangers together, or all senders together, may have too many
        connections. Then a stranger's connection is closed, at the address where strangers have the most. A
        site's connection is closed only if no stranger has one.
        """
        strangers: dict[str, list[Visit]] = {}
        for visit in self.visits:
            if visit.node is None:
                strangers.setdefault(network(visit.host), []).append(visit)
        host = network(host)
        if len(strangers.get(host, ())) >= self.most_of_one:
            crowd = strangers[host]
        elif sum(map(len, strangers.values())) >= self.most_strangers or len(self.visits) >= self.most:
            crowd = max(strangers.values(), key=len, default=list(self.visits))
        else:
            return
        old = time.monotonic() - crowd[0].began > CHANCE
        self.end(crowd[0] if old else random.choice(crowd))

    def admit(self, visit: Visit, node: int) -> bool:
        """Records that a connection belongs to the site with this node number, and returns True. If the site
        already has `PER_SITE` connections, an idle one is closed. If all of these are busy, returns False and
        records nothing."""
        if visit.node != node:
            same_site = [other for other in self.visits if other.node == node]
            if len(same_site) >= PER_SITE:
                idle = [other for other in same_site if not other.busy]
                if not idle:
                    return False
                self.end(idle[0])
            visit.node = node
        return True

    def end(self, visit: Visit) -> None:
        """Closes a connection at once."""
        self.visits.pop(visit, None)
        visit.close()

    async def sweep(self) -> None:
        """Every second, closes connections that have exceeded their time limit, and shortens the log.

        Time in which this process itself was paused is not counted against the connections.
        """
        before = time.monotonic()
        while True:
            await asyncio.sleep(1)
            current = time.monotonic()
            stalled, before = current - before - 1, current
            for visit in list(self.visits):
                visit.since += max(0.0, stalled)
                patience = ANSWER if visit.busy else HEADERS if visit.node is None or visit.unread else IDLE
                if visit.shaken and current - visit.since > patience:
                    self.end(visit)
            self.tick()
            cut_log()


def watched(stock: Any, port: Port) -> Any:
    """Returns uvicorn's protocol class `stock`, extended so that the port knows when a connection is idle and
    how much it has sent."""

    class Watched(stock):  # type: ignore[misc]
        visit: Visit

        def connection_lost(self, exc: Exception | None) -> None:
            port.visits.pop(self.visit, None)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            visit = self.visit
            if not visit.busy:
                if visit.unread > HEAD:
                    port.failed(visit.host, request_filter.ENDLESS)
                    port.end(visit)
                    return
                if not visit.unread and visit.node is not None:
                    visit.since = time.monotonic()
            visit.unread += len(data)
            super().data_received(data)
            if not visit.busy and self.cycle is not None and not self.cycle.response_complete:
                # the headers are complete: no more is read until the filter asks for the body
                self.flow.pause_reading()

    return Watched


def network(host: str) -> str:
    """Returns the address by which connections are counted. For IPv4 it is the address itself. For IPv6 it is
    the /64 network, since one machine may use all addresses of its network."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def raised_limit() -> int:
    """Raises this process's limit on open files as far as the system allows, up to `FILES`. Returns the new
    limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def cut_log() -> None:
    """Keeps only the end of this process's log (its stderr) if the log is larger than `LOG`. This is safe
    because the log is opened for appending."""
    with suppress(OSError):
        size = os.fstat(2).st_size
        if size > LOG:
            end = os.pread(2, LOG // 4, size - LOG // 4)
            os.ftruncate(2, 0)
            os.write(2, b"(cut)\n" + end.partition(b"\n")[2])


def ends_with(parent: int) -> None:
    """Starts a thread that ends this process when the process with the number `parent` ends. So no SuperLink
    is left behind if the centre crashes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


async def serve(listening: socket.socket, private: socket.socket, environment: dict[str, str]) -> None:
    """Answers requests until this process is asked to end. Sites send requests to the socket `listening`, and
    the centre to the socket `private`. `environment` has the options that the centre set for this process."""
    keys = Path(environment["SSFL_LINK_KEYS"]) if environment.get("SSFL_LINK_KEYS") else None
    trust = None
    if keys is not None:
        trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        trust.load_cert_chain(keys / "centre.crt", keys / "centre.key")
    flower = internals.superlink(keys is not None)
    filtered = request_filter.RequestFilter(
        flower, environment["SSFL_LINK_SECRET"], int(environment["SSFL_LINK_MODEL"]),
        request_filter.teller(int(environment["SSFL_LINK_TELL"])), keys is not None,
    )  # fmt: skip
    port = Port(listening, trust, int(environment["SSFL_LINK_SITES"]), filtered.failed, filtered.tick)
    filtered.port = port
    config = uvicorn.Config(
        filtered, access_log=False, loop="asyncio", ws="none", lifespan="on", proxy_headers=False,
        server_header=False, timeout_keep_alive=int(IDLE), timeout_graceful_shutdown=3,
    )  # fmt: skip
    config.load()
    server = uvicorn.Server(config)
    protocol = watched(config.http_protocol_class, port)

    def make(visit: Visit) -> asyncio.Protocol:
        state = {**server.lifespan.state, request_filter.VISIT: visit}
        made: asyncio.Protocol = protocol(config=config, server_state=server.server_state, app_state=state)
        made.visit = visit  # type: ignore[attr-defined]
        return made

    async def open_port() -> None:
        # Flower guards its state by locks, so more threads would only wait for each other
        anyio.to_thread.current_default_thread_limiter().total_tokens = HANDLERS
        while not server.started:
            await asyncio.sleep(0.05)
        await port.run(make)

    opened = asyncio.create_task(open_port())
    try:
        await server.serve(sockets=[private])
    finally:
        opened.cancel()


def main() -> None:
    """The entry point of this process, which the centre starts. It runs Flower's SuperLink behind the request
    filter."""
    # systemd and Slurm send SIGTERM to every process, but the centre needs this one to finish its round
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # SIGINT asks this process to end, but a shell makes its background processes ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = dict(os.environ)
    os.environ.pop("SSFL_LINK_SECRET")
    ends_with(int(environment["SSFL_LINK_PARENT"]))
    listening, private = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for each in (listening, private):
        each.setblocking(False)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(listening, private, environment))
    except SsflError as error:
        sys.exit(str(error))  # the centre shows this line


if __name__ == "__main__":
    main()
