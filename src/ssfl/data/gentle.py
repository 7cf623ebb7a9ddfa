"""Gentle views, for pretrained networks and large pictures: small random changes of rotation, zoom, aspect
ratio, position, gamma, contrast and brightness.

The standard views (`augment.py`) are made for images of 32 pixels. They shift an image by up to an eighth of
its side, and Cutout hides a quarter of it. That removes the details by which similar pictures differ. As in
`augment.py`, every image has its own random draws, and all arithmetic is in whole numbers. So the same draws
give the same bytes on every device.
"""

import math

import torch
from torch import Tensor

from ssfl.core.draws import below, bits, key
from ssfl.data.augment import View

GENTLE_DRAWS: int = 9
"""How many random numbers a gentle view needs, one for each of: flip, angle, zoom, stretch, shift in y, shift
in x, gamma, contrast, brightness."""
STEPS = 41
"""The number of values from which each random change is chosen, evenly spaced between its limits. The middle
value changes nothing."""
ANGLE, ZOOM, STRETCH, SHIFT = 10.0, 0.2, 0.1, 0.05
"""The largest changes in either direction. The angle is in degrees. Zoom and stretch are natural logarithms
of factors. The shift is a fraction of the image's side."""
GAMMA, CONTRAST, BRIGHTNESS = 0.35, 0.3, 25
"""The largest changes in either direction. Gamma is a natural logarithm. Contrast is a relative change (0.3:
a factor from 0.7 to 1.3). Brightness is in grey levels (of 255)."""
AT_ONCE = 1 << 22
"""On a CPU, images are processed in batches of at most this many pixel values, or of one image if it has
more."""
NARROW = 4096
"""Up to this side length in pixels, coordinates are computed in 32 bits, which is faster; above it, in 64
bits."""
_ONE = 1 << 16
_TABLES: dict[torch.device, tuple[Tensor, ...]] = {}


