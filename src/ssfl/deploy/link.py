"""The centre's link to Flower's SuperLink, which stores and forwards messages. This module starts the
SuperLink in a process of its own and sends requests to it.

Flower normally uses one port for everything: for sites, for commands that start runs or register sites, and
for the processes of a run. On that port, Flower authenticates only the sites. Here only sites use the port
(`port.py`, `request_filter.py`). The centre uses a Unix socket and a secret. Flower normally executes app
bundles (packages with a run's code); here none is ever executed.
"""

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from ssfl.deploy import internals, post, request_filter
from ssfl.errors import RunError, SsflError

STARTING = 300.0
"""How many seconds the SuperLink may take to start. On a busy machine its imports alone take a minute."""
RETRYING = 60.0
"""Seconds for which a failed request to the SuperLink is repeated before it raises."""
ASKING = 30.0
"""The centre asks Flower for an answer after this many seconds, even if the port has not reported that the
answer arrived."""
BEAT = 20.0
"""Seconds between two heartbeats. They tell Flower that the centre's process is alive."""
BACKLOG = 1024
"""How many new connections may wait until they are accepted."""
COMMAND = [sys.executable, "-m", "ssfl.deploy.port"]
"""The command that starts the SuperLink's process."""
LONGEST = 100
"""The maximum length of a Unix socket's path, in bytes. It is a little below the system's limit."""
Note = Callable[[dict[str, Any]], None]
"""A function that receives one report of the SuperLink's process."""


