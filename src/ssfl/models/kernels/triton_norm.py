"""Triton kernels (GPU code) for group normalisation, addition of a tensor and activation of n models.

One kernel does all three. A Triton program usually holds one or more whole groups of channels of one image,
so that each value is read only once. For some large images it holds only a part at a time, and reads values
more than once (see `_tiles`). Images are [n · B, H, W, C], parameters [n, C].
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels.launching import launch

LARGE = 1024
"""An image with at least this many pixels is called large, and uses other tile sizes. The number of pixels is
first rounded up to a power of two."""
MANY = 512
"""How many Triton programs (blocks of GPU threads) keep a large GPU busy. Large images are read in small
tiles only if there are at least this many programs."""


@triton.jit
def _over_group(values, BC: tl.constexpr, MEMBERS: tl.constexpr):
    """Returns for each of BC channels the sum over the whole group that the channel belongs to, [BC].
    `values` [BC] are the sums of the single channels, and a group has MEMBERS channels."""
    grouped = tl.sum(tl.reshape(values, (BC // MEMBERS, MEMBERS)), 1)
    return tl.reshape(tl.broadcast_to(grouped[:, None], (BC // MEMBERS, MEMBERS)), (BC,))


@triton.jit
def _normalised(x, real, pixels, eps, BC: tl.constexpr, MEMBERS: tl.constexpr):
    """Returns a tile [pixels, channels], normalised to mean 0 and variance 1 in each group, and the inverse
    standard deviation of each channel's group. `real` says which pixels of the tile lie inside the image."""
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
    grad, x, y, weight, bias, to_x, to_add, to_weight, to_bias, images, pixels, eps, slope,
    C: tl.constexpr, MEMBERS: tl.constexpr, ADD: tl.constexpr, MASK: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of x, of the added tensor, and of weight and bias, for one tile of an image.

    The activation's gradient needs the sign of its input. MASK says where this sign comes from: 0 means not
    needed, 1 means computed again, and 2 means read from the output y.
    """
    image = tl.program_id(0).to(tl.int64)
    model = image // images
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BP)
    real = (p < pixels)[:, None]
    place = image * pixels * C + p[:, None] * C + c[None, :]
    tile = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
    w = tl.load(weight + model * C + c).to(tl.float32)
    if MASK == 2:
        g = tl.where(tl.load(y + place, mask=real, other=0.0).to(tl.float32) > 0, g, g * slope)
    tile, scale = _normalised(tile, real, pixels, eps, BC, MEMBERS)
    if MASK == 1:
        shift = tl.load(bias + model * C + c).to(tl.float32)
        g = tl.where(tile * w[None, :] + shift[None, :] > 0, g, g * slope)
    if ADD:
        tl.store(to_add + place, g.to(to_add.dtype.element_ty), mask=real)
    both = tl.sum(g * tile, 0)
    alone = tl.sum(g, 0)
    tl.store(to_weight + image * C + c, both)
    tl.store(to_bias + image * C + c, alone)
    count = pixels * MEMBERS
    along = _over_group(both * w, BC, MEMBERS) / count
    level = _over_group(alone * w, BC, MEMBERS) / count
    grad_x = (g * w[None, :] - level[None, :] - tile * along[None, :]) * scale[None, :]
    tl.store(to_x + place, grad_x.to(to_x.dtype.element_ty), mask=real)


@triton.jit
def _forward_twice(
    x, weight, bias, add, y, images, pixels, eps, slope,
    C: tl.constexpr, MEMBERS: tl.constexpr, ADD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Does the same as `_forward` for large images, of which a program holds only a part at a time. It reads
    an image once for the statistics and once more, from the GPU's cache, to normalise it."""
    image = tl.program_id(0).to(tl.int64)
    model = image // images
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BP)
    x += image * pixels * C + c[None, :]
    mean, scale = _statistics(x, p, c, pixels, eps, C, MEMBERS, BP, BC)
    scale *= tl.load(weight + model * C + c).to(tl.float32)
    shift = tl.load(bias + model * C + c).to(tl.float32) - mean * scale
    add += image * pixels * C + c[None, :]
    y += image * pixels * C + c[None, :]
    for start in range(0, pixels, BP):
        place = (start + p)[:, None] * C
        real = (start + p < pixels)[:, None]
        tile = tl.load(x + place, mask=real, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if ADD:
            tile += tl.load(add + place, mask=real, other=0.0).to(tl.float32)
        tile = tl.where(tile > 0, tile, tile * slope)
        tl.store(y + place, tile.to(y.dtype.element_ty), mask=real)


@triton.jit
def _statistics(
    x, p, c, pixels, eps, C: tl.constexpr, MEMBERS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Returns the mean and the inverse standard deviation of each channel's group, [BC] each. First, the
    group's mean at the first pixel is subtracted from all values. This keeps the variance accurate if the
    mean is large."""
    first = _over_group(tl.sum(tl.load(x).to(tl.float32), 0), BC, MEMBERS) / MEMBERS
    total = tl.zeros((BP, BC), dtype=tl.float32)
    squares = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, pixels, BP):
        real = (start + p < pixels)[:, None]
        tile = tl.load(x + (start + p)[:, None] * C, mask=real, other=0.0).to(tl.float32)
        tile = tl.where(real, tile - first[None, :], 0.0)
        total += tile
        squares += tile * tile
    count = pixels * MEMBERS
    one = _over_group(tl.sum(total, 0), BC, MEMBERS) / count
    two = _over_group(tl.sum(squares, 0), BC, MEMBERS) / count
    return first + one, 1 / tl.sqrt(tl.maximum(two - one * one, 0.0) + eps)


@triton.jit
def _backward_twice(
    grad, x, y, weight, bias, to_x, to_add, to_weight, to_bias, images, pixels, eps, slope,
    C: tl.constexpr, MEMBERS: tl.constexpr, ADD: tl.constexpr, MASK: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Does the same as `_backward` for large images, of which a program holds only a part at a time. It reads
    an image several times, but only the first time from main GPU memory."""
    image = tl.program_id(0).to(tl.int64)
    model = image // images
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BP)
    here = image * pixels * C + c[None, :]
    x += here
    grad += here
    y += here
    to_x += here
    to_add += here
    mean, scale = _statistics(x, p, c, pixels, eps, C, MEMBERS, BP, BC)
    w = tl.load(weight + model * C + c).to(tl.float32)
    shift = tl.load(bias + model * C + c).to(tl.float32)
    both = tl.zeros((BP, BC), dtype=tl.float32)
    alone = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, pixels, BP):
        place = (start + p)[:, None] * C
        real = (start + p < pixels)[:, None]
        tile = (tl.load(x + place, mask=real, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        g = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
        if MASK == 2:
            g = tl.where(tl.load(y + place, mask=real, other=0.0).to(tl.float32) > 0, g, g * slope)
        if MASK == 1:
            g = tl.where(tile * w[None, :] + shift[None, :] > 0, g, g * slope)
        both += g * tile
        alone += g
    both, alone = tl.sum(both, 0), tl.sum(alone, 0)
    tl.store(to_weight + image * C + c, both)
    tl.store(to_bias + image * C + c, alone)
    count = pixels * MEMBERS
    along = _over_group(both * w, BC, MEMBERS) / count
    level = _over_group(alone * w, BC, MEMBERS) / count
    for start in range(0, pixels, BP):
        place = (start + p)[:, None] * C
        real = (start + p < pixels)[:, None]
        tile = (tl.load(x + place, mask=real, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        g = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
        if MASK == 2:
            g = tl.where(tl.load(y + place, mask=real, other=0.0).to(tl.float32) > 0, g, g * slope)
        if MASK == 1:
            g = tl.where(tile * w[None, :] + shift[None, :] > 0, g, g * slope)
        if ADD:
            tl.store(to_add + place, g.to(to_add.dtype.element_ty), mask=real)
        grad_x = (g * w[None, :] - level[None, :] - tile * along[None, :]) * scale[None, :]
        tl.store(to_x + place, grad_x.to(to_x.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["images"])
def _over_images(
    scale, shift, to_weight, to_bias, images, C: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr
):
    """Writes the gradients of a model's weight and bias: the sums of `scale` and `shift` [n · B, C] over its
    images."""
    model = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    one = tl.zeros((BI, BC), dtype=tl.float32)
    two = tl.zeros((BI, BC), dtype=tl.float32)
    for start in range(0, images, BI):
        i = start + tl.arange(0, BI)
        place = (model * images + i)[:, None] * C + c[None, :]
        inside = (i < images)[:, None]
        one += tl.load(scale + place, mask=inside, other=0.0)
        two += tl.load(shift + place, mask=inside, other=0.0)
    tl.store(to_weight + model * C + c, tl.sum(one, 0).to(to_weight.dtype.element_ty))
    tl.store(to_bias + model * C + c, tl.sum(two, 0).to(to_bias.dtype.element_ty))


def _tiles(shape: torch.Size, groups: int, added: bool, back: bool) -> tuple[int, int, int]:
    """Returns the size of the tile that a Triton program holds: its pixels, its channels, and its number of
    warps.

    If a tile has fewer pixels than the image, the image is read more than once. `added` says whether a tensor
    is added, and `back` whether the gradient is computed. The sizes were chosen by measurements,
    results/kernels-h200.json.
    """
    images, height, width, channels = shape
    tall, members = triton.next_power_of_2(height * width), channels // groups
    wide = max(members, min(channels, 64))
    if tall >= LARGE and (added or back) and wide <= 64 and images * channels // wide >= MANY:
        return 2048 // wide, wide, 4
    if tall >= LARGE:
        held, each = (16384, 32 if added else 64) if back else (32768, 32)
    else:
        held = 8192 if tall > 128 else 4096 if tall > 32 else 1024
        each = 32 if added and tall > 128 else 64
    wide = max(members, min(channels, held // tall, 64))
    return tall, wide, max(1, min(16, tall * wide // (32 * each)))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, groups: int, eps: float, slope: float,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Returns activation(group_norm(x) + add) for images x [n · B, H, W, C]. The activation is a leaky ReLU
    with this negative slope. `tile` overrides the result of `_tiles`, for measurements."""
    pixels, channels = x.shape[1] * x.shape[2], x.shape[3]
    tall, wide, warps = _tiles(x.shape, groups, add is not None, False)
    tall, wide, warps = tile or (tall, wide, warps)
    y = torch.empty_like(x)
    launch(
        _forward if tall >= pixels else _forward_twice, (len(x), channels // wide),
        x, weight, bias, x if add is None else add, y, len(x) // len(weight), pixels, eps, slope,
        channels, channels // groups, add is not None, tall, wide, num_warps=warps,
    )  # fmt: skip
    return y


def backward(
    grad: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, slope: float,
    added: bool, tile: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, of the added tensor (empty unless `added`), and of weight and bias, [n, C]
    each. `grad` is the gradient of the output y. `tile` overrides the result of `_tiles`, for
    measurements."""
    pixels, channels = x.shape[1] * x.shape[2], x.shape[3]
    tall, wide, warps = _tiles(x.shape, groups, added, True)
    tall, wide, warps = tile or (tall, wide, warps)
    to_x = torch.empty_like(x)
    to_add = torch.empty_like(x) if added else x.new_empty(0)
    scale, shift = (x.new_empty(len(x), channels, dtype=torch.float32) for _ in range(2))
    mask = 0 if slope == 1 else 2 if added else 1
    launch(
        _backward if tall >= pixels else _backward_twice, (len(x), channels // wide),
        grad, x, y, weight, bias, to_x, to_add, scale, shift, len(x) // len(weight), pixels, eps, slope,
        channels, channels // groups, added, mask, tall, wide, num_warps=warps,
    )  # fmt: skip
    to_weight, to_bias = torch.empty_like(weight), torch.empty_like(bias)
    narrow = min(channels, 16)
    launch(
        _over_images, (channels // narrow, len(weight)),
        scale, shift, to_weight, to_bias, len(x) // len(weight), channels, 64, narrow, num_warps=4,
    )  # fmt: skip
    return to_x, to_add, to_weight, to_bias
