"""The strong views of SemiFL's authors (Diao, Ding and Tarokh 2022), for runs of their published protocol.

They differ from the standard strong views (`augment.py`), which follow the paper that this package
reproduces. There are fifteen operations, always with their largest magnitude, and no Cutout at the end. Two
of the operations move an image by 100 pixels, which leaves nothing of an image of 32 × 32 pixels, and two
invert it. So one view in six has a single colour, and one in four is not changed by an operation.

As in `augment.py`, all arithmetic is in whole numbers, so the same draws give the same bytes on every device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ssfl.core.draws import below
from ssfl.data.augment import CUTOUT_FILL, WEAK_DRAWS, View, apply_stage, lightness, smooth, weak_views
from ssfl.data.operations import OPERATIONS, rotation

ALL: tuple[str, ...] = (
    "AutoContrast", "Brightness", "Color", "Contrast", "Cutout", "Equalize", "Invert", "Posterize", "Rotate",
    "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY",
)  # fmt: skip
"""The operations. Solarize with its largest magnitude is the same as Invert."""
NOTHING = len(ALL)
"""The number that stands for no operation."""
DRAWS_OF_ONE = 5
"""The random numbers of one operation: which one, whether it is applied, the sign, Cutout's place (y, x)."""
DRAWS: int = WEAK_DRAWS + 2 * DRAWS_OF_ONE
ANGLE, SHEAR, SHIFT, SQUARE = 30, 6, 100, 40
"""The magnitudes: degrees, pixels in 20 rows, pixels, and pixels of a side."""
_GREY_LEVELS = ("AutoContrast", "Equalize", "Posterize")
_BLENDS = {"Brightness": None, "Color": 1, "Contrast": 2, "Sharpness": 3}
"""For each operation that blends an image with another version of it, the column of that version in
`_Lookup.weights`. None means black, which needs no weight."""


class _Lookup(NamedTuple):
    """Lookup tables, on one device."""

    moves: Tensor  # [operation, sign]: the number of a row of the next three tables
    first: Tensor  # [number, H * W]: the position from which each pixel comes; H * W means black
    second: Tensor  # [number, H * W]: the position that is mixed with it
    share: Tensor  # int32 [number, H * W]: the share of the second position, in twentieths
    levels: Tensor  # [operation]: the number in `OPERATIONS` of an operation that changes grey levels
    inverts: Tensor  # [operation]: whether it inverts the image
    weights: Tensor  # int32 [operation, 4]: weights of image, grey, mean grey and smoothed version, in tenths


_TABLES: dict[tuple[int, int, torch.device], _Lookup] = {}


