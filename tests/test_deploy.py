"""Real federations: processes on this machine, TLS on, and the same bytes as a simulation.

Runs where Flower is installed: `pip install 'ssfl[flower]'`.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'ssfl[flower]'")

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.supercore.task_identity import TaskIdentity

import ssfl
from ssfl import assemble, runs
from ssfl.config import load_config
from ssfl.data import sources, split
from ssfl.deploy import centre, fleet, keys, site, wire
from ssfl.errors import ConfigError, DataError, RunError, SsflError
from ssfl.federation import State
from ssfl.predict import predict
from ssfl.settings import Config
from ssfl.simulation import Simulation
from ssfl.train import reproducible

NAMES = ("aachen", "bonn", "calais")
SHORT = ["federation.rounds=3", "federation.period=3", "train.batch_size=16", "train.warmup=0",
         "method.threshold=0.3", "run.threads=1", "run.device=cpu"]  # fmt: skip
METHODS = {
    "alternate": ["method.name=alternate"],
    "grouping": ["method.name=grouping", "federation.groups=2"],
    "replicas": ["method.name=grouping", "federation.groups=2", "method.server_replicas=true"],
    "fedavg": ["method.name=crl-gn"],
    "weighted": ["method.name=crl-gn", "method.averaging=weighted", "method.server_weight=0.5"],
    "batch norm": ["method.name=crl-bn", "model.norm_statistics=server"],
    "some of them": ["method.name=alternate", "federation.participants=2"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG files: labelled/CLASS at the centre, and one folder for each of three sites."""
    from sklearn.datasets import load_digits

    digits, root = load_digits(), tmp_path_factory.mktemp("folders")
    for number, (pixels, digit) in enumerate(zip(digits.images[:400], digits.target[:400], strict=True)):
        home = f"labelled/{digit}" if number < 100 else NAMES[number % 3]
        (root / home).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)).save(root / home / f"{number:03d}.png")
    return root


def config_of(folders: Path, sets: list[str]) -> Config:
    config = load_config("own", [f"data.path={folders / 'labelled'}", *SHORT, *sets])
    return replace(config, split=replace(config.split, users=3))


def simulated(config: Config, folders: Path) -> State:
    """What the engine "loop" makes of the same images, all of them in one process."""
    data = assemble.load_data(config)
    labels = data.labels.numpy()
    parts = [data.images, *(sources.read_image_files(files(folders, name), *data.shape) for name in NAMES)]
    edges = np.cumsum([0, *map(len, parts)])
    owned = [np.arange(*edges[i : i + 2]) for i in range(4)]
    unknown = torch.full((int(edges[-1] - edges[1]),), -1)
    everything = replace(data, images=torch.cat(parts), labels=torch.cat([data.labels, unknown]))
    config = replace(config, split=replace(config.split, server_labels=len(labels)))
    config = assemble.resolve(config, data)
    config = replace(config, run=replace(config.run, engine="loop"))
    with reproducible():
        sim = assemble.build(
            config, everything, split.Parts(owned[0], owned[1:]), owned[0][:0], torch.device("cpu")
        )
        state = sim.initial()
        while state.round < sim.rounds:
            state, _ = sim.play(state)
    return state


def files(folders: Path, name: str) -> list[Path]:
    return sources.image_files([folders / name])


def same(one: State, other: State) -> bool:
    return torch.equal(one.streams, other.streams) and torch.equal(one.average, other.average)


@dataclass
class Hall:
    """Flower's grid without Flower's processes: sites answer in this one."""

    sites: dict[int, site.Site]
    absent: set[int] = field(default_factory=set)
    spoil: Callable[[int, Message], Message | None] = lambda node, reply: reply
    waiting: dict[str, Message] = field(default_factory=dict)

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=node, name=one.name)
            for node, one in self.sites.items()
            if node not in self.absent
        ]

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = message.object_id
            node = message.metadata.dst_node_id
            app = site.client_app(self.sites[node])
            reply = self.spoil(node, app(message, Context(1, node, {}, RecordDict(), {})))
            if reply is not None:
                self.waiting[name] = reply
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, names: list[str]) -> list[Message]:
        return [self.waiting.pop(name) for name in names if name in self.waiting]


Open = Callable[..., tuple[centre.Centre, Hall, list[str]]]


