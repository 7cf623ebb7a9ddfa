"""The losses of section 3.1 as pure functions of logits, one value per image.

The mean over a batch estimates the paper's mean over D_s or D_k; images below the threshold count
as zeros in it, as in the paper and in FixMatch.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Losses(NamedTuple):
    """What an objective says of each image of a batch."""

    loss: Tensor
    """The image's loss, zero where it is masked out."""
    mask: Tensor
    """Whether the image is trained on: the indicator 1[max ȳ ≥ τ]."""
    label: Tensor
    """The class it is trained towards: argmax ȳ, or the true one."""


def supervised(logits: Tensor, labels: Tensor) -> Losses:
    """Cross-entropy with true labels: the server's L_s (3), and the oracle users of equation (6)."""
    loss = _cross_entropy(logits, labels)
    return Losses(loss, (labels >= 0).to(loss.dtype), labels)


def pseudo_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """argmax ȳ and 1[max ȳ ≥ τ], without gradient."""
    confidence, label = logits.detach().softmax(-1).max(-1)
    return label, (confidence >= threshold).to(logits.dtype)


def consistency(weak: Tensor, strong: Tensor, threshold: float) -> Losses:
    """CRL, the users' L_k (4): the weak view's confident prediction is the strong view's label."""
    label, mask = pseudo_label(weak, threshold)
    return Losses(_cross_entropy(strong, label) * mask, mask, label)


def self_training(teacher: Tensor, weak: Tensor, threshold: float) -> Losses:
    """Equation (5): the weak view's confident prediction is that same view's label."""
    return consistency(teacher, weak, threshold)


def given(strong: Tensor, labels: Tensor, mask: Tensor) -> Losses:
    """The strong view with a label that was made before."""
    return Losses(_cross_entropy(strong, labels) * mask, mask, labels)


def mixture(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """SemiFL's mix loss: of an image that is partly one class and partly another."""
    return share * _cross_entropy(logits, labels) + (1 - share) * _cross_entropy(logits, others)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Of every image, whatever the dimensions in front of the classes."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)
