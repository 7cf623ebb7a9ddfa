"""The centre's SuperLink: Flower's message exchange in a process of its own, closed but for the sites.

Stock Flower answers on one port to sites, to whoever starts runs or registers sites, and to the processes
that run them, and checks the sites alone. Here everything but the sites' part needs a secret that only the
`ssfl serve` that started the process knows, no app bundle is ever run, and `guard.py` looks at the rest.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid, http_grid

from ssfl.deploy import guard
from ssfl.errors import SsflError

STARTING = 300.0
"""Seconds until a SuperLink must answer; on a busy machine the import alone takes a minute."""
RETRYING = 60.0
"""Seconds in which a request to it is tried again."""
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
"""Flower wants an app for a run. Nobody runs this one: centre and sites have ssfl."""


class Secret:
    """Shows the secret with every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers[guard.SECRET] = self.secret
        return call_next(context)


@contextmanager
def running(
    folder: Path,
    keys: Path | None,
    host: str,
    port: int,
    sites: Mapping[str, ec.EllipticCurvePublicKey],
    deadline: float,
    model_bytes: int,
    note: Callable[[dict[str, Any]], None],
) -> Iterator[HttpGrid]:
    """A SuperLink with the given sites registered, and the grid of one run on it.

    Without keys nothing is encrypted and anybody may join. An answer that stops in the middle is given up
    after `deadline` seconds (Flower would wait for two hours); one larger than a model is refused. `note` is
    told what was refused and how much has travelled, from a thread of its own.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in folder.glob("link.db*"):  # an exchange of a run that was stopped: rounds are in checkpoints
        old.unlink()
    patient = partial(pull_objects, max_time=deadline, initial_backoff=0.1)
    http_grid.pull_objects = patient  # type: ignore[attr-defined]
    secret = secrets.token_hex(32)
    process = _start(folder, keys, host, port, secret, model_bytes, note)
    try:
        address = f"127.0.0.1:{port}"
        authority = None if keys is None else (keys / "ca.crt").read_bytes()
        more: dict[str, Any] = {"insecure": keys is None, "root_certificates": authority}
        _wait(process, port, folder / "link.log")
        with ControlHttpClient.from_server_address(address, interceptors=[Secret(secret)], **more) as control:
            for name, key in sites.items():
                control.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name))
            fab, _ = build_fab_from_files({"pyproject.toml": BUNDLE})
            control.StartRun(StartRunRequest(fab=Fab(content=fab)))
        with _grid(address, secret, more) as grid:
            yield grid
    finally:
        http_grid.pull_objects = pull_objects  # type: ignore[attr-defined]
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(
    folder: Path,
    keys: Path | None,
    host: str,
    port: int,
    secret: str,
    model_bytes: int,
    note: Callable[[dict[str, Any]], None],
) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SsflError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
            ) from error
    command = [
        sys.executable, "-m", "ssfl.deploy.link", "--host", host, "--port", str(port),
        "--isolation", "process", "--database", str(folder / "link.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    if keys is None:
        command.append("--insecure")
    else:
        command += ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "centre.crt"),
                    "--ssl-keyfile", str(keys / "centre.key"), "--enable-supernode-auth"]  # fmt: skip
    told, telling = os.pipe()
    environment = os.environ | {
        "FLWR_HOME": str(folder), "SSFL_LINK_SECRET": secret, "SSFL_LINK_PARENT": str(os.getpid()),
        "SSFL_LINK_MODEL": str(model_bytes), "SSFL_LINK_TELL": str(telling),
    }  # fmt: skip
    with (folder / "link.log").open("ab") as log:
        # a session of its own: Ctrl-C and SIGTERM are for the centre, which ends its round and then this
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, pass_fds=[telling],
        )  # fmt: skip
    os.close(telling)

    def listen() -> None:
        """Until the process ends."""
        with open(told, encoding="utf-8") as lines:
            for line in lines:
                note(json.loads(line))

    threading.Thread(target=listen, daemon=True).start()
    return process


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + STARTING
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SsflError(f"Flower's SuperLink does not start: see the end of {log}")


@contextmanager
def _grid(address: str, secret: str, more: dict[str, Any]) -> Iterator[HttpGrid]:
    """The exchange as the run's ServerApp sees it; this process is the ServerApp."""
    retry = make_simple_http_retry_invoker()
    retry.max_time = RETRYING

    def client(*interceptors: Any) -> RuntimeHttpClient:
        every = [
            Secret(secret),
            RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            *interceptors,
        ]
        return RuntimeHttpClient.from_server_address(address, interceptors=every, retry_invoker=retry, **more)

    with client() as anybody:
        task = anybody.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
    grid = HttpGrid(address, token=task.token, **more)
    with client(RuntimeTokenHttpInterceptor(task.token)) as own:
        grid._client = own
        given = own.PullTaskInput(PullTaskInputRequest())
        grid.set_run(run_from_proto(given.run))
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id

        def beat() -> bool:
            try:
                own.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                return False
            return True

        heart = HeartbeatSender(beat)
        heart.start()
        try:
            yield grid
        finally:
            heart.stop()
            retry.max_tries = 1
            with suppress(httpx.HTTPError):
                own.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))


def main() -> None:
    """The process: Flower's SuperLink as `flower-superlink` starts it, guarded."""
    import importlib

    import uvicorn
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.superlink.main import create_app

    # systemd and Slurm send SIGTERM to every process; the centre needs this one to end its round
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # by which the monitor ends this process; a shell has what it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_parent_process_monitor(int(os.environ["SSFL_LINK_PARENT"]))
    stock = importlib.import_module("flwr.superlink.cli.flower_superlink")
    config = stock._parse_superlink_lifespan_config()
    app = create_app(config, stock.SuperLinkLifespan)
    state = app.state.linkstate_factory.state
    guarded = guard.Guard(
        app,
        os.environ.pop("SSFL_LINK_SECRET"),
        int(os.environ["SSFL_LINK_MODEL"]),
        guard.teller(int(os.environ["SSFL_LINK_TELL"])),
        lambda public: state().get_node_id_by_public_key(public),
    )
    guarded.watch_handshakes()
    uvicorn.run(
        guarded, host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile, access_log=False, loop="asyncio",
    )  # fmt: skip


if __name__ == "__main__":
    main()
