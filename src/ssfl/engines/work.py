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
"""How many values (pixels times channels) of augmented images are made at once at most: 2,048 colour images
of 32×32, or 55 of 224×224."""


@dataclass(frozen=True)
class Pool:
    """All images of the simulation, on its device. Users and server refer to them by index."""

    images: Tensor
    """uint8 [N, C, H, W]: N images with C channels."""
    labels: Tensor
    """int64 [N]: the class of each image, -1 where unknown."""
    mean: Tensor
    """[C]: the mean of each channel, which is subtracted from images; `std` is the standard deviation, by
    which they are divided. Both are on the device of the images."""
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
    """The features of the images: the output of the network's frozen part, if there is one. None if the
    images themselves are used."""
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
        """Returns the network's input for "weak" or "strong" views, one view per random key. `source` is what
        `Pool.source` returned for the images."""
        view, number = (self.weak, 0) if kind == "weak" else (self.strong, 1)
        if self.features is not None:
            return self.features.at(number, source, draws.bits(keys, 1).squeeze(-1), self.dtype)
        return self.normalised(view.make(source, draws.bits(keys, view.draws), self.flip))

    def use(self, round: int) -> None:
        """Prepares the views from which a round draws, if the output of the network's frozen part is stored
        (`features`)."""
        if self.features is not None:
            self.features.use(round)

    def source(self, indices: Tensor) -> Tensor:
        """Returns what `views` takes as its source: the images at these indices or, if the network's frozen
        part has been applied already (`features`), the indices themselves."""
        return self.images[indices] if self.features is None else indices


@dataclass(frozen=True)
class Optimizer:
    """The constants of SGD. The learning rate is not one of them; it is part of `Work`."""

    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float = 0.0
    """The largest norm of a step's gradient, before weight decay is added; longer gradients are scaled down.
    0: no limit."""


@dataclass(frozen=True)
class Work:
    """The T steps of each of n trainers in a round: their images, learning rates and random keys."""

    role: str
    """Who trains: "user" or "server"."""
    views: tuple[str, ...]
    """The views of the images: "weak", "strong", or "mixed" (weak, but every second image strong)."""
    keys: Tensor
    """[4, n]: the keys from which this round's random numbers are drawn, for n trainers. See `round_keys`."""
    batches: Tensor
    """[n, T, B]: the images of n trainers in T batches of B, as indices into the pool."""
    labelled: Tensor | None
    """[n, T, B]: the labelled images that users own, as indices into the pool; -1 for a user without labelled
    images. None if no user has any."""
    rates: tuple[float, ...]
    """The learning rate of each of the T steps."""
    seats: int = 1
    """The largest number of trainers that this kind of work has in any round. Buffers have room for this
    many."""
    tensors: Named = field(default_factory=dict)
    """Further tensors of the method by name, [n, T, ...] each, for n trainers and T steps. A step finds its
    part in `step.tensors`."""
    extra_images: Named = field(default_factory=dict)
    """Further images by name, as indices into the pool, [n, T, B] each. A step finds weak views of them in
    `step.tensors`."""
    sent: Named = field(default_factory=dict)
    """What the server sent besides the model, by name, [n, ...] each for n trainers. Every step finds it in
    `step.tensors`."""
    lr_scale: Tensor | None = None
    """[n]: a factor for the learning rate of each of n trainers; None means 1."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each of n trainers takes; after these its model no longer changes. None
    means all T."""
    longest: int | None = None
    """The most steps that any trainer takes, if that is known to be less than T."""

    @property
    def steps(self) -> int:
        """T, the number of steps for which there are batches."""
        return self.batches.shape[1]

    @property
    def played(self) -> int:
        """The number of steps that must be computed until every trainer has taken all its steps."""
        return self.steps if self.longest is None else self.longest

    @property
    def kind(self) -> tuple[Any, ...]:
        """Identifies the kind of work. If two pieces of work have the same kind, a step that was recorded for
        one can be replayed for the other."""
        extra = {**self.tensors, **self.extra_images, **self.sent}
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in extra.items())
        even = self.taken is None
        return self.role, self.views, tuple(self.batches.shape[1:]), self.labelled is None, even, shapes

    def map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> "Work":
        """Returns the work with `change` applied to all its tensors with one entry per trainer, except the
        keys, and with other `fields` replaced."""

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
        """Returns the work of only these trainers."""
        return self.map(lambda tensor: tensor[trainers], keys=self.keys[:, trainers])

    def with_labels(self, labels: Labels) -> "Work":
        """Returns the work with the images that the method's `label` chose, and with their pseudo-labels."""
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
    """The result of T steps of n trainers: models [n, P + Q] with P weights and Q running statistics each,
    momentum [n, P], and metrics [n] by name."""

    rows: Tensor
    momentum: Tensor
    metrics: Named


def swap_or_not(image: Tensor, keys: Tensor, size: Tensor, turn: int | Tensor) -> Tensor:
    """Returns the images' positions after one pass of a swap-or-not shuffle. Each image and its mirror image
    about a random point change places or not. See `positions`."""
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
    """Returns the keys from which the random numbers of a round are drawn, [4, n]: one for each of four
    purposes and n trainers. A key follows from the seed, the purpose, the round and the trainer.

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
    """Returns the batch of one step for all trainers. `step` is the step's number from 0, or a tensor [1]
    with it on the device."""

    def at_step(tensor: Tensor) -> Tensor:
        return tensor[:, step] if isinstance(step, int) else tensor.index_select(1, step).squeeze(1)

    return _views(pool, work, at_step, draws.fold(work.keys, step), work.sent)


def each_batch(pool: Pool, work: Work, at_once: int = 2048) -> Iterator[Batch]:
    """Yields the batch of every step, with the same bytes as `make_batch`. Views are made for several steps
    at a time, about `at_once` images.

    This is for CPUs, where the overhead of a call is larger than the work for a small image. Of large images,
    fewer are made at a time, since their views would fill the memory.
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
