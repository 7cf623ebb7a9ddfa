"""The losses of section 3.1 of the paper (Zhang et al. 2020), as functions of logits. Each loss has one value
per image.

The mean over a batch estimates the paper's mean over the server's images (D_s) or over those of user k (D_k).
With pseudo-labels, images whose confidence is below the threshold τ have a loss of zero. They still count in
this mean, as in the paper and in FixMatch. ȳ denotes the predicted probabilities of an image.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Losses(NamedTuple):
    """The losses of n models on a batch of B images each, with the masks and labels that were used. A
    method's loss function returns it."""

    loss: Tensor
    """[n, B]: the loss of each of a model's B images, for n models; zero for images that are masked out. Or
    [n]: one loss per model."""
    mask: Tensor
    """[n, B]: 1 for images that are trained on, else 0, for n models with B images each. With pseudo-labels
    this is 1[max ȳ ≥ τ]: the largest predicted probability reaches the threshold τ."""
    label: Tensor
    """[n, B]: the label that each image is trained with, for n models with B images each. It is the true
    label, or the pseudo-label argmax ȳ (the most probable class)."""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 (never changed)
    """Further metrics of n models by name, [n] each. A method must list their names in its attribute
    `metrics`."""


def supervised(logits: Tensor, labels: Tensor) -> Losses:
    """Returns the cross-entropy of each image with its true label. For the server this is the loss L_s, the
    paper's equation (3). For users that know their labels it is equation (6)."""
    loss = cross_entropy(logits, labels)
    return Losses(loss, (labels >= 0).to(loss.dtype), labels, {})


def pseudo_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns for each image the pseudo-label argmax ȳ and the mask 1[max ȳ ≥ τ], without gradient. ȳ are the
    probabilities predicted by `logits` [..., classes], and τ is `threshold`."""
    confidence, label = logits.detach().softmax(-1).max(-1)
    return label, (confidence >= threshold).to(logits.dtype)


def consistency(teacher: Tensor, student: Tensor, threshold: float) -> Losses:
    """Returns the loss L_k of users without labels, the paper's equation (4). The teacher's prediction for
    one view of an image is the label with which the student is trained on another view.

    `teacher` and `student` are logits [n, B, classes]: for n models with B images each. Images for which the
    teacher's confidence is below `threshold` have a loss of zero. If teacher and student see the same weak
    views, this is self-training, the paper's equation (5).
    """
    label, mask = pseudo_label(teacher, threshold)
    return labelled(student, label, mask)


def labelled(logits: Tensor, labels: Tensor, mask: Tensor) -> Losses:
    """Returns the cross-entropy of each image with its given pseudo-label, `labels`. The cross-entropy is
    multiplied by `mask` (1 or 0), so it is zero for images that are not trained on."""
    return Losses(cross_entropy(logits, labels) * mask, mask, labels, {})


def mixture(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Returns the mixup loss of each mixed image. Such an image is the sum of `share` times an image with
    label `labels` and 1 - `share` times an image with label `others`. Its loss is the sum of the
    cross-entropies with these two labels, with the same two factors."""
    return share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, others)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of every image, [...], for logits [..., classes] and labels [...]."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)
