"""The method EASGD (Zhang, Choromanska and LeCun 2015), a baseline in which users know their labels. Each
user keeps its own model, which is pulled towards a common model."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step


@dataclass(frozen=True)
class Easgd(Method):
    """Elastic averaging: after a round, each user's model and the common model are moved towards each other
    by the same amount. Users know their labels."""

    elasticity: float | None = setting(
        None, least=0, most=1, what="0 does not pull the models, 1 makes them equal"
    )
    """α: the fraction of the difference between a user's model and the common model by which both are moved
    towards each other. Default: 0.9/C, for C participants."""

    defaults: ClassVar = {"model": {"norm": "batch"}, "train": {"momentum_policy": "user"}}
    trains_server: ClassVar = False
    start: ClassVar = "user"

    def needs(self) -> tuple[str, ...]:
        return ("labels", "models")

    def uses(self) -> tuple[str, ...]:
        return ("weak",)

    def user_loss(self, step: Step) -> Losses:
        return losses.supervised(step.forward(step.weak), step.labels)

    def round(self, state: State, fed: Fed) -> State:
        users, centre = fed.train_users(state.streams), state.average
        if not users.counted:
            return state.next(state.streams, centre)
        alpha = 0.9 / len(fed.cohort.drawn) if self.elasticity is None else self.elasticity
        pulled = users.rows + alpha * (centre - users.rows)  # x_i -= α (x_i - z)
        average = centre + alpha * (users.rows - centre).sum(0)  # z += α Σ (x_i - z)
        return state.next(state.streams.index_copy(0, users.indices, pulled), average, momentum_of=[users])
