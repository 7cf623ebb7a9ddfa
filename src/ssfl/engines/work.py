"""The local work of one round: which images, and which views of them.

An engine receives rows and `Work` and gives back rows: what is trained is decided here and by the method,
once, for every engine; engines decide only how fast.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.rows import placed
from ssfl.data import augment
from ssfl.engines.features import Features
from ssfl.federation import Batch, Labels, Named

SHUFFLE_ROUNDS = 24
VALUES = 1 << 23
"""So many values of views are made at once: 2,048 images of 32×32 in colour, or 55 of 224×224."""


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
    features: Features | None = None
    """What a frozen trunk makes of the images, where only the rest of the network is trained."""

    @property
    def wide(self) -> torch.dtype:
        """What is summed and kept: float32, or float64 where networks compute in it."""
        return torch.promote_types(self.dtype, torch.float32)

    def normalised(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """What the network gets of uint8 images as they are."""
        if self.features is not None:
            return self.features.plain(images, dtype or self.dtype)
        return augment.normalise(images, self.mean, self.std, dtype or self.dtype)

    def views(self, kind: str, source: Tensor, keys: Tensor) -> Tensor:
        """What the network gets of weak or strong views, one for each key, of images that `source` gave."""
        view, number = (self.weak, 0) if kind == "weak" else (self.strong, 1)
        if self.features is not None:
            return self.features.at(number, source, draws.bits(keys, 1).squeeze(-1), self.dtype)
        return self.normalised(view.make(source, draws.bits(keys, view.draws), self.flip))

    def source(self, places: Tensor) -> Tensor:
        """What `views` are made of: the images at these places, or the places alone."""
        return self.images[places] if self.features is None else places


@dataclass(frozen=True)
class Optimizer:
    """SGD's constants; the learning rate comes with the work."""

    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float = 0.0
    """The most length of a step's gradient, without weight decay; 0 is any."""


@dataclass(frozen=True)
class Work:
    """T steps for each of n trainers, all randomness named."""

    role: str
    """"user" or "server"."""
    views: tuple[str, ...]
    """Which views of the images are made: "weak", "strong", or "mixed", weak with every second one strong."""
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
    given: Named = field(default_factory=dict)
    """[n, T, ...] each: what the steps find in `step.given`."""
    more: Named = field(default_factory=dict)
    """[n, T, B] each: further images, of which the steps find weak views in `step.given`."""
    sent: Named = field(default_factory=dict)
    """[n, ...] each: what every step finds in `step.given`, the same in all of them."""
    pace: Tensor | None = None
    """[n]: what part of the learning rate each trainer takes; None is all of it."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each trainer takes, after which its model stays as it is; None is all."""
    longest: int | None = None
    """The most steps that any trainer takes, where that is known to be less than T."""

    @property
    def steps(self) -> int:
        """T, for which there are images."""
        return self.batches.shape[1]

    @property
    def played(self) -> int:
        """How many steps are needed until every trainer is done."""
        return self.steps if self.longest is None else self.longest

    @property
    def kind(self) -> tuple[Any, ...]:
        """What distinguishes work whose steps cannot share one recording."""
        extra = {**self.given, **self.more, **self.sent}
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in extra.items())
        even = self.taken is None
        return self.role, self.views, tuple(self.batches.shape[1:]), self.labelled is None, even, shapes

    def map(self, change: Callable[[Tensor], Tensor], **more: Any) -> "Work":
        """The same work with every tensor of trainers changed, [n, ...] in and out, but for the keys."""

        def each(tensors: Named) -> Named:
            return {name: change(tensor) for name, tensor in tensors.items()}

        return replace(
            self,
            batches=change(self.batches),
            labelled=_maybe(change, self.labelled),
            given=each(self.given),
            more=each(self.more),
            sent=each(self.sent),
            pace=_maybe(change, self.pace),
            taken=_maybe(change, self.taken),
            **more,
        )

    def of(self, trainers: slice) -> "Work":
        """The work of some of the trainers."""
        return self.map(lambda tensor: tensor[trainers], keys=self.keys[:, trainers])

    def with_labels(self, labels: Labels) -> "Work":
        """The same work on the images, and with the labels, that a method decided on."""
        made = replace(self, batches=labels.images, given=labels.given, more=labels.more, pace=labels.pace)
        if labels.steps is None:
            return made
        taken = labels.steps.to(torch.int64)
        taken = taken.clamp(max=self.steps) if self.taken is None else taken.minimum(self.taken)
        return replace(made, taken=taken, longest=int(taken.max()))


