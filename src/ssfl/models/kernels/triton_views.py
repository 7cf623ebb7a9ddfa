"""Triton kernels (GPU code) that make weakly and strongly augmented views of images, with the same bytes as
`data/augment.py`. A Triton program makes the view of one image. So a step needs three kernels for its views,
and torch need not compile anything for them.

The random numbers are those of `core/draws.py`, computed where they are used.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.data import augment, operations
from ssfl.models.kernels.launching import launch
from ssfl.models.kernels.triton_draws import below, fold

OPERATIONS = tl.constexpr(len(operations.OPERATIONS))
IDENTITY, AUTOCONTRAST, EQUALIZE = (
    tl.constexpr(operations.OPERATIONS.index(name)) for name in ("Identity", "AutoContrast", "Equalize")
)
WEAK_DRAWS, STRONG_DRAWS = tl.constexpr(augment.WEAK_DRAWS), tl.constexpr(augment.STRONG_DRAWS)
FRACTION, CUTOUT_FILL = tl.constexpr(operations.FRACTION), tl.constexpr(augment.CUTOUT_FILL)
ONE = tl.constexpr(1 << operations.FRACTION)


class Tables(NamedTuple):
    """Lookup tables of the operations, on one device. The first dimensions are the operation and its
    magnitude, from 0 to 9."""

    maps: Tensor  # int32 [operation, magnitude, sign, 6]: an affine map, in units of 1/65536
    levels: Tensor  # uint8 [operation, magnitude, level]: the new level for an old one
    stretch: Tensor  # float64 [range, level]: level * (255 / range), for AutoContrast
    weights: Tensor  # int32 [operation, magnitude, 4]: weights of image, grey, mean grey and smoothed version


@triton.jit
def _draw(key, NUMBER: tl.constexpr, bound):
    """Returns random number `NUMBER` of an image, a whole number from 0 to `bound` - 1."""
    return below(fold(key, tl.full((), NUMBER, tl.int64)), bound).to(tl.int32)


@triton.jit
def _reflected(place, size):
    return size - 1 - tl.abs(size - 1 - tl.abs(place))


@triton.jit
def _weak_source(y, x, key, H: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr):
    """Returns the position in an image from which pixel (y, x) of its weak view comes."""
    MOST_Y: tl.constexpr = H // 8 if H >= 8 else 1
    MOST_X: tl.constexpr = W // 8 if W >= 8 else 1
    from_y = _reflected(y - MOST_Y + _draw(key, 1, 2 * MOST_Y + 1), H)
    from_x = _reflected(x - MOST_X + _draw(key, 2, 2 * MOST_X + 1), W)
    if FLIP:
        from_x = tl.where(_draw(key, 0, 2) == 1, W - 1 - from_x, from_x)
    return from_y * W + from_x


@triton.jit
def _write(out, value, mean, std, inside):
    """Writes grey levels as the network's inputs, normalised as in `augment.normalise`."""
    scaled = tl.div_rn(value.to(tl.float32), 255.0)
    normalised = tl.div_rn(scaled - mean.to(tl.float32), std.to(tl.float32))
    tl.store(out, normalised.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _image(images, indices, count, SIZE: tl.constexpr):
    """Returns where this program's image begins. As in PyTorch, a negative index counts from the end."""
    index = tl.load(indices + tl.program_id(0)).to(tl.int64)
    return images + tl.where(index < 0, index + count, index) * SIZE


@triton.jit(do_not_specialize=["count"])
def _weak(
    images, indices, keys, mean, std, out, count,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Makes the weak view of one image, as `augment.weak_views` does, and normalises it."""
    view = tl.program_id(0).to(tl.int64)
    image = _image(images, indices, count, C * H * W)
    p = tl.arange(0, HELD)
    inside = p < H * W
    source = _weak_source(p // W, p % W, tl.load(keys + view), H, W, FLIP)
    for c in tl.static_range(C):
        value = tl.load(image + c * H * W + source, mask=inside, other=0)
        at = out + (view * C + c) * H * W + p
        _write(at, value, tl.load(mean + c), tl.load(std + c), inside)


@triton.jit
def _source(y, x, key, H: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr, FIRST: tl.constexpr):
    """Returns the position of pixel (y, x) in the memory that an operation reads: the image itself before
    the first operation, which also makes the weak view, or the result of the first operation."""
    source = y * W + x
    if FIRST:
        source = _weak_source(y, x, key, H, W, FLIP)
    return source


@triton.jit
def _stretched(value, inside, stretch):
    """Returns the grey levels of one channel after AutoContrast."""
    low = tl.min(tl.where(inside, value, 255), 0)
    high = tl.max(tl.where(inside, value, 0), 0)
    row = stretch + (high - low) * 256
    new = tl.load(row + tl.where(inside, value, low)) - tl.load(row + low)
    new = tl.minimum(tl.maximum(new, 0.0), 255.0).to(tl.int32)
    return tl.where(high > low, new, value)


@triton.jit
def _equalised(value, inside, SIZE: tl.constexpr, HELD: tl.constexpr):
    """Returns the grey levels of one channel after Equalize."""
    level = tl.arange(0, 256)
    counts = tl.histogram(value, 256)
    counts -= tl.where(level == 0, HELD - SIZE, 0)  # places beyond the image hold zeros
    high = tl.max(value, 0)
    step = (SIZE - tl.sum(tl.where(level == high, counts, 0), 0)) // 255
    darker = tl.cumsum(counts, 0) - counts
    new = tl.minimum((step // 2 + darker) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, tl.gather(new, value, 0), value)


@triton.jit
def _lightness(red, green, blue, C: tl.constexpr):
    """Returns the grey levels of an image, with the same rounding as Pillow."""
    grey = red
    if C == 3:
        grey = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16
    return grey


@triton.jit
def _recoloured(value, op, levels, stretch, inside, SIZE: tl.constexpr, HELD: tl.constexpr):
    """Returns the grey levels of one channel after AutoContrast, Equalize, Posterize or Solarize. Another
    operation does not change them. `levels` is the table of levels of this operation and magnitude."""
    new = tl.load(levels + value).to(tl.int32)
    if op == AUTOCONTRAST:
        new = _stretched(value, inside, stretch)
    # Pillow's Equalize leaves smaller images as they are. SIZE is a constant of the kernel, and op is not.
    if SIZE > 255:  # noqa: SIM102
        if op == EQUALIZE:
            new = _equalised(value, inside, SIZE, HELD)
    return tl.where(inside, new, 0)


@triton.jit
def _smoothed(
    image, value, y, x, key, inside, H: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Returns one channel after Pillow's filter SMOOTH: a 3x3 kernel of ones with 5 in the middle, divided by
    13. Pixels at the border stay unchanged. `image` is where the channel begins."""
    inner = inside & (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
    total = 4 * value + 6
    for dy in tl.static_range(-1, 2):
        for dx in tl.static_range(-1, 2):
            source = _source(y + dy, x + dx, key, H, W, FLIP, FIRST)
            total += tl.load(image + source, mask=inner, other=0).to(tl.int32)
    return tl.where(inner, (total * 5042) >> 16, value)


@triton.jit(do_not_specialize=["count"])
def _operation(
    images, indices, keys, maps, levels, stretch, weights, mean, std, out, count,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr, FIRST: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Does one of the two random operations of a strong view with one image, as `augment.strong_views` does.

    With `FIRST`, it reads the image to which `indices` points, makes a weak view of it, does the first
    operation, and writes grey levels. Otherwise it reads these, does the second operation and Cutout, and
    normalises.
    """
    view = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + view)
    BEFORE: tl.constexpr = WEAK_DRAWS if FIRST else WEAK_DRAWS + 4
    SIZE: tl.constexpr = H * W
    image = _image(images, indices, count, C * SIZE) if FIRST else images + view * C * SIZE
    op = tl.where(_draw(key, BEFORE + 1, 2) == 1, _draw(key, BEFORE, OPERATIONS), IDENTITY)
    strength = op * 10 + 1 + _draw(key, BEFORE + 2, 9)  # a row of the tables
    p = tl.arange(0, HELD)
    y, x, inside = p // W, p % W, p < SIZE

    # stage 1: Rotate, Shear, Translate. The maps of all other operations leave pixels where they are.
    row = maps + 6 * (2 * strength + (_draw(key, BEFORE + 3, 2) == 1).to(tl.int32))
    from_x = (tl.load(row) * x + tl.load(row + 1) * y + tl.load(row + 2)) >> 16
    from_y = (tl.load(row + 3) * x + tl.load(row + 4) * y + tl.load(row + 5)) >> 16
    within = inside & (from_x >= 0) & (from_x < W) & (from_y >= 0) & (from_y < H)
    source = _source(from_y, from_x, key, H, W, FLIP, FIRST)
    red = tl.load(image + source, mask=within, other=0).to(tl.int32)
    green, blue = red, red
    if C == 3:
        green = tl.load(image + SIZE + source, mask=within, other=0).to(tl.int32)
        blue = tl.load(image + 2 * SIZE + source, mask=within, other=0).to(tl.int32)

    # stage 2: AutoContrast, Equalize, Posterize, Solarize
    new_level = levels + 256 * strength
    red = _recoloured(red, op, new_level, stretch, inside, SIZE, HELD)
    if C == 3:
        green = _recoloured(green, op, new_level, stretch, inside, SIZE, HELD)
        blue = _recoloured(blue, op, new_level, stretch, inside, SIZE, HELD)

    # stage 3: Brightness, Color, Contrast, Sharpness
    for_image = tl.load(weights + 4 * strength)
    if for_image != ONE:
        grey = _lightness(red, green, blue, C)
        average = (2 * tl.sum(tl.where(inside, grey, 0), 0) + SIZE) // (2 * SIZE)
        flat = grey * tl.load(weights + 4 * strength + 1) + average * tl.load(weights + 4 * strength + 2)
        for_smooth = tl.load(weights + 4 * strength + 3)
        if for_smooth != 0:
            red = red * for_image + for_smooth * _smoothed(image, red, y, x, key, inside, H, W, FLIP, FIRST)
            if C == 3:
                green = green * for_image + for_smooth * _smoothed(
                    image + SIZE, green, y, x, key, inside, H, W, FLIP, FIRST
                )
                blue = blue * for_image + for_smooth * _smoothed(
                    image + 2 * SIZE, blue, y, x, key, inside, H, W, FLIP, FIRST
                )
        else:
            red, green, blue = red * for_image, green * for_image, blue * for_image
        red, green, blue = (red + flat) >> FRACTION, (green + flat) >> FRACTION, (blue + flat) >> FRACTION

    if FIRST:
        at = out + view * C * SIZE + p
        tl.store(at, red.to(tl.uint8), mask=inside)
        if C == 3:
            tl.store(at + SIZE, green.to(tl.uint8), mask=inside)
            tl.store(at + 2 * SIZE, blue.to(tl.uint8), mask=inside)
    else:
        SIDE: tl.constexpr = H // 2
        top = tl.maximum(_draw(key, STRONG_DRAWS - 2, H) - SIDE // 2, 0)
        left = tl.maximum(_draw(key, STRONG_DRAWS - 1, W) - SIDE // 2, 0)
        cut = (y >= top) & (y < top + SIDE) & (x >= left) & (x < left + SIDE)
        at = out + view * C * SIZE + p
        _write(at, tl.where(cut, CUTOUT_FILL, red), tl.load(mean), tl.load(std), inside)
        if C == 3:
            _write(at + SIZE, tl.where(cut, CUTOUT_FILL, green), tl.load(mean + 1), tl.load(std + 1), inside)
            _write(
                at + 2 * SIZE, tl.where(cut, CUTOUT_FILL, blue), tl.load(mean + 2), tl.load(std + 2), inside
            )


def weak(
    images: Tensor, indices: Tensor, keys: Tensor, flip: bool, mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns normalised weak views in this number type, [m, C, H, W], of the uint8 images with these indices
    [m]. Each view is made with the random numbers of its key in `keys` [m]. `mean` and `std` are [C]."""
    count, channels, height, width = images.shape
    out = images.new_empty(len(indices), channels, height, width, dtype=dtype)
    held, warps = _held(height * width)
    launch(
        _weak, (len(indices),), images, indices.contiguous(), keys.contiguous(), mean, std, out, count,
        channels, height, width, flip, held, num_warps=warps,
    )  # fmt: skip
    return out


def strong(
    images: Tensor, indices: Tensor, keys: Tensor, flip: bool, mean: Tensor, std: Tensor, dtype: torch.dtype,
    tables: Tables,
) -> Tensor:  # fmt: skip
    """Returns the same as `weak`, but strong views."""
    count, channels, height, width = images.shape
    halfway = images.new_empty(len(indices), channels, height, width)
    out = torch.empty_like(halfway, dtype=dtype)
    held, warps = _held(height * width)
    indices, keys = indices.contiguous(), keys.contiguous()
    for first, source, result in ((True, images, halfway), (False, halfway, out)):
        launch(
            _operation, (len(indices),), source, indices, keys, *tables, mean, std, result, count,
            channels, height, width, flip, first, held, num_warps=warps,
        )  # fmt: skip
    return out


def _held(pixels: int) -> tuple[int, int]:
    """Returns the number of pixels for which a program has room, and its number of warps."""
    held = triton.next_power_of_2(pixels)
    return held, min(max(held // 128, 1), 16)
