"""(FL)² (Lee et al. 2024): class-aware thresholds, flat minima, and a larger weight for unsure users.

The published method computes BatchNorm statistics over every user's images, as SemiFL does; this is left out
here. Its server trains before the first round; here the server trains alone in the first tenth of the rounds.
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
"""An image takes part in the sharpness-aware loss if the model's confidence in it is above this."""
LEAST = 0.01
"""ASAM's η: the move of each weight is scaled by its size plus this, so that a weight of zero can also
move."""


@dataclass(frozen=True)
class Fl2(Method):
    """Sharpness-aware consistency: users train their predictions to stay the same when the weights are moved
    in the direction in which the loss rises fastest."""

    sharpness: float = setting(0.1, least=0, most=10, what="a distance")
    """ρ: how far the weights are moved in the direction of the steepest loss."""
    momentum: float = setting(0.5, least=0, most=0.999, what="below 1")
    """β, the server's momentum: this much of the last round's movement is added to this round's."""

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
        """Returns pseudo-labels with FreeMatch's thresholds. The less confident a user's model is, the larger
        is the user's weight."""
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
        """Returns the gradient of the loss. For users, the gradient of the sharpness-aware consistency loss
        is added."""
        gradients, metrics = step.gradient(loss)
        if step.role == "server" or not self.sharpness:
            return gradients, metrics
        certain = step.tensors["certain"]
        ascent, _ = step.with_tensors(mask=certain).gradient(loss)
        with torch.no_grad():
            perturbed = uphill(step.weights, ascent, self.sharpness)

        def disagreement(moved: Step) -> Losses:
            """Returns KL( f(w) ‖ f(w + ε) ), the divergence between the predictions with weights w and with
            moved weights w + ε. As in the authors' code, it trains w + ε towards the predictions of w."""
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
    """Returns the weights [n, ...] after a move by `distance` in the direction in which the loss rises. As in
    ASAM, each weight's move is scaled by its own size; biases are not scaled."""
    sizes = {n: w.abs() + LEAST if "weight" in n else torch.ones_like(w) for n, w in weights.items()}
    steps = {name: size * gradients[name] for name, size in sizes.items()}
    rate = distance / lengths(list(steps.values())).clamp(min=1e-12)
    return {n: w + (sizes[n] * steps[n] * along(rate, w)).to(w.dtype) for n, w in weights.items()}
