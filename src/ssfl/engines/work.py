"""The work of one round: which images each trainer (a user or the server) sees in each step, and in which
views.

An engine takes models and a `Work`, and returns trained models. The work is prepared here in the same way for
all engines, so that all of them train on the same images.
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
from ssfl.models.kernels import views as view_kernels

SHUFFLE_ROUNDS = 24
VALUES = 1 << 23
"""The largest number of values (pixels times channels) in the augmented images that are made at one time. It
limits memory. It is enough for 2,730 colour images of 32×32 pixels, or 55 of 224×224."""


@dataclass(frozen=True)
class Pool:
    """All images of a simulation, on its device, and how they become inputs of the network. Users and server
    refer to the images by index."""

    images: Tensor
    """uint8 [N, C, H, W]: N images with C channels."""
    labels: Tensor
    """int64 [N]: the class of each of N images; -1 where unknown."""
    mean: Tensor
    """[C]: the mean of each of C channels. Images are normalised before they enter the network: `mean` is
    subtracted, and the result is divided by `std`, the standard deviation of each channel."""
    std: Tensor
    flip: bool
    """Whether augmented views may be mirrored horizontally."""
    dtype: torch.dtype
    """The number type that networks compute in, such as bfloat16. Weights, losses and statistics use float32
    or a more precise type."""
    weak: augment.View = augment.WEAK
    """The weak augmentation: how weakly augmented views of images are made."""
    strong: augment.View = augment.STRONG
    """The strong augmentation: how strongly augmented views of images are made."""
    features: Features | None = None
    """The stored outputs of the network's frozen layers for all images. None if the network has no frozen
    layers, or if their outputs are not stored."""
    test_views: int = 0
    """The number of augmented views of each test image. The prediction is the average over these views and
    the image itself."""
    kernels: bool = False
    """Whether GPU kernels may make the views."""

    @property
    def wide(self) -> torch.dtype:
        """The number type of weights and sums: float32, or float64 if networks compute in float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def normalised(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the network's input for uint8 images without augmentation: normalised images or, if
        `features` is set, the images' features. The result has the number type `dtype`; None means the pool's
        `dtype`."""
        if self.features is not None:
            return self.features.plain(images, dtype or self.dtype)
        return augment.normalise(images, self.mean, self.std, dtype or self.dtype)

    def test_inputs(self, images: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the network's inputs for evaluating uint8 images, in the number type `dtype`. The first
        input is the images without augmentation. Then follow `test_views` inputs with one augmented view of
        each image. The logits for all inputs are averaged."""
        yield self.normalised(images, dtype)
        for number in range(1, self.test_views + 1):
            if self.features is not None:
                yield self.features.plain(images, dtype, number)
            else:
                yield self.normalised(gentle.test_view(images, number, self.flip), dtype)

    def views(self, kind: str, source: Tensor, keys: Tensor) -> Tensor:
        """Returns the network's input for augmented views of the given kind ("weak" or "strong"), one view
        for each random key. `source` is the result of `Pool.source` for the images."""
        view, number = (self.weak, 0) if kind == "weak" else (self.strong, 1)
        if self.features is not None:
            return self.features.at(number, source, draws.bits(keys, 1).squeeze(-1), self.dtype)
        if self.by_kernels:
            return view_kernels.make(
                view, self.images, source, keys, self.flip, self.mean, self.std, self.dtype
            )
        return self.normalised(view.make(source, draws.bits(keys, view.draws), self.flip))

    @property
    def by_kernels(self) -> bool:
        """Whether GPU kernels make the views. They read images by index, and give the same bytes as the
        functions `weak` and `strong`."""
        if self.features is not None or not self.kernels:
            return False
        return all(view_kernels.suit(self.images, view, self.dtype) for view in (self.weak, self.strong))

    def use(self, round: int) -> None:
        """Prepares the stored features for a round (counted from 0). Each of the first rounds adds features
        of new augmented views. Does nothing if no features are stored."""
        if self.features is not None:
            self.features.use(round)

    def source(self, indices: Tensor) -> Tensor:
        """Returns the argument that `views` needs for the images at these indices: the uint8 images. If
        `features` is set, or if GPU kernels make the views, it is just the indices."""
        return self.images[indices] if self.features is None and not self.by_kernels else indices


@dataclass(frozen=True)
class Optimizer:
    """The constants of SGD: momentum, Nesterov or not, weight decay, gradient clipping. The learning rate
    changes from step to step, so it is part of `Work`."""

    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float = 0.0
    """Gradient clipping: a step's gradient is scaled down to at most this norm, before weight decay is added.
    0 means no limit."""


@dataclass(frozen=True)
class Work:
    """The T training steps of each of n trainers (users, or the server) in a round: their images, learning
    rates and random keys."""

    role: str
    """Who trains: "user" or "server"."""
    views: tuple[str, ...]
    """The views of the images that each step needs: "weak", "strong", "mixed" (weak views, but strong ones
    for every second image), or "plain" (without augmentation, instead of "weak")."""
    keys: Tensor
    """[4, n]: the keys from which the random numbers of this round are drawn, for four purposes and n
    trainers. See `round_keys`."""
    batches: Tensor
    """[n, T, B]: the images of n trainers in T steps, B images in each step, as indices into the pool."""
    labelled: Tensor | None
    """[n, T, B]: labelled images that the n users themselves have, B images in each of T steps, as indices
    into the pool. -1 for a user without any. None if no user has any."""
    rates: tuple[float, ...]
    """The learning rate of each of the round's T steps, the same for all trainers."""
    seats: int = 1
    """The largest number of trainers that are trained together in any round. Memory is allocated for this
    many trainers, so that the same memory can be used again in every round."""
    tensors: Named = field(default_factory=dict)
    """Further tensors of the method by name, [n, T, ...] each, for n trainers and T steps. In each step, the
    loss finds that step's part in `step.tensors`."""
    extra_images: Named = field(default_factory=dict)
    """Further images by name, such as partners for mixup, as indices into the pool. They are [n, T, B] each:
    B images in each of T steps, for n trainers. The loss finds weak views of them in `step.tensors`."""
    sent: Named = field(default_factory=dict)
    """Tensors that the server sent with the model, by name, [n, ...] each for n trainers. In every step, the
    loss finds them in `step.tensors`."""
    lr_scale: Tensor | None = None
    """[n]: a factor for the learning rate of each of n trainers; None means 1."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each of n trainers takes. After these its model no longer changes. None:
    all take T."""
    longest: int | None = None
    """The largest number of steps that any trainer (user or server) takes. None means T, the number of steps
    for which there are batches."""

    @property
    def steps(self) -> int:
        """T: the number of steps for which there are batches."""
        return self.batches.shape[1]

    @property
    def played(self) -> int:
        """How many steps an engine must compute, so that every trainer (user or server) has taken all its
        steps. It is at most T, the number of steps for which there are batches."""
        return self.steps if self.longest is None else self.longest

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for work with the same role, views and shapes. A GPU step that was recorded for
        one such work can be replayed for the others."""
        extra = {**self.tensors, **self.extra_images, **self.sent}
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in extra.items())
        even = self.taken is None
        return self.role, self.views, tuple(self.batches.shape[1:]), self.labelled is None, even, shapes

    def map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> "Work":
        """Returns a copy of the work in which the function `change` was applied to every tensor whose first
        dimension is the trainers. In `keys` the trainers are the second dimension, so `change` is not applied
        to it. Keyword arguments (`fields`) replace further fields, such as `keys`."""

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
        """Returns the part of the work that belongs to these trainers, such as those that one process
        trains."""
        return self.map(lambda tensor: tensor[trainers], keys=self.keys[:, trainers])

    def with_labels(self, labels: Labels) -> "Work":
        """Returns the work after pseudo-labelling: with the images that the method's function `label` chose,
        their pseudo-labels, and the users' numbers of steps and learning rate factors."""
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
    """The result of training n trainers for T steps. `rows` [n, P + Q] are their models, with P weights and Q
    running statistics each; `momentum` is [n, P]. `metrics` are [n] each, by name."""

    rows: Tensor
    momentum: Tensor
    metrics: Named


def swap_or_not(image: Tensor, keys: Tensor, size: Tensor, turn: int) -> Tensor:
    """Returns the positions of images after one pass of a swap-or-not shuffle (see `positions`). `image` are
    the positions before the pass. For each of them, `size` is the number of images that are shuffled, and
    `keys` determine the random numbers. `turn` is the number of the pass.

    In a pass, a random number r pairs position i with position (r - i) modulo `size`. Each pair is swapped or
    not, at random.
    """
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
) -> Tensor:
    """Returns which images each of n trainers (users, or the server) sees, [n, count]. An image is given by
    its position among the trainer's own images. The result is elements `first` to `first + count - 1` of the
    trainer's endless random sequence of images.

    `base` is the random key, `trainers` [n] are the trainers' numbers, and `sizes` [n] are their numbers of
    images. `first` is one number, or a tensor [n, 1] with one number per trainer.

    The sequence consists of one new permutation of the trainer's images after another. Each permutation is a
    swap-or-not shuffle (Hoang, Morris and Rogaway 2012). It makes several passes (see `swap_or_not`). Each
    pass pairs the positions at random, and swaps each pair or not. So any element can be computed without the
    others, and nothing is stored.
    """
    place = first + torch.arange(count, device=trainers.device)  # or [n, count], if trainers differ
    size = sizes[:, None]
    keys = draws.fold(draws.fold(base + torch.zeros_like(trainers), trainers)[:, None], place // size)
    image = place % size
    for turn in range(SHUFFLE_ROUNDS):
        image = swap_or_not(image, keys, size, turn)
    return image


VIEWS = ("weak", "strong", "labelled", "dropout")


def round_keys(seed: int, round: int, trainers: Tensor) -> Tensor:
    """Returns the keys from which the random numbers of a round are drawn, [4, n], for four purposes and n
    trainers. The purposes are weak views, strong views, views of labelled images, and dropout (`VIEWS`). So a
    trainer's random numbers depend only on the seed, the purpose, the round and the trainer.

    `trainers` [n] are the numbers of the users. The server has the number `draws.SERVER`, and further copies
    of its model have the numbers below that.
    """
    bases = placed([[draws.key(seed, purpose, round)] for purpose in VIEWS], trainers.device)
    return draws.fold(bases, trainers)


def for_prediction(work: Work) -> Work:
    """Returns the work for predicting instead of training: the same images, but only in weak views. If the
    work has plain views, it keeps them."""
    views = ("plain",) if "plain" in work.views else ("weak",)
    return replace(
        work, views=views, labelled=None, tensors={}, extra_images={}, sent={}, lr_scale=None, taken=None
    )


def make_batch(pool: Pool, work: Work, step: int | Tensor) -> Batch:
    """Returns the images and labels of one training step for all trainers (users, or the server). `step` is
    the step's number, counted from 0. A step that is recorded as a CUDA graph gets it as a tensor [1] on the
    device, whose value changes between replays."""

    def at_step(tensor: Tensor) -> Tensor:
        return tensor[:, step] if isinstance(step, int) else tensor.index_select(1, step).squeeze(1)

    size = work.batches.shape[2]
    if isinstance(step, Tensor) and pool.by_kernels:
        keys, image_keys = view_kernels.step_keys(work.keys, step, size)
    else:
        keys = draws.fold(work.keys, step)
        image_keys = _image_keys(keys, size)
    return _views(pool, work, at_step, keys, image_keys, work.sent)


def _image_keys(keys: Tensor, size: int) -> Tensor:
    """Returns the keys of the images of m batches, [3, m, size], for the three purposes in `VIEWS` that are
    views. `keys` [4, m] are the keys of the batches, for all four purposes."""
    return draws.fold(keys[:3, :, None], torch.arange(size, device=keys.device))


def each_batch(pool: Pool, work: Work, at_once: int = 2048) -> Iterator[Batch]:
    """Yields the batch of every step, with the same content as `make_batch`. Views are made for several steps
    together, about `at_once` images at a time.

    This is faster on a CPU, where calling a function takes longer than augmenting a small image. If images
    are large, fewer than `at_once` are augmented together, because their views would fill the memory.
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
        *fields, tensors = _views(pool, work, at_steps, keys, _image_keys(keys, size), {})
        for place in range(len(numbers)):

            def at_step(tensor: Tensor, shape: tuple[int, int] = shape, place: int = place) -> Tensor:
                by_step: Tensor = tensor.unflatten(0, shape)
                return by_step[:, place]

            step_tensors = {name: at_step(tensor) for name, tensor in tensors.items()}
            yield Batch(*(_maybe(at_step, part) for part in fields), step_tensors | work.sent)  # type: ignore[arg-type, call-arg]


def _maybe(change: Callable[[Tensor], Tensor], part: Tensor | None) -> Tensor | None:
    return None if part is None else change(part)


def _views(
    pool: Pool, work: Work, at: Callable[[Tensor], Tensor], keys: Tensor, image_keys: Tensor, sent: Named
) -> Batch:
    """Returns the images and labels of m batches of B images together; each batch belongs to one trainer and
    one step.

    `at` selects the m batches from tensors [n, T, ...] of n trainers and T steps. `keys` [4, m] are the keys
    of their random draws, and `image_keys` [3, m, B] those of the images' views. `sent` are tensors from the
    server, which are passed on unchanged.
    """
    chosen, labelled = at(work.batches), _maybe(at, work.labelled)
    rows, size = chosen.shape
    weak_keys, strong_keys, labelled_keys = image_keys
    slots = torch.arange(size, device=chosen.device)

    def views(kind: str, images: Tensor, keys: Tensor) -> Tensor:
        inputs = pool.views(kind, images, keys.flatten())
        return inputs.reshape(rows, -1, *inputs.shape[1:])

    images = pool.source(chosen.reshape(-1))
    weak = strong = labelled_views = own_labels = None
    if "strong" in work.views:
        strong = views("strong", images, strong_keys)
    if "plain" in work.views:
        weak = pool.normalised(pool.images[chosen.reshape(-1)]).unflatten(0, (rows, size))
    if "weak" in work.views:
        weak = views("weak", images, weak_keys)
    if "mixed" in work.views:
        plain = views("weak", images, weak_keys)
        second = (slots % 2 == 1).view(1, -1, *[1] * (plain.dim() - 2))
        weak = torch.where(second, views("strong", images, strong_keys), plain)
    tensors = {name: at(tensor) for name, tensor in work.tensors.items()}
    for number, (name, indices) in enumerate(work.extra_images.items()):
        extra = pool.source(at(indices).reshape(-1))
        tensors[name] = views("weak", extra, draws.fold(draws.fold(keys[0], size + number)[:, None], slots))
    if labelled is not None:
        images = pool.source(labelled.clamp(min=0).reshape(-1))
        labelled_views = views("weak", images, labelled_keys)
        own_labels = torch.where(labelled < 0, -1, pool.labels[labelled.clamp(min=0)])
    even = torch.full(chosen.shape, 1 / size, dtype=pool.wide, device=chosen.device)
    return Batch(weak, strong, pool.labels[chosen], labelled_views, own_labels, keys[3], even, tensors | sent)
