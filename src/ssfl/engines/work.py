"""The local work of one round: which images each trainer sees, and which views of them.

A trainer is a user or the server. An engine takes models and `Work`, and returns trained models. This file
and the method decide what is trained, in the same way for every engine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.rows import placed
from ssfl.core.step import Batch, Labels, Named
from ssfl.data import augment, gentle
from ssfl.engines.features import Features

SHUFFLE_ROUNDS = 24
VALUES = 1 << 23
"""How many values of views are made at once at most: 2,048 colour images of 32×32, or 55 of 224×224."""


@dataclass(frozen=True)
class Pool:
    """All images of the simulation, on its device. Users and server refer to them by index."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], -1 where unknown."""
    mean: Tensor
    """[C] on the device of the images; `std` likewise."""
    std: Tensor
    flip: bool
    """Whether views may be mirrored."""
    dtype: torch.dtype
    """The number type that networks compute in. Losses, weights and statistics have at least float32."""
    weak: augment.View = augment.WEAK
    """How weak views are made."""
    strong: augment.View = augment.STRONG
    """How strong views are made."""
    features: Features | None = None
    """The frozen trunk's output for the images, if only the rest of the network is trained."""
    test_views: int = 0
    """The prediction for a test image is averaged over the image and this many views of it."""

    @property
    def wide(self) -> torch.dtype:
        """The number type of weights and sums: float32, or float64 if networks compute in float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def normalised(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the network's input for uint8 images without augmentation."""
        if self.features is not None:
            return self.features.plain(images, dtype or self.dtype)
        return augment.normalise(images, self.mean, self.std, dtype or self.dtype)

    def test_inputs(self, images: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the network's inputs whose logits are averaged when uint8 images are evaluated: the images
        without augmentation, then their test views."""
        yield self.normalised(images, dtype)
        for number in range(1, self.test_views + 1):
            if self.features is not None:
                yield self.features.plain(images, dtype, number)
            else:
                yield self.normalised(gentle.test_view(images, number, self.flip), dtype)

    def views(self, kind: str, source: Tensor, keys: Tensor) -> Tensor:
        """Returns the network's input for "weak" or "strong" views, one view per key. `source` is what
        `Pool.source` returned for the images."""
        view, number = (self.weak, 0) if kind == "weak" else (self.strong, 1)
        if self.features is not None:
            return self.features.at(number, source, draws.bits(keys, 1).squeeze(-1), self.dtype)
        return self.normalised(view.make(source, draws.bits(keys, view.draws), self.flip))

    def use(self, round: int) -> None:
        """Prepares the views that a round draws from, if features are stored."""
        if self.features is not None:
            self.features.use(round)

    def source(self, indices: Tensor) -> Tensor:
        """Returns what `views` takes as its source: the images at these indices or, if features are stored,
        the indices."""
        return self.images[indices] if self.features is None else indices


@dataclass(frozen=True)
class Optimizer:
    """The constants of SGD. The learning rate is part of `Work`."""

    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float = 0.0
    """The largest norm of a step's gradient, without weight decay; 0: no limit."""


@dataclass(frozen=True)
class Work:
    """The T steps of each of n trainers in a round: their images, learning rates and random keys."""

    role: str
    """"user" or "server"."""
    views: tuple[str, ...]
    """The views of the images: "weak", "strong", or "mixed" (weak, but every second image strong)."""
    keys: Tensor
    """[4, n]: the keys of this round's draws, see `round_keys`."""
    batches: Tensor
    """[n, T, B]: indices into the pool."""
    labelled: Tensor | None
    """[n, T, B]: users' own labelled images, -1 for a user without; None if no user has any."""
    rates: tuple[float, ...]
    """[T]: the learning rate of each step."""
    seats: int = 1
    """The largest number of trainers of such work. Buffers have room for this many."""
    tensors: Named = field(default_factory=dict)
    """[n, T, ...] each: tensors that the steps get in `step.tensors`."""
    extra_images: Named = field(default_factory=dict)
    """[n, T, B] each: further images. The steps get weak views of them in `step.tensors`."""
    sent: Named = field(default_factory=dict)
    """[n, ...] each: what the server sent besides the model. Every step gets it in `step.tensors`."""
    lr_scale: Tensor | None = None
    """[n]: a factor on each trainer's learning rate; None: 1."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each trainer takes; after these its model no longer changes. None
    means T."""
    longest: int | None = None
    """The most steps that any trainer takes, if that is known to be less than T."""

    @property
    def steps(self) -> int:
        """T, the number of steps for which there are batches."""
        return self.batches.shape[1]

    @property
    def played(self) -> int:
        """The number of steps after which every trainer is done."""
        return self.steps if self.longest is None else self.longest

    @property
    def kind(self) -> tuple[Any, ...]:
        """Identifies the kind of work: work of equal kind can use the same recorded step."""
        extra = {**self.tensors, **self.extra_images, **self.sent}
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in extra.items())
        even = self.taken is None
        return self.role, self.views, tuple(self.batches.shape[1:]), self.labelled is None, even, shapes

    def map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> "Work":
        """Returns the work with `change` applied to all its tensors [n, ...] except the keys, and with other
        `fields` replaced."""

        def each(tensors: Named) -> Named:
            return {name: change(tensor) for name, tensor in tensors.items()}

        return replace(
            self,
            batches=change(self.batches),
            labelled=_maybe(change, self.labelled),
            tensors=each(self.tensors),
            extra_images=each(self.extra_images),
            sent=each(self.sent),
            lr_scale=_maybe(change, self.lr_scale),
            taken=_maybe(change, self.taken),
            **fields,
        )

    def of(self, trainers: slice) -> "Work":
        """Returns the work of some of the trainers."""
        return self.map(lambda tensor: tensor[trainers], keys=self.keys[:, trainers])

    def with_labels(self, labels: Labels) -> "Work":
        """Returns the work with the images and the pseudo-labels that the method's `label` chose."""
        work = replace(
            self,
            batches=labels.images,
            tensors=labels.tensors,
            extra_images=labels.extra_images,
            lr_scale=labels.lr_scale,
        )
        if labels.steps is None:
            return work
        taken = labels.steps.to(torch.int64)
        taken = taken.clamp(max=self.steps) if self.taken is None else taken.minimum(self.taken)
        return replace(work, taken=taken, longest=int(taken.max()))


