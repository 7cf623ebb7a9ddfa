"""Pseudo-labels that are made once a round: what the received model says of the images to come.

Before a user trains, the model it was sent looks at one weak view of every image of the round's T batches.
From its answers come the labels, the threshold of each class, how much the user's model will weigh, and how
long its steps are. The steps then train the strong views on these labels, whatever becomes of the model
meanwhile.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssfl import draws
from ssfl.engines.contract import Engine
from ssfl.settings import Method
from ssfl.work import Given, Work

CAP = 0.95
"""CBAFed's highest threshold of a class."""
MIX = 0.75
"""Both parameters of the Beta distribution that SemiFL's mixtures are drawn from."""
CERTAIN = 0.95
"""How sure (FL)² must be of an image to ask for the same answer around the weights."""
STEPS = 1024
"""The distribution's quantiles that are told apart."""
SLOWEST = 1 / 30
"""The least part of the learning rate that a user with few classes takes."""


class Looked(NamedTuple):
    """What came of looking at a round's images before training on them."""

    work: Work
    weights: Tensor | None = None
    """[n]: what each user's model weighs, where that is not the same."""
    counts: Tensor | None = None
    """[classes]: how many images of each class got a label; None where nobody looked."""
    reach: Tensor | None = None
    """[n]: how many times as far as it moves a user's model counts; None is once."""
    sure: Tensor | None = None
    """[n]: the share of a user's images that got a label, where batches are filled with these."""


def looked(engine: Engine, method: Method, rows: Tensor, work: Work, shares: Tensor | None = None) -> Looked:
    """The work with labels that the received models give, where the method wants that."""
    if method.labels != "round":
        return Looked(work)
    answers = engine.answers(rows, work)
    thresholds = class_thresholds(method.thresholds, answers, method.threshold, shares)
    images = work.batches.flatten(1)
    work, sure = labelled(work, answers, thresholds, fill=method.fill)
    weights = share = None
    if method.weighting == "doubt":
        weights = doubt(answers)
    elif method.weighting == "labelled":
        weights = distinct(images, sure).to(answers.dtype)
    if method.fill:
        share = sure.to(answers.dtype).mean(1)
        some = sure.any(1).to(answers.dtype)
        weights = some if weights is None else weights * some
    classes = answers.shape[-1]
    counts = answers.new_zeros(len(rows), classes).scatter_add_(1, answers.argmax(-1), sure.to(answers.dtype))
    if method.pace == "full" or work.labelled is not None:
        return Looked(work, weights, counts.sum(0), sure=share)
    pace = paces(counts, distinct(images, sure))
    reach = _coarse(pace.double() ** (-2 / 3)).to(pace)
    return Looked(replace(work, pace=pace), weights, counts.sum(0), reach, share)


def paces(counts: Tensor, images: Tensor) -> Tensor:
    """What part of the learning rate each user takes, [n], by how many labels of each class it has,
    [n, classes], and of how many images, [n].

    The fewer the classes, the sooner long steps lead to a model that knows these alone, and the mean of such
    models knows nothing; near the model that all received, what they learn adds up. Labels as mixed as m even
    classes (m is e to their entropy) give (m / M)^1.5, where M is how many classes they could be of: all, or
    as many as there are images.
    """
    parts = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    mixed = torch.special.entr(parts).sum(1).exp()
    return _coarse((mixed / images.clamp(1, counts.shape[1])).pow(1.5).clamp(SLOWEST, 1)).to(counts)


def _coarse(numbers: Tensor) -> Tensor:
    """To the nearest 4096th: a power's last bits are others for one user than for many at once."""
    return (numbers * 4096).round() / 4096


def distinct(images: Tensor, chosen: Tensor) -> Tensor:
    """How many different images [n, m] are among the chosen ones, [n]."""
    ordered = torch.where(chosen, images, -1).sort(1).values
    fresh = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    return (fresh & (ordered >= 0)).sum(1)


