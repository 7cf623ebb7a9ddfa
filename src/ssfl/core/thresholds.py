"""Thresholds by class, [n, classes], from a user's predicted probabilities [n, m, classes]."""

import torch
from torch import Tensor


def fixed(answers: Tensor, threshold: float) -> Tensor:
    """The same threshold τ for every class."""
    return answers.new_full((len(answers), answers.shape[-1]), threshold)


def flexible(answers: Tensor, threshold: float) -> Tensor:
    """FlexMatch: τ · β / (2 - β), lower for a class of which fewer images pass τ than of the commonest."""
    users, images, classes = answers.shape
    confidence, label = answers.max(-1)
    confident = (confidence >= threshold).to(answers.dtype)
    counts = answers.new_zeros(users, classes).scatter_add_(1, label, confident)
    unsure = images - counts.sum(1, keepdim=True)
    progress = counts / torch.maximum(counts.amax(1, keepdim=True), unsure).clamp(min=1)
    return threshold * progress / (2 - progress)


def free(answers: Tensor) -> Tensor:
    """FreeMatch, and (FL)²'s class-aware threshold: the user's mean confidence, lower for classes that it
    expects less often."""
    expected = answers.mean(1)
    confidence = answers.amax(-1).mean(1, keepdim=True)
    return confidence * expected / expected.amax(1, keepdim=True)


def balanced(answers: Tensor, threshold: float, counts: Tensor, highest: float) -> Tensor:
    """CBAFed: higher for classes with a larger share of what everybody trained on in the round before.

    `counts` [n, classes] are those images by class. An even share counts 1/10 however many classes there are.
    """
    total = counts.sum(1, keepdim=True)
    part = (counts / total).to(answers) * counts.shape[1] / 10
    by_class = (part + threshold - part.std(1, keepdim=True)).clamp(0, highest)
    return torch.where(total > 0, by_class, threshold).to(answers)
