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
"""A function that takes n user numbers and returns tensors [n, ...] by name. Entry i of each tensor is sent
to the i-th of these users, in addition to a model."""


class Workers(Protocol):
    """Trains a round's users and the server, either on this machine or at real sites."""

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: Extra | None
    ) -> Cohort:
        """Sends each user of the cohort its model in `start`, and the tensors that `extra` returns for the
        user. If `extra` is None, only models are sent. Returns the cohort without users that dropped out.
        With real sites, calls `meanwhile`, which trains the server's model, while the sites train."""

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> Returned:
        """Trains some of the cohort's users and returns what the server receives from them. `part` says which
        users, as a slice of positions in the cohort. These n users start from the models `rows` [n, P + Q]
        and with `momentum` [n, P], which is not sent to real sites. `tensors` are what they were sent besides
        the models. A model is a row of P weights and Q running statistics."""

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """Trains the m models `rows` [m, P + Q], which start with `momentum` [m, P], on the server's labelled
        images and returns the result. A model is a row of P weights and Q running statistics."""


class Ranks(Protocol):
    """The processes of torchrun, among which the users of a round are divided. See `engines/dist.py`."""

    def share(self, count: int) -> slice:
        """Returns which of a round's `count` users this process trains, as a slice of their positions in the
        cohort."""

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """Exchanges the results of a round among the processes; every process gets the same list. Its first
        entry is the sum of `streams` over all processes. The further entries are the tensors of `each`, now
        with one row for each of all `count` users.

        `streams` has, for each group of users, the sum of the models that this process trained. Each tensor
        in `each` has one row for each user that this process trained, such as the user's metrics. `start` is
        the model that the round started from; raises if it differs between processes.
        """
