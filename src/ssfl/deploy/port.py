"""The process with the centre's port. It limits the number of connections, their duration and their memory.

Strangers connect to one port and reach only `request_filter.py`. The centre has its own Unix socket in a
folder that only its user may enter. So the centre always reaches Flower, whatever strangers do to the port.
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
"""Seconds for a TLS handshake."""
HEADERS = 20.0
"""Seconds for a stranger to send a signed request, and for a site to complete headers that it began."""
IDLE = 75.0
"""Seconds that a site's connection may be idle."""
ANSWER = 900.0
"""Seconds after which any request is given up."""
HEAD = 65_536
"""How many bytes may arrive before the headers are complete."""
STRANGERS = 64
"""How many connections without a known key are allowed from one address. For each site, two more are allowed,
because many sites may share one address."""
CHANCE = 1.0
"""Seconds after which a connection without a key counts as old. If there are too many, an old one is closed,
or any of them if none is old. So a slow site that shares its address with strangers can still get in."""
PER_SITE = 8
"""The connections allowed for one site."""
SPARE = 128
"""Open files reserved for everything except the port: logs, threads, the centre's own socket."""
FILES = 65_536
"""The limit on open files that is requested from the system."""
HANDLERS = 4
"""The requests that Flower handles at the same time."""
LOG = 4 << 20
"""The largest log, in bytes. Of a longer one only the end is kept."""


@dataclass(eq=False)
class Visit:
    """A connection to the port."""

    host: str
    since: float
    """When it last changed from idle to busy or back."""
    began: float = field(default_factory=time.monotonic)
    node: int | None = None
    """The site's node, once a request was signed with a known key; None for a stranger."""
    unread: int = 0
    """The bytes that arrived since the last request."""
    shaken: bool = False
    """Whether the TLS handshake is over. The handshake has a time limit of its own."""
    busy: bool = False
    """Whether a request is being answered."""
    close: Callable[[], Any] = lambda: None


@dataclass
class Port:
    """Accepts connections, closes some if there are too many, and passes the others to uvicorn."""

    listening: socket.socket
    trust: ssl.SSLContext | None
    sites: int
    failed: Callable[[str, str], None]
    """Called if a connection fails before its first request, with its address and the reason."""
    tick: Callable[[], None] = lambda: None
    """Called every second."""
    visits: dict[Visit, None] = field(default_factory=dict)
    """All connections, the oldest first."""

    def __post_init__(self) -> None:
        most = raised_limit() - SPARE
        self.most_of_one = min(STRANGERS + 2 * self.sites, most // 4)
        self.most_strangers = min(2 * self.most_of_one, most // 2)
        self.most = most

    async def run(self, make: Callable[[Visit], asyncio.Protocol]) -> None:
        """Accepts connections until cancelled."""
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
            await asyncio.sleep(0)  # handshakes go on, however many connections wait to be accepted

    async def _receive(
        self, accepted: socket.socket, visit: Visit, make: Callable[[Visit], asyncio.Protocol]
    ) -> None:
        """Does the TLS handshake of a new connection, then hands the connection to the HTTP protocol that
        `make` returns."""
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
        """Closes a stranger's connection if there are too many.

        The connection is one from `host` if that address has too many, otherwise one from the address with
        the most.
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
        """Records that a connection belongs to a site. Returns False if the site has too many connections and
        all of them are busy."""
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
        """Closes connections that take too long, and shortens the log, every second.

        Seconds in which this process got no processor time do not count.
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
    """Returns uvicorn's protocol class, extended so that the port knows when a connection is idle."""

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
    """Returns the part of an address that identifies its owner. With IPv6 this is a network (/64), since one
    machine may own all of it."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def raised_limit() -> int:
    """Raises the limit on open files as far as the system allows, and returns it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def cut_log() -> None:
    """Keeps only the end of a log that is too long. This is safe because the log is opened for appending."""
    with suppress(OSError):
        size = os.fstat(2).st_size
        if size > LOG:
            end = os.pread(2, LOG // 4, size - LOG // 4)
            os.ftruncate(2, 0)
            os.write(2, b"(cut)\n" + end.partition(b"\n")[2])


def ends_with(parent: int) -> None:
    """Ends this process when its parent process ends, for whatever reason."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


async def serve(listening: socket.socket, private: socket.socket, environment: dict[str, str]) -> None:
    """Answers on both sockets until this process is asked to end."""
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
    """Runs this process: Flower's SuperLink behind the request filter."""
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
