"""The consistency loss (CRL) of the paper (Zhang et al. 2020) with BatchNorm and FedAvg, equation (8)."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step, paper_round
from ssfl.methods import parts


@dataclass(frozen=True)
class CrlBn(Method):
    """Averages all users and the server with equal weights. Weak and strong views pass through the network in
    one batch."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if its confidence is at least this."""
    views: str = setting("joint", choices=("separate", "joint"))
    """Whether weak and strong views pass through the network in "separate" batches or in one "joint" one."""
    teacher_mode: str = setting("train", choices=("eval", "train"))
    """Whether pseudo-labels come from the network in "eval" or in "train" mode; joint views are in training
    mode."""
    server_weight: float | None = setting(None, least=0, most=1, what="a share of the average")
    """The server's weight in every average. Default: the same as a user's."""
    server_replicas: bool = False
    """Train one copy of the server for each group, as in the authors' code, instead of one for all."""

    defaults: ClassVar = {"model": {"norm": "batch"}}

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold, self.views, self.teacher_mode)

    def round(self, state: State, fed: Fed) -> State:
        return paper_round(state, fed, self.server_weight, self.server_replicas)
