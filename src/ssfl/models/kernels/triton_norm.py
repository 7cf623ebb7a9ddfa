"""Triton kernels: group normalisation, a sum and an activation in one pass over the images.

A program takes some channels (whole groups) of one image and holds them all, so that an image is read
once, whatever is computed from it. Images are [n · B, H, W, C], parameters [n, C].
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGE = 1024
"""Pixels from which a program holds more of an image."""


@triton.jit
def _over_group(values, BC: tl.constexpr, MEMBERS: tl.constexpr):
    """[BC] sums per channel to sums per group, for each of its channels."""
    grouped = tl.sum(tl.reshape(values, (BC // MEMBERS, MEMBERS)), 1)
    return tl.reshape(tl.broadcast_to(grouped[:, None], (BC // MEMBERS, MEMBERS)), (BC,))


@triton.jit
def _normalised(x, real, pixels, eps, BC: tl.constexpr, MEMBERS: tl.constexpr):
    """The tile [pixels, channels] with mean 0 and variance 1 per group, and one over its deviation."""
    count = pixels * MEMBERS
    mean = _over_group(tl.sum(x, 0), BC, MEMBERS) / count
    x = tl.where(real, x - mean[None, :], 0.0)
    scale = 1 / tl.sqrt(_over_group(tl.sum(x * x, 0), BC, MEMBERS) / count + eps)
    return x * scale[None, :], scale


@triton.jit
def _forward(
    x, weight, bias, add, y, images, pixels, eps, slope,
    C: tl.constexpr, MEMBERS: tl.constexpr, ADD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    model = image // images
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BP)
    real = (p < pixels)[:, None]
    place = image * pixels * C + p[:, None] * C + c[None, :]
    tile = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    tile, _ = _normalised(tile, real, pixels, eps, BC, MEMBERS)
    scale = tl.load(weight + model * C + c).to(tl.float32)
    shift = tl.load(bias + model * C + c).to(tl.float32)
    tile = tile * scale[None, :] + shift[None, :]
    if ADD:
        tile += tl.load(add + place, mask=real, other=0.0).to(tl.float32)
    tile = tl.where(tile > 0, tile, tile * slope)
    tl.store(y + place, tile.to(y.dtype.element_ty), mask=real)


@triton.jit
def _backward(
    grad, x, y, weight, to_x, to_add, to_weight, to_bias, images, pixels, eps, slope,
    C: tl.constexpr, MEMBERS: tl.constexpr, ADD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    model = image // images
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BP)
    real = (p < pixels)[:, None]
    place = image * pixels * C + p[:, None] * C + c[None, :]
    tile = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    tile, scale = _normalised(tile, real, pixels, eps, BC, MEMBERS)
    g = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
    active = tl.load(y + place, mask=real, other=0.0).to(tl.float32) > 0
    g = tl.where(active, g, g * slope)
    if ADD:
        tl.store(to_add + place, g.to(to_add.dtype.element_ty), mask=real)
    both = tl.sum(g * tile, 0)
    alone = tl.sum(g, 0)
    tl.store(to_weight + image * C + c, both)
    tl.store(to_bias + image * C + c, alone)
    w = tl.load(weight + model * C + c).to(tl.float32)
    count = pixels * MEMBERS
    along = _over_group(both * w, BC, MEMBERS) / count
    level = _over_group(alone * w, BC, MEMBERS) / count
    found = (g * w[None, :] - level[None, :] - tile * along[None, :]) * scale[None, :]
    tl.store(to_x + place, found.to(to_x.dtype.element_ty), mask=real)


def _tiles(pixels: int, channels: int, groups: int, held: int) -> tuple[int, int, int]:
    """Pixels and channels of a tile that holds about so many numbers, and warps. Measured on an H200."""
    tall = triton.next_power_of_2(pixels)
    held *= 2 if tall >= LARGE else 1
    wide = min(channels, max(channels // groups, held // tall))
    return tall, wide, max(1, min(16, tall * wide // 1024))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, groups: int, eps: float, slope: float
) -> Tensor:
    """The normalised, summed and activated images."""
    pixels, channels = x.shape[1] * x.shape[2], x.shape[3]
    tall, wide, warps = _tiles(pixels, channels, groups, 16384)
    y = torch.empty_like(x)
    _forward[(len(x), channels // wide)](
        x, weight, bias, x if add is None else add, y, len(x) // len(weight), pixels, eps, slope,
        channels, channels // groups, add is not None, tall, wide, num_warps=warps,
    )  # fmt: skip
    return y


def backward(
    grad: Tensor, x: Tensor, y: Tensor, weight: Tensor, groups: int, eps: float, slope: float, added: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for x, for what was added (if so), and for weight and bias, image by image."""
    pixels, channels = x.shape[1] * x.shape[2], x.shape[3]
    tall, wide, warps = _tiles(pixels, channels, groups, 8192)
    to_x = torch.empty_like(x)
    to_add = torch.empty_like(x) if added else x.new_empty(0)
    to_weight, to_bias = (x.new_empty(len(x), channels, dtype=torch.float32) for _ in range(2))
    _backward[(len(x), channels // wide)](
        grad, x, y, weight, to_x, to_add, to_weight, to_bias, len(x) // len(weight), pixels, eps, slope,
        channels, channels // groups, added, tall, wide, num_warps=warps,
    )  # fmt: skip
    return to_x, to_add, to_weight, to_bias
