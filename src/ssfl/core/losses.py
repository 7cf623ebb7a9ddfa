"""The losses of section 3.1 as pure functions of logits, one value per image.

The mean over a batch estimates the paper's mean over D_s or D_k. Images below the threshold count as zeros in
it, as in the paper and in FixMatch.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Losses(NamedTuple):
    """The loss of each image of a batch, [n, B], or of each model, [n]."""

    loss: Tensor
    """The image's loss, zero where it is masked out."""
    mask: Tensor
    """[n, B]: whether the image is trained on, the indicator 1[max ȳ ≥ τ]."""
    label: Tensor
    """[n, B]: the class it is trained towards, argmax ȳ or the true one."""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 (never changed)
    """[n] each: further metrics that the method declares in `metrics`."""


def supervised(logits: Tensor, labels: Tensor) -> Losses:
    """Cross-entropy with true labels: the server's L_s (3), and the oracle users of equation (6)."""
    loss = cross_entropy(logits, labels)
    return Losses(loss, (labels >= 0).to(loss.dtype), labels, {})


def pseudo_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """argmax ȳ and 1[max ȳ ≥ τ], without gradient."""
    confidence, label = logits.detach().softmax(-1).max(-1)
    return label, (confidence >= threshold).to(logits.dtype)


def consistency(teacher: Tensor, student: Tensor, threshold: float) -> Losses:
    """Equation (4), the users' L_k: the confident prediction for one view is the label of the other.

    With the weak view for both it is self-training, equation (5).
    """
    label, mask = pseudo_label(teacher, threshold)
    return labelled(student, label, mask)


def labelled(logits: Tensor, labels: Tensor, mask: Tensor) -> Losses:
    """Cross-entropy with pseudo-labels that exist already, zero where the mask is."""
    return Losses(cross_entropy(logits, labels) * mask, mask, labels, {})


def mixture(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """The loss of mixed images: partly one class and partly another (mixup)."""
    return share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, others)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every image, whatever the dimensions in front of the classes."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)