def class_thresholds(rule: str, answers: Tensor, threshold: float, shares: Tensor | None = None) -> Tensor:
    """How sure a user must be of each class, [n, classes], from probabilities [n, m, classes].

    "fixed": τ for all. "flex" (FlexMatch): a class of which fewer images pass τ than of the commonest gets
    a lower one, τ · β / (2 - β). "free" (FreeMatch, and (FL)²'s CAT): the user's mean confidence, less
    for classes that it expects less. "balanced" (CBAFed): more for classes with a larger share of what
    everybody trained on in the round before, [classes]; an even share counts 1/10 however many there are.
    """
    users, images, classes = answers.shape
    confidence, label = answers.max(-1)
    if rule == "free":
        expected = answers.mean(1)
        return confidence.mean(1, keepdim=True) * expected / expected.amax(1, keepdim=True)
    if rule == "flex":
        sure = (confidence >= threshold).to(answers.dtype)
        counts = answers.new_zeros(users, classes).scatter_add_(1, label, sure)
        unsure = images - counts.sum(1, keepdim=True)
        progress = counts / torch.maximum(counts.amax(1, keepdim=True), unsure).clamp(min=1)
        return threshold * progress / (2 - progress)
    if rule == "balanced" and shares is not None and bool(shares.sum() > 0):
        part = (shares / shares.sum()).to(answers) * classes / 10
        return (part + threshold - part.std()).clamp(0, CAP).expand(users, classes)
    return answers.new_full((users, classes), threshold)


def labelled(work: Work, answers: Tensor, thresholds: Tensor, *, fill: bool = False) -> tuple[Work, Tensor]:
    """The work with labels given, and which of its images got one, [n, T · B].

    With `fill`, batches hold images with a label alone, over again if need be, instead of counting the others
    as zeros. Where the objective mixes images, each has a partner, any image with whatever label.
    """
    users, steps, size = work.batches.shape
    confidence, label = answers.max(-1)
    sure = confidence >= thresholds.gather(1, label)
    images, labels, mask, certain = work.batches.flatten(1), label, sure, sure & (confidence >= CERTAIN)
    everybody = torch.arange(users, device=images.device)[:, None]
    place = torch.arange(steps * size, device=images.device).expand(users, -1)
    if fill:
        order = (~sure).to(torch.uint8).sort(dim=1, stable=True).indices
        chosen = order.gather(1, place % sure.sum(1, keepdim=True).clamp(min=1))
        images, labels, mask, certain = (part[everybody, chosen] for part in (images, labels, mask, certain))
    shape = work.batches.shape
    partners = partner_labels = shares = None
    if work.objective.mix:
        keys = draws.fold(work.keys[2][:, None], place)
        other = draws.below(keys, torch.full_like(place, steps * size))
        partners = work.batches.flatten(1)[everybody, other].reshape(shape)
        partner_labels = label[everybody, other].reshape(shape)
        turn = torch.arange(steps, device=images.device)
        drawn = draws.uniform(draws.fold(draws.fold(work.keys[2], -1)[:, None], turn))
        table = torch.from_numpy(_quantiles()).to(answers)
        shares = table[(drawn * STEPS).long().clamp(max=STEPS - 1)]
    given = Given(
        labels.reshape(shape),
        mask.to(answers.dtype).reshape(shape),
        partners,
        partner_labels,
        shares,
        certain.to(answers.dtype).reshape(shape) if work.objective.sharpness else None,
    )
    return work.with_labels(images.reshape(shape), given), sure


def doubt(answers: Tensor) -> Tensor:
    """(FL)²'s weight of a user, [n]: who is less sure has more to learn, 1 - mean confidence."""
    return 1 - answers.amax(-1).mean(-1)


@cache
def _quantiles() -> np.ndarray:
    from scipy.stats import beta

    middles = (np.arange(STEPS) + 0.5) / STEPS
    return np.asarray(beta.ppf(middles, MIX, MIX))
