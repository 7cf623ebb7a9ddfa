"""The centre's port under attack: a real SuperLink in its own process, TLS, light sites and strangers."""

import asyncio
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
import uvicorn
from flwr.app import Error, Message

import light
from ssfl.deploy import connection, internals, keys, link, notes, port, request_filter
from ssfl.deploy import sites as deploy_sites
from ssfl.deploy.fleet import Fleet
from ssfl.deploy.port import LOG, network
from ssfl.errors import SsflError
from stage import free_port
from waiting import command_of, descendants, wait_until

SITES = ("aachen", "bonn", "calais")
NUMBERS = 20_000
"""Weights of the model that travels."""


@dataclass
class Scene:
    """A SuperLink with light sites."""

    fleet: Fleet
    crowd: light.Crowd
    host: str
    port: int
    folder: Path
    lines: list[str] = field(default_factory=list)

    def round(self) -> int:
        """Send all sites that are there a model; how many came back."""
        nodes = self.fleet.connected().values()
        return len(self.fleet.exchange({node: light.model(NUMBERS) for node in nodes}, "train", 60.0))

    def gathered(self) -> None:
        wait_until(
            lambda: len(self.fleet.connected()) == self.fleet.needed, lambda: f"not all came: {self.lines}"
        )

    def refused(self) -> list[dict[str, Any]]:
        self.fleet.listen()
        return [event for event in self.fleet.log if event["event"] == "refused"]


@contextmanager
def scene(folder: Path, host: str = "127.0.0.1", names: Sequence[str] = SITES) -> Iterator[Scene]:
    """A SuperLink with light sites that are there."""
    ring, port, lines, told = folder / "keys", free_port(), list[str](), Queue[dict[str, Any]]()
    keys.init(ring, [host])
    sites = [keys.read_site(keys.add(ring, name)) for name in names]
    with link.running(
        folder / "link", ring, host, port, keys.sites(ring), 60.0, 4 * NUMBERS, told.put
    ) as grid:
        fleet = Fleet(
            grid=grid, names=list(names), needed=len(names), deadline=60.0, patience=60.0, tell=lines.append,
            notes=told, exclude=grid.exclude,
        )  # fmt: skip
        with light.crowd(f"{host}:{port}", sites) as there:
            made = Scene(fleet, there, host, port, folder, lines)
            made.gathered()
            yield made


def test_the_port_opens_on_one_interface_alone(tmp_path: Path) -> None:
    with scene(tmp_path, "127.0.0.2") as made:
        assert made.round() == 3
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", made.port), 5)
        # what a proxy would say of where a request comes from is not believed
        with httpx.Client(verify=False, headers={"x-forwarded-for": "10.9.8.7"}) as anybody:
            assert anybody.post(f"https://127.0.0.2:{made.port}/v1/control/start-run").status_code == 403
        wait_until(made.refused, "the refusal was not told")
        assert {event["from"] for event in made.refused()} == {"127.0.0.1"}