@pytest.fixture
def hall(folders: Path) -> Iterator[Open]:
    """A centre and three sites in one process."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def make(config: Config, **times: Any) -> tuple[centre.Centre, Hall, list[str]]:
        lines: list[str] = []
        there = {
            number: site.Site(name, files(folders, name), "cpu", 1, lambda line: None)
            for number, name in zip((77, 55, 66), NAMES, strict=True)
        }
        sim, terms = centre.prepare(config)
        grid = Hall(there)
        settings = {"needed": 3, "deadline": 1.0, "patience": 0.5} | times
        reached = fleet.Fleet(grid, list(NAMES), tell=lines.append, **settings)
        return centre.with_sites(sim, terms, reached), grid, lines

    with reproducible():
        yield make


def played(sim: Simulation) -> tuple[State, list[Any]]:
    state, events = sim.initial(), []
    while state.round < sim.rounds:
        state, told = sim.play(state)
        events += told
    return state, events


@pytest.mark.parametrize("method", METHODS)
def test_sites_do_what_simulated_users_do(method: str, folders: Path, hall: Open) -> None:
    config = config_of(folders, METHODS[method])
    state, events = played(hall(config)[0])
    assert same(state, simulated(config, folders))
    assert 0.05 < np.mean([event["mask_rate"] for event in events]) < 1
    size = 4 * state.average.numel()
    for event in events:
        assert event["bytes_up"] == event["bytes_down"] == size * len(event["participants"])


def test_a_site_that_does_not_answer_is_left_out(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, METHODS["grouping"]))
    grid.spoil = lambda node, reply: None if node == 55 and "model" in reply.content else reply
    _, [event] = made.play(made.initial())
    assert (event["participants"], event["returned"]) == ([0, 1, 2], [0, 2])
    assert sorted(user for group in event["groups"] for user in group) == [0, 2]
    assert event["bytes_down"] == 3 * made.message_bytes()
    assert event["bytes_up"] == 2 * made.message_bytes()
    assert "bonn did not answer within 1 s" in lines


def test_what_cannot_be_averaged_is_left_out(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, []))

    def spoil(node: int, reply: Message) -> Message:
        if "model" not in reply.content:
            return reply
        [array] = reply.content["model"].to_numpy_ndarrays()
        if node == 55:
            array = np.where(np.arange(len(array)) == 7, np.nan, array).astype(np.float32)
        if node == 66:
            array = array[:-1]
        reply.content["model"] = wire.pack(torch.from_numpy(array.copy()))["model"]
        return reply

    grid.spoil = spoil
    state, [event] = made.play(made.initial())
    assert event["returned"] == [0]
    assert state.average.isfinite().all()
    assert any("bonn" in line and "not finite" in line for line in lines)
    assert any("calais" in line and "float32" in line for line in lines)


def test_a_site_that_fails_says_why(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, []))

    def spoil(node: int, reply: Message) -> Message:
        if node != 66 or "model" not in reply.content:
            return reply
        return make_message(metadata=reply.metadata, error=Error(0, "no disk"))

    grid.spoil = spoil
    _, [event] = made.play(made.initial())
    assert event["returned"] == [0, 1]
    assert "calais has no answer: no disk" in lines


def test_too_few_sites_are_waited_for_but_not_for_ever(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, []))
    state, _ = made.play(made.initial())
    grid.absent = {66}
    with pytest.raises(RunError, match="2 of 3 sites are there, calais not, after 0 s"):
        made.play(state)
    assert "waiting: 2 of 3 sites are there, calais not" in lines
    made.fleet.needed = 2
    _, [event] = made.play(state)
    assert event["participants"] == event["returned"] == [0, 1]


def test_nobody_at_all_stops_the_run(folders: Path, hall: Open) -> None:
    made, grid, _ = hall(config_of(folders, []))
    grid.spoil = lambda node, reply: None if "model" in reply.content else reply
    with pytest.raises(RunError, match="no site gave a model in round 1"):
        made.play(made.initial())


def test_sites_check_what_they_are_asked(folders: Path, hall: Open) -> None:
    made, _, _ = hall(config_of(folders, []))
    good = json.loads(made.terms)
    assert "labelled" not in made.terms  # where the centre keeps its images is its own affair
    for key, value in [("shape", [1, 8, 10**6]), ("mean", [float("nan")]), ("std", [0.0]), ("classes", 1),
                       ("shape", "8"), ("config", "[run]\nseed = -1"), ("config", "x")]:  # fmt: skip
        with pytest.raises(SsflError):
            wire.read_terms(json.dumps(good | {key: value}))
    with pytest.raises(DataError, match="cannot be read"):
        wire.read_terms("hello")
    one = site.Site("aachen", files(folders, "aachen"), "cpu", 1)
    with pytest.raises(SsflError, match="user 3 of 3"):
        one.simulation(made.terms, 3)


@pytest.mark.parametrize("setting", ["method.name=supervised", "train.momentum_policy=user",
                                     "train.precision=float64", "federation.dropout=0.5"])  # fmt: skip
def test_what_real_sites_cannot_do_is_refused(setting: str, folders: Path) -> None:
    with pytest.raises(ConfigError, match="does not go with real sites: use"):
        centre.prepare(config_of(folders, [setting]))


# Keys


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.init(folder, ["fl.example.org", "10.1.2.3"])
    handed = keys.add(folder, "aachen")
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(SsflError, match="never overwritten"):
        keys.init(folder, [])
    with pytest.raises(SsflError, match="never overwritten"):
        keys.add(folder, "aachen")
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    read = keys.read_site(handed)
    assert read.name == "aachen"
    assert read.private.public_key() == keys.sites(folder)["aachen"]
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((folder / "centre.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1"]


def test_wrong_names_and_files_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SsflError, match="ssfl keys init"):
        keys.add(tmp_path / "none", "aachen")
    with pytest.raises(SsflError, match="no name or address"):
        keys.init(tmp_path / "keys", ["https://fl.example.org"])
    keys.init(tmp_path / "keys", [])
    for name in ("../aachen", "ca", "", "a b"):
        with pytest.raises(SsflError, match="cannot be a site's name"):
            keys.add(tmp_path / "keys", name)
    (tmp_path / "x.site").write_text("name = 'x'")
    with pytest.raises(SsflError, match="no site file"):
        keys.read_site(tmp_path / "x.site")
    (tmp_path / "keys" / "x.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(SsflError, match="no public key"):
        keys.sites(tmp_path / "keys")


# Real processes


@dataclass
class Stage:
    """Starts processes, and ends every one of them whatever happens."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ssfl(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        source = Path(ssfl.__file__).parents[1]
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ssfl", *map(str, arguments)], cwd=self.folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process

    def join(self, name: str, port: int, folders: Path, ring: Path) -> subprocess.Popen[bytes]:
        place = [f"127.0.0.1:{port}", "--data", folders / name, "--key", ring / f"{name}.site"]
        return self.ssfl(name, "join", *place, "--device", "cpu", "--threads", 1)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, name: str, words: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while words not in self.said(name):
            assert time.monotonic() < end, f"{name} never said {words!r} but {self.said(name)!r}"
            time.sleep(0.1)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:
                process.terminate()
        for process in made.started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A keys folder of the three sites."""
    folder = tmp_path_factory.mktemp("ring") / "keys"
    keys.init(folder, [])
    for name in NAMES:
        keys.add(folder, name)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sets(*settings: str) -> list[str]:
    return [word for setting in (*SHORT, *settings) for word in ("--set", setting)]


def test_a_federation_ends_with_the_bytes_of_a_simulation(folders: Path, ring: Path, stage: Stage) -> None:
    port, out = free_port(), stage.folder / "run"
    serve = stage.ssfl("serve", "serve", "--data", folders / "labelled", "--keys", ring, "--port", port,
                       "--out", out, *sets(*METHODS["grouping"]))  # fmt: skip
    joins = [stage.join(name, port, folders, ring) for name in reversed(NAMES)]
    assert serve.wait(120) == 0, stage.said("serve")
    for process, name in zip(joins, reversed(NAMES), strict=True):
        assert process.wait(30) == 0, stage.said(name)
        assert "all 3 rounds are played" in stage.said(name)
    checkpoint = runs.load_checkpoint(out, torch.device("cpu"))
    assert checkpoint is not None
    config = config_of(folders, METHODS["grouping"])
    assert same(checkpoint.state, simulated(config, folders))
    # the run folder is like any other
    summary, parts = (json.loads((out / name).read_text()) for name in ("summary.json", "split.json"))
    assert parts["sites"] == list(NAMES)
    assert parts["sizes"] == [len(files(folders, name)) for name in NAMES]
    assert summary["bytes_up"] == summary["bytes_down"] == 3 * 3 * 4 * checkpoint.state.average.numel()
    assert len(predict(out, [folders / "bonn"])) == parts["sizes"][1]
    with pytest.raises(ConfigError, match="ssfl serve --resume"):
        assemble.make(runs.read_config(out))


def test_strangers_are_kept_out_and_missing_sites_not_waited_for_for_ever(
    folders: Path, ring: Path, stage: Stage
) -> None:
    port, out = free_port(), stage.folder / "run"
    serve = stage.ssfl("serve", "serve", "--data", folders / "labelled", "--keys", ring, "--port", port,
                       "--out", out, "--patience", 20, *sets())  # fmt: skip
    stage.until("serve", "listening")
    other = stage.folder / "other"
    keys.init(other, [])
    keys.add(other, "aachen")
    forged = stage.folder / "forged.site"  # a stranger's key, and the certificate that the centre shows
    true, false = (folder / "aachen.site" for folder in (ring, other))
    forged.write_text(
        false.read_text().split("authority")[0] + "authority" + true.read_text().split("authority")[1]
    )
    for name, file in (("other", other / "aachen.site"), ("forged", forged)):
        stage.ssfl(name, "join", f"127.0.0.1:{port}", "--data", folders / "aachen", "--key", file,
                   "--patience", 5)  # fmt: skip
    import httpx

    with httpx.Client(verify=False) as anybody:
        for path in (
            "/v1/control/register-node",
            "/v1/control/start-run",
            "/v1/runtime/acquire-task",
            "/docs",
        ):
            assert anybody.post(f"https://127.0.0.1:{port}{path}").status_code == 403
    assert stage.started[1].wait(60) == 2
    assert "shows another certificate" in stage.said("other")
    assert stage.started[2].wait(60) == 2
    assert "does not know this site's key, or" in stage.said("forged")
    assert serve.wait(60) == 2
    assert "0 of 3 sites are there, aachen, bonn, calais not, after 20 s" in stage.said("serve")
    assert "Traceback" not in stage.said("serve") + stage.said("other") + stage.said("forged")


@pytest.mark.slow
def test_a_stopped_centre_goes_on_to_the_same_bytes(folders: Path, ring: Path, stage: Stage) -> None:
    port, out = free_port(), stage.folder / "run"
    place = ["--keys", ring, "--port", port]
    long = ["federation.rounds=8"]
    for name in NAMES:
        stage.join(name, port, folders, ring)
    first = stage.ssfl("first", "serve", "--data", folders / "labelled", "--out", out, *place, *sets(*long))
    stage.until("first", "round 3  accuracy")
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = stage.ssfl("second", "serve", "--resume", out, *place)
    assert second.wait(200) == 0, stage.said("second")
    checkpoint = runs.load_checkpoint(out, torch.device("cpu"))
    assert checkpoint is not None
    assert same(checkpoint.state, simulated(config_of(folders, long), folders))


@pytest.mark.slow
def test_a_killed_site_is_left_out_and_may_come_back(folders: Path, ring: Path, stage: Stage) -> None:
    port, out = free_port(), stage.folder / "run"
    serve = stage.ssfl("serve", "serve", "--data", folders / "labelled", "--keys", ring, "--port", port,
                       "--out", out, "--sites", 2, "--deadline", 5,
                       *sets("federation.rounds=30"))  # fmt: skip
    joins = {name: stage.join(name, port, folders, ring) for name in NAMES}
    stage.until("serve", "3 of 3 sites")
    joins["bonn"].send_signal(signal.SIGKILL)
    joins["bonn"].wait()
    stage.until("serve", "bonn did not answer within 5 s")
    stage.join("bonn", port, folders, ring)
    assert serve.wait(200) == 0, stage.said("serve")
    came = [len(event["returned"]) for event in runs.read_events(out) if event["event"] == "round"]
    assert len(came) == 30
    assert 2 in came
    assert came[-1] == 3
    assert "Traceback" not in stage.said("serve")


def test_insecure_is_for_this_machine_alone(folders: Path, stage: Stage) -> None:
    away = stage.ssfl("away", "join", "10.0.0.1:8443", "--insecure", "--data", folders / "bonn")
    neither = stage.ssfl("neither", "serve", "--data", folders / "labelled")
    assert away.wait(60) == 2
    assert "for this machine alone" in stage.said("away")
    assert neither.wait(60) == 2
    assert "--insecure" in stage.said("neither")
