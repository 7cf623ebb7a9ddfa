"""Real federations on this machine: processes, and what a simulation of the same users gives."""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import ssfl
from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core.cohort import only
from ssfl.data import sources, split
from ssfl.federation import State
from ssfl.runs import assemble, checkpoints, folder, resolve
from ssfl.runs.surroundings import reproducible
from ssfl.simulate.simulation import Simulation
from waiting import wait_until

NAMES = ("aachen", "bonn", "calais")
SHORT = ["federation.rounds=3", "federation.period=3", "train.batch_size=16", "train.warmup=0",
         "method.threshold=0.3", "run.threads=1", "run.device=cpu"]  # fmt: skip
METHODS = {
    "anchored": ["method.name=anchored"],
    "alternate": ["method.name=alternate"],
    "full pace": ["method.name=anchored", "method.pace=full"],
    "relative": ["method.name=anchored", "method.relative=true", "method.threshold=1"],
    "grouping": ["method.name=grouping", "federation.groups=2"],
    "replicas": ["method.name=grouping", "federation.groups=2", "method.server_replicas=true"],
    "fedavg": ["method.name=crl-gn"],
    "weighted": ["method.name=crl-gn", "method.server_weight=0.5"],
    "batch norm": ["method.name=crl-bn", "model.norm_statistics=server"],
    "some of them": ["method.name=alternate", "federation.participants=2"],
}


def config_of(folders: Path, sets: list[str]) -> Config:
    """A federation's settings, for a simulation of the same users; real sites pass the gate by themselves."""
    config = load_config("own", [f"data.path={folders / 'labelled'}", "federation.gate=true", *SHORT, *sets])
    return replace(config, split=replace(config.split, users=3))


def simulation(config: Config, folders: Path) -> Simulation:
    """The engine "loop" with the same images, all of them in one process."""
    data = resolve.load_data(config)
    labels = data.labels.numpy()
    parts = [data.images, *(sources.read_image_files(files(folders, name), *data.shape) for name in NAMES)]
    edges = np.cumsum([0, *map(len, parts)])
    owned = [np.arange(*edges[i : i + 2]) for i in range(4)]
    unknown = torch.full((int(edges[-1] - edges[1]),), -1)
    everything = replace(data, images=torch.cat(parts), labels=torch.cat([data.labels, unknown]))
    config = replace(config, split=replace(config.split, server_labels=len(labels)))
    config = resolve.resolve(config, data)
    config = replace(config, run=replace(config.run, engine="loop"))
    return assemble.build(
        config, everything, split.Parts(owned[0], owned[1:]), owned[0][:0], torch.device("cpu")
    )


def simulated(
    config: Config, folders: Path, arrivals: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None
) -> State:
    """What a simulation of the same users gives; `arrivals` says for each round which users were sent a model
    and which came back."""
    with reproducible():
        sim = simulation(config, folders)
        state = sim.initial()
        while state.round < sim.rounds:
            if arrivals is not None:
                cohort = only(sim.plan.cohort(state.round), *arrivals[state.round])
                _, _, own = sim.plan.prepare(state.round)
                sim._ahead[state.round] = cohort, sim.plan.users_work(state.round, cohort), own
            state, _ = sim.play(state)
    return state


def arrivals(run: Path) -> list[tuple[list[int], list[int]]]:
    """Which users were sent a model and which came back, in each round of a run."""
    rounds = [event for event in folder.read_events(run) if event["event"] == "round"]
    assert [event["round"] for event in rounds] == list(range(1, len(rounds) + 1))
    return [(event["participants"], event["returned"]) for event in rounds]


def files(folders: Path, name: str) -> list[Path]:
    return sources.image_files([folders / name])


def same(one: State, other: State) -> bool:
    return torch.equal(one.streams, other.streams) and torch.equal(one.average, other.average)


@dataclass
class Stage:
    """Starts processes, and ends every one of them whatever happens."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """What each process was called, by its number."""

    def start(self, name: str, *command: object, **environment: str) -> subprocess.Popen[bytes]:
        source = Path(ssfl.__file__).parents[1]
        around = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"} | environment
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                list(map(str, command)), cwd=self.folder, env=around, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip
        self.started.append(process)
        self.names[process.pid] = name
        return process

    def ssfl(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        return self.start(name, sys.executable, "-m", "ssfl", *arguments)

    def serve(self, folders: Path, ring: Path, port: int, *more: object) -> subprocess.Popen[bytes]:
        place = ["--data", folders / "labelled", "--keys", ring, "--port", port, "--out", self.folder / "run"]
        return self.ssfl("serve", "serve", *place, *more)

    def join(self, name: str, port: int, folders: Path, ring: Path, *more: object) -> subprocess.Popen[bytes]:
        place = [f"127.0.0.1:{port}", "--data", folders / name, "--key", ring / f"{name}.site"]
        return self.ssfl(name, "join", *place, "--device", "cpu", "--threads", 1, *more)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, name: str, words: str, quiet: float = 120) -> None:
        """Wait as long as there is progress until a process says something."""

        def said() -> bool:
            over = next((one for one in reversed(self.started) if self.names[one.pid] == name), None)
            ended = over is not None and over.poll() is not None
            found = words in self.said(name)
            assert found or not ended, f"{name} ended and never said {words!r} but {self.said(name)!r}"
            return found

        wait_until(said, lambda: f"{name} never said {words!r} but {self.said(name)!r}", quiet, self.logs)

    def ended(self, process: "subprocess.Popen[bytes]", quiet: float = 120) -> int:
        """The exit code of a process, which may take as long as there is progress."""
        name = self.names[process.pid]
        wait_until(
            lambda: process.poll() is not None, lambda: f"{name} goes on: {self.said(name)}", quiet, self.logs
        )
        assert process.returncode is not None
        return int(process.returncode)

    @property
    def logs(self) -> list[Path]:
        """What grows while there is progress."""
        return [*self.folder.glob("*.log"), *self.folder.glob("*/events.jsonl")]


def checkpoint(run: Path) -> State:
    """The last state of a run."""
    found = checkpoints.newest(run, torch.device("cpu"))
    assert found is not None
    return found.state


PORTS = itertools.count(10_000 + os.getpid() * 97 % 20_000)
"""Below the ports that Linux gives to outgoing connections: one of those may be taken, by any connection of
the machine, between the look here and the moment a centre listens. Each test process begins elsewhere."""


def free_port() -> int:
    """A port on which nothing listens, another one each time."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is always a next port")


def sets(*settings: str) -> list[str]:
    return [word for setting in (*SHORT, *settings) for word in ("--set", setting)]
