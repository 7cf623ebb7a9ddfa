"""The local work of one round: which images, and which views of them; `losses.py` has the loss.

An engine receives rows and `Work` and gives back rows: what is trained is decided here, once, for
every engine; engines decide only how fast.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssfl import draws
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
    weak: augment.View = augment.WEAK
    """How weak views are made, and `strong` the strong ones."""
    strong: augment.View = augment.STRONG

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
    mix: float = 0.0
    """The weight of the loss on mixtures of two images, where labels are given."""
    sharpness: float = 0.0
    """ρ: how far weights are moved uphill to ask for the same answers, where labels are given."""
    proximal: float = 0.0
    """μ: how strongly weights are held to those received, (μ / 2) · ‖w - w_received‖²."""
    both: bool = False
    """Whether every second labelled image is in a strong view."""


@dataclass(frozen=True)
class Optimizer:
    """SGD's constants; the learning rate comes with the work."""

    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float = 0.0
    """The most length of a step's gradient, without weight decay; 0 is any."""


class Given(NamedTuple):
    """Pseudo-labels that were made before the first step, of images [n, T, B] or [n, B]."""

    labels: Tensor
    mask: Tensor
    """1 where there is a label, 0 where not."""
    partners: Tensor | None
    """What each image is mixed with: indices into the pool; None without mixtures."""
    partner_labels: Tensor | None
    shares: Tensor | None
    """[n, T] or [n]: the share of the image itself in a batch's mixtures."""
    certain: Tensor | None
    """1 where the label is all but certain; None where nobody asks."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Given":
        return Given(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]


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
    given: Given | None = None
    """Pseudo-labels of the batches' images; None where every step makes its own."""
    pace: Tensor | None = None
    """[n]: what part of the learning rate each trainer takes; None is all of it."""

    @property
    def steps(self) -> int:
        return self.batches.shape[1]

    def of(self, trainers: slice) -> "Work":
        """The work of some of the trainers."""
        keys, batches = self.keys[:, trainers], self.batches[trainers]
        given = None if self.given is None else self.given.map(lambda part: part[trainers])
        labelled, helpers, pace = (
            None if part is None else part[trainers] for part in (self.labelled, self.helpers, self.pace)
        )
        return replace(
            self, keys=keys, batches=batches, labelled=labelled, helpers=helpers, given=given, pace=pace
        )

    def with_labels(self, batches: Tensor, given: Given) -> "Work":
        """The same work on other batches, whose labels are given."""
        return replace(self, batches=batches, given=given)


class Batch(NamedTuple):
    """One step's images of n trainers, [n, B, ...], normalised."""

    weak: Tensor
    """The strong ones again where labels are given and nothing is mixed: nobody looks at them."""
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
    given: Given | None = None
    """Labels made before."""
    partner: Tensor | None = None
    """Weak views of the images to mix with."""


class Trained(NamedTuple):
    """What comes back from training: rows [n, P + Q], momentum [n, P], and numbers per trainer."""

    rows: Tensor
    momentum: Tensor
    stats: dict[str, Tensor]


TOLD = ("loss", "masked", "told", "right")
"""The numbers, in this order."""


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


def looking(work: Work) -> Work:
    """The same images, to be looked at in weak views alone."""
    return replace(work, objective=Objective("supervised"), labelled=None, given=None)


def make_batch(pool: Pool, work: Work, step: int | Tensor) -> Batch:
    """The views of one step, all trainers at once; `step` may be a number on the device, [1]."""

    def at_step(places: Tensor) -> Tensor:
        return places[:, step] if isinstance(step, int) else places.index_select(1, step).squeeze(1)

    labelled = None if work.labelled is None else at_step(work.labelled)
    given = None if work.given is None else work.given.map(at_step)
    return _views(pool, work.objective, at_step(work.batches), labelled, draws.fold(work.keys, step), given)


def each_batch(pool: Pool, work: Work, at_once: int = 2048) -> Iterator[Batch]:
    """The views of every step in turn, made several steps at a time, about so many images at once.

    On a CPU a call costs more than a small image. The bytes are those of `make_batch`.
    """
    trainers, steps, size = work.batches.shape
    stride = max(1, at_once // (trainers * size))
    for first in range(0, steps, stride):
        some = torch.arange(first, min(first + stride, steps), device=work.keys.device)
        shape = (trainers, len(some))

        def fold(part: Tensor, some: Tensor = some) -> Tensor:
            return part[:, some].flatten(0, 1)

        keys = draws.fold(work.keys[:, :, None], some).flatten(1)
        given = None if work.given is None else work.given.map(fold)
        made = _views(pool, work.objective, fold(work.batches), _maybe(fold, work.labelled), keys, given)
        for place in range(len(some)):

            def one(part: Tensor, shape: tuple[int, int] = shape, place: int = place) -> Tensor:
                apart: Tensor = part.unflatten(0, shape)
                return apart[:, place]

            parts = [part.map(one) if isinstance(part, Given) else _maybe(one, part) for part in made]
            yield Batch(*parts)  # type: ignore[arg-type]


def _maybe(change: Callable[[Tensor], Tensor], part: Tensor | None) -> Tensor | None:
    return None if part is None else change(part)


def _views(
    pool: Pool,
    objective: Objective,
    chosen: Tensor,
    labelled: Tensor | None,
    keys: Tensor,
    given: Given | None,
) -> Batch:
    """The views of images [m, B], and of labelled ones; `keys` [4, m] name the draws of each row."""
    rows, size = chosen.shape
    weak_keys, strong_keys, labelled_keys, dropout_keys = keys.unbind()
    slots = torch.arange(size, device=chosen.device)

    def views(view: augment.View, images: Tensor, keys: Tensor) -> Tensor:
        drawn = draws.bits(draws.fold(keys[:, None], slots), view.draws)
        made = pool.normalised(view.make(images, drawn.flatten(0, 1), pool.flip))
        return made.reshape(rows, -1, *made.shape[1:])

    images = pool.images[chosen.reshape(-1)]
    strong = own = own_labels = partner = None
    if objective.name not in ("supervised", "self-training"):
        strong = views(pool.strong, images, strong_keys)
    if strong is not None and given is not None and given.partners is None:
        weak = strong
    else:
        weak = views(pool.weak, images, weak_keys)
    if objective.both:
        other = views(pool.strong, images, strong_keys)
        weak = torch.where((slots % 2 == 1).view(1, -1, 1, 1, 1), other, weak)
    if given is not None and given.partners is not None:
        others = pool.images[given.partners.reshape(-1)]
        partner = views(pool.weak, others, draws.fold(weak_keys, size))
    if labelled is not None:
        images = pool.images[labelled.clamp(min=0).reshape(-1)]
        own = views(pool.weak, images, labelled_keys)
        own_labels = torch.where(labelled < 0, -1, pool.labels[labelled.clamp(min=0)])
    even = torch.full(chosen.shape, 1 / size, dtype=pool.wide, device=chosen.device)
    return Batch(weak, strong, pool.labels[chosen], own, own_labels, dropout_keys, even, given, partner)
