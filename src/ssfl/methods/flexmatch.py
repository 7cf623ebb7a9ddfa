"""The method "flexmatch": the thresholds of FlexMatch (Zhang et al. 2021) in a federation. They are computed
once a round and are lower for classes that are learned slowly."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import thresholds
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class FlexMatch(Method):
    """Users make pseudo-labels once a round, with a threshold for each class that is lower for classes that
    are learned slowly. The server trains last."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: the upper limit of every class's threshold. A prediction is confident if its probability is at least
    τ. The class with the most confident predictions gets the threshold τ. But if even more predictions, of
    all classes together, are not confident, its threshold is lower than τ."""

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
