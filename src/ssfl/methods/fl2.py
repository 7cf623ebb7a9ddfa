"""The method (FL)² (Lee et al. 2024): thresholds for each class, training towards flat minima of the loss,
and a larger weight for users with low confidence.

The published method, like SemiFL, computes BatchNorm statistics over every user's images; this is left out
here. The published server trains before the first round. Here it trains alone in the first tenth of the
rounds.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core import thresholds
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.core.rows import lengths
from ssfl.core.step import along
from ssfl.federation import Fed, Labels, Look, Loss, Method, Named, State, Step
from ssfl.methods import parts

CERTAIN = 0.95
"""An image is part of the sharpness-aware loss only if the received model's confidence in it is at least
this."""
LEAST = 0.01
"""The constant η of ASAM (adaptive sharpness-aware minimisation). The change of a weight w is proportional to
(|w| + η)², so that a weight of zero can also change."""


@dataclass(frozen=True)
class Fl2(Method):
    """Sharpness-aware consistency: users train so that their predictions stay the same when the weights are
    moved in the direction in which the loss rises fastest."""

    sharpness: float = setting(0.1, least=0, most=10, what="a distance")
    """ρ: how far the weights are moved in the direction in which the loss rises fastest. 0 switches the
    sharpness-aware loss off."""
    momentum: float = setting(0.5, least=0, most=0.999, what="a momentum")
    """β, the server's momentum: this fraction of the last round's movement of the model is added to this
    round's."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 1.0},
        "federation": {"head_start": 0.1},
    }
    note: ClassVar = "without the published BatchNorm statistics over every user's images"

    def needs(self) -> tuple[str, ...]:
        return ("reports",)

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def passes(self) -> int:
        return 1 + 2 * bool(self.sharpness)

    def label(self, look: Look) -> Labels:
        """Returns pseudo-labels, made with FreeMatch's thresholds for each class. A user's weight in the
        average is 1 minus the received model's mean confidence in the user's images. A user without
        pseudo-labels has weight 0."""
        sure = parts.confident(look, thresholds.free(look.probabilities))
        certain = sure & (look.probabilities.amax(-1) >= CERTAIN)
        labels = parts.labelled(look, sure, fill=True, certain=certain)
        drawn = look.drawn
        doubt = 1 - (look.probabilities.amax(-1) * drawn).sum(-1) / drawn.sum(-1).clamp(min=1)
        assert labels.weight is not None
        return labels._replace(weight=doubt * labels.weight)

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        """Returns the gradient of the loss by weight name, and its metrics. At users, the gradient of the
        sharpness-aware consistency loss is added."""
        gradients, metrics = step.gradient(loss)
        if step.role == "server" or not self.sharpness:
            return gradients, metrics
        certain = step.tensors["certain"]
        ascent, _ = step.with_tensors(mask=certain).gradient(loss)
        with torch.no_grad():
            perturbed = uphill(step.weights, ascent, self.sharpness)

        def disagreement(moved: Step) -> Losses:
            """Returns the loss KL( f(w) ‖ f(w + ε) ): how much the predictions f change when the weights w
            are moved by ε. As in the authors' code, its gradient is taken at w + ε, and the predictions at w
            are fixed targets."""
            target = moved.forward(moved.strong, grad=False, weights=step.weights).log_softmax(-1)
            divergence = (target.exp() * (target - moved.forward(moved.strong).log_softmax(-1))).sum(-1)
            return Losses(divergence * certain, certain, moved.tensors["labels"])

        sharpness, _ = step.gradient(disagreement, at=perturbed)
        return {name: gradient + sharpness[name] for name, gradient in gradients.items()}, metrics

    def initial(self, state: State, fed: Fed) -> Named:
        return parts.still(state, self.momentum)

    def round(self, state: State, fed: Fed) -> State:
        users = fed.train_users(state.streams)
        streams, velocity = parts.momentum(state, users, self.momentum)
        return parts.server_last(state, fed, users, streams, **velocity)


def uphill(weights: Named, gradients: Named, distance: float) -> dict[str, Tensor]:
    """Returns the weights [n, ...] by name, moved by `distance` (ρ) in the direction in which the loss rises
    fastest. As in ASAM, larger weights move further; biases are not scaled by their size."""
    sizes = {n: w.abs() + LEAST if "weight" in n else torch.ones_like(w) for n, w in weights.items()}
    steps = {name: size * gradients[name] for name, size in sizes.items()}
    rate = distance / lengths(list(steps.values())).clamp(min=1e-12)
    return {n: w + (sizes[n] * steps[n] * along(rate, w)).to(w.dtype) for n, w in weights.items()}
