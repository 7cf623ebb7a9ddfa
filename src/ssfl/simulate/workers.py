"""The workers of a simulation: they train all users and the server with an engine on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
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
    """Trains the users and the server of one simulated round. Implements the interface `Workers` of
    `protocols.py`."""

    config: Config
    layout: Layout
    classes: int
    engine: Engine
    round: int
    cohort: Cohort
    users_work: Work
    server_work: Work | None
    phases: Phases
    _started: list[torch.cuda.Stream] = field(default_factory=list, repr=False)
    """The queue of GPU work in which the server trains next to the users, if it does."""

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: Extra | None
    ) -> Cohort:
        """Returns the cohort unchanged. There is nothing to send, because the users are simulated on this
        machine. Users that drop out were already left out when the cohort was drawn.

        If the engine can, the server starts to train here (`meanwhile`), next to the users. One model is too
        small to fill a GPU.
        """
        if self.engine.side is not None and cohort.users:
            self.engine.side.wait_stream(torch.cuda.current_stream(start.device))
            with torch.cuda.stream(self.engine.side):
                meanwhile()
        return cohort

    def train(self, rows: Tensor, momentum: Tensor, part: slice, tensors: Named) -> local.Returned:
        """Trains some of the cohort's users and returns what the server receives from them. `part` says which
        users, as a slice of positions in the cohort. These n users start from the models `rows` [n, P + Q]
        and with `momentum` [n, P]. `tensors` are what they were sent besides the models. A model is a row of
        P weights and Q running statistics."""
        work = replace(self.users_work.of(part), sent=tensors)
        with self.phases.during("users"):
            result = local.train(self.engine, self.config.method, self.layout.weights, rows, momentum, work)
        if self._started and part.stop >= len(self.cohort.users):
            # the time that the server needs longer than the users
            with self.phases.during("server"):
                torch.cuda.current_stream(rows.device).wait_stream(self._started.pop())
        users = self.cohort.users[part]
        received = sent_back(self.config, self.layout, self.classes, self.round, users, rows, result.rows)
        return result._replace(rows=received)

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """Trains the m models `rows` [m, P + Q], which start with `momentum` [m, P], on the server's labelled
        images and returns the result. Usually m = 1; some methods train a copy of the server's model for each
        group. A model is a row of P weights and Q running statistics."""
        assert self.server_work is not None
        side = self.engine.side
        if side is not None and torch.cuda.current_stream(rows.device) == side:
            self._started.append(side)
            return self.engine.train(rows, momentum, self.server_work)  # `train` waits and measures the time
        with self.phases.during("server"):
            return self.engine.train(rows, momentum, self.server_work)
