"""Triton kernels (GPU code) for the convolutions of n models on Hopper GPUs. They compute the same products
as `triton_conv.py`, but tiles are loaded by the GPU's copy engine (TMA), which is faster.

A tile of pixels is a box of images, rows and columns. The copy engine computes the addresses, and loads
pixels outside an image as zeros. So only storing the results needs a mask. With stride s, images are viewed
as [n · B, H / s, s, W / s, s · C]. Then pixels with the same position modulo s (a phase) also form a box. The
products are [outputs, pixels], because the operand that is loaded as a box must be the second one. A first
operand would pass through registers.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.errors import warn_user
from ssfl.models.kernels import triton_batch
from ssfl.models.kernels.launching import launch
from ssfl.models.kernels.triton_batch import scale_and_shift
from ssfl.models.kernels.triton_sum import totals

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton is too old
    TensorDescriptor = None

PROGRAMS = 132
"""How many Triton programs (blocks of GPU threads) keep the GPU busy: one for each multiprocessor."""
MOST_PARTS = 8
"""The largest number of parts into which these kernels split a sum over pixels. If these are too few to keep
the GPU busy, `triton_conv.py` is used instead. In such cases these kernels were hardly faster."""
NARROW = 64
"""The smallest number of outputs in a tile that the tensor cores can compute."""
FAR = 8
"""Keeps positions positive when they are divided by the stride: this many strides are added before the
division and subtracted after it."""


@triton.jit(do_not_specialize=["images", "H", "W"])
def _correlate(
    x, w, bias, add, level, y, sums, mean, var, gain, shift, images, H, W, y_model, eps, slope,
    stride: tl.constexpr, up: tl.constexpr, pad: tl.constexpr, k: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, FOLD: tl.constexpr, MOMENTS: tl.constexpr, LARGEST: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Writes a convolution, or its gradient with respect to the images. Output y[o, m] is the value of
    channel o at pixel m. It is the sum, over taps (positions in the filter) and channels c, of w · x[pixel m
    moved by the tap, c]. Each image in y has H rows and W columns of pixels.

    In this kernel, C is the number of channels of x, and O that of y. If FLIP is false, x are the images, y
    is the convolution, and w is [n · O, k · k · C]. If FLIP is true, x is the gradient of the convolution's
    output, and y is the gradient of the images. Then w is [n · C, k · k · O], and `up` is the stride of the
    forward pass. Pixels of the same phase (position modulo `up`) are computed together.

    With FOLD, a pixel of y stands for FOLD neighbouring columns, and w are widened filters
    (`triton_fold.py`). With ADD, `add` is added to the result.

    With NORM, y is the activation of the result after batch normalisation with `mean` and `var` [n, OUT] and
    the parameters `gain` and `shift`. `add` is then added between normalisation and activation.

    With MOMENTS, two sums for each channel over the pixels of this tile are written to `sums`: of d and of
    d², where d is the value of y minus the channel's `level`. Batch normalisation needs them.
    """
    STEP: tl.constexpr = stride * FOLD  # between the columns of x that neighbouring pixels of y begin at
    BM: tl.constexpr = BI * BH * BW
    DEEP: tl.constexpr = C // BK
    model = tl.program_id(2) // (up * up)
    below, beside = tl.program_id(2) % (up * up) // up, tl.program_id(2) % up
    rows, columns = (H + up - 1 - below) // up, (W + up - 1 - beside) // up
    across, down = tl.cdiv((W + up - 1) // up, BW), tl.cdiv((H + up - 1) // up, BH)
    column = tl.program_id(0) % across * BW
    row = tl.program_id(0) // across % down * BH
    image = tl.program_id(0) // (across * down) * BI
    first = model * images + image
    o = tl.program_id(1) * BN
    if FLIP:  # the first tap in each direction that meets a pixel, and how many taps do
        dy, dx = (below + pad) % up, (beside + pad) % up
        wide = (k - dx + up - 1) // up
        taps = (k - dy + up - 1) // up * wide
        top, left = row + (below + pad - dy) // up, column + (beside + pad - dx) // up
    else:
        wide = k + FOLD - 1
        taps = k * wide
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for i in range(taps * DEEP):
        tap = i // DEEP
        c = i % DEEP * BK
        if FLIP:
            at = (dy + tap // wide * up) * k + dx + tap % wide * up
            a = x.load([first, top - tap // wide, 0, left - tap % wide, c])
            b = w.load([model * C + c, at * OUT + o]).T
        else:
            h, v = tap // wide + (FAR * stride - pad), tap % wide + (FAR * STEP - pad)
            high, far = row + h // stride - FAR, column + v // STEP - FAR
            a = x.load([first, high, h % stride, far, v % STEP * C + c])
            b = w.load([model * OUT + o, tap * C + c])
        total = tl.dot(b, tl.reshape(a, (BM, BK)).T, total)
    o += tl.arange(0, BN)
    if BIAS:
        total += tl.load(bias + model * OUT + o).to(tl.float32)[:, None]
    if NORM:
        channel = model * (OUT // FOLD) + o % (OUT // FOLD)
        factor, offset = scale_and_shift(mean, var, gain, shift, channel, eps)
        total = total * factor[:, None] + offset[:, None]
    m = tl.arange(0, BM)
    image += m // (BH * BW)
    row += m // BW % BH
    column += m % BW
    inside = (image < images) & (row < rows) & (column < columns)
    place = (image * H + row * up + below) * W + column * up + beside
    at = model.to(tl.int64) * y_model + place[None, :] * OUT + o[:, None]
    if ADD:
        total += tl.load(add + at, mask=inside[None, :], other=0.0).to(tl.float32)
    if NORM:
        total = tl.where(total > 0, total, total * slope)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=inside[None, :])
    if MOMENTS:
        DEPTH: tl.constexpr = OUT // FOLD
        start = tl.load(level + model * DEPTH + o % DEPTH)
        start = tl.where(tl.abs(start) < LARGEST, start, 0.0)
        d = tl.where(inside[None, :], rounded.to(tl.float32) - start[:, None], 0.0)
        part = (model * tl.num_programs(0) + tl.program_id(0)) * FOLD + o // DEPTH
        sums += part * 2 * DEPTH + o % DEPTH
        tl.store(sums, tl.sum(d, 1))
        tl.store(sums + DEPTH, tl.sum(d * d, 1))


@triton.jit(do_not_specialize=["images", "H", "W", "steps", "chunk"])
def _filters(
    g, x, out, images, H, W, steps, chunk, out_model, out_part,
    stride: tl.constexpr, pad: tl.constexpr, k: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr,
    ROW: tl.constexpr, FLAT: tl.constexpr, FOLD: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Writes the gradient with respect to the filters, summed over a chunk of the pixels m. Output out[o,
    tap, c] is the sum of g[m, o] · x[pixel m moved by the tap, c]. Here g is the gradient of the
    convolution's output, and a tap is a position in the filter.

    With ROW, the three taps in a row of a 3 × 3 filter are computed together, since they use the same values
    of g. With FLAT, g is [pixels, O] and a tile of g is contiguous in memory. With FOLD, a pixel of g stands
    for FOLD neighbouring columns, and out are widened filters (`triton_fold.py`), with four taps in a row.
    """
    STEP: tl.constexpr = stride * FOLD
    WIDE: tl.constexpr = k + FOLD - 1
    BM: tl.constexpr = BI * BH * BW
    DEEP: tl.constexpr = C // BJ
    LINES: tl.constexpr = k if ROW else k * WIDE
    model = tl.program_id(2)
    part = tl.program_id(1)
    c = tl.program_id(0) % DEEP * BJ
    tap = tl.program_id(0) // DEEP % LINES * (WIDE if ROW else 1)
    o = tl.program_id(0) // (DEEP * LINES) * BO
    across, down = tl.cdiv(W, BW), tl.cdiv(H, BH)
    h, v = tap // WIDE + (FAR * stride - pad), tap % WIDE + (FAR * STEP - pad)
    total = tl.zeros((BO, BJ), dtype=tl.float32)
    if ROW:
        second = tl.zeros((BO, BJ), dtype=tl.float32)
        third = tl.zeros((BO, BJ), dtype=tl.float32)
        fourth = tl.zeros((BO, BJ), dtype=tl.float32)
    for t in range(part * chunk, tl.minimum((part + 1) * chunk, steps)):
        column = t % across * BW
        row = t // across % down * BH
        image = model * images + t // (across * down) * BI
        if FLAT:
            a = g.load([model * (images * H * W) + t * BM, o]).T
        else:
            a = tl.reshape(g.load([image, row, 0, column, o]), (BM, BO)).T
        row += h // stride - FAR
        column -= FAR
        b = x.load([image, row, h % stride, column + v // STEP, v % STEP * C + c])
        total = tl.dot(a, tl.reshape(b, (BM, BJ)), total)
        if ROW:
            b = x.load([image, row, h % stride, column + (v + 1) // STEP, (v + 1) % STEP * C + c])
            second = tl.dot(a, tl.reshape(b, (BM, BJ)), second)
            b = x.load([image, row, h % stride, column + (v + 2) // STEP, (v + 2) % STEP * C + c])
            third = tl.dot(a, tl.reshape(b, (BM, BJ)), third)
            if FOLD == 2:
                b = x.load([image, row, h % stride, column + (v + 3) // STEP, (v + 3) % STEP * C + c])
                fourth = tl.dot(a, tl.reshape(b, (BM, BJ)), fourth)
    o += tl.arange(0, BO)
    c += tl.arange(0, BJ)
    out += model.to(tl.int64) * out_model + part.to(tl.int64) * out_part
    place = out + o[:, None] * (k * WIDE * C) + tap * C + c[None, :]
    tl.store(place, total.to(out.dtype.element_ty))
    if ROW:
        tl.store(place + C, second.to(out.dtype.element_ty))
        tl.store(place + 2 * C, third.to(out.dtype.element_ty))
        if FOLD == 2:
            tl.store(place + 3 * C, fourth.to(out.dtype.element_ty))


class Tile(NamedTuple):
    """The size of the tile that a Triton program computes: its pixels, outputs and channels, and the numbers
    of warps and pipeline stages."""

    pixels: int
    outputs: int
    channels: int
    warps: int
    stages: int


def usable(device: torch.device) -> bool:
    """Returns whether these kernels can be used: the GPU has the copy engine (TMA), and the installed Triton
    supports it."""
    return torch.cuda.get_device_capability(device) == (9, 0) and TensorDescriptor is not None


@cache
def hopper(device: torch.device) -> bool:
    """Returns the result of `usable`. Warns once if the GPU has the copy engine but Triton is too old. Unlike
    `usable`, it cannot be called from compiled code."""
    if torch.cuda.get_device_capability(device) == (9, 0) and TensorDescriptor is None:
        warn_user(
            f"training on {torch.cuda.get_device_name(device)} is slower than it could be, because the "
            "fastest convolutions need a newer Triton: install a newer torch, which brings it"
        )
    return usable(device)


def _power(value: int) -> int:
    """Returns the smallest power of two that is at least this value, because tile sizes must be powers of
    two."""
    return 1 << (value - 1).bit_length()


def box_shape(pixels: int, height: int, width: int) -> tuple[int, int, int]:
    """Returns the shape of a tile with `pixels` pixels: its numbers of images, rows and columns. Of the
    possible shapes, it is the one that extends least beyond images of this height and width."""

    def side(size: int, room: int) -> int:
        sizes = [each for each in (8, 16, 32, 64) if each <= min(_power(size), room)] or [
            min(_power(size), room)
        ]
        return min(sizes, key=lambda each: (-(-size // each) * each, -each))

    columns = side(width, pixels)
    rows = side(height, pixels // columns)
    return pixels // (rows * columns), rows, columns


def pixel_boxes(x: Tensor, stride: int, box: tuple[int, int, int], channels: int, fold: int = 1) -> Any:
    """Returns a descriptor with which the copy engine (TMA) loads boxes of pixels from x. The tensor x [n ·
    B, H, W, C] has the images of n models, B for each model. A box has box[0] images, box[1] rows, box[2]
    columns and `channels` channels. Neighbouring pixels of a box are `stride` rows and `stride` · `fold`
    columns apart in the image."""
    _, height, width, deep = x.shape
    step = stride * fold
    shape = [len(x), height // stride, stride, width // step, step * deep]
    strides = [height * width * deep, stride * width * deep, width * deep, step * deep, 1]
    return TensorDescriptor(x, shape, strides, [box[0], box[1], 1, box[2], channels])


def matrix_tiles(x: Tensor, rows: int, block: list[int]) -> Any:
    """Returns a descriptor with which the copy engine (TMA) loads tiles of the shape `block` from x. For
    this, x is viewed as a matrix with `rows` rows."""
    columns = x.numel() // rows
    return TensorDescriptor(x, [rows, columns], [columns, 1], block)


def product_tile(
    x: Tensor, models: int, size: list[int], outputs: int, kernel: int, stride: int, up: int
) -> Tile | None:
    """Returns the tile size with which `_correlate` computes a convolution, or the gradient of a convolution
    with respect to its images. Returns None if the GPU code in this file cannot compute it. The caller then
    uses the code in `triton_conv.py`.

    For a convolution, x has the images, `stride` is its stride, and `up` is 1. For a gradient, x is the
    gradient of the convolution's output. Then `up` is the convolution's stride, and `stride` is 1. x has
    equally many images for each of `models` models.

    `kernel` is the side of a filter. `size` is the height and width of the result, and `outputs` its number
    of channels. The tile sizes were chosen by measurements, results/kernels-h200.json and
    results/kernels-narrow-h200.json.
    """
    _, height, width, channels = x.shape
    if not hopper(x.device) or height % stride or width % stride:
        return None
    deep = min(channels & -channels, 64)
    if outputs == NARROW // 2 and up > 1 and deep == 64:
        return Tile(256, outputs, deep, 4, 2)
    if outputs % NARROW:
        return None
    if deep < 64:
        return Tile(256, NARROW, deep, 4, 4)
    if outputs % 128 or kernel == 1:
        return Tile(128, NARROW, deep, 4, 3)
    pixels = len(x) // models * -(-size[0] // up) * -(-size[1] // up)
    tiles = models * up * up * pixels // 128 * (outputs // 128)
    if tiles < PROGRAMS:
        return Tile(64, 128, deep, 4, 4)
    if tiles <= 3 * PROGRAMS and channels <= 128:
        # with two stages, three fit on a multiprocessor, so all run at once
        return Tile(128, 128, deep, 4, 2)
    return Tile(128, 128, deep, 8, 4) if up == 1 and channels >= 256 else Tile(128, 128, deep, 4, 3)


def filter_tile(
    grad: Tensor, x: Tensor, models: int, kernel: int, stride: int
) -> tuple[Tile, bool, int] | None:
    """Returns how to compute the gradient of a convolution with respect to its filters, as (tile size, row,
    parts). `row` says whether the three taps (positions) in a row of a 3×3 filter are computed together. The
    sum over pixels is split into `parts` parts. Returns None if `triton_conv.py` must be used instead.

    `grad` is the gradient of the convolution's output, and x has its input images. `kernel` is the side of a
    filter. Tile sizes and parts were chosen by measurements, results/kernels-h200.json and
    results/kernels-narrow-h200.json.
    """
    _, height, width, outputs = grad.shape
    channels, images = x.shape[3], len(x) // models
    if not hopper(x.device) or x.shape[1] % stride or x.shape[2] % stride or outputs % NARROW:
        return None
    row = kernel == 3 and channels <= 128
    if row:
        tile = Tile(128, NARROW, min(channels & -channels, 64), 4, 3)
    elif channels <= 128 or outputs % 128:
        tile = Tile(64, NARROW, min(channels & -channels, 64), 4, 5)
    else:
        tile = Tile(128 if height * width >= 64 else 64, 128, min(channels & -channels, 128), 8, 3)
    box = box_shape(tile.pixels, height, width)
    if images % box[0]:  # a tile would extend into the next model's images
        return None
    tiles = models * (outputs // tile.outputs) * (kernel if row else kernel**2) * (channels // tile.channels)
    programs = PROGRAMS * (1 if _flat(box, height, width) else 8) * (1 if kernel > 1 else 2)
    steps = images // box[0] * triton.cdiv(height, box[1]) * triton.cdiv(width, box[2])
    parts = max(1, min(programs // tiles, steps // 4, MOST_PARTS))
    return None if parts == MOST_PARTS and parts * tiles < PROGRAMS else (tile, row, parts)


def _flat(box: tuple[int, int, int], height: int, width: int) -> bool:
    """Returns whether the pixels of a tile lie next to each other in memory, so that they can be loaded as
    one block. `box` is the tile's numbers of images, rows and columns."""
    return box[2] == width and (box[1] == height or (box[0] == 1 and height % box[1] == 0))


def correlate(
    x: Tensor, w: Tensor, bias: Tensor | None, size: list[int], outputs: int,
    stride: int, up: int, padding: int, flip: bool, tile: Tile, fold: int = 1, level: Tensor | None = None,
    add: Tensor | None = None, norm: triton_batch.Fixed | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns a convolution, or the gradient of a convolution with respect to its images. Each of n models
    has B images and its own filters w [n, O, k, k, C].

    If `flip` is false, x has the images [n · B, H, W, C], `stride` is the stride of the convolution, and `up`
    is 1. If `flip` is true, x is the gradient of the convolution's output, [n · B, H, W, O]. Then `up` is the
    stride of the convolution, and `stride` is 1.

    `size` is the height and width of the result, and `outputs` its number of channels. `padding` is that of
    the convolution in both cases. `tile` comes from `product_tile`.

    If `fold` is not 1, w are widened filters, and the result has `fold` columns in one (`triton_fold.py`).

    If `level` [n, O] is not None, also returns the sums for batch normalisation, as `triton_batch.moments`
    does. They are sums over the result minus its channel's `level`. If `add` is not None, this tensor of the
    same shape is added to the result. If `norm` is not None, the result is normalised first, and activated
    after the addition.
    """
    models, images, channels, kernel = len(w), len(x) // len(w), x.shape[3], w.shape[2]
    y = x.new_empty(len(x), *size, outputs)
    box = box_shape(tile.pixels, -(-size[0] // up), -(-size[1] // up))
    block = [tile.channels, tile.outputs] if flip else [tile.outputs, tile.channels]
    down, across = (triton.cdiv(-(-side // up), each) for side, each in zip(size, box[1:], strict=True))
    parts, sums = triton.cdiv(images, box[0]) * down * across, None
    if level is not None:
        sums = level.new_empty(models, parts * fold, 2, outputs // fold)
    launch(
        _correlate, (parts, outputs // tile.outputs, models * up * up),
        pixel_boxes(x, stride, box, tile.channels, fold), matrix_tiles(w, models * w.shape[1], block),
        w if bias is None else bias.contiguous(), y if add is None else add, w if level is None else level, y,
        y if sums is None else sums, *((w, w, w, w) if norm is None else norm[:4]), images, size[0], size[1],
        images * size[0] * size[1] * outputs, *((0.0, 0.0) if norm is None else norm[4:]),
        stride, up, padding, kernel, channels, outputs, flip, bias is not None, add is not None,
        norm is not None, fold, level is not None, triton_batch.LARGEST,
        *box, tile.outputs, tile.channels, FAR, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, sums


def weights_grad(
    grad: Tensor,
    x: Tensor,
    models: int,
    kernel: int,
    stride: int,
    padding: int,
    tile: Tile,
    row: bool,
    parts: int,
    fold: int = 1,
) -> Tensor:
    """Returns the gradient of a convolution with respect to its filters, [n, O, k, k, C]. Each of n models
    has O filters of k × k pixels and C channels. `grad` is the gradient of the convolution's output, and x
    has its input images. `tile`, `row` and `parts` come from `filter_tile`. Sums over pixels are in
    float32.

    If `fold` is not 1, `grad` has `fold` columns in one. Then the result has the partial sums of the gradient
    with respect to widened filters (`triton_fold.py`).
    """
    _, height, width, outputs = grad.shape
    channels, images = x.shape[3], len(x) // models
    box = box_shape(tile.pixels, height, width)
    flat = _flat(box, height, width)
    steps = images // box[0] * triton.cdiv(height, box[1]) * triton.cdiv(width, box[2])
    parts = max(1, min(parts, steps))
    chunk = triton.cdiv(steps, parts)
    wide = kernel + fold - 1
    shape = (models, outputs, kernel, wide, channels)
    whole = parts == 1 and fold == 1
    out = grad.new_empty(shape) if whole else grad.new_empty(parts, *shape, dtype=torch.float32)
    length = outputs * kernel * wide * channels
    taps = kernel if row else kernel * wide
    launch(
        _filters, ((outputs // tile.outputs) * taps * (channels // tile.channels), parts, models),
        matrix_tiles(grad, len(grad) * height * width, [tile.pixels, tile.outputs])
        if flat
        else pixel_boxes(grad, 1, box, tile.outputs),
        pixel_boxes(x, stride, box, tile.channels, fold),
        out, images, height, width, steps, chunk, length, models * length,
        stride, padding, kernel, channels, outputs, *box, tile.outputs, tile.channels, row, flat, fold, FAR,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out if whole or fold > 1 else totals(out, grad.dtype)
