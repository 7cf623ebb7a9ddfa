"""Triton kernels (GPU code) that compute random numbers as `core/draws.py` does: the keys of a step's images,
and the order in which users see their images."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.core import draws
from ssfl.models.kernels.launching import launch

GAMMA, FIRST_FACTOR, SECOND_FACTOR = (
    tl.constexpr(value) for value in (draws.signed(draws.GAMMA), draws.MULTIPLY_1, draws.MULTIPLY_2)
)
HELD = 256
"""How many keys or positions a Triton program computes."""


@triton.jit
def _shifted_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def fold(keys, parts):
    """Does the same as `draws.fold`."""
    x = keys + (tl.cast(parts, tl.int64) + 1) * GAMMA
    x = (x ^ _shifted_right(x, 30)) * FIRST_FACTOR
    x = (x ^ _shifted_right(x, 27)) * SECOND_FACTOR
    return x ^ _shifted_right(x, 31)


@triton.jit
def below(draw, bound):
    """Does the same as `draws.below`."""
    return (_shifted_right(draw, 32) * bound) >> 32


@triton.jit(do_not_specialize=["batch", "count"])
def _step_keys(keys, step, of_step, of_images, batch, count, HELD: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * HELD + tl.arange(0, HELD)
    inside = i < count
    row, place = i // batch, i % batch
    key = fold(tl.load(keys + row, mask=inside, other=0), tl.load(step))
    tl.store(of_step + row, key, mask=inside & (place == 0))
    tl.store(of_images + i, fold(key, place), mask=inside)


def step_keys(keys: Tensor, step: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Returns the keys of one step, made from the keys of a round [4, n] for four purposes and n trainers.
    The first result, [4, n], has the keys of the step. The second, [3, n, batch], has those of its images for
    the first three purposes. `step` [1] is the number of the step."""
    of_step, of_images = torch.empty_like(keys), keys.new_empty(*keys.shape, batch)
    count = of_images.numel()
    launch(
        _step_keys, (triton.cdiv(count, HELD),),
        keys.contiguous(), step, of_step, of_images, batch, count, HELD, num_warps=4,
    )  # fmt: skip
    return of_step, of_images[:3]


@triton.jit(do_not_specialize=["base", "start", "count"])
def _positions(
    trainers, sizes, first, out, base, start, count, TURNS: tl.constexpr, EACH: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Computes a part of one trainer's positions. See `positions` in `engines/work.py`."""
    trainer = tl.program_id(0)
    i = tl.program_id(1) * HELD + tl.arange(0, HELD)
    size = tl.load(sizes + trainer)
    begin = tl.load(first + trainer) if EACH else start.to(tl.int64)
    place = begin + i
    key = fold(fold(base.to(tl.int64), tl.load(trainers + trainer)), place // size)
    image = place % size
    for turn in range(TURNS):
        key_of_turn = fold(key, turn)
        mirror = below(key_of_turn, size) - image
        mirror = tl.where(mirror < 0, mirror + size, mirror)
        swap = fold(key_of_turn, tl.maximum(image, mirror)) < 0
        image = tl.where(swap, mirror, image)
    tl.store(out + trainer.to(tl.int64) * count + i, image, mask=i < count)


def positions(
    base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int, turns: int
) -> Tensor:
    """Returns the same as `positions` in `engines/work.py`, which explains the arguments. The shuffle makes
    `turns` passes."""
    out = trainers.new_empty(len(trainers), count)
    if not out.numel():
        return out
    each, start = (first.contiguous(), 0) if isinstance(first, Tensor) else (None, first)
    launch(
        _positions, (len(trainers), triton.cdiv(count, HELD)),
        trainers.contiguous(), sizes.contiguous(), out if each is None else each, out,
        base, start, count, turns, each is not None, HELD, num_warps=4,
    )  # fmt: skip
    return out
