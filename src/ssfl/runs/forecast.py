"""Estimates the time and memory of a run before its first round. A few training steps are measured, and also
a whole round if rounds are short."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ssfl.core.words import count
from ssfl.data.hands import Hands
from ssfl.engines import local
from ssfl.engines.memory import peak
from ssfl.engines.work import Work
from ssfl.federation import State
from ssfl.runs import baseline
from ssfl.runs.text import duration
from ssfl.simulate.simulation import Simulation

LONG = 2.0
"""A time limit, in seconds, for measurements before the run. If the first step takes longer than this, no
second step is measured. If all steps of a round would take longer than this, no whole round is measured."""
SCORED, SCORED_FEATURES = 64, 8
"""The number of test images on which the time of an evaluation is measured. The second number is for networks
with a frozen part, whose output must first be computed for every image."""
SAMPLED = 0.05
"""How many seconds pass between two measurements of the used memory."""


@dataclass(frozen=True)
class Forecast:
    """The expected cost of the remaining rounds of a run."""

    rounds: int
    round: float
    """The expected duration of a round, in seconds."""
    evaluations: int
    evaluation: float
    """The expected duration of an evaluation, in seconds."""
    compared: float
    """Seconds for training the models that the run is compared with: the server-only model and the models of
    the cross-validation."""
    features: float
    """Seconds for computing features, the outputs of the network's frozen part, for the whole run."""
    memory: int
    """The largest number of bytes of memory that all processes of the run used while steps or a round were
    tried. On a GPU, only the GPU memory that was used is counted."""

    @property
    def seconds(self) -> float:
        rounds = self.rounds * self.round + self.evaluations * self.evaluation
        return rounds + self.compared + self.features


