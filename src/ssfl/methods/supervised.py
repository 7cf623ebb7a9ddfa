"""The method "supervised", equation (6) of the paper (Zhang et al. 2020): users know their labels. It is an
upper bound for methods without users' labels."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step, paper_round


@dataclass(frozen=True)
class Supervised(Method):
    """Users train on their true labels, with BatchNorm and FedAvg. It is an upper bound for methods without
    users' labels."""

    server_weight: float | None = setting(None, least=0, most=1, what="the server's share of the average")
    """The server's weight in every average. Default: the same weight as each user."""
    server_replicas: bool = False
    """Whether one copy of the server's model is trained for each group, as in the authors' code. Otherwise
    one server model is trained for all groups."""

    defaults: ClassVar = {"model": {"norm": "batch"}}

    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def uses(self) -> tuple[str, ...]:
        return ("weak",)

    def user_loss(self, step: Step) -> Losses:
        return losses.supervised(step.forward(step.weak), step.labels)

    def round(self, state: State, fed: Fed) -> State:
        return paper_round(state, fed, self.server_weight, self.server_replicas)
