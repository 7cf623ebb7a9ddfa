"""Interfaces that `Round` uses, so that rounds run alike in simulations and in real federations: the
experiment, the workers that train, and the processes of torchrun."""

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
    """What a round needs to know about the run: its config, data and plan, and how to evaluate models.
    Simulations and the server of a real federation implement it."""

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
"""A function that takes n user numbers and returns the tensors, [n, ...] each and by name, that these users
are sent in addition to a model."""


class Workers(Protocol):
    """Trains a round's users and the server, either on this machine or at real sites."""

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: Extra | None
    ) -> Cohort:
        """Sends each user the model of its group in `start`, and the `extra` tensors. Returns the cohort
        without users that dropped out. With real sites, calls `meanwhile` while the sites train; it trains
        the server's model."""

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> Returned:
        """Returns the training results of some of the cohort's users. `part` is the slice of the cohort,
        `rows` [n, P + Q] the model that each of its n users starts from, and `tensors` what else the users
        were sent."""

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """Returns the models `rows` [m, P + Q] after training on the server's labelled images."""


class Ranks(Protocol):
    """The processes of torchrun, among which the users of a round are divided. See `engines/dist.py`."""

    def share(self, count: int) -> slice:
        """Returns which of a round's `count` users this process trains, as a slice of their positions in the
        cohort."""

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """Exchanges results among the processes; every process gets the same. Returns a list: first the sum
        over processes of `streams` (sums of the models of each group), then each tensor of `each` with the
        rows of all `count` users, in order."""