def measure(sim: Simulation, state: State) -> Forecast | None:
    """Measures a few training steps and returns the forecast for the rounds after `state`. Returns None if
    training steps are compiled, if torchrun divides them among processes, or if the measurement fails."""
    if sim.ranks is not None or sim.config.run.compile:
        return None
    try:
        with _watched(sim.device) as memory:
            users = _users(sim, state)
            server = _server(sim, state)
            each = users + server
            if each < LONG:  # measure a whole round, including what the method does besides training steps
                each = _timed(sim, lambda: sim.play(state))
    except Exception:  # a method may need something that only a round has
        return None
    every = sim.config.run.eval_every or 1
    last = sim.rounds
    evaluations = -(-last // every) - state.round // every
    rounds = last - state.round
    comparison = baseline.expected(sim.config, each, server)
    evaluation = _evaluation(sim, state)
    features = _features(sim)
    return Forecast(rounds, each, evaluations, evaluation, comparison, features, memory[0])


def lines(sim: Simulation, expected: Forecast | None) -> list[str]:
    """Returns lines of text that say what the run will do and, if `expected` is not None, how much time and
    memory it will need."""
    federation, train = sim.config.federation, sim.config.train
    channels, height, width = sim.dataset.shape
    parameters = f"{sim.layout.weights:,} parameters"
    participants = federation.participants or 0
    users = (
        f"{participants} of {sim.config.split.users}"
        if participants < sim.config.split.users
        else f"{participants}"
    )
    tested = len(sim.dataset.test_labels)
    kind = "grey" if channels == 1 else "colour"
    steps = count(federation.period, "local step")
    if federation.local_epochs is not None:
        steps = f"{federation.local_epochs:g} local epochs (at most {sim.plan.most_steps:,} steps)"
    shown = [
        f"{sim.config.model.name} ({parameters}) on {kind} images of {width}x{height}; {users} users, "
        f"{len(sim.parts.server):,} labelled images at the server, {tested:,} test images",
        f"{count(sim.rounds, 'round')} of {steps}, batch size {train.batch_size}",
    ]
    if expected is not None:
        measured = "round" if expected.round < LONG else "step"
        others = {"features": expected.features, "models to compare with": expected.compared}
        extra = "".join(
            f", {duration(seconds)} for {what}"
            for what, seconds in others.items()
            if seconds > 0.1 * expected.seconds
        )
        shown[1] += (
            f": about {duration(expected.seconds)} ({duration(expected.round)} per round{extra}) and "
            f"{expected.memory / 1e9:.1f} GB of memory, estimated from one {measured}"
        )
    path, labelled = sim.config.data.path, sim.dataset.labelled
    if path is not None and not path.endswith(".npz") and labelled == len(sim.dataset.labels):
        free = len(np.setdiff1d(Hands.of(sim.parts.users).flat, sim.parts.server))
        if free:
            shown.append(
                f"there is no unlabelled/, so {free:,} of {count(labelled, 'labelled training image')} are "
                "given to the users without their labels (split.server_labels: how many the server keeps)"
            )
    if sim.dataset.grey is not None and not sim.config.data.flip:
        total = len(sim.dataset.images) + len(sim.dataset.test_images)
        if 2 * sim.dataset.grey > total:
            shown.append(
                f"images are not mirrored, because {sim.dataset.grey:,} of {total:,} images are grey (--set "
                "data.flip=true mirrors them)"
            )
    if sim.dataset.deep:
        shown.append(
            "images with more than 8 bits per channel are converted to 8 bits: the pixel value "
            f"{sim.dataset.white:,} becomes white (255)"
        )
    return shown


def _users(sim: Simulation, state: State) -> float:
    """Returns how many seconds the training of all users takes in a round, estimated from a few steps."""
    cohort, work, _ = sim.plan.prepare(sim.rounds - 1)
    count = min(len(cohort.users), sim.plan.at_once)
    if not count:
        return 0.0
    rows = state.average.repeat(count, 1)
    momentum = rows.new_zeros(count, sim.layout.weights)

    def train(work: Work) -> None:
        local.train(sim.engine, sim.method, sim.layout.weights, rows, momentum, work)

    return _steps(sim, train, work.of(slice(count))) * len(cohort.users) / count


def _server(sim: Simulation, state: State) -> float:
    """Returns how many seconds the training of the server takes in a round, estimated from a few steps; 0 if
    the server does not train."""
    if not sim.has_server or not sim.method.trains_server:
        return 0.0
    work = sim.plan.server_work(sim.rounds - 1)
    rows = state.average.repeat(len(work.batches), 1)
    momentum = rows.new_zeros(len(rows), sim.layout.weights)
    return _steps(sim, lambda work: sim.engine.train(rows, momentum, work), work)


def _steps(sim: Simulation, train: Callable[[Work], object], work: Work) -> float:
    """Returns an estimate of the seconds that all steps of `work` take. First, `train` is called with only
    the first step of `work`. If this was short and there are further steps, two more calls are measured: with
    the first step, and with the first two steps."""
    first = _timed(sim, lambda: train(_cut(work, 1)))
    if work.played == 1 or first > LONG:
        return first * work.played
    one, two = (_timed(sim, lambda count=count: train(_cut(work, count))) for count in (1, 2))  # type: ignore[misc]
    further = min(max(two - one, one / 4), two / 2)  # on a busy machine the difference itself is unreliable
    return one + further * (work.played - 1)


def _cut(work: Work, steps: int) -> Work:
    """Returns the same training work, shortened to its first `steps` steps. It is used to time a few
    steps."""
    labelled = None if work.labelled is None else work.labelled[:, :steps]
    taken = None if work.taken is None else work.taken.clamp(max=steps)
    return replace(
        work,
        batches=work.batches[:, :steps],
        labelled=labelled,
        rates=work.rates[:steps],
        taken=taken,
        longest=None if work.longest is None else min(work.longest, steps),
    )


def _evaluation(sim: Simulation, state: State) -> float:
    """Returns about how many seconds one evaluation takes, estimated from a few test images."""
    images = len(sim.dataset.test_labels) * (sim.config.run.test == "every") + len(sim.validation)
    most = SCORED if sim.pool.features is None else SCORED_FEATURES
    count = min(most, len(sim.dataset.test_labels))
    test = sim.dataset.test_images[:count].to(sim.device), sim.dataset.test_labels[:count]
    seconds = _timed(sim, lambda: sim.score(state.average, *test))
    return seconds * max(1.0, images / max(count, 1))


def _features(sim: Simulation) -> float:
    """Returns about how many seconds it will take to compute all features that are still missing. Features
    are the outputs of the network's frozen part, for training views and for images that are evaluated."""
    if sim.pool.features is None:
        return 0.0
    held = [sim.validation, *([sim.parts.server] if sim.config.run.folds else [])]
    pooled = sim.pool.images[torch.from_numpy(np.unique(np.concatenate(held))).to(sim.device)]
    return sim.pool.features.left() + sum(
        sim.pool.features.left_to_evaluate(images, sim.pool.test_views)
        for images in (sim.dataset.test_images, pooled)
    )


def _timed(sim: Simulation, call: Callable[[], object]) -> float:
    """Returns how many seconds `call` takes. The time in which features (the outputs of the network's frozen
    part) were computed is subtracted, because each is computed only once in a run."""
    features = sim.pool.features
    computed = 0.0 if features is None else features.seconds
    began = time.perf_counter()
    call()
    if sim.device.type == "cuda":
        torch.cuda.synchronize(sim.device)
    elapsed = time.perf_counter() - began
    return elapsed if features is None else max(0.0, elapsed - (features.seconds - computed))


@contextmanager
def _watched(device: torch.device) -> Iterator[list[int]]:
    """Measures the used memory inside the `with` block. Yields a list with one number, which is updated: the
    largest number of bytes that this process and its children have used. If `device` is a GPU, the number is
    replaced after the block by the largest number of bytes used on the GPU."""
    most, done = [0], threading.Event()

    def watch() -> None:
        while True:
            most[0] = max(most[0], _held())
            if done.wait(SAMPLED):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()
        most[0] = most[0] or peak(device)["cpu"]
        if device.type == "cuda":
            most[0] = peak(device)["gpu"]


def _held() -> int:
    """Returns how many bytes of memory this process and its children use now. Memory that they share counts
    once. Memory-mapped files, such as decoded images, do not count, because the system can free that memory
    at any time."""
    total = 0
    for process in (os.getpid(), *_children()):
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Pss_Anon", "Pss_Shmem"):
                    total += 1024 * int(rest.split()[0])
    return total


def _children() -> list[int]:
    processes: list[int] = []
    with suppress(OSError, ValueError):
        for task in Path("/proc/self/task").iterdir():
            processes += map(int, (task / "children").read_text().split())
    return processes