@dataclass
class Link:
    """Sends messages to the sites through Flower's SuperLink and fetches their answers. To Flower, this
    process is the run's ServerApp."""

    call: internals.Caller
    run: int
    deadline: float
    """Seconds after which an answer that has arrived only in part is given up."""
    answered: set[str] = field(default_factory=set)
    """The identifiers of messages whose answers have arrived. Another thread fills this set from the reports
    of the process at the port."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Flower's node number of each site that has a key, by the site's name."""
    pause: float = 0.1
    """Seconds between two checks whether an answer has arrived. The pause is short because the check reads
    only `answered`."""
    _asked: dict[str, float] = field(default_factory=dict)
    """For each message identifier: when Flower was last asked for the answer (`time.monotonic`)."""

    def get_nodes(self) -> Iterable[internals.NodeInfo]:
        """Returns Flower's records of the sites that are connected."""
        return list(self.call("runtime/get-nodes").nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages to sites. Returns the identifiers of the messages that Flower accepted. Flower does
        not accept messages to a site that has disconnected."""
        sent, nodes = [], []
        for message in messages:
            with suppress(internals.CannotCarry):
                sent.append(internals.send(self.call, "runtime", internals.SERVER, message))
                nodes.append(message.metadata.dst_node_id)
        self._tell_port(request_filter.WAKE, nodes)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns those answers to the given messages that have arrived.

        Flower is asked for an answer as soon as the port reports it. Flower is also asked every `ASKING`
        seconds, because the port cannot report that a site has disconnected.
        """
        now = time.monotonic()
        for name in message_ids:
            self._asked.setdefault(name, now)
        due = [
            name for name in message_ids if name in self.answered or now - self._asked.get(name, now) > ASKING
        ]
        if not due:
            return []
        self._asked.update(dict.fromkeys(due, now))
        pulled = self.call("runtime/pull-messages", message_ids=due)
        for reply in pulled.messages_list:
            self.answered.discard(reply.metadata.reply_to_message_id)
            self._asked.pop(reply.metadata.reply_to_message_id, None)
        if len(self._asked) > 10_000:  # drop messages whose answers are no longer wanted
            self._asked.clear()
        return [
            internals.receive(self.call, "runtime", internals.SERVER, self.run, tree, self.deadline)
            for tree in pulled.message_object_trees
        ]

    def forget(self, message_ids: Collection[str]) -> None:
        """Deletes messages whose answers are no longer wanted, and what has arrived of these answers."""
        for name in message_ids:
            self.answered.discard(name)
            self._asked.pop(name, None)
        self._tell_port(request_filter.FORGET, message_ids)

    def renew(self, name: str, key: ec.EllipticCurvePublicKey | None) -> None:
        """Replaces a site's key by `key`. If `key` is None, the site can no longer connect."""
        old = self.numbers.get(name)
        if old is not None:
            self.exclude([old])
            self.call("control/unregister-node", node_id=old)
            del self.numbers[name]
        if key is not None:
            self.numbers[name] = internals.register(self.call, name, key)

    def exclude(self, nodes: Collection[int]) -> None:
        """Tells the process at the port to refuse further requests of these nodes, because their sites were
        excluded from the run. A few requests are still answered, so that each site learns why."""
        self._tell_port(request_filter.EXCLUDE, nodes)

    def _tell_port(self, path: str, listed: Collection[int] | Collection[str]) -> None:
        """Sends a list to the request filter at the port, unless it is empty. `path` says what the list means
        (`request_filter.WAKE` and others)."""
        if listed:
            self.call.post(path.lstrip("/"), json.dumps(list(listed)).encode())


@contextmanager
def running(
    folder: Path,
    keys: Path | None,
    host: str,
    port: int,
    sites: Mapping[str, ec.EllipticCurvePublicKey],
    deadline: float,
    model_bytes: int,
    note: Note,
) -> Iterator[Link]:
    """Starts a SuperLink, registers the sites with their public keys, and starts a run. Yields the `Link`
    through which the centre sends messages.

    `folder` is for the SuperLink's own files, such as its log. Sites connect to `host` and `port`. Without a
    `keys` folder nothing is encrypted and anybody may join. An incomplete answer is given up after `deadline`
    seconds. An answer is refused if it is larger than a model (`model_bytes`) by more than
    `answers.ROOM` bytes. `note` is called from another thread with the port's reports: refused
    requests, and numbers of bytes.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in folder.glob("link.db*"):  # left by a stopped run; its rounds are in checkpoints
        old.unlink()
    secret, answered = secrets.token_hex(32), set[str]()

    def hear(fact: dict[str, Any]) -> None:
        if "answered" in fact:
            answered.add(fact["answered"])
        else:
            note(fact)

    with own_socket(folder) as (own, path):
        with listening(host, port) as public:
            process = start(folder, keys, public, own, secret, model_bytes, len(sites), hear)
        own.close()
        try:
            limits = httpx.Limits(max_connections=40, keepalive_expiry=60)
            transport = httpx.HTTPTransport(uds=path, limits=limits)
            with httpx.Client(transport=transport, timeout=httpx.Timeout(60, pool=None)) as http:
                own_headers = {request_filter.SECRET: secret}
                call = internals.Caller(http, "http://superlink", lambda: own_headers, RETRYING)
                _wait(process, call, folder / "link.log")
                call.check = lambda: _require_running(process, folder / "link.log")
                numbers = internals.begin(call, sites)
                with _played(call) as run:
                    yield Link(call, run, deadline, answered, numbers)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yields the open socket that sites connect to. Raises with advice if the port cannot be opened."""
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            public = stack.enter_context(socket.socket(family, kind, protocol))
            public.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                public.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            public.bind(address)
            public.listen(BACKLOG)
        except OSError as error:
            fix = "choose another --port"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                fix = "give an address of this machine with --host, or 0.0.0.0 for all its addresses"
            elif error.errno == errno.EACCES:
                fix = "choose a --port above 1023"
            raise SsflError(f"cannot listen on {host}:{port}: {error.strerror}; {fix}") from error
        yield public


@contextmanager
def own_socket(folder: Path) -> Iterator[tuple[socket.socket, str]]:
    """Opens a Unix socket over which the centre, and nobody else, sends requests to the SuperLink. Yields the
    socket and its path.

    The socket is in `folder`, or in a temporary folder if its path would be too long. In both cases, only the
    user of this process may enter the socket's folder.
    """
    with ExitStack() as stack:
        path = min(str(folder / "link.sock"), os.path.relpath(folder / "link.sock"), key=len)
        if len(os.fsencode(path)) > LONGEST:
            place = (
                tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) < LONGEST - 30 else "/tmp"
            )
            path = str(
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssfl-", dir=place))) / "link"
            )
        with suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
            own.bind(path)
            own.listen(BACKLOG)
            try:
                yield own, path
            finally:
                with suppress(OSError):
                    os.unlink(path)


