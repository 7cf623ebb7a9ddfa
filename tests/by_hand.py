"""Rounds whose models are single numbers and whose trainers add to them, to follow by hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

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
from ssfl.federation import Method, Named, State
from ssfl.simulate.plan import Owners, Plan
from ssfl.simulate.rounds import Round
from ssfl.simulate.scoring import ModelScore
from ssfl.simulate.simulation import Simulation

Trainer = Callable[[Tensor, Tensor, slice], TrainedRows]
"""(rows, momentum, places in the cohort) -> what training them gave."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Experiment(Simulation):
    """An experiment without images or a network: `judged` says how good a row is."""

    judged: Callable[[Tensor], ModelScore] = lambda row: ModelScore(0.0, 0.0, [])
    direction: Tensor | None = None
    """What the gate compares updates with."""

    def score(self, row: Tensor, images: Tensor, labels: Tensor) -> ModelScore:
        return self.judged(row)

    def server_images(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        return torch.zeros(0), torch.zeros(0)

    def descent(self, row: Tensor, round: int) -> Tensor | None:
        return self.direction


@dataclass(frozen=True)
class Workers:
    """Who trains: the users, and the server."""

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
    judged: Callable[[Tensor], ModelScore] | None = None,
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
    own = np.arange(0 if server is None else 2)
    hers = [np.arange(2, 4)] * 4
    unused = cast(Any, None)
    plan = Plan(config, Owners.of(hers, CPU), None, Owners.of([own], CPU), unused, CPU)
    nothing = torch.zeros(0, 1, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    dataset = Dataset("by hand", *nothing, *nothing, ("a", "b"), (0.5,), (0.5,), False)
    sim = Experiment(dataset, Parts(own, hers), own[:0], unused, nn.Identity(), layout, unused, plan, CPU)
    if judged is not None:
        sim = replace(sim, judged=judged)
    sim = replace(sim, direction=direction)
    workers = Workers(users, users if server is None else server)
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