def gentle_views(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Returns one gentle view, uint8, of each of N uint8 images [N, C, H, W]. `draws` [N, 9] are the random
    numbers of each image. With `flip`, views may be mirrored."""
    batch = max(1, AT_ONCE // math.prod(images.shape[1:]))
    # an exported program must not depend on the number of images
    if images.device.type != "cpu" or torch.compiler.is_compiling() or len(images) <= batch:
        return _toned(_moved(images, draws, flip), draws)
    parts = zip(images.split(batch), draws.split(batch), strict=True)
    return torch.cat([_toned(_moved(part, drawn, flip), drawn) for part, drawn in parts])


GENTLE = View(gentle_views, GENTLE_DRAWS)


def test_view(images: Tensor, number: int, flip: bool) -> Tensor:
    """Returns a gentle view of uint8 images [N, C, H, W] for test-time augmentation. The views are numbered
    1, 2, ... and are fixed: view `number` changes all images in the same way. With `flip`, some views are
    mirrored.

    Views 1 and 2 are opposites, as are 3 and 4, and so on. If view 1 rotates images to the left, view 2
    rotates them as far to the right. So an even number of views favours no direction.
    """
    pair, opposite = divmod(number - 1, 2)
    drawn = bits(torch.tensor([key(0, "test", pair)]), GENTLE_DRAWS)
    drawn = (~drawn if opposite else drawn).to(images.device)
    return gentle_views(images, drawn.expand(images.shape[0], -1), flip)


def _moved(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Returns N images [N, C, H, W] as int32 after random rotation, zoom, stretch, shift and, with `flip`,
    mirroring. Pixels are interpolated bilinearly, and edges are reflected. `draws` [N, 9] are the random
    numbers."""
    count, channels, height, width = images.shape
    cosines, sines, zooms, stretches, *_ = _tables(images.device)
    chosen = below(draws, STEPS)
    cosine, sine = cosines[chosen[:, 1]], sines[chosen[:, 1]]
    zoom, stretch = zooms[chosen[:, 2]], stretches[chosen[:, 3]]
    wide = zoom * stretch >> 16
    # 32 bits are faster on a CPU, and suffice for coordinates of usual images
    kind = torch.int32 if count * height * width < 1 << 31 and max(height, width) <= NARROW else torch.int64
    turned = torch.stack((cosine * wide, -sine * zoom, sine * wide, cosine * zoom), 1) >> 16
    xx, xy, yx, yy = turned.to(kind).view(-1, 4, 1, 1).unbind(1)
    # twice the distances from the centre are whole numbers
    row = (2 * torch.arange(height, device=images.device, dtype=kind) + 1 - height).view(1, -1, 1)
    column = (2 * torch.arange(width, device=images.device, dtype=kind) + 1 - width).view(1, 1, -1)
    if flip:
        column = torch.where((below(draws[:, 0], 2) == 1).view(-1, 1, 1), -column, column)
    down, right = (
        ((chosen[:, place] - STEPS // 2) * int(2 * SHIFT * side * _ONE) // (STEPS // 2) + (side - 1) * _ONE)
        .to(kind)
        .view(-1, 1, 1)
        for place, side in ((4, height), (5, width))
    )
    y = (yx * column + (yy * row + down)) >> 9  # in 1/256 of a pixel
    x = (xx * column + (xy * row + right)) >> 9
    first = torch.arange(count, device=images.device, dtype=kind).view(-1, 1, 1) * (height * width)
    rows = [_inside((y >> 8) + near, height) * width + first for near in (0, 1)]
    columns = [_inside((x >> 8) + near, width) for near in (0, 1)]
    share_y, share_x = (((256 - (part & 255)), part & 255) for part in (y, x))
    # the channels of a pixel are looked up together, as one number
    levels = images.to(torch.int32)
    pixels = sum((levels[:, channel] << 8 * channel for channel in range(1, channels)), levels[:, 0])
    pixels = pixels.reshape(-1)
    blend = [levels.new_full((count, height, width), 1 << 15) for _ in range(channels)]
    for dy in (0, 1):
        for dx in (0, 1):
            near = pixels.index_select(0, (rows[dy] + columns[dx]).view(-1)).view(count, height, width)
            share = (share_y[dy] * share_x[dx]).to(torch.int32)
            for channel, total in enumerate(blend):
                total.addcmul_((near >> 8 * channel) & 255, share)
    return torch.stack([total >> 16 for total in blend], 1)


def _inside(place: Tensor, size: int) -> Tensor:
    """Returns pixel coordinates along an image side of `size` pixels, all from 0 to size - 1. Coordinates
    `place` outside this range are reflected at the edges."""
    return (size - 1 - (size - 1 - place.abs()).abs()).clamp(0, size - 1)


def _toned(images: Tensor, draws: Tensor) -> Tensor:
    """Returns uint8 images after random changes of gamma, contrast and brightness. The argument `images`
    [N, C, H, W] is int32, with grey levels from 0 to 255. Contrast changes around the image's mean. `draws`
    [N, 9] are the random numbers."""
    *_, gammas, contrasts = _tables(images.device)
    chosen = below(draws, STEPS)
    levels = images.flatten(1).long()
    new = gammas[chosen[:, 6]]
    mean = new.gather(1, levels).sum(1, keepdim=True) // levels.shape[1]
    contrast = contrasts[chosen[:, 7]].unsqueeze(1)
    brighter = ((chosen[:, 8] - STEPS // 2) * BRIGHTNESS // (STEPS // 2)).unsqueeze(1)
    new = ((new - mean) * contrast + (1 << 15) >> 16) + mean + brighter
    return new.clamp(0, 255).to(torch.uint8).gather(1, levels).view(images.shape)


def prepare(device: torch.device) -> None:
    """Makes the lookup tables that gentle views need on a device. Call it before `torch.export` records a
    program with gentle views, because the tables cannot be made during the recording."""
    _tables(device)


def _tables(device: torch.device) -> tuple[Tensor, ...]:
    """Returns the lookup tables on a device: cosines, sines, zooms, stretches, the new grey levels for each
    gamma, and contrasts. Each table has `STEPS` entries, one for each value that a random change can have.
    All but the grey levels are whole numbers in units of 1/65536."""
    if device not in _TABLES:
        parts = [2 * step / (STEPS - 1) - 1 for step in range(STEPS)]
        angles = [math.radians(ANGLE * part) for part in parts]
        numbers = (
            [math.cos(angle) for angle in angles],
            [math.sin(angle) for angle in angles],
            [math.exp(ZOOM * part) for part in parts],
            [math.exp(STRETCH * part) for part in parts],
        )
        fixed = [torch.tensor([round(number * _ONE) for number in each]) for each in numbers]
        gammas = [
            [round(255 * (level / 255) ** math.exp(GAMMA * part)) for level in range(256)] for part in parts
        ]
        contrasts = [round((1 + CONTRAST * part) * _ONE) for part in parts]
        tables = (*fixed, torch.tensor(gammas), torch.tensor(contrasts))
        _TABLES[device] = tuple(table.to(device) for table in tables)
    return _TABLES[device]
