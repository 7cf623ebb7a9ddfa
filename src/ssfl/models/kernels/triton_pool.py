"""Triton kernels (GPU code) for a convolution with max pooling, and for its gradient, on Hopper GPUs.

The convolution's output is four times as large as the pooled one. It is pooled in registers, so it is never
written to memory. All tensors are contiguous.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels import triton_tma
from ssfl.models.kernels.launching import launch

TILE = triton_tma.Tile(256, 64, 32, 4, 4)
"""The tile of a program, as for this convolution without pooling (results/kernels-h200.json)."""
PIXELS = 16
"""How many pooled pixels `_spread` handles at a time."""
NOBODY = 4
"""Stands for the position of the largest pixel (0 to 3) if ReLU or dropout made the output zero. Then no
pixel gets a gradient."""


@triton.jit(do_not_specialize=["images", "H", "W"])
def _pooled(
    x, w, bias, keep, y, largest, images, H, W,
    k: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr, NOBODY: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes ReLU(keep · max pooling of (convolution + bias)). An image has H × W pixels after pooling, and
    twice as many in each direction before it. Also writes which of the four pixels was the largest. With
    KEEP, a channel of an image is multiplied by its number in `keep`."""
    BM: tl.constexpr = BI * BH * BW
    HIGH: tl.constexpr = BH // 2
    WIDE: tl.constexpr = BW // 2
    DEEP: tl.constexpr = C // BK
    model = tl.program_id(2)
    across, down = tl.cdiv(W, WIDE), tl.cdiv(H, HIGH)
    column = tl.program_id(0) % across
    row = tl.program_id(0) // across % down
    image = tl.program_id(0) // (across * down) * BI
    first = model * images + image
    o = tl.program_id(1) * BN
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for i in range(k * k * DEEP):
        tap = i // DEEP
        c = i % DEEP * BK
        a = x.load([first, row * BH + tap // k, 0, column * BW + tap % k, c])
        b = w.load([model * OUT + o, tap * C + c])
        total = tl.dot(b, tl.reshape(a, (BM, BK)).T, total)
    left, right = tl.split(tl.reshape(total, (BN, BI * HIGH, 2, WIDE, 2)))
    left, below_left = tl.split(tl.permute(left, (0, 1, 3, 2)))
    right, below_right = tl.split(tl.permute(right, (0, 1, 3, 2)))
    above, below = tl.maximum(left, right), tl.maximum(below_left, below_right)
    at = tl.where(below > above, tl.where(below_right > below_left, 3, 2), tl.where(right > left, 1, 0))
    best = tl.reshape(tl.maximum(above, below), (BN, BM // 4))
    at = tl.reshape(at, (BN, BM // 4))
    m = tl.arange(0, BM // 4)
    image += m // (HIGH * WIDE)
    row = row * HIGH + m // WIDE % HIGH
    column = column * WIDE + m % WIDE
    inside = ((image < images) & (row < H) & (column < W))[None, :]
    o += tl.arange(0, BN)
    best += tl.load(bias + model * OUT + o).to(tl.float32)[:, None]
    best = best.to(y.dtype.element_ty).to(tl.float32)  # rounded as without this kernel
    image = model.to(tl.int64) * images + image
    if KEEP:
        best *= tl.load(keep + image[None, :] * OUT + o[:, None], mask=inside, other=0.0).to(tl.float32)
    at = tl.where(best > 0, at, NOBODY)
    best = tl.where(best > 0, best, 0.0).to(y.dtype.element_ty)
    pixel = row * W + column
    tl.store(y + (image[None, :] * OUT + o[:, None]) * (H * W) + pixel[None, :], best, mask=inside)
    place = (image * (H * W) + pixel)[None, :] * OUT + o[:, None]
    tl.store(largest + place, at.to(tl.uint8), mask=inside)


@triton.jit
def _spread(
    grad, largest, keep, out, to_bias, pixels, W,
    OUT: tl.constexpr, KEEP: tl.constexpr, NOBODY: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the convolution's output: of each four pixels, the largest gets the gradient of
    the pooled one, and the others get 0. Also writes its sum over the image, the bias's gradient."""
    image = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BC + tl.arange(0, BC)
    if KEEP:
        factor = tl.load(keep + image * OUT + o).to(tl.float32)[None, :]
    total = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, pixels, BP):
        p = start + tl.arange(0, BP)
        inside = (p < pixels)[:, None]
        g = tl.load(grad + (image * OUT + o)[None, :] * pixels + p[:, None], mask=inside, other=0.0)
        g = g.to(tl.float32)
        at = tl.load(largest + (image * pixels + p)[:, None] * OUT + o[None, :], mask=inside, other=NOBODY)
        if KEEP:
            g = (g * factor).to(grad.dtype.element_ty).to(tl.float32)  # rounded as without this kernel
        total += tl.where(at < NOBODY, g, 0.0)
        place = image * pixels * 4 + p // W * 4 * W + p % W * 2
        for i in tl.static_range(4):
            here = (place + (i // 2 * 2 * W + i % 2))[:, None] * OUT + o[None, :]
            tl.store(out + here, tl.where(at == i, g, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(to_bias + image * OUT + o, tl.sum(total, 0))


def pooled(x: Tensor, w: Tensor, bias: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns ReLU(keep · max pooling of (convolution + bias)) of n models, [n · B, O, H, W], and the
    position (0 to 3) of the largest of each four pixels, [n · B, H, W, O]. Images x are [n · B, 2H + k - 1,
    2W + k - 1, C], filters [n, O, k, k, C] and biases [n, O]. `keep` [n · B, O] has a factor for each channel
    of each image; None means no factors."""
    models, outputs, kernel, _, channels = w.shape
    height, width = (x.shape[1] - kernel + 1) // 2, (x.shape[2] - kernel + 1) // 2
    images = len(x) // models
    y = x.new_empty(len(x), outputs, height, width)
    largest = torch.empty(len(x), height, width, outputs, dtype=torch.uint8, device=x.device)
    deep = min(channels & -channels, TILE.channels)
    box = triton_tma.box_shape(TILE.pixels, 2 * height, 2 * width)
    down, across = triton.cdiv(2 * height, box[1]), triton.cdiv(2 * width, box[2])
    launch(
        _pooled, (triton.cdiv(images, box[0]) * down * across, outputs // TILE.outputs, models),
        triton_tma.pixel_boxes(x, 1, box, deep),
        triton_tma.matrix_tiles(w, models * outputs, [TILE.outputs, deep]),
        bias.contiguous(), bias if keep is None else keep.contiguous(), y, largest, images, height, width,
        kernel, channels, outputs, keep is not None, NOBODY, *box, TILE.outputs, deep,
        num_warps=TILE.warps, num_stages=TILE.stages,
    )  # fmt: skip
    return y, largest


def spread(grad: Tensor, largest: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the convolution's output, [n · B, 2H, 2W, O], and its sum over each image's
    pixels, [n · B, O]. `grad` [n · B, O, H, W] is the gradient of the pooled output; `largest` and `keep` are
    as in `pooled`."""
    _, height, width, outputs = largest.shape
    out = grad.new_empty(len(grad), 2 * height, 2 * width, outputs)
    to_bias = grad.new_empty(len(grad), outputs, dtype=torch.float32)
    wide = min(outputs & -outputs, 64)
    launch(
        _spread, (len(grad), outputs // wide),
        grad, largest, grad if keep is None else keep.contiguous(), out, to_bias, height * width, width,
        outputs, keep is not None, NOBODY, PIXELS, wide, num_warps=4,
    )  # fmt: skip
    return out, to_bias
