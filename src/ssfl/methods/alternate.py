"""The method "alternate": users train, their average becomes the new model, and the server then trains this
model on its labels."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class Alternate(Method):
    """Users and server train in turn: users train with pseudo-labels, their models are averaged, and then the
    server trains the average on true labels. This is the simplest method in which the two train in turn."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if the model's confidence in it is at least this."""
    views: str = setting("separate", choices=("separate", "joint"))
    """Whether weak and strong views pass through the network in two "separate" batches or together in one
    "joint" batch. With BatchNorm the results differ."""
    teacher_mode: str = setting("eval", choices=("eval", "train"))
    """Whether the network makes pseudo-labels in "eval" or in "train" mode. This setting matters only if
    `views` is "separate". A joint batch is always computed in "train" mode."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold, self.views, self.teacher_mode)

    def round(self, state: State, fed: Fed) -> State:
        return parts.server_last(state, fed, fed.train_users(state.streams))