def start(
    folder: Path,
    keys: Path | None,
    public: socket.socket,
    own: socket.socket,
    secret: str,
    model_bytes: int,
    sites: int,
    note: Note,
) -> subprocess.Popen[bytes]:
    """Starts the SuperLink's process and returns it. The process answers sites on the socket `public` and the
    centre on the socket `own`. A thread calls `note` with every report of the process.

    The process writes its log into `folder`. `keys` is the keys folder, or None if nothing is encrypted. The
    centre's requests must contain `secret`. `model_bytes` is the size of a model. `sites` is the number of
    sites that have keys.
    """
    reading, writing = os.pipe()
    environment = os.environ | {
        "FLWR_HOME": str(folder), "SSFL_LINK_SECRET": secret, "SSFL_LINK_PARENT": str(os.getpid()),
        "SSFL_LINK_MODEL": str(model_bytes), "SSFL_LINK_TELL": str(writing), "SSFL_LINK_SITES": str(sites),
        "SSFL_LINK_KEYS": "" if keys is None else str(keys),
    }  # fmt: skip
    sockets = [public.fileno(), own.fileno()]
    with (folder / "link.log").open("a+b") as log:
        # In its own session, Ctrl-C and SIGTERM reach only the centre. The centre finishes its round and then
        # ends this process.
        process = subprocess.Popen(
            [*COMMAND, *map(str, sockets)], env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            pass_fds=[writing, *sockets],
        )  # fmt: skip
    os.close(writing)

    def listen() -> None:
        """Passes each report of the process to `note`, until the process ends."""
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                with suppress(ValueError):  # a line that cannot be read must not end this thread
                    note(json.loads(line))

    threading.Thread(target=listen, daemon=True).start()
    return process


def _wait(process: subprocess.Popen[bytes], call: internals.Caller, log: Path) -> None:
    """Waits until the SuperLink answers. Raises if its process ends, or if it does not answer within
    `STARTING` seconds."""
    end = time.monotonic() + STARTING
    while time.monotonic() < end and process.poll() is None:
        try:
            if call.http.get(f"{call.base}/health", headers=dict(call.headers())).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SsflError(f"Flower's SuperLink did not start ({_last_line(log)}): the end of {log} says more")


def _last_line(log: Path) -> str:
    """Returns the last line of the SuperLink's log, for an error message."""
    lines = log.read_text("utf-8", "replace").split("\n")
    return next((post.short(line) for line in reversed(lines) if line.strip()), "its log is empty")


def _require_running(process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises if the SuperLink's process has ended. Without the process no request can succeed, so it is
    useless to try again."""
    code = process.poll()
    if code is None:
        return
    if code == -signal.SIGKILL:
        raise RunError(
            "Flower's process was killed, perhaps because the machine has too little memory: check that"
        )
    raise RunError(f"Flower's process ended with exit code {code} ({_last_line(log)}): see the end of {log}")


@contextmanager
def _played(call: internals.Caller) -> Iterator[int]:
    """Makes this process the run's ServerApp and yields the run's number. During the `with` block, a thread
    sends heartbeats. At the end of the block, the run is marked as completed."""
    run = internals.take_task(call)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with suppress(httpx.HTTPError, RunError):  # the centre's next request reports it
                call("runtime/send-task-heartbeat")

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        yield run
    finally:
        over.set()
        call.patience = 0.0
        with suppress(httpx.HTTPError, RunError):
            call("runtime/push-task-output", sub_status="completed", details="")
