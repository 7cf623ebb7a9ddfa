"""Convolutions of n models with few output channels on Hopper GPUs.

A product of the tensor cores needs at least 64 outputs. A convolution with 32 output channels has fewer. So
two neighbouring columns of the output are computed together, as one column with twice the channels. In memory
this is the same tensor. The filters must be widened for it: a filter of 3 × 3 becomes two filters of 3 × 4.
The first has zeros in its last column, and the second in its first. A quarter of the products is with zeros.
But each pixel is loaded 6 times instead of 9, and loading takes most of the time.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels import triton_batch, triton_tma
from ssfl.models.kernels.launching import launch

FOLD = 2
"""How many columns are computed as one."""
KERNEL = 3
"""The side of the filters."""
CHANNELS = 32
"""The number of input channels for which this is faster (results/kernels-narrow-h200.json)."""
SUMMED = 128
"""How many pixels of two columns each are added up at a time for the gradient of the filters."""
HELD = 1024
"""How many values a Triton program computes."""


@triton.jit
def _position(i, C: tl.constexpr, WIDE: tl.constexpr, k: tl.constexpr, OUT: tl.constexpr):
    """Returns the column, row and number of the filter that value i belongs to, in filters [..., OUT, k,
    WIDE, C]. Also returns the index of the leading dimensions."""
    return i // C % WIDE, i // (C * WIDE) % k, i // (C * WIDE * k) % OUT, i // (C * WIDE * k * OUT)


@triton.jit
def _widen(
    w, out, count,
    OUT: tl.constexpr, C: tl.constexpr, k: tl.constexpr, FOLD: tl.constexpr, FLIP: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Writes widened filters, out [n, FOLD, O, k, k + FOLD - 1, C], where O is OUT. If FLIP is false, w is
    [n, O, k, k, C]. If FLIP is true, w is [n, C, k, k, O], and its taps are read in reverse order."""
    WIDE: tl.constexpr = k + FOLD - 1
    i = tl.program_id(0) * HELD + tl.arange(0, HELD)
    c = i % C
    column, row, o, before = _position(i, C, WIDE, k, OUT)
    fold, model = before % FOLD, before // FOLD
    column -= fold
    if FLIP:
        place = (((model * C + c) * k + k - 1 - row) * k + k - 1 - column) * OUT + o
    else:
        place = (((model * OUT + o) * k + row) * k + column) * C + c
    value = tl.load(w + place, mask=(i < count) & (column >= 0) & (column < k), other=0.0)
    tl.store(out + i, value, mask=i < count)


