"""Ideas for the method `anchored` that are no settings of it. `benchmarks.variants screen` compares them.

Each idea is a small subclass. It is dropped, or becomes a part of the method, when it has been measured.
"""

from dataclasses import dataclass

import torch

import ssfl
from ssfl.methods.anchored import Anchored


@dataclass(frozen=True)
class SoftWeights(Anchored):
    """`anchored` with the weights of SoftMatch (Chen et al. 2023): every image has a pseudo-label, also those
    with a low confidence. An image's weight in the loss falls as its confidence falls below the mean
    confidence of the user's images."""

    def label(self, look: ssfl.Look) -> ssfl.Labels:
        """Returns the labels of `anchored`, with a weight from 0 to 1 for each image instead of the mask."""
        labels = super().label(look)
        confidence = look.probabilities.amax(-1)
        below = (confidence.mean(1, keepdim=True) - confidence).clamp(min=0)
        spread = confidence.var(1, correction=0, keepdim=True).clamp(min=1e-6)
        weight = torch.exp(-2 * below**2 / spread) * look.drawn
        mask = labels.tensors["mask"]
        return labels._replace(tensors=labels.tensors | {"mask": weight.reshape(mask.shape).to(mask)})


@dataclass(frozen=True)
class LongStep(Anchored):
    """`anchored` with a longer step instead of momentum: the model moves twice as far as the users' mean.
    With the momentum 0.5, steps in a constant direction become twice as long in the end. So this shows
    whether momentum is more than a longer step."""

    momentum: float = ssfl.setting(0.0, least=0, most=0.999, what="a momentum")
    """The server's momentum, off by default."""

    def label(self, look: ssfl.Look) -> ssfl.Labels:
        """Returns the labels of `anchored`, with twice its scale of the update."""
        labels = super().label(look)
        once = look.probabilities.new_ones(len(look.probabilities))
        return labels._replace(
            update_scale=2 * (once if labels.update_scale is None else labels.update_scale)
        )


@dataclass(frozen=True)
class Aligned(Anchored):
    """`anchored` with distribution alignment (Berthelot et al. 2020): before the threshold, each class's
    probability is divided by its mean over the user's images. A user then predicts all classes about equally
    often."""

    def label(self, look: ssfl.Look) -> ssfl.Labels:
        """Returns the labels of `anchored`, from aligned probabilities."""
        drawn = look.drawn[:, :, None].to(look.probabilities)
        mean = (look.probabilities * drawn).sum(1, keepdim=True) / drawn.sum(1, keepdim=True).clamp(min=1)
        even = look.probabilities / mean.clamp(min=1e-6)
        return super().label(look._replace(probabilities=even / even.sum(-1, keepdim=True)))
