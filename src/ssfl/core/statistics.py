"""Statistics of accuracies: confidence intervals, comparisons of two models, balanced accuracy and
calibration.

This module does not import torch, which takes seconds. So the command line and the board (the page that shows
runs in a browser) can use it without delay.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import NamedTuple, TypeVar

Seed = TypeVar("Seed")
Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution, for two-sided intervals of 95 %."""
FEW = 100
"""With fewer test images than this, an accuracy is too uncertain to say much. For example, the 95 %
confidence interval of an accuracy of 90 % is then wider than 11 percentage points."""
UNEVEN = 1.5
"""Class sizes count as uneven if the largest class has more than this many times the images of the
smallest."""
ZERO = 1e-9
"""Accuracies that differ by less than this, in percentage points, differ only by rounding."""


class Interval(NamedTuple):
    """A 95 % confidence interval, from `low` to `high`."""

    low: float
    high: float


class SeedMean(NamedTuple):
    """A mean over seeds, with its 95 % confidence interval."""

    mean: float
    half: float | None
    """Half the width of the interval. None if there is no interval: with a single seed, or if all seeds have
    the same value."""

    @property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of `mean` (Student's t over the seeds); None if there is none."""
        return None if self.half is None else Interval(self.mean - self.half, self.mean + self.half)


@dataclass(frozen=True)
class Paired:
    """The comparison of two models on the same `count` images."""

    count: int
    correct: int
    """How many images the first model classifies correctly."""
    other_correct: int
    """How many images the second model classifies correctly."""
    won: int
    """How many images only the first model classifies correctly."""
    lost: int
    """How many images only the second model classifies correctly."""

    @property
    def difference(self) -> float:
        """The accuracy of the first model minus that of the second."""
        return (self.won - self.lost) / self.count

    @property
    def interval(self) -> Interval:
        """The 95 % confidence interval of `difference` (see `paired_interval`)."""
        return paired_interval(self.count, self.correct, self.other_correct, self.won, self.lost)

    @property
    def p(self) -> float:
        """The p-value of the exact McNemar test: the probability of a difference at least this large if both
        models are equally good."""
        return mcnemar(self.won, self.lost)


def wilson(correct: float, count: int) -> Interval:
    """Returns Wilson's score interval, the 95 % confidence interval of the proportion `correct` / `count`. It
    stays within 0 and 1, even with few images."""
    if count < 1:
        return Interval(0.0, 1.0)
    share, square = correct / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    low, high = middle - half, middle + half
    return Interval(0.0 if correct <= 0 else max(low, 0.0), 1.0 if correct >= count else min(high, 1.0))


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Returns the comparison of two models on the same images. `first` and `second` say for each image
    whether that model classifies it correctly."""
    pairs = list(zip(first, second, strict=True))
    won, lost = (sum(bool(a) > bool(b) for a, b in each) for each in (pairs, [(b, a) for a, b in pairs]))
    return Paired(len(pairs), sum(map(bool, first)), sum(map(bool, second)), won, lost)


def paired_interval(count: int, correct: int, other: int, won: int, lost: int) -> Interval:
    """Returns the 95 % confidence interval of the difference between two models' accuracies on the same
    images (Newcombe 1998, method 10). The arguments are the fields of `Paired`; `other` is `other_correct`.

    It combines the Wilson intervals of both accuracies, and takes into account that the models' errors are
    correlated (with a continuity correction).
    """
    if count < 1:
        return Interval(-1.0, 1.0)
    first, second = correct / count, other / count
    a, b = wilson(correct, count), wilson(other, count)
    both, neither = correct - won, count - correct - lost
    margins = correct * (count - correct) * other * (count - other)
    phi = 0.0
    if margins:
        product = float(both * neither - won * lost)
        if product > 0:
            product = max(product - count / 2, 0.0)
        phi = product / math.sqrt(margins)
    down, up = first - a.low, b.high - second
    low = math.sqrt(max(down * down - 2 * phi * down * up + up * up, 0.0))
    down, up = second - b.low, a.high - first
    high = math.sqrt(max(down * down - 2 * phi * down * up + up * up, 0.0))
    apart = first - second
    return Interval(max(apart - low, -1.0), min(apart + high, 1.0))


def mcnemar(won: int, lost: int) -> float:
    """Returns the two-sided p-value of the exact McNemar test, which asks whether two models differ in
    accuracy. `won` is the number of images that only the first model classifies correctly, and `lost` the
    number that only the second does."""
    total = won + lost
    if not total:
        return 1.0
    tail = term = 1  # `term` is the binomial coefficient of total and k
    for k in range(min(won, lost)):
        term = term * (total - k) // (k + 1)
        tail += term
    return float(min(1.0, 2 * tail / 2**total))


def auroc(first: Sequence[float], second: Sequence[float]) -> tuple[float, Interval | None]:
    """Returns the area under the ROC curve, with its 95 % confidence interval: how well scores separate two
    classes. `first` and `second` are the scores of the images of the two classes, and those of the second
    should be higher. The area is the probability that this is so for a random image of each class; a tie
    counts half.

    The interval is DeLong's (1988) on the logit scale. It is None if the scores separate the classes
    completely, or if a class has only one image.
    """
    import numpy as np
    from scipy.stats import rankdata

    ranks = rankdata([*first, *second])
    above = (ranks[len(first) :] - rankdata(second)) / len(first)  # part of `first` below each of `second`
    below = 1 - (ranks[: len(first)] - rankdata(first)) / len(second)
    area = float(above.mean())
    if min(len(first), len(second)) < 2 or not 0 < area < 1:
        return area, None
    error = math.sqrt(np.var(above, ddof=1) / len(second) + np.var(below, ddof=1) / len(first))
    middle, half = math.log(area / (1 - area)), Z * error / (area * (1 - area))
    if not half:
        return area, None
    return area, Interval(*(1 / (1 + math.exp(-end)) for end in (middle - half, middle + half)))


def mean_interval(values: Sequence[float]) -> SeedMean | None:
    """Returns the mean of `values` with its 95 % interval (Student's t). `values` has one number for each
    seed, in percent or percentage points. Returns None if there are no values."""
    from scipy.stats import t

    if not values:
        return None
    count = len(values)
    half = float(t.ppf(0.975, count - 1)) * stdev(values) / count**0.5 if count > 1 else None
    return SeedMean(mean(values), None if half is None or half < ZERO else half)


def accuracy_interval(accuracies: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of the mean accuracy over the seeds (Student's t), within 0 and 100.
    `accuracies` has one accuracy in percent for each seed. Returns None if there is no interval: with fewer
    than two seeds, or if all seeds have the same accuracy."""
    over_seeds = mean_interval(accuracies)
    if over_seeds is None or over_seeds.interval is None:
        return None
    low, high = over_seeds.interval
    return Interval(max(low, 0.0), min(high, 100.0))


def mean_difference(ours: Mapping[Seed, float], theirs: Mapping[Seed, float]) -> SeedMean | None:
    """Returns the mean of `ours` minus `theirs` over their common seeds, with its 95 % interval. Both
    arguments are accuracies in percent by seed. Returns None if there is no common seed."""
    return mean_interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def confusion(labels: Sequence[int], predicted: Sequence[int], classes: int) -> list[list[int]]:
    """Returns the confusion matrix: how many images of each class (row) were predicted as each class
    (column)."""
    matrix = [[0] * classes for _ in range(classes)]
    for label, guess in zip(labels, predicted, strict=True):
        matrix[label][guess] += 1
    return matrix


def class_accuracies(matrix: Sequence[Sequence[int]]) -> list[float | None]:
    """Returns the accuracy on the images of each class, from a confusion matrix; None for a class without
    images."""
    return [row[k] / sum(row) if sum(row) else None for k, row in enumerate(matrix)]


def balanced(class_accuracy: Sequence[float | None]) -> float | None:
    """Returns the balanced accuracy, which is the mean of the class accuracies. A class without images (None)
    is left out. Returns None if no class has images."""
    accuracies = [value for value in class_accuracy if value is not None]
    return math.fsum(accuracies) / len(accuracies) if accuracies else None


def is_uneven(counts: Sequence[float]) -> bool:
    """Returns whether the largest class has many more images than the smallest (see `UNEVEN`). `counts` are
    the numbers of images per class; classes without images are ignored."""
    present = [count for count in counts if count > 0]
    return len(present) > 1 and max(present) > UNEVEN * min(present)


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability diagram: the images whose confidence lies between `low` and `high`."""

    low: float
    high: float
    count: int
    confidence: float | None
    """The mean confidence of the images in this bin; None if there are none."""
    accuracy: float | None


def reliability(confidence: Sequence[float], correct: Sequence[bool], bins: int = 10) -> list[Bin]:
    """Returns the bins of a reliability diagram, which have equal width. `confidence` and `correct` have one
    entry per image. A bin has the mean confidence and the accuracy of its images. In a well calibrated model
    these two agree in every bin."""
    table = []
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = [k for k, value in enumerate(confidence) if min(int(value * bins), bins - 1) == number]
        count = len(inside)
        mean = math.fsum(confidence[k] for k in inside) / count if count else None
        accuracy = sum(bool(correct[k]) for k in inside) / count if count else None
        table.append(Bin(low, high, count, mean, accuracy))
    return table


def calibration_error(bins: Sequence[Bin]) -> float | None:
    """Returns the expected calibration error (ECE): the mean distance between confidence and accuracy over
    the bins of `reliability`, weighted by their numbers of images. Returns None if there are no images."""
    total = sum(one.count for one in bins)
    if not total:
        return None
    gaps = [
        one.count * abs(one.confidence - one.accuracy)
        for one in bins
        if one.confidence is not None and one.accuracy is not None
    ]
    return math.fsum(gaps) / total
