"""Triton kernels (GPU code) for batch normalisation of n models, with addition of a tensor and activation,
forward and backward.

Images are [n · B, H, W, C]; parameters and statistics are [n, C]. A sum over a model's pixels is computed in
parts. The number of parts depends only on the shapes, and the parts are added in a fixed order. So the result
has the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels.launching import launch

PROGRAMS = 1056
"""How many Triton programs (blocks of GPU threads) keep a large GPU busy: eight for each of its 132
multiprocessors."""
TOGETHER, MANY = 32, 128
"""How many partial sums a Triton program loads and adds at a time: those of `_moments`, and those of a
convolution, which are more."""
LARGEST = 1e4
"""A running mean that is not below this cannot be used as the level of sums: the sums would be inaccurate.
Noise or an attacker can make it so large."""
HELD = 4096
"""The number of values in a tile (pixels times channels), which a Triton program loads at a time."""


class Fixed(NamedTuple):
    """How the images of n models are normalised with given statistics, and activated. The tensors are [n, C]
    each, for n models and C channels."""

    mean: Tensor
    var: Tensor
    """The variance. A negative one counts as 0."""
    weight: Tensor
    bias: Tensor
    eps: float
    slope: float
    """The activation is a leaky ReLU with this negative slope."""


@triton.jit(do_not_specialize=["rows", "chunk"])
def _moments(x, out, rows, chunk, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Writes the sums from which the mean and variance of each channel are computed, for one part of the
    pixels in a model's batch. These are the sums of d and of d², where d is a pixel's value minus the value
    of the batch's first pixel. Subtracting it keeps the variance accurate if the mean is large."""
    model, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    x += model * rows * C
    level = tl.load(x + c).to(tl.float32)[None, :]
    total = tl.zeros((BR, BC), dtype=tl.float32)
    squares = tl.zeros((BR, BC), dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, rows)
    for start in tl.range(part * chunk, end, BR, num_stages=3):
        r = start + tl.arange(0, BR)
        inside = (r < end)[:, None]
        tile = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        tile = tl.where(inside, tile - level, 0.0)
        total += tile
        squares += tile * tile
    out += ((model * tl.num_programs(1) + part) * 2) * C + c
    tl.store(out, tl.sum(total, 0))
    tl.store(out + C, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["rows", "parts"])
def _statistics(
    x, sums, mean, var, running_mean, running_var, new_mean, new_var, rows, parts, momentum,
    C: tl.constexpr, GIVEN: tl.constexpr, LARGEST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes the mean and the variance of each channel of a model, computed from the partial sums that
    `_moments` wrote. Also writes the new running mean and variance, as torch's BatchNorm computes them. With
    GIVEN, a convolution wrote the sums, with the running mean as the level instead of the first pixel."""
    model = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    if GIVEN:
        level = tl.load(running_mean + model * C + c)
        level = tl.where(tl.abs(level) < LARGEST, level, 0.0)
    else:
        level = tl.load(x + model * rows * C + c).to(tl.float32)
    one, two = _added(sums, model, c, parts, C, BP, BC)
    one, two = level + one / rows, tl.maximum(two / rows - (one / rows) * (one / rows), 0.0)
    at = model * C + c
    tl.store(mean + at, one)
    tl.store(var + at, two)
    unbiased = two * (rows / tl.maximum(rows - 1, 1))
    before_mean, before_var = tl.load(running_mean + at), tl.load(running_var + at)
    tl.store(new_mean + at, before_mean + momentum * (one - before_mean))
    tl.store(new_var + at, before_var + momentum * (unbiased - before_var))


@triton.jit
def _added(sums, model, c, parts, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Returns two totals for each channel of a model. `sums` has two sums for each channel and each part of
    the pixels; they are added up over all parts. BP parts are loaded and added at a time."""
    one = tl.zeros((BP, BC), dtype=tl.float32)
    two = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)
        place = sums + ((model * parts + p) * 2)[:, None] * C + c[None, :]
        inside = (p < parts)[:, None]
        one += tl.load(place, mask=inside, other=0.0)
        two += tl.load(place + C, mask=inside, other=0.0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def scale_and_shift(mean, var, weight, bias, at, eps):
    """Returns what batch normalisation multiplies the channels at the positions `at` by, and what it then
    adds."""
    spread = tl.sqrt(tl.maximum(tl.load(var + at), 0.0) + eps)
    scale = tl.load(weight + at).to(tl.float32) / spread
    shift = tl.load(bias + at).to(tl.float32) - tl.load(mean + at) * scale
    return scale, shift


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, mean, var, weight, bias, add, y, rows, eps, slope,
    C: tl.constexpr, ADD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = (r < rows)[:, None]
    place = model * rows * C + r[:, None] * C + c[None, :]
    tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        summand = tl.load(add + place, mask=inside, other=0.0).to(tl.float32)
    scale, shift = scale_and_shift(mean, var, weight, bias, model * C + c, eps)
    tile = tile * scale[None, :] + shift[None, :]
    if ADD:
        tile += summand
    tile = tl.where(tile > 0, tile, tile * slope)
    tl.store(y + place, tile.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "chunk"])