def strong_views(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Returns a strong view of each of the uint8 images [N, C, H, W]. First a weak view is made. Then follow
    two random operations, each applied with probability 1/2. With `flip`, views may be mirrored. `draws` [N,
    13] are the random numbers."""
    views = weak_views(images, draws[:, :WEAK_DRAWS], flip)
    for begin in (WEAK_DRAWS, WEAK_DRAWS + DRAWS_OF_ONE):
        choice, applied, sign, y, x = draws[:, begin : begin + DRAWS_OF_ONE].unbind(1)
        # The authors draw the probability from 0.2 to 0.8 each time, so it is 1/2 in all.
        op = torch.where(below(applied, 2) == 1, below(choice, len(ALL)), NOTHING)
        views = apply(views, op, below(sign, 2) == 1, y, x)
    return views


SEMIFL = View(strong_views, DRAWS)


def apply(images: Tensor, op: Tensor, negative: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Returns uint8 images [N, C, H, W] after one operation each. For every image, `op` [N] is the
    operation's number in `ALL`, or `NOTHING`. `negative` [N] says whether its direction is reversed, and
    `y` and `x` [N] are the random numbers of Cutout's place."""
    tables = _tables_for(images)
    images = _moved(images, tables.moves[op, negative.long()], tables)
    levels = tables.levels[op]
    images = apply_stage(2, images, levels, torch.ones_like(levels), negative)
    images = torch.where(tables.inverts[op].view(-1, 1, 1, 1), 255 - images, images)
    images = _blended(images, tables.weights[op])
    return _cut(images, op == ALL.index("Cutout"), y, x)


def _moved(images: Tensor, move: Tensor, tables: _Lookup) -> Tensor:
    """Returns images whose pixels are mixed from two other positions of the same image. `move` [N] are rows
    of the tables."""
    pixels = torch.nn.functional.pad(images.flatten(2), (0, 1)).to(torch.int32)
    first, second = (
        pixels.gather(2, table[move].unsqueeze(1).expand(-1, images.shape[1], -1))
        for table in (tables.first, tables.second)
    )
    share = tables.share[move].unsqueeze(1)
    mixed = torch.div(first * (20 - share) + second * share, 20, rounding_mode="floor")
    return mixed.to(torch.uint8).view(images.shape)


def _blended(images: Tensor, weights: Tensor) -> Tensor:
    """Returns images after Brightness, Color, Contrast or Sharpness with the factor 1.9: 1.9 times the image
    minus 0.9 times black, its grey version, its mean grey level, or its smoothed version. `weights` [N, 4]
    are in tenths."""
    for_image, for_grey, for_mean, for_smooth = weights.view(-1, 4, 1, 1, 1).unbind(1)
    wide = images.to(torch.int32)
    grey, count = lightness(wide), images.shape[2] * images.shape[3]
    mean = (2 * grey.sum((1, 2, 3), keepdim=True, dtype=torch.int32) + count) // (2 * count)
    total = wide * for_image + grey * for_grey + mean * for_mean + smooth(images) * for_smooth
    return torch.div(total, 10, rounding_mode="floor").clamp(0, 255).to(torch.uint8)


def _cut(images: Tensor, chosen: Tensor, draw_y: Tensor, draw_x: Tensor) -> Tensor:
    """Returns images of which the `chosen` ones [N] have a grey square. It begins half of its side above and
    to the left of a random pixel, but not outside of the image."""
    inside = []
    for draw, size in ((draw_y, images.shape[2]), (draw_x, images.shape[3])):
        start = (below(draw, size) - SQUARE // 2).clamp(min=0).unsqueeze(1)
        place = torch.arange(size, device=images.device)
        inside.append((place >= start) & (place <= start + SQUARE))
    square = inside[0].unsqueeze(2) & inside[1].unsqueeze(1) & chosen.view(-1, 1, 1)
    return torch.where(square.unsqueeze(1), CUTOUT_FILL, images).to(torch.uint8)


def _tables_for(images: Tensor) -> _Lookup:
    height, width = images.shape[-2:]
    key = (height, width, images.device)
    if key not in _TABLES:  # a plain dict: torch.compile uses its entries, but ignores lru_cache
        _TABLES[key] = _Lookup(*(table.to(images.device) for table in _tables(height, width)))
    return _TABLES[key]


def _tables(height: int, width: int) -> _Lookup:
    """Returns the lookup tables for images of this size. In those by operation, the last entry is that of
    `NOTHING`."""
    rows, columns = torch.arange(height).unsqueeze(1), torch.arange(width).unsqueeze(0)
    nowhere = height * width
    here = (rows * width + columns).flatten()
    first, second, share = [here], [here], [torch.zeros_like(here)]
    moves = torch.zeros(len(ALL) + 1, 2, dtype=torch.long)

    def add(name: str, negative: int, one: Tensor, other: Tensor, part: Tensor) -> None:
        moves[ALL.index(name), negative] = len(first)
        first.append(one.flatten())
        second.append(other.flatten())
        share.append(part.expand(height, width).flatten())

    for negative, sign in enumerate((1, -1)):
        turned = rotation(sign * ANGLE, height, width)
        add("Rotate", negative, turned, turned, torch.zeros_like(turned))
        for name, place, size, step in (
            ("TranslateX", columns, width, 1),
            ("TranslateY", rows, height, width),
        ):
            source = place + sign * SHIFT
            moved = here.view(height, width) + sign * SHIFT * step
            moved = torch.where((source < 0) | (source >= size), nowhere, moved)
            add(name, negative, moved, moved, torch.zeros_like(moved))
        for name, place, along, size, step in (
            ("ShearX", columns, rows, width, 1), ("ShearY", rows, columns, height, width),
        ):  # fmt: skip
            # In fortieths of a pixel, the middle of the pixel from which this one comes. Pillow mixes the two
            # pixels whose middles are nearest, if it lies inside the image, and otherwise returns black.
            middle = 40 * place + 20 + sign * SHEAR * (2 * along + 1)
            left = torch.div(middle - 20, 40, rounding_mode="floor")
            outside = (middle < 0) | (middle >= 40 * size)
            fixed = here.view(height, width) - place * step
            one, other = (fixed + side.clamp(0, size - 1) * step for side in (left, left + 1))
            one, other = (torch.where(outside, nowhere, side) for side in (one, other))
            add(name, negative, one, other, (middle - 20 - 40 * left) // 2)
    levels = torch.full((len(ALL) + 1,), OPERATIONS.index("Identity"))
    for name in _GREY_LEVELS:
        levels[ALL.index(name)] = OPERATIONS.index(name)
    inverts = torch.zeros(len(ALL) + 1, dtype=torch.bool)
    inverts[[ALL.index("Invert"), ALL.index("Solarize")]] = True
    weights = torch.tensor([10, 0, 0, 0], dtype=torch.int32).repeat(len(ALL) + 1, 1)
    for name, column in _BLENDS.items():
        weights[ALL.index(name), 0] = 19
        if column is not None:
            weights[ALL.index(name), column] = -9
    taken = torch.stack(first), torch.stack(second), torch.stack(share).to(torch.int32)
    return _Lookup(moves, *taken, levels, inverts, weights)
