"""Users train, their average replaces the model, and the server then trains that average on its labels."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class Alternate(Method):
    """The simplest method in which every round ends with the server's training on true labels."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if its confidence is at least this."""
    views: str = setting("separate", choices=("separate", "joint"))
    """Whether weak and strong views pass through the network in "separate" batches or in one "joint" one."""
    teacher_mode: str = setting("eval", choices=("eval", "train"))
    """Whether pseudo-labels come from the network in "eval" or in "train" mode; joint views are in training
    mode."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold, self.views, self.teacher_mode)

    def round(self, state: State, fed: Fed) -> State:
        return parts.server_last(state, fed, fed.train_users(state.streams))
