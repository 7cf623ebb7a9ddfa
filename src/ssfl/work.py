"""The local work of one round: which images, which views of them, which loss.

An engine receives rows and `Work` and gives back rows: what is trained is decided here, once, for
every engine; engines decide only how fast.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssfl import draws, objectives
from ssfl.data import augment
from ssfl.rows import placed

SHUFFLE_ROUNDS = 24


@dataclass(frozen=True)
class Pool:
    """Every image of the simulation on its device; owners are indices into it."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], -1 where unknown."""
    mean: Tensor
    """Of each channel, on the images' device, as `std`."""
    std: Tensor
    flip: bool
    dtype: torch.dtype
    """In which networks compute. Losses, weights and statistics are never narrower than float32."""

    @property
    def wide(self) -> torch.dtype:
        """What is summed and kept: float32, or float64 where networks compute in it."""
        return torch.promote_types(self.dtype, torch.float32)

    def normalised(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return augment.normalise(images, self.mean, self.std, dtype or self.dtype)


@dataclass(frozen=True)
class Objective:
    """What a trainer minimises."""

    name: str
    """"consistency", "self-training", "supervised" or "fedmatch"."""
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
    keys: Tensor
    """[4, n]: names the draws of this round, see `round_keys`."""
    batches: Tensor
    """[n, T, B]: indices into the pool."""
    labelled: Tensor | None
    """[n, T, B]: labelled images of users that have any, or None; -1 for a user without."""
    rates: tuple[float, ...]
    """[T]: the learning rate of each step."""
    seats: int = 1
    """How many trainers such work may be for: fewer come where users do not return."""
    helpers: Tensor | None = None
    """[n, H, P / 2]: ψ of FedMatch's helpers, zeros where there is none; None in a round without."""

    @property
    def steps(self) -> int:
        return self.batches.shape[1]

    def of(self, trainers: slice) -> "Work":
        """The work of some of the trainers."""
        labelled, helpers = (None if x is None else x[trainers] for x in (self.labelled, self.helpers))
        keys, batches = self.keys[:, trainers], self.batches[trainers]
        return replace(self, keys=keys, batches=batches, labelled=labelled, helpers=helpers)


class Batch(NamedTuple):
    """One step's images of n trainers, [n, B, ...], normalised."""

    weak: Tensor
    strong: Tensor | None
    """None unless the objective uses it."""
    labels: Tensor
    """The true ones: what "supervised" trains on; otherwise only to tell how good the pseudo-labels are."""
    own: Tensor | None
    """Weak views of the users' own labelled images, if any have some."""
    own_labels: Tensor | None
    keys: Tensor
    """[n]: names the dropout masks of the step."""
    weights: Tensor
    """[n, B]: each image's share of its trainer's loss."""


class Trained(NamedTuple):
    """What comes back from training: rows [n, P + Q], momentum [n, P], and numbers per trainer."""

    rows: Tensor
    momentum: Tensor
    stats: dict[str, Tensor]


TOLD = ("loss", "masked", "told", "right")
"""The numbers, in this order."""
MakeViews = Callable[[Tensor, Tensor, bool], Tensor]
Forward = Callable[[Tensor, bool, Tensor], Tensor]
"""(images [n, B, ...], whether in training mode, dropout keys [n]) -> logits [n, B, classes]."""


def positions(base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int) -> Tensor:
    """Places `first` to `first + count` in each trainer's endless row of fresh permutations: [n, count].

    Each permutation of a trainer's images is a swap-or-not shuffle (Hoang, Morris and Rogaway 2012):
    in every pass an image and its mirror image about a random point change places or not. It is
    computed for the wanted places alone, whatever the sizes, with nothing stored.
    """
    place = first + torch.arange(count, device=trainers.device)
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


VIEWS = ("weak", "strong", "labelled", "dropout")


def round_keys(seed: int, round: int, trainers: Tensor) -> Tensor:
    """The keys (seed, purpose, round, trainer) of the draws that are made in every step, [4, n].

    Trainers are the users' numbers, or draws.SERVER.
    """
    bases = placed([[draws.key(seed, purpose, round)] for purpose in VIEWS], trainers.device)
    return draws.fold(bases, trainers)


def make_batch(pool: Pool, work: Work, step: int | Tensor) -> Batch:
    """The views of one step, all trainers at once; `step` may be a number on the device, [1]."""

    def at_step(places: Tensor) -> Tensor:
        return places[:, step] if isinstance(step, int) else places.index_select(1, step).squeeze(1)

    labelled = None if work.labelled is None else at_step(work.labelled)
    return _views(pool, work.objective, at_step(work.batches), labelled, draws.fold(work.keys, step))


def each_batch(pool: Pool, work: Work, at_once: int = 2048) -> Iterator[Batch]:
    """The views of every step in turn, made several steps at a time, about so many images at once.

    On a CPU a call costs more than a small image. The bytes are those of `make_batch`.
    """
    trainers, steps, size = work.batches.shape
    stride = max(1, at_once // (trainers * size))
    for first in range(0, steps, stride):
        some = torch.arange(first, min(first + stride, steps), device=work.keys.device)
        shape = (trainers, len(some))

        def fold(places: Tensor | None, some: Tensor = some) -> Tensor | None:
            return None if places is None else places[:, some].flatten(0, 1)

        keys = draws.fold(work.keys[:, :, None], some).flatten(1)
        chosen = work.batches[:, some].flatten(0, 1)
        made = _views(pool, work.objective, chosen, fold(work.labelled), keys)
        apart = [None if part is None else part.unflatten(0, shape) for part in made]
        for place in range(len(some)):
            yield Batch(*(None if part is None else part[:, place] for part in apart))  # type: ignore[arg-type]


def _views(pool: Pool, objective: Objective, chosen: Tensor, labelled: Tensor | None, keys: Tensor) -> Batch:
    """The views of images [m, B], and of labelled ones; `keys` [4, m] name the draws of each row."""
    rows, size = chosen.shape
    weak_keys, strong_keys, labelled_keys, dropout_keys = keys.unbind()
    slots = torch.arange(size, device=chosen.device)

    def views(make: MakeViews, images: Tensor, keys: Tensor, count: int) -> Tensor:
        drawn = draws.bits(draws.fold(keys[:, None], slots), count)
        made = pool.normalised(make(images, drawn.flatten(0, 1), pool.flip))
        return made.reshape(rows, -1, *made.shape[1:])

    images = pool.images[chosen.reshape(-1)]
    weak = views(augment.weak_views, images, weak_keys, augment.WEAK_DRAWS)
    strong = own = own_labels = None
    if objective.name in ("consistency", "fedmatch"):
        strong = views(augment.strong_views, images, strong_keys, augment.STRONG_DRAWS)
    if labelled is not None:
        images = pool.images[labelled.clamp(min=0).reshape(-1)]
        own = views(augment.weak_views, images, labelled_keys, augment.WEAK_DRAWS)
        own_labels = torch.where(labelled < 0, -1, pool.labels[labelled.clamp(min=0)])
    even = torch.full(chosen.shape, 1 / size, dtype=pool.wide, device=chosen.device)
    return Batch(weak, strong, pool.labels[chosen], own, own_labels, dropout_keys, even)


def local_loss(forward: Forward, batch: Batch, objective: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each trainer's step, [n], and what is told about it."""
    wide = batch.weights.dtype

    def logits(images: Tensor, training: bool, number: int) -> Tensor:
        return forward(images, training, draws.fold(batch.keys, number)).to(wide)

    def teacher() -> Tensor:
        with torch.no_grad():
            return logits(batch.weak, objective.teacher_mode == "train", 0)

    joint = objective.views == "joint"
    if objective.name == "supervised":
        found = objectives.supervised(logits(batch.weak, True, 1), batch.labels)
    elif objective.name == "self-training":
        own = None if joint else teacher()
        student = logits(batch.weak, True, 1)
        found = objectives.self_training(student if own is None else own, student, objective.threshold)
    elif batch.strong is None:
        raise ValueError("the consistency loss needs strong views")
    elif joint:
        weak, strong = logits(torch.cat([batch.weak, batch.strong], 1), True, 1).chunk(2, 1)
        found = objectives.consistency(weak, strong, objective.threshold)
    else:
        # the teacher first: with batch normalisation its pass also moves the statistics
        weak = teacher()
        strong = logits(batch.strong, True, 1)
        found = objectives.consistency(weak, strong, objective.threshold)
    loss = (found.loss * batch.weights).sum(1)
    if batch.own is not None and batch.own_labels is not None:
        labelled = objectives.supervised(logits(batch.own, True, 2), batch.own_labels.clamp(min=0))
        loss = loss + (labelled.loss * (batch.own_labels >= 0)).mean(1)
    mask = found.mask
    known = batch.labels >= 0
    right = (found.label == batch.labels).to(mask.dtype) * mask
    stats = {
        "loss": loss.detach(),
        "masked": mask.mean(1),
        "told": (mask * known).mean(1),
        "right": right.mean(1),
    }
    return loss, stats
