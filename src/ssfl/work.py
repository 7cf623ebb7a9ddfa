"""The local work of one round: which images, which views of them, which loss.

An engine receives rows and `Work` and gives back rows: what is trained is decided here, once, for
every engine; engines decide only how fast.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssfl import draws, objectives
from ssfl.data import augment

SHUFFLE_ROUNDS = 24


@dataclass(frozen=True)
class Pool:
    """Every image of the simulation on its device; owners are indices into it."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], -1 where unknown."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    dtype: torch.dtype

    def normalised(self, images: Tensor) -> Tensor:
        return augment.normalise(images, self.mean, self.std, self.dtype)


@dataclass(frozen=True)
class Objective:
    """What a trainer minimises."""

    name: str
    """"consistency", "self-training" or "supervised"."""
    threshold: float = 0.95
    views: str = "separate"
    teacher_mode: str = "eval"


@dataclass(frozen=True)
class Optimizer:
    """SGD's constants; the learning rate comes with the work."""

    momentum: float
    nesterov: bool
    weight_decay: float


@dataclass(frozen=True)
class Work:
    """T steps for each of n trainers, all randomness named."""

    objective: Objective
    trainers: Tensor
    """[n]: the users' numbers, or draws.SERVER."""
    batches: Tensor
    """[n, T, B]: indices into the pool."""
    labelled: Tensor | None
    """[n, T, B]: labelled images of users that have any, or None; -1 for a user without."""
    rates: tuple[float, ...]
    """[T]: the learning rate of each step."""
    seed: int
    round: int

    @property
    def steps(self) -> int:
        return self.batches.shape[1]

    def of(self, trainers: slice) -> "Work":
        """The work of some of the trainers."""
        labelled = None if self.labelled is None else self.labelled[trainers]
        return replace(
            self,
            trainers=self.trainers[trainers],
            batches=self.batches[trainers],
            labelled=labelled,
        )


class Batch(NamedTuple):
    """One step's images of n trainers, [n, B, ...], normalised."""

    weak: Tensor
    strong: Tensor
    """Empty unless the objective uses it."""
    labels: Tensor
    """The true ones: what "supervised" trains on; otherwise only to tell how good the pseudo-labels are."""
    own: Tensor
    """Weak views of the users' own labelled images, or empty."""
    own_labels: Tensor
    keys: Tensor
    """[n]: names the dropout masks of the step."""
    weights: Tensor
    """[n, B]: each image's share of the loss."""


class Trained(NamedTuple):
    """What comes back from training: rows [n, P + Q], momentum [n, P], and numbers per trainer."""

    rows: Tensor
    momentum: Tensor
    stats: dict[str, Tensor]


Forward = Callable[[Tensor, bool, Tensor], Tensor]
"""(images, whether in training mode, dropout key) -> logits."""


def positions(base: int, trainers: Tensor, sizes: Tensor, first: int, count: int) -> Tensor:
    """Places `first` to `first + count` in each trainer's endless row of fresh permutations: [n, count].

    Each permutation of a trainer's images is a swap-or-not shuffle (Hoang, Morris and Rogaway 2012):
    in every pass an image and its mirror image about a random point change places or not. It is
    computed for the wanted places alone, whatever the sizes, with nothing stored.
    """
    place = torch.arange(first, first + count, device=trainers.device)
    size = sizes[:, None]
    keys = draws.fold(draws.fold(base + torch.zeros_like(trainers), trainers)[:, None], place // size)
    image = place % size
    for turn in range(SHUFFLE_ROUNDS):
        key = draws.fold(keys, turn)
        mirror = draws.below(key, size) - image
        mirror = torch.where(mirror < 0, mirror + size, mirror)
        swap = draws.fold(key, torch.maximum(image, mirror)) < 0
        image = torch.where(swap, mirror, image)
    return image


def _step_keys(work: Work, purpose: str, step: int) -> Tensor:
    """The keys (seed, purpose, round, trainer, step) of all trainers, [n]."""
    base = draws.key(work.seed, purpose, work.round)
    return draws.fold(draws.fold(base + torch.zeros_like(work.trainers), work.trainers), step)


def _view_draws(work: Work, purpose: str, step: int, count: int, slots: int) -> Tensor:
    """The draws of every image's view, [n, slots, count]: the step's keys, folded with the image's slot."""
    slot = torch.arange(slots, device=work.trainers.device)
    return draws.bits(draws.fold(_step_keys(work, purpose, step)[:, None], slot), count)


def make_batch(pool: Pool, work: Work, step: int) -> Batch:
    """The views of one step, all trainers at once."""
    chosen = work.batches[:, step]
    trainers, size = chosen.shape
    images = pool.images[chosen.reshape(-1)]

    def views(make: Callable[[Tensor, Tensor, bool], Tensor], images: Tensor, drawn: Tensor) -> Tensor:
        made = pool.normalised(make(images, drawn.flatten(0, 1), pool.flip))
        return made.reshape(trainers, -1, *made.shape[1:])

    weak = views(augment.weak_views, images, _view_draws(work, "weak", step, augment.WEAK_DRAWS, size))
    strong, own = weak[:, :0], weak[:, :0]
    own_labels = pool.labels[chosen[:, :0]]
    if work.objective.name == "consistency":
        strong = views(
            augment.strong_views,
            images,
            _view_draws(work, "strong", step, augment.STRONG_DRAWS, size),
        )
    if work.labelled is not None:
        places = work.labelled[:, step]
        drawn = _view_draws(work, "labelled", step, augment.WEAK_DRAWS, places.shape[1])
        own = views(augment.weak_views, pool.images[places.clamp(min=0).reshape(-1)], drawn)
        own_labels = torch.where(places < 0, -1, pool.labels[places.clamp(min=0)])
    keys = _step_keys(work, "dropout", step)
    even = torch.full(chosen.shape, 1 / size, dtype=pool.dtype, device=chosen.device)
    return Batch(weak, strong, pool.labels[chosen], own, own_labels, keys, even)


def local_loss(forward: Forward, batch: Batch, objective: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one trainer's step and what is told about it (`batch` without the n dimension)."""

    def named(number: int) -> Tensor:
        return draws.fold(batch.keys, number)

    def teacher() -> Tensor:
        with torch.no_grad():
            return forward(batch.weak, objective.teacher_mode == "train", named(0))

    joint = objective.views == "joint"
    if objective.name == "supervised":
        found = objectives.supervised(forward(batch.weak, True, named(1)), batch.labels)
    elif objective.name == "self-training":
        own = None if joint else teacher()
        logits = forward(batch.weak, True, named(1))
        found = objectives.self_training(logits if own is None else own, logits, objective.threshold)
    elif joint:
        weak, strong = forward(torch.cat([batch.weak, batch.strong]), True, named(1)).chunk(2)
        found = objectives.consistency(weak, strong, objective.threshold)
    else:
        # the teacher first: with batch normalisation its pass also moves the statistics
        weak = teacher()
        strong = forward(batch.strong, True, named(1))
        found = objectives.consistency(weak, strong, objective.threshold)
    loss = (found.loss * batch.weights).sum()
    if len(batch.own):
        labelled = objectives.supervised(forward(batch.own, True, named(2)), batch.own_labels.clamp(min=0))
        loss = loss + (labelled.loss * (batch.own_labels >= 0)).mean()
    mask = found.mask
    known = batch.labels >= 0
    right = (found.label == batch.labels).to(mask.dtype) * mask
    stats = {
        "loss": loss.detach(),
        "masked": mask.mean(),
        "told": (mask * known).mean(),
        "right": right.mean(),
    }
    return loss, stats
