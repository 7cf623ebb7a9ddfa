"""Confidence thresholds for pseudo-labels. Each function returns one threshold for each of n users and each
class, [n, classes].

Most thresholds are computed from `probabilities` [n, m, classes], the predicted probabilities for m images of
each user.
"""

import torch
from torch import Tensor


def fixed(probabilities: Tensor, threshold: float) -> Tensor:
    """Returns the same `threshold` for every user and class, [n, classes]. So a fixed threshold can be used
    where one threshold per class is expected. Only the shape of `probabilities` is used."""
    return probabilities.new_full((len(probabilities), probabilities.shape[-1]), threshold)


def flexible(probabilities: Tensor, threshold: float) -> Tensor:
    """Returns FlexMatch's thresholds, [n, classes]: τ · β / (2 - β), where τ is `threshold`. Classes that are
    learned slowly get lower thresholds.

    β of a class is a ratio between 0 and 1. Its numerator is the number of images that are predicted as this
    class with a confidence of at least τ. Its denominator is the larger of two numbers: the largest numerator
    of any class, and the number of images with a confidence below τ.
    """
    users, images, classes = probabilities.shape
    confidence, label = probabilities.max(-1)
    confident = (confidence >= threshold).to(probabilities.dtype)
    counts = probabilities.new_zeros(users, classes).scatter_add_(1, label, confident)
    unsure = images - counts.sum(1, keepdim=True)
    progress = counts / torch.maximum(counts.amax(1, keepdim=True), unsure).clamp(min=1)
    return threshold * progress / (2 - progress)


def free(probabilities: Tensor) -> Tensor:
    """Returns the thresholds of FreeMatch and (FL)², [n, classes]. Rarely predicted classes get lower
    thresholds.

    A class's threshold is the user's mean confidence, times the mean probability of the class, divided by the
    largest mean probability of any class.
    """
    expected = probabilities.mean(1)
    confidence = probabilities.amax(-1).mean(1, keepdim=True)
    return confidence * expected / expected.amax(1, keepdim=True)


def balanced(probabilities: Tensor, threshold: float, counts: Tensor, highest: float) -> Tensor:
    """Returns CBAFed's thresholds, [n, classes]. Classes with a larger share of the images that were trained
    on in the last round get higher thresholds.

    A class's threshold is `threshold` + share - standard deviation of all shares, limited to the range from 0
    to `highest`. Shares come from `counts` [n, classes], see `class_shares`. If all counts are zero, every
    class gets `threshold`. Of `probabilities`, only the number type is used.
    """
    share = class_shares(counts).to(probabilities)
    by_class = (share + threshold - share.std(1, keepdim=True)).clamp(0, highest)
    return torch.where(share.isnan(), threshold, by_class)


def class_shares(counts: Tensor) -> Tensor:
    """Returns the share of each class in the images that were trained on in the last round, [n, classes].
    Shares are scaled so that an even share is 1/10, whatever the number of classes.

    `counts` [n, classes] are the numbers of these images. The server counts them over all users and itself,
    and sends the counts to each of n users. If all counts are zero, the shares are not a number.
    """
    return counts / counts.sum(1, keepdim=True) * counts.shape[1] / 10
