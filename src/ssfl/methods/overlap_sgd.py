"""The method OverlapSGD (Wang, Liang and Joshi 2020), a baseline in which users know their labels. Each user
keeps its own model and never waits for the average."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step


@dataclass(frozen=True)
class OverlapSgd(Method):
    """After a round, each user's model is pulled towards the average of the previous round, which is sent
    while the user trains. Users know their labels."""

    elasticity: float = setting(0.6, least=0, most=1, what="0 does not pull the models, 1 makes them equal")
    """α: each user's model is pulled towards the average by this fraction of the difference between the
    two."""

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
        users = fed.train_users(state.streams)
        if not users.counted:
            return state.next(state.streams, state.average)
        pulled = users.rows + self.elasticity * (state.average - users.rows)
        return state.next(
            state.streams.index_copy(0, users.indices, pulled), pulled.mean(0), momentum_of=[users]
        )
