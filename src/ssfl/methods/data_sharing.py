"""The method DataSharing (Zhao et al. 2018), a baseline in which users know their labels. Every user is also
sent the same labelled images of all classes."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step


@dataclass(frozen=True)
class DataSharing(Method):
    """Users train on their true labels, and each is also sent the server's labelled images. The average of
    the users' models is the new model; the server does not train."""

    defaults: ClassVar = {"model": {"norm": "batch"}, "split": {"shared": True}}
    trains_server: ClassVar = False
    note: ClassVar = "users know the labels of their images, and are sent labelled ones"

    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def uses(self) -> tuple[str, ...]:
        return ("weak",)

    def user_loss(self, step: Step) -> Losses:
        return losses.supervised(step.forward(step.weak), step.labels)

    def round(self, state: State, fed: Fed) -> State:
        users = fed.train_users(state.streams)
        return state.next(users.means, users.average, momentum_of=[users])
