"""The workers of a simulation: the engine trains all users and the server on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core.clock import Phases
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout
from ssfl.engines import local
from ssfl.engines.contract import Engine
from ssfl.engines.work import TrainedRows, Work
from ssfl.federation import Named
from ssfl.simulate.protocols import Extra
from ssfl.simulate.sending import sent_back


@dataclass(frozen=True)
class Simulated:
    """Implements `Workers` for one round of a simulation."""

    config: Config
    layout: Layout
    engine: Engine
    round: int
    cohort: Cohort
    users_work: Work
    server_work: Work | None
    phases: Phases

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: Extra | None
    ) -> Cohort:
        """Sends nothing, since the users are simulated here, and returns the cohort as it is. Users that drop
        out were already left out when it was drawn."""
        return cohort

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> local.Returned:
        """Returns the results of some of the cohort's users (`part`), trained from these models, one per
        row."""
        work = replace(self.users_work.of(part), sent=tensors)
        with self.phases.during("users"):
            result = local.train(self.engine, self.config.method, self.layout.weights, rows, momentum, work)
        users = self.cohort.users[part]
        return result._replace(rows=sent_back(self.config, self.layout, self.round, users, rows, result.rows))

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """Returns these models after training on the server's labelled images."""
        assert self.server_work is not None
        with self.phases.during("server"):
            return self.engine.train(rows, momentum, self.server_work)
