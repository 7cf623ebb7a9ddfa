"""Rounds whose models are a single number each: users and server add what they are told to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssfl.config.loading import load_config
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout
from ssfl.data.split import Parts
from ssfl.engines.local import Returned
from ssfl.engines.work import TrainedRows
from ssfl.federation import METRICS, Named, State
from ssfl.simulate.rounds import Round
from ssfl.simulate.simulation import Simulation


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def start(streams: Sequence[float], average: float | None = None, **memory: Tensor) -> State:
    """A state of such models that keeps no momentum."""
    middle = sum(streams) / len(streams) if average is None else average
    return State(0, column(*streams), column(middle)[0], torch.zeros(0, 1).double(), memory=memory)


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
    """What the server was given to train."""

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


def toy(method: str, *sets: str, server: bool = False) -> Simulation:
    """A simulation without images, of two classes, whose server has one of each or nothing."""
    own = ["federation.head_start=0", "federation.slow_average=0"]
    config = load_config("quickstart", [f"method.name={method}", *own, *sets])
    labelled = torch.arange(2 if server else 0)
    plan: Any = SimpleNamespace(
        config=config,
        server=SimpleNamespace(images=labelled),
        users=SimpleNamespace(sizes=torch.full((config.split.users,), 100)),
    )
    dataset: Any = SimpleNamespace(classes=("one", "two"), shape=(1, 1, 1))
    pool: Any = SimpleNamespace(labels=torch.arange(2), wide=torch.float64)
    nothing: Any = None
    parts = Parts(labelled.numpy(), [np.zeros(0, np.int64)] * config.split.users)
    layout = Layout(("w",), ((1,),), (1,), 1)
    return Simulation(
        dataset, parts, labelled.numpy(), pool, nothing, layout, nothing, plan, torch.device("cpu")
    )


def played(sim: Simulation, state: State, cohort: Cohort, workers: Adding) -> tuple[State, Round]:
    """The method's round, and what it was played with."""
    fed = Round(sim, state, cohort, workers, keep=False)
    return sim.method.round(state, fed), fed