@triton.jit(do_not_specialize=["parts"])
def _narrow(
    sums, out, parts, count, OUT: tl.constexpr, C: tl.constexpr, k: tl.constexpr, FOLD: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Writes the gradient with respect to filters, out [n, O, k, k, C], where O is OUT. `sums` [parts, n,
    FOLD, O, k, k + FOLD - 1, C] are partial sums of the gradient with respect to the widened filters."""
    WIDE: tl.constexpr = k + FOLD - 1
    i = tl.program_id(0) * HELD + tl.arange(0, HELD)
    c = i % C
    column, row, o, model = _position(i, C, k, k, OUT)
    total = tl.zeros((HELD,), dtype=tl.float32)
    for _ in range(parts):
        for fold in tl.static_range(FOLD):
            place = (((model * FOLD + fold) * OUT + o) * k + row) * WIDE + column + fold
            total += tl.load(sums + place * C + c, mask=i < count, other=0.0)
        sums += count // (k * k) * (k * WIDE * FOLD)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < count)


def suits(x: Tensor, outputs: int, width: int, kernel: int, stride: int) -> bool:
    """Returns whether a convolution is computed in this way: the images x [n · B, H, W, C] are convolved with
    `outputs` filters, and the result is `width` pixels wide."""
    return x.shape[3] == CHANNELS and possible(x, outputs, width, kernel, stride)


def possible(x: Tensor, outputs: int, width: int, kernel: int, stride: int) -> bool:
    """Returns whether a convolution can be computed in this way, also if another way is faster. The arguments
    are as in `suits`."""
    few = outputs == triton_tma.NARROW // FOLD
    whole = kernel == KERNEL and stride == 1 and width % FOLD == 0 and x.shape[2] % FOLD == 0
    return few and whole and triton_tma.hopper(x.device)


def suits_grad(grad: Tensor, x: Tensor, models: int, kernel: int, stride: int) -> bool:
    """Returns whether the gradient of a convolution with respect to its filters is computed in this way. The
    arguments are as in `weights_grad`."""
    _, height, width, outputs = grad.shape
    if not possible(x, outputs, width, kernel, stride):
        return False
    box = triton_tma.box_shape(SUMMED, height, width // FOLD)
    return len(x) // models % box[0] == 0  # otherwise a tile would extend into the next model's images


def widened(w: Tensor, flip: bool) -> Tensor:
    """Returns the widened filters [n, 2 · O, 3, 4, C] of filters w [n, O, 3, 3, C]. If `flip` is true, they
    are for the gradient with respect to the images. Then the result is [n, 2 · C, 3, 4, O]."""
    models, rows, kernel, _, columns = w.shape
    outputs, channels = (columns, rows) if flip else (rows, columns)
    out = w.new_empty(models, FOLD * outputs, kernel, kernel + FOLD - 1, channels)
    launch(
        _widen, (triton.cdiv(out.numel(), HELD),),
        w, out, out.numel(), outputs, channels, kernel, FOLD, flip, HELD, num_warps=4,
    )  # fmt: skip
    return out


def correlate(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    size: list[int],
    padding: int,
    flip: bool,
    level: Tensor | None = None,
    tile: triton_tma.Tile | None = None,
    add: Tensor | None = None,
    norm: triton_batch.Fixed | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns a convolution [n · B, H', W', O] of images x [n · B, H, W, C] with filters w [n, O, 3, 3, C]
    and biases [n, O]. `size` is (H', W'). If `flip` is true, x is the gradient of a convolution's output, and
    the result the gradient of its images. Then `padding` is 2 minus that of the convolution. `level`, `add`,
    `norm` and the second result are as in `triton_tma.correlate`."""
    wide = widened(w, flip)
    outputs = wide.shape[1]
    if tile is None:
        tile = triton_tma.Tile(256, outputs, CHANNELS, 4, 4)
    both = None if bias is None else bias.repeat(1, FOLD)
    folded = [size[0], size[1] // FOLD]
    y, sums = triton_tma.correlate(
        x, wide, both, folded, outputs, 1, 1, padding, False, tile, FOLD, level, add, norm
    )
    return y.view(len(x), *size, outputs // FOLD), sums


def weights_grad(
    grad: Tensor,
    x: Tensor,
    models: int,
    padding: int,
    tile: triton_tma.Tile | None = None,
    parts: int | None = None,
) -> Tensor:
    """Returns the gradient of a convolution with respect to its filters, [n, O, 3, 3, C]. `grad` [n · B, H',
    W', O] is the gradient of the convolution's output, and x [n · B, H, W, C] has its images."""
    count, height, width, outputs = grad.shape
    folded, channels = grad.view(count, height, width // FOLD, FOLD * outputs), x.shape[3]
    if tile is None or parts is None:
        deep = min(channels & -channels, 64)
        tile = triton_tma.Tile(SUMMED if deep < 32 else SUMMED // 2, FOLD * outputs, deep, 4, 3)
        parts = max(1, 2 * triton_tma.PROGRAMS // (models * KERNEL * (channels // deep)))
    sums = triton_tma.weights_grad(folded, x, models, KERNEL, 1, padding, tile, True, parts, FOLD)
    out = grad.new_empty(models, outputs, KERNEL, KERNEL, channels)
    launch(
        _narrow, (triton.cdiv(out.numel(), HELD),),
        sums, out, len(sums), out.numel(), outputs, channels, KERNEL, FOLD, HELD, num_warps=4,
    )  # fmt: skip
    return out