def test_a_port_that_cannot_be_opened_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SsflError, match="--port"), link.listening("127.0.0.1", port):
            pass
    for host in ("203.0.113.7", "no such host"):
        with pytest.raises(SsflError, match="--host"), link.listening(host, free_port()):
            pass


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def memory() -> int:
    """Bytes that the SuperLink's process holds in memory."""
    status = Path(f"/proc/{port_process()}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024


@pytest.fixture
def few_files() -> Iterator[None]:
    """The common limit of 1,024 open files, in processes that are started meanwhile; strangers need more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"needs 4,096 open files for the strangers, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CLIENT_HELLO = bytes.fromhex("160301020001")  # the first six bytes of one


def still_open(connections: list[socket.socket]) -> list[socket.socket]:
    """Returns the connections that the other side has not closed. It sends nothing over them."""
    left = []
    for each in connections:
        each.setblocking(False)
        try:
            each.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            left.append(each)
        except OSError:
            pass
    return left


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    said = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, 700)); "
    said += "from ssfl.deploy import port; print(port.raised_limit(), *r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["700", "700", "700"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "addresses"), [(b"", 1), (CLIENT_HELLO, 8)], ids=["idle", "half a ClientHello"]
)
def test_rounds_go_on_while_strangers_hold_connections(
    said: bytes, addresses: int, tmp_path: Path, few_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,200 of them, idle or with half a ClientHello, and the SuperLink may open 1,024 files. Connections are
    limited from one address, and from all addresses together."""
    monkeypatch.setattr(link, "COMMAND", [sys.executable, "-c", LIMITED, "ssfl.deploy.port"])
    with scene(tmp_path) as made, ExitStack() as held:
        assert made.round() == 3

        strangers: list[socket.socket] = []

        def knock() -> None:
            for number in range(1200):
                stranger = held.enter_context(socket.socket())
                strangers.append(stranger)
                stranger.settimeout(20)
                stranger.bind((f"127.0.0.{2 + number % addresses}", 0))
                try:
                    stranger.connect((made.host, made.port))
                    stranger.sendall(said)
                except OSError:
                    pass

        knocking = threading.Thread(target=knock, daemon=True)
        knocking.start()
        for _ in range(5):
            assert made.round() == 3
        wait_until(lambda: not knocking.is_alive(), "the strangers cannot connect")
        most = (port.STRANGERS + 2 * len(SITES)) * min(addresses, 2)
        wait_until(lambda: len(still_open(strangers)) <= most, f"more than {most} connections stay open")
        assert made.round() == 3
        # a site that comes now is let in too
        made.crowd.over.set()
        with light.crowd(f"{made.host}:{made.port}", [keys.read_site(tmp_path / "keys" / "bonn.site")]):
            wait_until(lambda: made.round() >= 1, "no new connection gets through")
        assert (tmp_path / "link" / "link.log").stat().st_size < LOG


@pytest.mark.slow
def test_a_site_gets_in_while_strangers_at_its_address_connect_again_and_again(tmp_path: Path) -> None:
    """Hundreds a second, so that no connection without a key is left open for long."""
    with scene(tmp_path) as made:
        over = threading.Event()

        def knock() -> None:
            held = deque[socket.socket]()
            while not over.wait(0.001):
                with suppress(OSError):
                    held.append(socket.create_connection((made.host, made.port), 20))
                if len(held) > 300:
                    held.popleft().close()
            for one in held:
                one.close()

        knocking = threading.Thread(target=knock, daemon=True)
        knocking.start()
        for _ in range(3):
            assert made.round() == 3
        assert made.crowd.lost == []
        made.crowd.over.set()
        with light.crowd(f"{made.host}:{made.port}", [keys.read_site(tmp_path / "keys" / "bonn.site")]):
            wait_until(lambda: made.round() >= 1, "no new connection gets through")
        over.set()
        knocking.join(60)


def port_process() -> int:
    """The number of the process with the port."""
    [pid] = [pid for pid in descendants(os.getpid()) if b"ssfl.deploy.port" in command_of(pid)]
    return pid


@pytest.mark.slow
def test_sites_are_not_lost_because_heartbeats_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site counts as connected for 20 s after a heartbeat, and here there are none."""
    monkeypatch.setattr(connection, "_beat", lambda call, node, gone: None)
    with scene(tmp_path) as made:
        time.sleep(25)  # they only ask for work
        assert made.round() == 3
        # the port's process gets no processor time
        os.kill(port_process(), signal.SIGSTOP)
        time.sleep(25)
        os.kill(port_process(), signal.SIGCONT)
        assert made.round() == 3
        assert made.crowd.lost == []
        assert not any("disconnected" in line for line in made.lines)


def test_addresses_of_one_network_count_as_one() -> None:
    assert network("192.0.2.7") == network("::ffff:192.0.2.7") != network("192.0.2.8")
    assert network("2001:db8::1") == network("2001:db8:0:0:ffff::2") != network("2001:db8:0:1::1")


def stranger(host: str, port: int) -> ssl.SSLSocket:
    """A connection with TLS, and without a key."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    return trust.wrap_socket(socket.create_connection((host, port), 60))


HEAD = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n"


def test_no_body_is_read_before_the_headers_are_judged() -> None:
    """With uvicorn's own protocol class and real sockets; the application waits before it asks for a body."""
    asked, seen = threading.Event(), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while not asked.is_set():  # the signature is being verified
            await asyncio.sleep(0.01)
        seen.append(len(made[0].cycle.body))
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        seen.append(size)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    made: list[Any] = []

    async def serve(listening: socket.socket) -> None:
        config = uvicorn.Config(app, lifespan="off", ws="none", access_log=False)
        config.load()
        server = uvicorn.Server(config)
        open_port = port.Port(listening, None, 1, lambda host, why: None)
        protocol = port.watched(config.http_protocol_class, open_port)

        def make(visit: port.Visit) -> asyncio.Protocol:
            made.append(protocol(config=config, server_state=server.server_state, app_state={}))
            made[-1].visit = visit
            return made[-1]  # type: ignore[no-any-return]

        task = asyncio.create_task(open_port.run(make))
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        task.cancel()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        thread = threading.Thread(target=lambda: asyncio.run(serve(listening)), daemon=True)
        thread.start()
        with socket.create_connection(listening.getsockname(), 60) as one:
            one.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n")
            wait_until(lambda: made and made[0].cycle is not None, "the headers did not arrive")
            one.sendall(b"x" * 50_000)
            time.sleep(0.2)
            asked.set()
            thread.join(60)
    assert seen == [0, 50_000]


@pytest.mark.slow
def test_bodies_of_strangers_are_not_kept(tmp_path: Path, few_files: None) -> None:
    """400 of them promise 50 KB each, and send 40."""
    with scene(tmp_path) as made, ExitStack() as held:
        for _ in range(3):
            assert made.round() == 3
        before, answered = memory(), 0
        for _ in range(400):
            one = held.enter_context(stranger(made.host, made.port))
            with suppress(OSError):  # answered and closed before all was sent
                one.sendall(HEAD + b"x" * 40_000)
                answered += one.recv(100).startswith(b"HTTP/1.1 401")
        assert answered > 0
        assert made.round() == 3
        assert memory() - before < 50 * 2**20
        # neither are headers without an end
        with stranger(made.host, made.port) as endless, pytest.raises(OSError):  # noqa: PT011, PT012
            endless.sendall(b"POST / HTTP/1.1\r\n")
            for _ in range(1000):
                endless.sendall(b"a: " + b"b" * 10_000 + b"\r\n")
        wait_until(lambda: len(made.refused()) >= 2, "the refusals were not told")
        reasons = {event["reason"] for event in made.refused()}
        assert "a request without a signature" in reasons
        assert any("headers" in reason for reason in reasons)
        assert made.round() == 3


HURRIED = """
import sys
from ssfl.deploy import port, request_filter
port.HANDSHAKE = port.HEADERS = request_filter.STALLED = 2.0
sys.argv = sys.argv[1:]
port.main()
"""


@pytest.mark.slow
def test_who_connects_and_does_not_go_on_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes, headers and bodies have limits, which are short here."""
    monkeypatch.setattr(link, "COMMAND", [sys.executable, "-c", HURRIED, "ssfl.deploy.port"])
    with scene(tmp_path) as made:
        key = keys.read_site(tmp_path / "keys" / "bonn.site")
        headers = internals.signed(key.private, datetime.now(UTC)) | {"host": "x", "content-length": "1000"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"POST /v1/fleet/push-object HTTP/1.1\r\n{lines}\r\n".encode()
        with ExitStack() as held:
            silent = held.enter_context(socket.create_connection((made.host, made.port), 60))
            waits, half, stalls = (held.enter_context(stranger(made.host, made.port)) for _ in range(3))
            half.sendall(request[:100])
            stalls.sendall(request + b"x" * 500)
            assert stalls.recv(100).startswith(b"HTTP/1.1 400")
            for one in (silent, waits, half):
                with suppress(ConnectionError):
                    assert one.recv(1) == b""

        def told() -> bool:
            made.fleet.listen()
            return any("500 of 1000 bytes" in line for line in made.lines)

        wait_until(told, "the body that broke off was not told")
        assert made.round() == 3
        assert made.crowd.lost == []


def signed(made: Scene, name: str) -> internals.Caller:
    """Requests that a site's key signs, whatever they are."""
    key = keys.read_site(made.folder / "keys" / f"{name}.site")
    http = httpx.Client(verify=False, timeout=60)
    clock = internals.CentreClock()
    return internals.Caller(
        http, f"https://{made.host}:{made.port}", lambda: internals.signed(key.private, clock.now())
    )


def statuses(call: internals.Caller, path: str, content: bytes, times: int) -> list[int]:
    """How the same request is answered again and again."""
    found = []
    for _ in range(times):
        try:
            call.post(f"v1/fleet/{path}", content)
            found.append(200)
        except httpx.HTTPStatusError as error:
            found.append(error.response.status_code)
    return found


def test_a_site_that_is_noisy_or_left_out_fills_no_log(tmp_path: Path) -> None:
    with scene(tmp_path) as made:
        noisy = signed(made, "bonn")
        assert set(statuses(noisy, "push-object", b"\xff" * 1000, 60)) == {400}
        wait_until(lambda: len(made.refused()) >= notes.AT_ONCE, "the refusals were not told")
        made.round()
        assert len(made.refused()) == notes.AT_ONCE
        assert {event["site"] for event in made.refused()} == {"bonn"}
        # left out, it is told so once and then dropped, without a line for each request
        before = len(made.lines)
        made.fleet.leave_out([1])
        found = statuses(noisy, "push-object", b"\xff" * 1000, 60)
        assert found[-1] == 403
        assert found.count(400) <= request_filter.FAREWELL
        assert made.round() == 2
        assert len(made.refused()) == notes.AT_ONCE
        assert len(made.lines) - before == 1
        wait_until(lambda: made.crowd.lost, "it goes on trying")
        assert "excluded" in made.crowd.lost[-1]
        # strangers who ask for what is closed get a line for each kind
        with httpx.Client(verify=False) as anybody:
            for _ in range(20):
                assert anybody.post(f"https://{made.host}:{made.port}/docs").status_code == 403
        wait_until(lambda: len(made.refused()) > notes.AT_ONCE, "a 403 was not told")
        assert [event["site"] for event in made.refused()[notes.AT_ONCE :]] == [None]


def test_what_was_only_counted_is_told_once_a_minute() -> None:
    told: list[dict[str, Any]] = []
    kept = notes.Notes(told.append)
    for number in range(1000):
        kept.add(7, "10.0.0.1", "x" * 30_000, True)
        kept.add(None, f"10.0.{number // 4 % 256}.1", "no key", True)
        kept.count(8, "10.0.0.2", "left out")
    assert len(told) == notes.AT_ONCE + notes.SENDERS - 2
    assert max(len(note["reason"]) for note in told) < 1000
    told.clear()
    kept.began -= notes.PERIOD
    kept.flush()
    by = {note["node"] or note["from"]: note["reason"] for note in told}
    assert by[7].startswith(f"{1000 - notes.AT_ONCE} more")
    assert by[8].startswith("1000 more")
    assert int(by[notes.OTHERS].split()[0]) > 0
    assert max(map(len, by.values())) < 1000
    assert all(not note["lost"] for note in told)
    told.clear()
    kept.began -= notes.PERIOD
    kept.flush()
    assert told == []


def test_requests_that_cost_no_answer_do_not_hide_those_that_do() -> None:
    told: list[dict[str, Any]] = []
    kept = notes.Notes(told.append)
    for _ in range(100):
        kept.add(7, "10.0.0.1", "a second answer", False)
    for _ in range(3):
        kept.add(7, "10.0.0.1", "an answer that was altered", True)
    assert [note["lost"] for note in told] == [False] * notes.AT_ONCE + [True] * 3


def test_long_texts_are_cut(tmp_path: Path) -> None:
    def fail(message: Message) -> Message:
        return Message(Error(0, "no disk " * 4000), reply_to=message)

    lines: list[str] = []
    with scene(tmp_path) as made:
        made.fleet.tell = lines.append
        made.crowd.reply = fail
        assert made.round() == 0
    assert len(lines) == 3
    assert all("no disk" in line and len(line) < 1000 for line in lines)


def processor_seconds() -> float:
    """What the SuperLink's process has computed."""
    fields = Path(f"/proc/{port_process()}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_many_sites_are_let_in_and_cost_little_while_they_wait(tmp_path: Path) -> None:
    names = [f"site-{number:02d}" for number in range(40)]
    with scene(tmp_path, names=names) as made:
        nodes = list(made.fleet.connected().values())
        began = time.monotonic()
        before = processor_seconds()
        time.sleep(10)
        each = (processor_seconds() - before) / len(names) / (time.monotonic() - began)
        assert each < 0.01  # of a core; asking twice a second took three times as much
        for _ in range(3):
            came = made.fleet.exchange({node: light.model(NUMBERS) for node in nodes[:10]}, "train", 300.0)
            assert len(came) == 10
        assert made.crowd.lost == []


def test_who_is_slow_to_say_its_name_holds_nobody_up_and_is_let_in_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_sites, "GREETING", 1.0)
    with scene(tmp_path) as made:
        held, name = threading.Event(), "bonn"
        made.crowd.over.set()
        for thread in made.crowd.threads:
            thread.join(60)
        wait_until(lambda: not made.fleet.connected(), "they did not leave")

        def slow(message: Message) -> Message:
            held.wait(300)
            return light.answer(message)

        mute, others = light.Crowd(slow), light.Crowd()
        for site in SITES:
            key = keys.read_site(tmp_path / "keys" / f"{site}.site")
            who = mute if site == name else others
            threading.Thread(target=who.attend, args=(f"{made.host}:{made.port}", key), daemon=True).start()
        wait_until(lambda: len(made.fleet.connected()) == 2, "the others are held up")
        assert made.round() == 2
        held.set()
        wait_until(lambda: len(made.fleet.connected()) == 3, "its late answer does not count")
        assert made.round() == 3
        mute.over.set()
        others.over.set()
