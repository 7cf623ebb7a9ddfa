"""(FL)² (Lee et al. 2024): class-aware thresholds, flat minima, and a larger weight for unsure users.

Published on SemiFL's rounds, with BatchNorm statistics over every user's images: not here. Its server's
training before the first round is a tenth of the rounds here.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core import thresholds
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.core.rows import lengths
from ssfl.federation import Fed, Labels, Look, Loss, Method, Named, State, Step, along
from ssfl.methods import parts

CERTAIN = 0.95
"""How sure the model must be of an image to ask for the same answer around the weights."""
LEAST = 0.01
"""ASAM's η: how far a weight of zero may go."""


@dataclass(frozen=True)
class Fl2(Method):
    """Users ask for the same answers at weights moved uphill (sharpness-aware consistency)."""

    sharpness: float = setting(0.1, least=0, most=10, what="a distance")
    """ρ: how far weights are moved uphill."""
    momentum: float = setting(0.5, least=0, most=0.999, what="below 1")
    """β: the server's momentum, how much of the last round's movement is added to this one's."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 1.0},
        "federation": {"head_start": 0.1},
    }
    note: ClassVar = "published with BatchNorm statistics over every user's images; goes without"

    def needs(self) -> tuple[str, ...]:
        return ("reports",)

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def passes(self) -> int:
        return 1 + 2 * bool(self.sharpness)

    def label(self, look: Look) -> Labels:
        sure = parts.confident(look, thresholds.free(look.answers))
        certain = sure & (look.answers.amax(-1) >= CERTAIN)
        labels = parts.labelled(look, sure, fill=True, certain=certain)
        drawn = look.drawn
        doubt = 1 - (look.answers.amax(-1) * drawn).sum(-1) / drawn.sum(-1).clamp(min=1)
        assert labels.weight is not None
        return labels._replace(weight=doubt * labels.weight)

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        slopes, metrics = step.slopes(loss)
        if step.role == "server" or not self.sharpness:
            return slopes, metrics
        certain = step.given["certain"]
        sure, _ = step.having(mask=certain).slopes(loss)
        with torch.no_grad():
            moved = uphill(step.weights, sure, self.sharpness)

        def disagreement(there: Step) -> Losses:
            """KL( f(w) ‖ f(w + ε) ), as in the authors' code: it moves w + ε towards what w says."""
            here = there.forward(there.strong, grad=False, weights=step.weights).log_softmax(-1)
            apart = (here.exp() * (here - there.forward(there.strong).log_softmax(-1))).sum(-1)
            return Losses(apart * certain, certain, there.given["labels"])

        around, _ = step.slopes(disagreement, at=moved)
        return {name: slope + around[name] for name, slope in slopes.items()}, metrics

    def initial(self, state: State, fed: Fed) -> Named:
        return parts.still(state, self.momentum)

    def round(self, state: State, fed: Fed) -> State:
        users = fed.train_users(state.streams)
        streams, velocity = parts.momentum(state, users, self.momentum)
        return parts.server_last(state, fed, users, streams, **velocity)


def uphill(weights: Named, slopes: Named, distance: float) -> dict[str, Tensor]:
    """ASAM's step of n models [n, ...]: weights moved so far uphill, larger ones further, biases alike."""
    sizes = {n: w.abs() + LEAST if "weight" in n else torch.ones_like(w) for n, w in weights.items()}
    steps = {name: size * slopes[name] for name, size in sizes.items()}
    rate = distance / lengths(list(steps.values())).clamp(min=1e-12)
    return {n: w + (sizes[n] * steps[n] * along(rate, w)).to(w.dtype) for n, w in weights.items()}