def _grad_sums(
    grad, x, y, mean, var, weight, bias, to_add, out, rows, chunk, eps, slope,
    C: tl.constexpr, ADD: tl.constexpr, MASK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes two sums over a part of a model's pixels, for each channel: of the gradient, and of the gradient
    times normalised x. They give the gradients of bias and weight. With ADD, it also writes the gradient of
    the added tensor.

    The activation's gradient needs the sign of its input. MASK says where this sign comes from: 0 means not
    needed, 1 means computed again, and 2 means read from the output y.
    """
    model, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    level = tl.load(mean + model * C + c)[None, :]
    even = (1 / tl.sqrt(tl.load(var + model * C + c) + eps))[None, :]
    w = tl.load(weight + model * C + c).to(tl.float32)[None, :]
    shift = tl.load(bias + model * C + c).to(tl.float32)[None, :]
    alone = tl.zeros((BR, BC), dtype=tl.float32)
    both = tl.zeros((BR, BC), dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, rows)
    for start in tl.range(part * chunk, end, BR, num_stages=3):
        r = start + tl.arange(0, BR)
        inside = (r < end)[:, None]
        place = model * rows * C + r[:, None] * C + c[None, :]
        tile = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - level) * even
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if MASK == 1:
            g = tl.where(tile * w + shift > 0, g, g * slope)
        if MASK == 2:
            g = tl.where(tl.load(y + place, mask=inside, other=0.0).to(tl.float32) > 0, g, g * slope)
        if ADD:
            tl.store(to_add + place, g.to(to_add.dtype.element_ty), mask=inside)
        alone += g
        both += g * tile
    out += ((model * tl.num_programs(1) + part) * 2) * C + c
    tl.store(out, tl.sum(alone, 0))
    tl.store(out + C, tl.sum(both, 0))


@triton.jit(do_not_specialize=["parts"])
def _sums(sums, totals, to_bias, to_weight, parts, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Writes the gradients of bias and weight, and the same numbers as float32 to `totals` [2, n, C]."""
    model, every = tl.program_id(1).to(tl.int64), tl.num_programs(1) * C
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    one, two = _added(sums, model, c, parts, C, BP, BC)
    at = model * C + c
    tl.store(totals + at, one)
    tl.store(totals + every + at, two)
    tl.store(to_bias + at, one.to(to_bias.dtype.element_ty))
    tl.store(to_weight + at, two.to(to_weight.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, x, mean, var, weight, bias, totals, add, to_x, rows, eps, slope,
    C: tl.constexpr, MASK: tl.constexpr, ADD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = (r < rows)[:, None]
    place = model * rows * C + r[:, None] * C + c[None, :]
    tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    at = model * C + c
    even = 1 / tl.sqrt(tl.load(var + at) + eps)
    w = tl.load(weight + at).to(tl.float32)
    tile = (tile - tl.load(mean + at)[None, :]) * even[None, :]
    if MASK == 1:
        shift = tl.load(bias + at).to(tl.float32)
        g = tl.where(tile * w[None, :] + shift[None, :] > 0, g, g * slope)
    every = tl.num_programs(2) * C
    level, along = tl.load(totals + at) / rows, tl.load(totals + every + at) / rows
    grad_x = (g - level[None, :] - tile * along[None, :]) * (w * even)[None, :]
    if ADD:
        grad_x += tl.load(add + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_x + place, grad_x.to(to_x.dtype.element_ty), mask=inside)


def _wide(channels: int, most: int) -> int:
    """Returns the width of a tile in channels: the largest power of two, up to `most`, that divides the
    number of channels."""
    return min(channels & -channels, most)


def _parts(rows: int, models: int, channels: int, wide: int, tall: int) -> tuple[int, int]:
    """Returns into how many parts a model's `rows` pixels are split for a sum, and the number of pixels in a
    part. There are enough parts to keep the GPU busy. A tile has `tall` pixels and `wide` channels."""
    parts = max(1, min(PROGRAMS // (models * (channels // wide)), triton.cdiv(rows, 4 * tall), 256))
    chunk = triton.cdiv(triton.cdiv(rows, parts), tall) * tall
    return triton.cdiv(rows, chunk), chunk


def moments(x: Tensor, models: int) -> Tensor:
    """Returns two sums for each channel of n models over their images [n · B, H, W, C]: of d and of d², where
    d is a pixel's value minus that of the first pixel. The result is [n, parts, 2, C], because the pixels are
    divided into parts."""
    channels = x.shape[3]
    rows, wide = x.numel() // (models * channels), _wide(channels, 64)
    tall = HELD // wide
    parts, chunk = _parts(rows, models, channels, wide, tall)
    sums = x.new_empty(models, parts, 2, channels, dtype=torch.float32)
    launch(
        _moments, (channels // wide, parts, models),
        x, sums, rows, chunk, channels, tall, wide, num_warps=4,
    )  # fmt: skip
    return sums


def statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, sums: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the mean and the variance of each channel of n models over their images [n · B, H, W, C], and
    the new running mean and variance, [n, C] each. `momentum` is the weight of the images in these.

    `sums` are those of `moments`, but with the running mean in place of the first pixel. A convolution
    computes them (`triton_tma.correlate`). If they are None, they are computed here.
    """
    models, channels = running_mean.shape
    rows, narrow = x.numel() // (models * channels), _wide(channels, 16)
    given = sums is not None
    sums = moments(x, models) if sums is None else sums
    mean, var, new_mean, new_var = (torch.empty_like(running_mean) for _ in range(4))
    launch(
        _statistics, (channels // narrow, models),
        x, sums, mean, var, running_mean, running_var, new_mean, new_var, rows, sums.shape[1], momentum,
        channels, given, LARGEST, MANY if given else TOGETHER, narrow, num_warps=4,
    )  # fmt: skip
    return mean, var, new_mean, new_var


def forward(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None,
    eps: float, slope: float,
) -> Tensor:  # fmt: skip
    """Returns activation(norm(x) + add) for images x [n · B, H, W, C], given the mean and variance of each
    model's channels, [n, C]. A negative variance counts as 0. The activation is a leaky ReLU with this
    negative slope."""
    models, channels = weight.shape
    rows, wide = x.numel() // weight.numel(), _wide(channels, 64)
    tall = HELD // wide
    y = torch.empty_like(x)
    launch(
        _forward, (triton.cdiv(rows, tall), channels // wide, models),
        x, mean, var, weight, bias, x if add is None else add, y, rows, eps, slope,
        channels, add is not None, tall, wide, num_warps=4,
    )  # fmt: skip
    return y


def backward(
    grad: Tensor, x: Tensor, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor,
    eps: float, slope: float, added: bool, passed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, of the added tensor (empty unless `added`), and of weight and bias, [n, C]
    each. `grad` is the gradient of the output y. If `passed` is not None, it is added to the gradient of
    x."""
    models, channels = weight.shape
    rows, wide = x.numel() // weight.numel(), _wide(channels, 64)
    tall = HELD // wide // 2
    parts, chunk = _parts(rows, models, channels, wide, tall)
    to_x = torch.empty_like(x)
    to_add = torch.empty_like(x) if added else x.new_empty(0)
    sums = x.new_empty(models, parts, 2, channels, dtype=torch.float32)
    totals = x.new_empty(2, models, channels, dtype=torch.float32)
    to_weight, to_bias = torch.empty_like(weight), torch.empty_like(bias)
    # the sign of the activation's input is (0) not needed, (1) computed again, or (2) read from y
    mask = 0 if slope == 1 else 2 if added else 1
    launch(
        _grad_sums, (channels // wide, parts, models),
        grad, x, y, mean, var, weight, bias, to_add, sums, rows, chunk, eps, slope,
        channels, added, mask, tall, wide, num_warps=4,
    )  # fmt: skip
    narrow = _wide(channels, 16)
    launch(
        _sums, (channels // narrow, models),
        sums, totals, to_bias, to_weight, parts, channels, TOGETHER, narrow, num_warps=4,
    )  # fmt: skip
    tall = HELD // wide
    launch(
        _backward, (triton.cdiv(rows, tall), channels // wide, models),
        to_add if added else grad, x, mean, var, weight, bias, totals, x if passed is None else passed, to_x,
        rows, eps, slope, channels, mask % 2, passed is not None, tall, wide, num_warps=4,
    )  # fmt: skip
    return to_x, to_add, to_weight, to_bias
