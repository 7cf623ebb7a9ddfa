"""The method "freematch": the thresholds of FreeMatch (Wang et al. 2023) in a federation. They are computed
once a round from a user's mean confidence and from how often each class is predicted."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import thresholds
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class FreeMatch(Method):
    """Users make pseudo-labels once a round, with a threshold for each class that is lower for rarely
    predicted classes. The server trains last."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: Look) -> Labels:
        return parts.labelled(look, parts.confident(look, thresholds.free(look.probabilities)))

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def round(self, state: State, fed: Fed) -> State:
        return parts.server_last(state, fed, fed.train_users(state.streams))
