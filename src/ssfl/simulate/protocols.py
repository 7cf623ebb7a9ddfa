"""Interfaces that a round uses: the simulation (or the server of a real federation), its workers, and other
processes."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout
from ssfl.data.dataset import Dataset
from ssfl.engines.local import Returned
from ssfl.engines.work import TrainedRows
from ssfl.federation import Named
from ssfl.simulate.plan import Plan
from ssfl.simulate.scoring import ModelScore


class Experiment(Protocol):
    """What a round needs from its simulation, or from the server of a real federation."""

    @property
    def config(self) -> Config: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def dataset(self) -> Dataset: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def ranks(self) -> "Ranks | None": ...
    @property
    def holds_models(self) -> bool: ...
    @property
    def has_server(self) -> bool: ...
    @property
    def server_counts(self) -> Tensor: ...

    def server_images(self, most: int | None = None) -> tuple[Tensor, Tensor]: ...
    def server_score(self, row: Tensor, most: int | None = None) -> ModelScore: ...
    def predicted(self, row: Tensor, images: Tensor) -> Tensor: ...
    def descent(self, row: Tensor, round: int) -> Tensor | None: ...
    def prepare(self, round: int) -> None: ...


Extra = Callable[[Sequence[int]], Named]
"""A function that maps n users to the tensors that they are sent besides a model, [n, ...] each."""


class Workers(Protocol):
    """Trains a round's users and the server, in this process or elsewhere."""

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: Extra | None
    ) -> Cohort:
        """Sends the models `start`, one per group, and the `extra` tensors to the users. Returns the cohort
        without users that dropped out. While real sites train, it calls `meanwhile`, which trains the
        server's model."""

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> Returned:
        """Returns the results of some of the cohort's users (`part`), trained from the models and tensors
        that they were sent."""

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """Returns these models after training on the server's labelled images."""


class Ranks(Protocol):
    """The processes of torchrun that share the users of a round, see `engines/dist.py`."""

    def share(self, count: int) -> slice:
        """Returns which of a round's `count` users this process trains, as a slice of their positions."""

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """Returns the sum of all processes' `streams` (the partial sums of the groups' models), and each
        tensor of `each` with the rows of all users, in order."""
