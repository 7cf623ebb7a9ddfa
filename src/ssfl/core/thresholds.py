"""Confidence thresholds for pseudo-labels. Each function returns one threshold for each user and class, [n,
classes].

They are computed from the predicted probabilities [n, m, classes] for m images of each of n users.
"""

import torch
from torch import Tensor


def fixed(probabilities: Tensor, threshold: float) -> Tensor:
    """Returns `threshold` for every user and class."""
    return probabilities.new_full((len(probabilities), probabilities.shape[-1]), threshold)


def flexible(probabilities: Tensor, threshold: float) -> Tensor:
    """Returns FlexMatch's thresholds, τ · β / (2 - β), where τ is `threshold`: slowly learned classes have
    lower ones.

    For each class, β is the number of images that are predicted as this class with a confidence of at least
    τ, divided by the largest such number of any class. If the number of images with a lower confidence is
    larger still, it is the divisor.
    """
    users, images, classes = probabilities.shape
    confidence, label = probabilities.max(-1)
    confident = (confidence >= threshold).to(probabilities.dtype)
    counts = probabilities.new_zeros(users, classes).scatter_add_(1, label, confident)
    unsure = images - counts.sum(1, keepdim=True)
    progress = counts / torch.maximum(counts.amax(1, keepdim=True), unsure).clamp(min=1)
    return threshold * progress / (2 - progress)


def free(probabilities: Tensor) -> Tensor:
    """Returns the thresholds of FreeMatch and (FL)²: a user's mean confidence, times the mean probability of
    the class, divided by the largest mean probability of any class. So rarely predicted classes have lower
    ones."""
    expected = probabilities.mean(1)
    confidence = probabilities.amax(-1).mean(1, keepdim=True)
    return confidence * expected / expected.amax(1, keepdim=True)


def balanced(probabilities: Tensor, threshold: float, counts: Tensor, highest: float) -> Tensor:
    """Returns CBAFed's thresholds: higher for classes with a larger share of the images that the last round
    trained on.

    They are `threshold` + share - standard deviation of the shares, limited to 0 to `highest`. `counts` [n,
    classes] says for each class how many images all users trained on. Shares are scaled so that an even share
    is 1/10, whatever the number of classes.
    """
    total = counts.sum(1, keepdim=True)
    part = (counts / total).to(probabilities) * counts.shape[1] / 10
    by_class = (part + threshold - part.std(1, keepdim=True)).clamp(0, highest)
    return torch.where(total > 0, by_class, threshold).to(probabilities)
