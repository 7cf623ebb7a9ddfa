"""The operations of strong views, and lookup tables from which they are computed. The tables give the same
results as Pillow."""

import math

import torch
from torch import Tensor

OPERATIONS: tuple[str, ...] = (
    "AutoContrast",
    "Brightness",
    "Color",
    "Contrast",
    "Equalize",
    "Identity",
    "Posterize",
    "Rotate",
    "Sharpness",
    "ShearX",
    "ShearY",
    "Solarize",
    "TranslateX",
    "TranslateY",
)
FRACTION = 22  # bits after the binary point; with more, 255 would not fit into int32


def operation_tables(height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the lookup tables from which the operations can be computed pixel by pixel, for images of this
    size. The first, int32 [operation, magnitude, sign, 6], has affine maps (see `_fixed_affine`). The others
    are the levels, the stretched levels and the weights of `augment._Tables`."""
    maps = torch.tensor(_maps(height, width), dtype=torch.int32)
    return maps.view(len(OPERATIONS), 10, 2, 6), level_table(), stretch_table(), weight_table()


def _maps(height: int, width: int) -> list[tuple[int, ...]]:
    """Returns the affine map of each operation, magnitude and sign, in this order."""
    return [
        _fixed_affine(name, sign * v, height, width)
        for name in OPERATIONS
        for v in range(10)
        for sign in (1, -1)
    ]


def move_tables(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns two lookup tables for the operations that move pixels (rotation, shear, translation). The
    first, [operation, magnitude, sign], says which affine map is used, as a row of the second table. The
    second, [map, H · W], has the position from which a map takes each pixel. H · W means a position outside
    the image."""
    maps = _maps(height, width)
    distinct = sorted(set(maps))
    moves = torch.tensor([distinct.index(each) for each in maps]).view(len(OPERATIONS), 10, 2)
    return moves, _positions(distinct, height, width)


def rotation(degrees: int, height: int, width: int) -> Tensor:
    """Returns the position [H, W] from which each pixel of an image comes if the image is rotated by so many
    degrees, a multiple of 3. H · W means a position outside the image."""
    return _positions([_fixed_affine("Rotate", degrees / 3, height, width)], height, width).view(
        height, width
    )


def _positions(maps: list[tuple[int, ...]], height: int, width: int) -> Tensor:
    """Returns the position from which each affine map takes each pixel, [map, H · W]. H · W means a position
    outside the image."""
    xx, xy, x0, yx, yy, y0 = torch.tensor(maps).view(-1, 6, 1, 1).unbind(1)
    rows, columns = torch.arange(height).unsqueeze(1), torch.arange(width)
    x = (xx * columns + xy * rows + x0) >> 16
    y = (yx * columns + yy * rows + y0) >> 16
    outside = (x < 0) | (x >= width) | (y < 0) | (y >= height)
    return torch.where(outside, height * width, y * width + x).flatten(1)


def _fixed_affine(name: str, v: float, height: int, width: int) -> tuple[int, ...]:
    """Returns the six coefficients of an affine map, in units of 1/65536, as Pillow computes them. The map
    leads from a pixel to the position from which its value comes. `name` is the operation and `v` its
    magnitude, with sign."""
    a, b, c, d, e, f = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0
    if name == "Rotate":
        angle = -math.radians(3 * v % 360.0)
        a = e = round(math.cos(angle), 15)
        b, d = round(math.sin(angle), 15), round(-math.sin(angle), 15)
        c = a * -(width / 2) + b * -(height / 2) + width / 2
        f = d * -(width / 2) + e * -(height / 2) + height / 2
    elif name == "ShearX":
        b = v * 0.3 / 10
    elif name == "ShearY":
        d = v * 0.3 / 10
    elif name == "TranslateX":
        c = int(v * 0.3 / 10 * width)
    elif name == "TranslateY":
        f = int(v * 0.3 / 10 * height)
    # Pillow samples at pixel centres, hence the halves.
    exact = (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)
    return tuple(math.floor(value * 65536.0 + 0.5) for value in exact)


def level_table() -> Tensor:
    """Returns a lookup table [operation, magnitude, old level] of new grey levels. Only Posterize and
    Solarize change levels; the other operations keep them."""
    levels = torch.arange(256, dtype=torch.uint8)
    table = levels.repeat(len(OPERATIONS), 10, 1)
    for v in range(1, 10):
        dropped = 4 - int(0.4 * v)
        table[OPERATIONS.index("Posterize"), v] = levels >> dropped << dropped
        turned = levels >= 256 - int(25.6 * v)
        table[OPERATIONS.index("Solarize"), v] = torch.where(turned, 255 - levels, levels)
    return table


def stretch_table() -> Tensor:
    """Returns a lookup table for AutoContrast, float64 [range, level]: level · (255 / range). The range is
    the difference between the highest and the lowest level of a channel.

    Pillow computes int(level * scale - low * scale), which is sometimes one below the exact quotient. The
    products here are rounded exactly as Pillow rounds them, to give the same result.
    """
    levels = torch.arange(256, dtype=torch.float64)
    # Not 255.0 / levels: torch multiplies by the reciprocal then, which rounds twice.
    scale = torch.full_like(levels, 255.0) / levels.clamp(min=1)
    return scale.unsqueeze(1) * levels


def weight_table() -> Tensor:
    """Returns a lookup table [operation, magnitude, 4] of the integer weights that `augment._enhance` uses.
    With them, every pair of levels gives the same result as Pillow's float32 blend with the factor 0.05 +
    0.09 v, where v is the magnitude.

    Both weights of a blend are rounded up, so that results that are whole numbers stay whole. The error from
    this is far below 1/100, the smallest distance of any other result from the next whole number. The factor
    0.59 (v = 6) is an exception: for some pairs of levels whose exact result is whole, Pillow's float32
    result is slightly too low and is rounded down. The weights for this factor are changed so that the same
    pairs are rounded down.
    """
    one = 1 << FRACTION
    table = torch.zeros(len(OPERATIONS), 10, 4, dtype=torch.int32)
    table[:, :, 0] = one
    for v in range(1, 10):
        percent = 5 + 9 * v
        for_image, for_other = (math.ceil(share * one / 100) for share in (percent, 100 - percent))
        if v == 6:
            for_image, for_other = for_image - 2, for_other + 27
        for column, name in enumerate(("Brightness", "Color", "Contrast", "Sharpness")):
            row = table[OPERATIONS.index(name), v]
            row[column] = for_other
            row[0] = for_image  # last: for Brightness, column is 0, and black needs no weight
    return table
