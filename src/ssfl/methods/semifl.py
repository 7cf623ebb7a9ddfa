"""SemiFL (Diao, Ding and Tarokh 2022): labels once a round, fix and mix losses, the server trains last.

Published with BatchNorm statistics over every user's images, which no real federation could compute, and with
5 local epochs of batches of 10: not here.
"""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, Named, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class SemiFL(Method):
    """Batches hold confident images alone. Each is trained in a strong view, and mixed with another image."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: an image gets a pseudo-label when the received model is at least this sure."""
    mix: float = setting(1.0, least=0, most=100, what="a weight")
    """λ: the weight of the mix loss."""
    alpha: float = setting(0.75, least=1e-3, most=100, what="above 0")
    """Both parameters of the Beta distribution that the shares of mixtures are drawn from."""
    momentum: float = setting(0.5, least=0, most=0.999, what="below 1")
    """β: the server's momentum, how much of the last round's movement is added to this one's."""

    defaults: ClassVar = {"model": {"norm": "group"}, "train": {"weight_decay": 5e-4, "clip": 1.0}}
    note: ClassVar = "published with BatchNorm statistics over every user's images; goes without"

    def needs(self) -> tuple[str, ...]:
        return ("reports",)

    def uses(self) -> tuple[str, ...]:
        return ("weak", "strong") if self.mix else ("strong",)

    def passes(self) -> int:
        return 1 + bool(self.mix)

    def label(self, look: Look) -> Labels:
        labels = parts.labelled(look, parts.confident(look, self.threshold), fill=True)
        return parts.mixed(labels, look, self.alpha) if self.mix else labels

    def user_loss(self, step: Step) -> Losses:
        fix = parts.round_labels(step)
        if not self.mix:
            return fix
        given = step.given
        share = given["share"][:, None]
        part = share[..., None, None, None]
        images = (part * step.weak + (1 - part) * given["partner"]).to(step.weak.dtype)
        logits = step.forward(images, draw="mix")
        mix = losses.mixture(logits, given["labels"], given["partner_labels"], share)
        return fix._replace(loss=fix.loss + self.mix * mix * given["mask"])

    def initial(self, state: State, fed: Fed) -> Named:
        return parts.still(state, self.momentum)

    def round(self, state: State, fed: Fed) -> State:
        users = fed.train_users(state.streams)
        streams, velocity = parts.momentum(state, users, self.momentum)
        return parts.server_last(state, fed, users, streams, **velocity)
