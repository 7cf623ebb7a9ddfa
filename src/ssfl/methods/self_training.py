"""The method "self-training", a baseline of the paper (Zhang et al. 2020), equation (5): the confident
prediction for a weak view is the label of that same view."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step, paper_round


@dataclass(frozen=True)
class SelfTraining(Method):
    """The paper's baseline without strong views: users train on weak views with their own predictions as
    labels. It uses BatchNorm and FedAvg."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if the model's confidence in it is at least this."""
    views: str = setting("joint", choices=("separate", "joint"))
    """Whether pseudo-labels come from the same forward pass that is trained ("joint") or from another pass
    over the same views ("separate")."""
    teacher_mode: str = setting("train", choices=("eval", "train"))
    """Whether the pass that makes pseudo-labels is in "eval" or in "train" mode. This setting matters only if
    `views` is "separate"."""
    server_weight: float | None = setting(None, least=0, most=1, what="the server's share of the average")
    """The server's weight in every average. Default: the same weight as each user."""

    defaults: ClassVar = {"model": {"norm": "batch"}}

    def uses(self) -> tuple[str, ...]:
        return ("weak",)

    def user_loss(self, step: Step) -> Losses:
        teacher = None
        if self.views == "separate":
            train = self.teacher_mode == "train"
            teacher = step.forward(step.weak, grad=False, train=train, draw="teacher")
        student = step.forward(step.weak)
        return losses.consistency(student if teacher is None else teacher, student, self.threshold)

    def round(self, state: State, fed: Fed) -> State:
        return paper_round(state, fed, self.server_weight)
