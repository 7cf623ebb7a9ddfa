"""Rounds whose models are single numbers and whose trainers add to them, to follow by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ssfl.config.loading import load_config
from ssfl.config.settings import (
    Config,
    FederationSettings,
    ModelSettings,
    RunSettings,
    SplitSettings,
    TrainSettings,
)
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout
from ssfl.data.dataset import Dataset
from ssfl.data.split import Parts
from ssfl.engines.local import Returned
from ssfl.engines.work import TrainedRows
from ssfl.federation import METRICS, Method, Named, State
from ssfl.simulate.plan import Owners, Plan
from ssfl.simulate.protocols import Workers
from ssfl.simulate.rounds import Round
from ssfl.simulate.scoring import ModelScore
from ssfl.simulate.simulation import Simulation

Trainer = Callable[[Tensor, Tensor, slice], TrainedRows]
"""(rows, momentum, positions in the cohort) -> the trained rows."""
Judge = Callable[[Tensor], ModelScore]
CPU = torch.device("cpu")
ONE_NUMBER = Layout(("w",), ((1,),), (1,), 1)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def start(streams: Sequence[float], average: float | None = None, **memory: Tensor) -> State:
    """A state of such models that keeps no momentum."""
    middle = sum(streams) / len(streams) if average is None else average
    return State(0, column(*streams), column(middle)[0], torch.zeros(0, 1).double(), memory=memory)


# --- who trains ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calling:
    """Workers that call a trainer for the users and one for the server."""

    users: Trainer
    server: Trainer

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: object = None
    ) -> Cohort:
        return cohort

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> Returned:
        return Returned(*self.users(rows, momentum, part))

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        return self.server(rows, momentum, slice(0, len(rows)))


@dataclass
class Adding:
    """Workers that add to every row that they are sent."""

    users: Sequence[float] = ()
    server: Sequence[float] = ()
    weight: Sequence[float] | None = None
    report: Named = field(default_factory=dict)
    tensors: list[Named] = field(default_factory=list)
    """What users were sent besides models."""
    served: list[list[float]] = field(default_factory=list)
    """The rows that the server was to train."""

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: object = None
    ) -> Cohort:
        return cohort

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> Returned:
        self.tensors.append(tensors)
        metrics = dict.fromkeys(METRICS, rows.new_zeros(len(rows)))
        weight = None if self.weight is None else torch.tensor(self.weight).to(rows)[part]
        report = {name: tensor[part] for name, tensor in self.report.items()}
        return Returned(rows + column(*self.users)[part].to(rows), momentum, metrics, weight, report)

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        self.served.append(rows.flatten().tolist())
        metrics = dict.fromkeys(METRICS, rows.new_zeros(len(rows)))
        return TrainedRows(rows + column(*self.server).to(rows), momentum, metrics)


# --- the simulation -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment(Simulation):
    """A simulation without images or a network: `judged` says how good a row is."""

    judged: Judge = lambda row: ModelScore(0.0, 0.0, [])
    direction: Tensor | None = None
    """What the gate compares updates with."""

    def server_score(self, row: Tensor, most: int | None = None) -> ModelScore:
        return self.judged(row)

    def server_images(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        return torch.zeros(0), torch.zeros(0)

    def descent(self, row: Tensor, round: int) -> Tensor | None:
        return self.direction


def experiment(config: Config, server: bool, layout: Layout = ONE_NUMBER, **fields: Any) -> Experiment:
    """Of two classes; the server has a labelled image of each, or none."""
    server_images = np.arange(2 if server else 0)
    users_images = [np.arange(100)] * config.split.users
    unused = cast(Any, None)
    plan = Plan(config, Owners.of(users_images, CPU), None, Owners.of([server_images], CPU), unused, CPU)
    nothing = torch.zeros(0, 1, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    dataset = Dataset("by hand", *nothing, *nothing, ("a", "b"), (0.5,), (0.5,), False)
    pool: Any = SimpleNamespace(labels=torch.arange(2), wide=torch.float64)
    return Experiment(
        dataset, Parts(server_images, users_images), server_images[:0], pool, nn.Identity(), layout, unused,
        plan, CPU, **fields,
    )  # fmt: skip


def toy(method: str, *sets: str, server: bool = False) -> Experiment:
    """An experiment with a method by its name and settings."""
    own = ["federation.head_start=0", "federation.slow_average=0"]
    return experiment(load_config("quickstart", [f"method.name={method}", *own, *sets]), server)


def played(sim: Simulation, state: State, cohort: Cohort, workers: Workers) -> tuple[State, Round]:
    """The method's round, and what it was played with."""
    fed = Round(sim, state, cohort, workers, keep=False)
    return sim.method.round(state, fed), fed


def make_round(
    method: Method,
    state: State,
    cohort: Cohort,
    users: Trainer,
    server: Trainer | None = None,
    *,
    at_once: int | None = None,
    keep: bool = False,
    weights: int = 1,
    judged: Judge | None = None,
    direction: Tensor | None = None,
    norm_statistics: str = "average",
    **federation: Any,
) -> tuple[Experiment, Round]:
    """A round of four users at most; without `server` nobody has labels, and `federation` are settings."""
    config = Config(
        method=method,
        split=SplitSettings(users=4),
        model=ModelSettings(norm_statistics=norm_statistics),
        federation=FederationSettings(rounds=10, participants=4, groups=len(state.streams), **federation),
        train=TrainSettings(momentum_policy="slot" if len(state.momentum) else "reset"),
        run=RunSettings(users_at_once=at_once),
    )
    length = state.streams.shape[1]
    sizes = (weights,) if length == weights else (weights, length - weights)
    layout = Layout(("w", "s")[: len(sizes)], tuple((size,) for size in sizes), sizes, weights)
    fields = {"direction": direction} | ({} if judged is None else {"judged": judged})
    sim = experiment(config, server is not None, layout, **fields)
    workers = Calling(users, users if server is None else server)
    return sim, Round(sim, state, cohort, workers, keep)


def play(
    method: Method,
    state: State,
    cohort: Cohort,
    users: Trainer,
    server: Trainer | None = None,
    **settings: Any,
) -> tuple[State, Round]:
    """The next state, and the round with its log."""
    sim, fed = make_round(method, state, cohort, users, server, **settings)
    return sim.played(state, fed), fed