class TrainedRows(NamedTuple):
    """What T steps of training gave: rows [n, P + Q], momentum [n, P], and metrics [n] by name."""

    rows: Tensor
    momentum: Tensor
    metrics: Named


def positions(base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int) -> Tensor:
    """Places `first` to `first + count` in each trainer's endless row of fresh permutations: [n, count].

    Each permutation of a trainer's images is a swap-or-not shuffle (Hoang, Morris and Rogaway 2012):
    in every pass an image and its mirror image about a random point change places or not. It is
    computed for the wanted places alone, whatever the sizes, with nothing stored.
    """
    place = first + torch.arange(count, device=trainers.device)  # or [n, count], where trainers differ
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
    return replace(work, views=("weak",), labelled=None, given={}, more={}, sent={}, pace=None, taken=None)


def make_batch(pool: Pool, work: Work, step: int | Tensor) -> Batch:
    """The views of one step, all trainers at once; `step` may be a number on the device, [1]."""

    def at_step(places: Tensor) -> Tensor:
        return places[:, step] if isinstance(step, int) else places.index_select(1, step).squeeze(1)

    return _views(pool, work, at_step, draws.fold(work.keys, step), work.sent)


def each_batch(pool: Pool, work: Work, at_once: int = 2048) -> Iterator[Batch]:
    """The views of every step in turn, made several steps at a time, about so many images at once.

    On a CPU a call costs more than a small image. The bytes are those of `make_batch`. Large images are made
    fewer at a time: their views would fill the memory.
    """
    trainers, _, size = work.batches.shape
    at_once = min(at_once, VALUES // pool.images[0].numel())
    steps, stride = work.played, max(1, at_once // (trainers * size))
    for first in range(0, steps, stride):
        some = torch.arange(first, min(first + stride, steps), device=work.keys.device)
        shape = (trainers, len(some))

        def fold(part: Tensor, some: Tensor = some) -> Tensor:
            return part[:, some].flatten(0, 1)

        keys = draws.fold(work.keys[:, :, None], some).flatten(1)
        made = _views(pool, work, fold, keys, {})
        for place in range(len(some)):

            def one(part: Tensor, shape: tuple[int, int] = shape, place: int = place) -> Tensor:
                apart: Tensor = part.unflatten(0, shape)
                return apart[:, place]

            *tensors, given = made
            parts = [_maybe(one, part) for part in tensors]
            now = {name: one(part) for name, part in given.items()}
            yield Batch(*parts, now | work.sent)  # type: ignore[arg-type, call-arg]


def _maybe(change: Callable[[Tensor], Tensor], part: Tensor | None) -> Tensor | None:
    return None if part is None else change(part)


def _views(pool: Pool, work: Work, at: Callable[[Tensor], Tensor], keys: Tensor, sent: Named) -> Batch:
    """The views of images [m, B], and of labelled ones. `at` takes tensors [n, T, ...] to the m rows that are
    wanted; `keys` [4, m] name the draws of each row; `sent` is given to the steps as it is."""
    chosen, labelled = at(work.batches), _maybe(at, work.labelled)
    rows, size = chosen.shape
    weak_keys, strong_keys, labelled_keys, dropout_keys = keys.unbind()
    slots = torch.arange(size, device=chosen.device)

    def views(kind: str, images: Tensor, keys: Tensor) -> Tensor:
        made = pool.views(kind, images, draws.fold(keys[:, None], slots).flatten())
        return made.reshape(rows, -1, *made.shape[1:])

    images = pool.source(chosen.reshape(-1))
    weak = strong = own = own_labels = None
    if "strong" in work.views:
        strong = views("strong", images, strong_keys)
    if "weak" in work.views:
        weak = views("weak", images, weak_keys)
    if "mixed" in work.views:
        plain = views("weak", images, weak_keys)
        second = (slots % 2 == 1).view(1, -1, *[1] * (plain.dim() - 2))
        weak = torch.where(second, views("strong", images, strong_keys), plain)
    given = {name: at(tensor) for name, tensor in work.given.items()}
    for number, (name, others) in enumerate(work.more.items()):
        more = pool.source(at(others).reshape(-1))
        given[name] = views("weak", more, draws.fold(weak_keys, size + number))
    if labelled is not None:
        images = pool.source(labelled.clamp(min=0).reshape(-1))
        own = views("weak", images, labelled_keys)
        own_labels = torch.where(labelled < 0, -1, pool.labels[labelled.clamp(min=0)])
    even = torch.full(chosen.shape, 1 / size, dtype=pool.wide, device=chosen.device)
    return Batch(weak, strong, pool.labels[chosen], own, own_labels, dropout_keys, even, given | sent)