class TrainedRows(NamedTuple):
    """The result of T steps: models [n, P + Q], momentum [n, P], and metrics [n] by name."""

    rows: Tensor
    momentum: Tensor
    metrics: Named


def swap_or_not(image: Tensor, keys: Tensor, size: Tensor, turn: int | Tensor) -> Tensor:
    """Returns positions after one pass of a swap-or-not shuffle of `size` images (see `positions`)."""
    key = draws.fold(keys, turn)
    mirror = draws.below(key, size) - image
    mirror = torch.where(mirror < 0, mirror + size, mirror)
    swap = draws.fold(key, torch.maximum(image, mirror)) < 0
    return torch.where(swap, mirror, image)


def positions(
    base: int,
    trainers: Tensor,
    sizes: Tensor,
    first: int | Tensor,
    count: int,
    swap: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Returns which of its images each trainer sees at the places `first` to `first + count` of its endless
    sequence: [n, count].

    The sequence is one new permutation of the trainer's images after another. Each permutation is a
    swap-or-not shuffle (Hoang, Morris and Rogaway 2012): in every pass an image and its mirror image about a
    random point are swapped or not. Only the places asked for are computed, and nothing is stored.

    `swap` is `swap_or_not`, compiled. It is called pass by pass, on one dimension. Compiling all passes
    together would take many times as long, and would be repeated for every number of trainers.
    """
    place = first + torch.arange(count, device=trainers.device)  # or [n, count], if trainers differ
    size = sizes[:, None]
    keys = draws.fold(draws.fold(base + torch.zeros_like(trainers), trainers)[:, None], place // size)
    image = place % size
    if swap is None or not image.numel():
        for turn in range(SHUFFLE_ROUNDS):
            image = swap_or_not(image, keys, size, turn)
        return image
    shape = image.shape
    # copies of their own: views, or steps of 0 in memory, would be compiled again
    image, keys, size = (
        x.expand(shape).flatten().clone(memory_format=torch.contiguous_format) for x in (image, keys, size)
    )
    for number in torch.arange(SHUFFLE_ROUNDS, device=image.device).unbind():
        image = swap(image, keys, size, number)
    return image.view(shape)


VIEWS = ("weak", "strong", "labelled", "dropout")


def round_keys(seed: int, round: int, trainers: Tensor) -> Tensor:
    """Returns the keys (seed, purpose, round, trainer) of the random draws of every step, [4, n].

    `trainers` are the users' numbers, or draws.SERVER.
    """
    bases = placed([[draws.key(seed, purpose, round)] for purpose in VIEWS], trainers.device)
    return draws.fold(bases, trainers)


def for_prediction(work: Work) -> Work:
    """Returns work on the same images with weak views only, to predict their classes."""
    return replace(
        work, views=("weak",), labelled=None, tensors={}, extra_images={}, sent={}, lr_scale=None, taken=None
    )


def make_batch(pool: Pool, work: Work, step: int | Tensor) -> Batch:
    """Returns the batch of one step for all trainers. `step` is a number, or a tensor [1] on the device."""

    def at_step(tensor: Tensor) -> Tensor:
        return tensor[:, step] if isinstance(step, int) else tensor.index_select(1, step).squeeze(1)

    return _views(pool, work, at_step, draws.fold(work.keys, step), work.sent)


def each_batch(pool: Pool, work: Work, at_once: int = 2048) -> Iterator[Batch]:
    """Yields the batch of every step, with the same bytes as `make_batch`. Views are made for several steps
    at a time, about `at_once` images.

    This is for CPUs, where a call costs more than a small image. Fewer large images are made at a time, since
    their views would fill the memory.
    """
    trainers, _, size = work.batches.shape
    at_once = min(at_once, VALUES // pool.images[0].numel())
    steps, stride = work.played, max(1, at_once // (trainers * size))
    for first in range(0, steps, stride):
        numbers = torch.arange(first, min(first + stride, steps), device=work.keys.device)
        shape = (trainers, len(numbers))

        def at_steps(tensor: Tensor, numbers: Tensor = numbers) -> Tensor:
            return tensor[:, numbers].flatten(0, 1)

        keys = draws.fold(work.keys[:, :, None], numbers).flatten(1)
        *fields, tensors = _views(pool, work, at_steps, keys, {})
        for place in range(len(numbers)):

            def at_step(tensor: Tensor, shape: tuple[int, int] = shape, place: int = place) -> Tensor:
                by_step: Tensor = tensor.unflatten(0, shape)
                return by_step[:, place]

            step_tensors = {name: at_step(tensor) for name, tensor in tensors.items()}
            yield Batch(*(_maybe(at_step, part) for part in fields), step_tensors | work.sent)  # type: ignore[arg-type, call-arg]


def _maybe(change: Callable[[Tensor], Tensor], part: Tensor | None) -> Tensor | None:
    return None if part is None else change(part)


def _views(pool: Pool, work: Work, at: Callable[[Tensor], Tensor], keys: Tensor, sent: Named) -> Batch:
    """Returns a batch of images [m, B], where each of the m rows belongs to one trainer and one step.

    `at` selects these rows from tensors [n, T, ...], `keys` [4, m] are the keys of their random draws, and
    `sent` is passed on to the steps unchanged.
    """
    chosen, labelled = at(work.batches), _maybe(at, work.labelled)
    rows, size = chosen.shape
    weak_keys, strong_keys, labelled_keys, dropout_keys = keys.unbind()
    slots = torch.arange(size, device=chosen.device)

    def views(kind: str, images: Tensor, keys: Tensor) -> Tensor:
        inputs = pool.views(kind, images, draws.fold(keys[:, None], slots).flatten())
        return inputs.reshape(rows, -1, *inputs.shape[1:])

    images = pool.source(chosen.reshape(-1))
    weak = strong = labelled_views = own_labels = None
    if "strong" in work.views:
        strong = views("strong", images, strong_keys)
    if "weak" in work.views:
        weak = views("weak", images, weak_keys)
    if "mixed" in work.views:
        plain = views("weak", images, weak_keys)
        second = (slots % 2 == 1).view(1, -1, *[1] * (plain.dim() - 2))
        weak = torch.where(second, views("strong", images, strong_keys), plain)
    tensors = {name: at(tensor) for name, tensor in work.tensors.items()}
    for number, (name, indices) in enumerate(work.extra_images.items()):
        extra = pool.source(at(indices).reshape(-1))
        tensors[name] = views("weak", extra, draws.fold(weak_keys, size + number))
    if labelled is not None:
        images = pool.source(labelled.clamp(min=0).reshape(-1))
        labelled_views = views("weak", images, labelled_keys)
        own_labels = torch.where(labelled < 0, -1, pool.labels[labelled.clamp(min=0)])
    even = torch.full(chosen.shape, 1 / size, dtype=pool.wide, device=chosen.device)
    return Batch(
        weak, strong, pool.labels[chosen], labelled_views, own_labels, dropout_keys, even, tensors | sent
    )
