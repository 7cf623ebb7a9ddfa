"""FlexMatch's thresholds (Zhang et al. 2021) in a federation: computed once a round, lower for slowly learned
classes."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import thresholds
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class FlexMatch(Method):
    """Users make pseudo-labels once a round with thresholds for each class; the server trains last."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: the threshold of the most frequent class."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: Look) -> Labels:
        by_class = thresholds.flexible(look.probabilities, self.threshold)
        return parts.labelled(look, parts.confident(look, by_class))

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def round(self, state: State, fed: Fed) -> State:
        return parts.server_last(state, fed, fed.train_users(state.streams))
