"""Triton kernels (GPU code) for the convolutions of n models, each with its own filters, computed as matrix
products.

Images are not unfolded in memory: a tile of the product reads its pixels directly from the image. All tensors
are contiguous with channels last: images [n · B, H, W, C], filters [n, O, k, k, C]. Tile sizes are fixed
functions of the shapes. They are not tuned by timing during a run, so that the same work gives the same bits
every time.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels import triton_batch, triton_fold, triton_tma
from ssfl.models.kernels.launching import launch
from ssfl.models.kernels.triton_batch import scale_and_shift
from ssfl.models.kernels.triton_sum import totals

PROGRAMS = 528
"""How many Triton programs (blocks of GPU threads) keep a large GPU busy. A sum over pixels is split into
parts to reach this number."""


@triton.jit
def _correlate(
    x, w, bias, output, y, images, H, W, OH, OW, x_model, w_model, y_model,
    stride: tl.constexpr, up: tl.constexpr, pad: tl.constexpr, k: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes a convolution, or its gradient with respect to the images. Output y[m, o] is the sum, over taps
    (positions in the filter) and channels c, of x[pixel m moved by the tap, c] · w.

    In this kernel, C is the number of channels of x, and O that of y. If FLIP is false, x are the images, y
    is the convolution, and w is [O, k, k, C]. If FLIP is true, x is the gradient of the convolution's output,
    and y is the gradient of the images. Then w is [C, k, k, O], with its taps read in reverse order. `up` is
    the stride of the forward pass if FLIP is true, otherwise 1.

    If `up` is above 1, most taps fall between the pixels of x. In each row and column of the filter, only
    every `up`-th tap meets a pixel. These are the same taps for all output pixels of the same phase (position
    modulo `up`). So the pixels of one phase are computed together.

    With RELU, the images of the forward pass are the output of a ReLU, and y is the gradient of its input:
    zero where `output` is zero.
    """
    model = (tl.program_id(2) // (up * up)).to(tl.int64)
    phase = tl.program_id(2) % (up * up)
    x += model * x_model
    w += model * w_model
    y += model * y_model
    output += model * y_model
    rows, columns = (OH + up - 1) // up, (OW + up - 1) // up
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    column = (m % columns) * up + phase % up
    row = (m // columns % rows) * up + phase // up
    image = m // columns // rows
    inside = (image < images) & (row < OH) & (column < OW)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    # the first tap in each direction that meets a pixel, and how many taps do
    down, right = (pad + phase // up * (up - 1)) % up, (pad + phase % up * (up - 1)) % up
    across = (k - right + up - 1) // up
    taps = (k - down + up - 1) // up * across
    top, left = (row * stride - pad + down) // up, (column * stride - pad + right) // up
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(taps * (C // BK)):
        tap = i // (C // BK)
        first = (i % (C // BK)) * BK
        h = top + tap // across
        v = left + tap % across
        ok = inside
        if pad > 0 or FLIP:
            ok = ok & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        pixel = (image * H + h) * W + v
        a = tl.load(x + pixel[:, None] * C + (first + c)[None, :], mask=ok[:, None], other=0.0)
        at = (down + tap // across * up) * k + right + tap % across * up
        if FLIP:
            b = tl.load(w + ((first + c)[:, None] * (k * k) + (k * k - 1 - at)) * OUT + o[None, :])
        else:
            b = tl.load(w + o[None, :] * (k * k * C) + at * C + (first + c)[:, None])
        total = tl.dot(a, b, total)
    if BIAS:
        total += tl.load(bias + model * OUT + o).to(tl.float32)[None, :]
    place = ((image * OH + row) * OW + column)[:, None] * OUT + o[None, :]
    if RELU:
        above = tl.load(output + place, mask=inside[:, None], other=0.0).to(tl.float32) > 0
        total = tl.where(above, total, 0.0)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _filters(
    g, x, out, count, chunk, H, W, OH: tl.constexpr, OW: tl.constexpr, g_model, x_model, out_model, out_part,
    stride: tl.constexpr, pad: tl.constexpr, k: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    FEW: tl.constexpr, BIAS: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Writes the gradient with respect to the filters, summed over a chunk of the pixels m. Output out[o,
    (tap, c)] is the sum of g[m, o] · x[pixel m moved by the tap, c]. Here g is the gradient of the
    convolution's output, and a tap is a position in the filter.

    FEW is for images with few channels: then x is [B, C, H, W] and out is [o, (c, tap)]. With BIAS, out has
    one more column, the gradient with respect to the bias. It is computed as if for an input that is 1
    everywhere.
    """
    LENGTH: tl.constexpr = k * k * C + (1 if BIAS else 0)
    model = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    g += model * g_model
    x += model * x_model
    out += model * out_model + part * out_part
    tiles: tl.constexpr = (LENGTH + BJ - 1) // BJ
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    j = (tl.program_id(0) % tiles) * BJ + tl.arange(0, BJ)
    if FEW:
        tap, c = j % (k * k), j // (k * k)
    else:
        tap, c = j // C, j % C
    real = j < k * k * C
    down, right = tap // k - pad, tap % k - pad
    total = tl.zeros((BO, BJ), dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, count)
    for start in range(part * chunk, end, BM):
        m = start + tl.arange(0, BM)
        column, rest = m % OW, m // OW
        row, image = rest % OH, rest // OH
        inside = m < end
        a = tl.load(g + m[:, None] * OUT + o[None, :], mask=inside[:, None], other=0.0)
        h = (row * stride)[:, None] + down[None, :]
        v = (column * stride)[:, None] + right[None, :]
        ok = inside[:, None] & real[None, :]
        if pad > 0:
            ok = ok & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        if FEW:
            place = ((image * C)[:, None] + c[None, :]) * H * W + h * W + v
        else:
            place = ((image * H)[:, None] * W + h * W + v) * C + c[None, :]
        b = tl.load(x + place, mask=ok, other=0.0)
        if BIAS:
            b = tl.where((j == k * k * C)[None, :], 1.0, b.to(tl.float32)).to(x.dtype.element_ty)
        total = tl.dot(tl.trans(a), b, total)
    place = out + o[:, None] * LENGTH + j[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(j < LENGTH)[None, :])


@triton.jit
def _first(
    x, w, bias, y, mean, var, gain, shift, count, H, W, OH, OW, x_model, w_model, y_model, eps, slope,
    stride: tl.constexpr, pad: tl.constexpr, k: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """Writes the convolution of a network's first layer, and with RELU its activation. Since x [B, C, H, W]
    has few channels, all inputs of an output pixel are loaded at once. The filters w are [O, C, k, k]. With
    NORM, batch normalisation with given statistics and an activation follow, as in `triton_tma._correlate`.
    """
    LENGTH: tl.constexpr = C * k * k
    model = tl.program_id(2).to(tl.int64)
    x += model * x_model
    w += model * w_model
    y += model * y_model
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = m < count
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    j = tl.arange(0, BJ)
    h = (m // OW % OH * stride - pad)[:, None] + (j // k % k)[None, :]
    v = (m % OW * stride - pad)[:, None] + (j % k)[None, :]
    ok = inside[:, None] & (j < LENGTH)[None, :] & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    plane = (m // OW // OH * C)[:, None] + (j // (k * k))[None, :]
    a = tl.load(x + (plane * H + h) * W + v, mask=ok, other=0.0)
    b = tl.load(w + o[None, :] * LENGTH + j[:, None], mask=(j < LENGTH)[:, None], other=0.0)
    total = tl.dot(a, b)
    if BIAS:
        total += tl.load(bias + model * OUT + o).to(tl.float32)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)
    if NORM:
        factor, offset = scale_and_shift(mean, var, gain, shift, model * OUT + o, eps)
        total = total * factor[None, :] + offset[None, :]
        total = tl.where(total > 0, total, total * slope)
    tl.store(y + m[:, None] * OUT + o[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])


@cache
def _stages(wanted: int, device: torch.device) -> int:
    """Returns the number of pipeline stages of a kernel, that is how many tiles are loaded ahead. It is
    `wanted`, or two if the GPU has little shared memory."""
    room: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return wanted if room >= 160 * 1024 else 2


def _tile(channels: int, most: int) -> int:
    """Returns the size of a tile in channels: the largest power of two, up to `most`, that divides the number
    of channels."""
    return min(channels & -channels, most)


def _product_tiles(outputs: int, channels: int) -> tuple[int, int, int, int, int]:
    """Returns the tile of `_correlate`: its numbers of pixels, output channels and input channels, and the
    numbers of warps and pipeline stages. They were chosen by timings on an H200."""
    wide, deep = _tile(outputs, 128), _tile(channels, 64)
    if wide == 64 and deep == 64:
        return 128, wide, deep, 4, 3
    return (128 if wide == 128 else 256), wide, deep, 8, 3 if deep == 64 else 4


def _filter_tiles(outputs: int, channels: int) -> tuple[int, int, int, int, int]:
    """Returns the tile of `_filters`: its numbers of output channels, inputs (taps times input channels) and
    pixels, and the numbers of warps and pipeline stages."""
    tall = _tile(outputs, 128)
    if tall == 128 and channels >= 256:
        return tall, 128, 64, 8, 3
    return tall, 128 if tall < 128 and channels >= 64 else 64, 64, 4, 3


def first(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, relu: bool = False,
    norm: triton_batch.Fixed | None = None,
) -> Tensor:  # fmt: skip
    """Returns the output of a network's first layer, [n · B, H', W', O], for n models. Images are [n · B, C,
    H, W] with few channels, filters [n, O, C, k, k] and biases [n, O]. If `relu` is true, ReLU is applied. If
    `norm` is not None, the output is normalised and activated."""
    models, outputs, channels, kernel, _ = w.shape
    size = [(s + 2 * padding - kernel) // stride + 1 for s in x.shape[2:]]
    images = len(x) // models
    y = x.new_empty(len(x), *size, outputs)
    count, wide = images * size[0] * size[1], _tile(outputs, 64)
    deep = max(16, triton.next_power_of_2(channels * kernel * kernel))
    tall = max(16, 128 * 64 // max(deep, 64))  # the inputs of a tile must fit into registers
    launch(
        _first, (triton.cdiv(count, tall), outputs // wide, models),
        x, w, w if bias is None else bias.contiguous(), y, *((w, w, w, w) if norm is None else norm[:4]),
        count, x.shape[2], x.shape[3], size[0], size[1],
        images * channels * x.shape[2] * x.shape[3], w.stride(0), count * outputs,
        *((0.0, 0.0) if norm is None else norm[4:]), stride, padding, kernel, channels, outputs,
        bias is not None, relu, norm is not None, tall, wide, deep, num_warps=4,
    )  # fmt: skip
    return y


def correlate(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Returns the convolutions of n models, [n · B, H', W', O]. Images are [n · B, H, W, C], filters [n, O,
    k, k, C] and biases [n, O]."""
    return correlate_with_moments(x, w, bias, stride, padding, None)[0]


def correlate_with_moments(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, level: Tensor | None,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the same convolutions as `correlate`, plus the tensor `add` if it is not None. If `level` [n,
    O] is not None, also returns the sums for batch normalisation (see `triton_tma.correlate`), or None if the
    kernel does not compute them."""
    size = [(s + 2 * padding - w.shape[2]) // stride + 1 for s in x.shape[1:3]]
    return _launch(x, w, bias, size, w.shape[1], stride, 1, padding, False, level=level, add=add)


def correlate_and_normalise(
    x: Tensor, w: Tensor, stride: int, padding: int, norm: triton_batch.Fixed, add: Tensor | None
) -> Tensor:
    """Returns the same convolutions as `correlate`, normalised, plus `add` if it is not None, and activated
    (`triton_batch.forward`)."""
    size = [(s + 2 * padding - w.shape[2]) // stride + 1 for s in x.shape[1:3]]
    return _launch(x, w, None, size, w.shape[1], stride, 1, padding, False, add=add, norm=norm)[0]


def spread(
    grad: Tensor, w: Tensor, size: list[int], stride: int, padding: int, output: Tensor | None = None,
    add: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the gradient of a convolution with respect to its images, [n · B, H, W, C]. `size` is (H, W),
    the height and width of the images. `grad` [n · B, H', W', O] is the gradient of the convolution's output,
    and w [n, O, k, k, C] are the filters.

    If the images are the `output` of a ReLU, it can be given here. Then the result is the gradient of the
    ReLU's input. If `add` is not None, it is added to the result.
    """
    padding = w.shape[2] - 1 - padding
    return _launch(grad, w, None, size, w.shape[4], 1, stride, padding, True, output, add=add)[0]


def _launch(
    x: Tensor, w: Tensor, bias: Tensor | None, size: list[int],
    outputs: int, stride: int, up: int, pad: int, flip: bool, output: Tensor | None = None,
    level: Tensor | None = None, add: Tensor | None = None, norm: triton_batch.Fixed | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns the result of `_correlate`: a convolution or, if `flip` is true, its gradient with respect to
    the images. The result has `size` (height, width) pixels and `outputs` channels. It is zero where `output`
    is zero, if that is given. If `norm` is given, the result is normalised. If `add` is given, it is added,
    and then comes the activation of `norm`.

    Chooses the kernel that suits the GPU and the shapes. Also returns what `triton_tma.correlate` returns for
    this `level`, if that is the kernel.
    """
    models, images, channels = len(w), len(x) // len(w), x.shape[3]
    if output is None and triton_fold.suits(x, outputs, size[1], w.shape[2], stride * up):
        return triton_fold.correlate(x, w, bias, size, pad, flip, level, add=add, norm=norm)
    tile = triton_tma.product_tile(x, models, size, outputs, w.shape[2], stride, up)
    if tile is not None and output is None:
        return triton_tma.correlate(
            x, w, bias, size, outputs, stride, up, w.shape[2] - 1 - pad if flip else pad, flip, tile,
            level=level, add=add, norm=norm,
        )  # fmt: skip
    y = x.new_empty(len(x), *size, outputs)
    tall, wide, deep, warps, stages = _product_tiles(outputs, channels)
    pixels = images * -(-size[0] // up) * -(-size[1] // up)
    stages = _stages(stages, x.device)
    launch(
        _correlate, (triton.cdiv(pixels, tall), outputs // wide, models * up * up),
        x, w, w if bias is None else bias.contiguous(), y if output is None else output, y,
        images, x.shape[1], x.shape[2], size[0], size[1],
        images * x.shape[1] * x.shape[2] * channels, w.stride(0), images * size[0] * size[1] * outputs,
        stride, up, pad, w.shape[2], channels, outputs, flip, bias is not None, output is not None,
        tall, wide, deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if norm is not None:
        return triton_batch.forward(y, *norm[:4], add, norm.eps, norm.slope), None
    return y if add is None else y.add_(add), None


def weights_grad(
    grad: Tensor, x: Tensor, few: bool, models: int, kernel: int, stride: int, padding: int
) -> Tensor:
    """Returns the gradient of a convolution with respect to its filters, [n, O, k, k, C]. `grad` [n · B, H',
    W', O] is the gradient of the output, and x [n · B, H, W, C] are the images. Sums over pixels are in
    float32.

    If `few` is true, the images have few channels (a network's first layer). Then they are [n · B, C, H, W],
    and the result is [n, O, C, k, k].
    """
    if not few and triton_fold.suits_grad(grad, x, models, kernel, stride):
        return triton_fold.weights_grad(grad, x, models, padding)
    tile = None if few else triton_tma.filter_tile(grad, x, models, kernel, stride)
    if tile is not None:
        return triton_tma.weights_grad(grad, x, models, kernel, stride, padding, *tile)
    out = _filters_grad(grad, x, few, False, models, kernel, stride, padding)
    channels = x.shape[1] if few else x.shape[3]
    last = (channels, kernel, kernel) if few else (kernel, kernel, channels)
    return out.view(models, grad.shape[3], *last)


def first_grad(grad: Tensor, x: Tensor, models: int, kernel: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a network's first layer with respect to its filters, [n, O, C, k, k], and to
    its biases, [n, O]. The layer has stride 1 and no padding. Arguments are as in `weights_grad`."""
    out = _filters_grad(grad, x, True, True, models, kernel, 1, 0)
    filters = out[:, :, :-1].contiguous()
    return filters.view(models, grad.shape[3], x.shape[1], kernel, kernel), out[:, :, -1].contiguous()


def _filters_grad(
    grad: Tensor, x: Tensor, few: bool, bias: bool, models: int, kernel: int, stride: int, padding: int
) -> Tensor:
    """Returns the result of `_filters`, [n, O, C · k · k], with one more column for the bias if `bias` is
    true. The other arguments are as in `weights_grad`."""
    _, height, width, outputs = grad.shape
    high, broad, channels = (x.shape[2], x.shape[3], x.shape[1]) if few else x.shape[1:]
    images = len(x) // models
    count, length = images * height * width, kernel * kernel * channels + bias
    tall, wide, deep, warps, stages = _filter_tiles(outputs, channels)
    stages = _stages(stages, x.device)
    if few:
        wide = max(16, triton.next_power_of_2(length))
    tiles = (outputs // tall) * triton.cdiv(length, wide)
    parts = max(1, min(PROGRAMS // (tiles * models), count // (8 * deep)))
    chunk = triton.cdiv(triton.cdiv(count, parts), deep) * deep
    shape = (models, outputs, length)
    out = grad.new_empty(shape) if parts == 1 else grad.new_empty(parts, *shape, dtype=torch.float32)
    launch(
        _filters, (tiles, parts, models),
        grad, x, out, count, chunk, high, broad, height, width,
        count * outputs, images * high * broad * channels, outputs * length, models * outputs * length,
        stride, padding, kernel, channels, outputs, few, bias,
        tall, wide, deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out if parts == 1 else totals(out, grad.dtype)
