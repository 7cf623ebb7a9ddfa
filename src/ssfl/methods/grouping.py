"""The method "grouping", proposed by the paper (Zhang et al. 2020): the consistency loss (equation (4)) with
GroupNorm and grouping-based averaging (equation (7))."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step, paper_round
from ssfl.methods import parts


@dataclass(frozen=True)
class Grouping(Method):
    """Divides the participants at random into groups; each group averages its own members with the server."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if the model's confidence in it is at least this."""
    views: str = setting("separate", choices=("separate", "joint"))
    """Whether weak and strong views pass through the network in two "separate" batches or together in one
    "joint" batch. With BatchNorm the results differ."""
    teacher_mode: str = setting("train", choices=("eval", "train"))
    """Whether the network makes pseudo-labels in "eval" or in "train" mode. This setting matters only if
    `views` is "separate". A joint batch is always computed in "train" mode."""
    server_weight: float | None = setting(None, least=0, most=1, what="the server's share of the average")
    """The server's weight in every average. Default: the same weight as each user."""
    server_replicas: bool = False
    """Whether one copy of the server's model is trained for each group, as in the authors' code. Otherwise
    one server model is trained for all groups."""

    defaults: ClassVar = {"model": {"norm": "group"}}
    grouped: ClassVar = True

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold, self.views, self.teacher_mode)

    def round(self, state: State, fed: Fed) -> State:
        return paper_round(state, fed, self.server_weight, self.server_replicas)
