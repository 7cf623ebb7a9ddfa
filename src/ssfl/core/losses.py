"""The losses of section 3.1 of the paper (Zhang et al. 2020) as functions of logits, with one value per
image.

The mean over a batch estimates the paper's mean over D_s (the server's images) or D_k (those of user k). An
image whose confidence is below the threshold counts as zero in this mean, as in the paper and in FixMatch. ȳ
are the predicted probabilities and τ is the threshold.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Losses(NamedTuple):
    """The losses of n models on a batch of B images each, with the masks and labels that were used."""

    loss: Tensor
    """The loss of each image, [n, B], zero if the image is masked out; or one loss per model, [n]."""
    mask: Tensor
    """[n, B]: 1 if the image is trained on, else 0: the indicator 1[max ȳ ≥ τ]."""
    label: Tensor
    """[n, B]: the label that the image is trained with: the pseudo-label argmax ȳ, or the true one."""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 (never changed)
    """[n] each: further metrics, which the method must also list in its attribute `metrics`."""


def supervised(logits: Tensor, labels: Tensor) -> Losses:
    """Returns the cross-entropy with true labels: the server's loss L_s, the paper's equation (3), and the
    loss of labelled users, the paper's equation (6)."""
    loss = cross_entropy(logits, labels)
    return Losses(loss, (labels >= 0).to(loss.dtype), labels, {})


def pseudo_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns the pseudo-label argmax ȳ and the mask 1[max ȳ ≥ τ], without gradient."""
    confidence, label = logits.detach().softmax(-1).max(-1)
    return label, (confidence >= threshold).to(logits.dtype)


def consistency(teacher: Tensor, student: Tensor, threshold: float) -> Losses:
    """Returns the users' loss L_k, the paper's equation (4): the teacher's confident prediction for one view
    of an image is the label with which the student is trained on another view.

    If teacher and student see the same weak view, this is self-training, the paper's equation (5).
    """
    label, mask = pseudo_label(teacher, threshold)
    return labelled(student, label, mask)


def labelled(logits: Tensor, labels: Tensor, mask: Tensor) -> Losses:
    """Returns the cross-entropy with pseudo-labels that are given. It is multiplied by `mask` (1 or 0), so it
    is zero for images that are not trained on."""
    return Losses(cross_entropy(logits, labels) * mask, mask, labels, {})


def mixture(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Returns the mixup loss of mixed images. Each is the sum of `share` times an image with label `labels`,
    and 1 - `share` times an image with label `others`."""
    return share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, others)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of every image, for logits [..., classes] and labels [...]."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)
