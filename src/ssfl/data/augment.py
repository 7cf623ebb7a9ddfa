"""Weak and strong views of a batch of images. A weak view is made by a random flip and shift. A strong view
is made from a weak one by random operations and Cutout. Each image has its own random draws.

Everything runs on the device of the images. The same draws give the same bytes on every device, also if the
code is compiled or runs in a CUDA graph. For this, the arithmetic leaves a compiler no freedom in rounding,
and no tensor's shape depends on the pixels. The fourteen operations of strong views match Pillow byte for
byte, as it rounds on x86-64. On Arm, Pillow's own results of blending with the factor 0.86 are sometimes one
grey level darker. Lookup tables are made at first use and then kept, so run a view once before you compile or
capture it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssfl.core.draws import below, uniform
from ssfl.data.operations import FRACTION, OPERATIONS, level_table, move_tables, stretch_table, weight_table

__all__ = [
    "OPERATIONS", "STRONG", "STRONG_DRAWS", "WEAK", "WEAK_DRAWS", "View", "apply_operation", "apply_stage",
    "below", "lightness", "normalise", "smooth", "strong", "strong_views", "uniform", "weak", "weak_views",
]  # fmt: skip

WEAK_DRAWS: int = 3  # flip, shift in y, shift in x
STRONG_DRAWS: int = WEAK_DRAWS + 2 * 4 + 2  # twice (operation, applied, magnitude, sign), then Cutout

_IDENTITY, _AUTOCONTRAST, _EQUALIZE = map(OPERATIONS.index, ("Identity", "AutoContrast", "Equalize"))
_MOVES, _COLOURS = ("Rotate", "Shear", "Translate"), ("AutoContrast", "Equalize", "Posterize", "Solarize")
_STAGES = tuple(
    0 if name == "Identity" else 1 if name.startswith(_MOVES) else 2 if name in _COLOURS else 3
    for name in OPERATIONS
)
"""For each of `OPERATIONS`, the stage of `apply_stage` that computes it: 1, 2 or 3. The operation Identity
has 0, because it needs no stage."""
LARGE = 64 * 64
"""Images with at least this many pixels are called large. To save time on a CPU, a large image goes only
through those stages of `apply_stage` that its own operations need."""
AT_ONCE = 16
"""How many large images (see `LARGE`) are processed together on a CPU."""
CUTOUT_FILL = 127


class _Tables(NamedTuple):
    """Lookup tables of the operations, on one device. Tables with a magnitude as index have ten entries for
    it, but only 1 to 9 are used."""

    moves: Tensor  # [operation, magnitude, sign]: the number of a row of `sources`
    sources: Tensor  # [number, H * W]: the position from which each pixel comes; H * W means black
    levels: Tensor  # uint8 [operation, magnitude, level]: the new level for an old one
    stretch: Tensor  # float64 [range, level]: level * (255 / range), for AutoContrast
    weights: Tensor  # int32 [operation, magnitude, 4]: weights of image, grey, mean grey and smoothed version


_TABLES: dict[tuple[int, int, torch.device], _Tables] = {}


class View(NamedTuple):
    """A kind of augmentation: the function that makes the views, and how many random numbers it needs for
    each image."""

    make: Callable[[Tensor, Tensor, bool], Tensor]
    """A function (uint8 images [N, C, H, W], draws [N, m], whether images may be mirrored) -> views, uint8
    images of the same shape. The draws are random 64-bit numbers."""
    draws: int
    """m: how many random 64-bit numbers the function `make` needs for each image."""

    def of(self, images: Tensor, generator: torch.Generator | None, flip: bool) -> Tensor:
        """Returns one view of each of the uint8 images [N, C, H, W]. Random numbers come from `generator`
        (None: torch's global one). With `flip`, views may be mirrored."""
        return self.make(images, _draw(images, generator, self.draws), flip)


def weak(images: Tensor, generator: torch.Generator | None, flip: bool = True) -> Tensor:
    """Returns a weak view (random flip and shift) of each of the uint8 images [N, C, H, W], as uint8. Random
    numbers come from `generator` (None: torch's global one). With flip=False, images are not mirrored."""
    _check(images)
    return WEAK.of(images, generator, flip)


def strong(images: Tensor, generator: torch.Generator | None, flip: bool = True) -> Tensor:
    """Returns a strong view (random flip, shift, two random operations, Cutout) of each of the uint8 images
    [N, C, H, W], as uint8. Random numbers come from `generator` (None: torch's global one). With flip=False,
    images are not mirrored."""
    _check(images)
    return STRONG.of(images, generator, flip)


def normalise(
    images: Tensor,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns uint8 images [N, C, H, W] as inputs of a network: (x / 255 - mean) / std for each channel. It
    is computed in at least float32, and rounded to `dtype` only at the end.

    Inside a CUDA graph, pass mean and std as tensors on the device of the images.
    """
    work = torch.promote_types(dtype, torch.float32)
    centre, spread = (torch.as_tensor(x, dtype=work, device=images.device) for x in (mean, std))
    if images.dim() != 4 or centre.shape != spread.shape or centre.shape != images.shape[1:2]:
        raise ValueError(
            "normalise: pass images [N, C, H, W] and one mean and one std for each of the C "
            f"channels, not {list(images.shape)} with {list(centre.shape)} and {list(spread.shape)}"
        )
    # by a tensor, because for a number a GPU would multiply by 1 / 255, which rounds differently
    scaled = images.to(work) / torch.full((), 255.0, dtype=work, device=images.device)
    return ((scaled - centre.view(-1, 1, 1)) / spread.view(-1, 1, 1)).to(dtype)


def weak_views(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Returns a weak view of each of the uint8 images [N, C, H, W]. It is mirrored with probability 1/2 (only
    if `flip`), then shifted by at most 1/8 of the side, with reflected edges. `draws` [N, 3] are the random
    numbers."""
    flips, shift_y, shift_x = draws.unsqueeze(-1).unbind(1)
    height, width = images.shape[-2:]
    y = _shifted(shift_y, height)
    x = _shifted(shift_x, width)
    if flip:
        x = torch.where(below(flips, 2) == 1, width - 1 - x, x)
    return _take(images, (y.unsqueeze(2) * width + x.unsqueeze(1)).flatten(1))


def strong_views(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Returns a strong view of each of the uint8 images [N, C, H, W]. First a weak view is made. Then follow
    two random operations, each applied with probability 1/2, and Cutout. With `flip`, views may be mirrored.
    `draws` [N, 13] are the random numbers."""
    large = images.shape[-2] * images.shape[-1] >= LARGE
    if large and images.device.type == "cpu" and not torch.compiler.is_compiling():
        return _large_strong_views(images, draws, flip)
    views = weak_views(images, draws[:, :WEAK_DRAWS], flip)
    for first in (WEAK_DRAWS, WEAK_DRAWS + 4):
        choice, applied, magnitude, sign = draws[:, first : first + 4].unbind(1)
        op = below(choice, len(OPERATIONS))
        op = torch.where(below(applied, 2) == 1, op, _IDENTITY)
        views = apply_operation(views, op, 1 + below(magnitude, 9), below(sign, 2) == 1)
    return _cutout(views, draws[:, -2], draws[:, -1])


def _large_strong_views(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Returns the same bytes as `strong_views`, but faster, for large images on a CPU.

    Images are processed in small batches that fit into the CPU's cache, and each image goes only through the
    stages of its own operations.
    """
    views_of_all = torch.empty_like(images)
    for first in range(0, len(images), AT_ONCE):
        batch = slice(first, first + AT_ONCE)
        views = weak_views(images[batch], draws[batch, :WEAK_DRAWS], flip)
        for place in (WEAK_DRAWS, WEAK_DRAWS + 4):
            choice, applied, magnitude, sign = draws[batch, place : place + 4].unbind(1)
            op = torch.where(below(applied, 2) == 1, below(choice, len(OPERATIONS)), _IDENTITY)
            stage = torch.tensor([_STAGES[one] for one in op.tolist()])
            strength, negative = 1 + below(magnitude, 9), below(sign, 2) == 1
            for number in set(stage.tolist()) - {0}:
                chosen = (stage == number).nonzero().squeeze(1)
                one = op[chosen], strength[chosen], negative[chosen]
                views[chosen] = apply_stage(number, views[chosen], *one)
        views_of_all[batch] = _cutout(views, draws[batch, -2], draws[batch, -1])
    return views_of_all


WEAK = View(weak_views, WEAK_DRAWS)
STRONG = View(strong_views, STRONG_DRAWS)


def apply_operation(images: Tensor, op: Tensor, magnitude: Tensor, negative: Tensor) -> Tensor:
    """Returns uint8 images [N, C, H, W] after one operation each. For every image, `op` [N] is the
    operation's number in `OPERATIONS`, `magnitude` [N] its strength from 1 to 9, and `negative` [N] whether
    its direction is reversed.

    Every image goes through all three stages of `apply_stage`; only that of its own operation changes it.
    This costs more arithmetic than necessary, but no tensor's shape depends on the draws, as compiled code
    requires.
    """
    for stage in (1, 2, 3):
        images = apply_stage(stage, images, op, magnitude, negative)
    return images


def apply_stage(stage: int, images: Tensor, op: Tensor, magnitude: Tensor, negative: Tensor) -> Tensor:
    """Returns uint8 images [N, C, H, W] after one of three stages. Images whose operation belongs to another
    stage stay unchanged. The arguments are those of `apply_operation`.

    Stage 1 moves pixels (Rotate, Shear, Translate). Stage 2 maps grey levels to new ones (AutoContrast,
    Equalize, Posterize, Solarize). Stage 3 blends an image with another version of it (Brightness, Color,
    Contrast, Sharpness).
    """
    tables = _tables_for(images)
    if stage == 1:
        moves = tables.moves[op, magnitude, negative.long()]
        return _take(images, tables.sources.index_select(0, moves))
    if stage == 2:
        return _recolour(images, op, magnitude, tables)
    return _enhance(images, tables.weights[op, magnitude])


def _check(images: Tensor) -> None:
    shape = list(images.shape)
    fits = len(shape) == 4 and shape[1] in (1, 3) and min(shape[2:]) >= 4
    if images.dtype != torch.uint8 or not fits:
        raise ValueError(
            "pass a batch of images as a uint8 tensor [N, C, H, W] with C 1 or 3 and H, W at "
            f"least 4, not {images.dtype} {shape}"
        )


def _draw(images: Tensor, generator: torch.Generator | None, count: int) -> Tensor:
    device = torch.device("cpu") if generator is None else generator.device
    bound = 2**63 - 1
    shape = (len(images), count)
    draws = torch.randint(-bound - 1, bound, shape, generator=generator, device=device)
    return draws.to(images.device)


def _take(images: Tensor, source: Tensor) -> Tensor:
    """Returns images whose pixels are taken from other positions of the same image. `source` [N, H · W] is
    the position from which each pixel comes; the position H · W means black."""
    n, channels, height, width = images.shape
    index = source.unsqueeze(1).expand(n, channels, height * width)
    pixels = torch.nn.functional.pad(images.flatten(2), (0, 1))
    return pixels.gather(2, index).view(images.shape)


def _shifted(draw: Tensor, size: int) -> Tensor:
    """Returns positions [N, size] along one side of N images, after a random shift by at most an eighth of
    the side. Entry i is the position from which pixel i takes its value. Positions beyond the edges are
    reflected."""
    pad = max(1, size // 8)
    place = torch.arange(-pad, size - pad, device=draw.device) + below(draw, 2 * pad + 1)
    return size - 1 - (size - 1 - place.abs()).abs()


def _cutout(images: Tensor, draw_y: Tensor, draw_x: Tensor) -> Tensor:
    """Returns images in which a square around a random centre is grey. Its side is half the height of the
    image; what lies beyond the edges is cut off. `draw_y` and `draw_x` [N] are the random numbers of the
    centre."""
    height, width = images.shape[-2:]
    side = height // 2
    inside = []
    for draw, size in ((draw_y, height), (draw_x, width)):
        start = (below(draw, size) - side // 2).clamp(min=0).unsqueeze(1)
        place = torch.arange(size, device=images.device)
        inside.append((place >= start) & (place < start + side))
    square = (inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1).to(torch.uint8)
    return images * (1 - square) + CUTOUT_FILL * square  # several times faster than masked_fill


def _recolour(images: Tensor, op: Tensor, magnitude: Tensor, tables: _Tables) -> Tensor:
    """Returns images after AutoContrast, Equalize, Posterize or Solarize. Each of these replaces every grey
    level of a channel by another. Images with other operations stay unchanged."""
    index = images.flatten(2).long()
    # int16, because the minimum of uint8 is wrong if compiled for CPUs (pytorch issue 191499).
    short = images.to(torch.int16).flatten(2)
    # Levels are 0 to 255 anyway. The clamps are for compiled code, which also computes rows beyond the last
    # image of a block, where a minimum over nothing would be an index out of bounds.
    low, high = (x.clamp(0, 255).long() for x in (short.amin(2, keepdim=True), short.amax(2, keepdim=True)))
    levels = tables.levels[op, magnitude].unsqueeze(1)

    rows = tables.stretch.index_select(0, (high - low).clamp(0, 255).flatten()).view(*index.shape[:2], 256)
    stretched = (rows - rows.gather(2, low)).clamp_(0, 255).to(torch.uint8)
    chosen = (op == _AUTOCONTRAST).view(-1, 1, 1) & (high > low)
    levels = torch.where(chosen, stretched, levels)

    if index.shape[2] > 255:  # Pillow's Equalize leaves smaller images as they are
        step, equalised = _equalise(index, high)
        chosen = (op == _EQUALIZE).view(-1, 1, 1) & (step > 0)
        levels = torch.where(chosen, equalised, levels)
    return levels.gather(2, index).view(images.shape)


def _equalise(index: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Computes Pillow's operation Equalize. Returns two tensors. The first is the number of pixels per new
    level, [N, C, 1]; a channel for which it is 0 must stay unchanged. The second is the new level of each old
    level, [N, C, 256].

    `index` [N, C, H · W] has the levels of all pixels, and `high` [N, C, 1] the highest level.
    """
    n, channels, count = index.shape
    ones = torch.ones((), dtype=torch.int32, device=index.device).expand(index.shape)
    counts = torch.zeros(n, channels, 256, dtype=torch.int32, device=index.device)
    counts = counts.scatter_add(2, index, ones)
    step = (count - counts.gather(2, high)) // 255
    darker = counts.cumsum(2, dtype=torch.int32) - counts
    levels = (step // 2 + darker) // step.clamp(min=1)
    return step, levels.clamp_(max=255).to(torch.uint8)


def _enhance(images: Tensor, weights: Tensor) -> Tensor:
    """Returns images after Brightness, Color, Contrast or Sharpness. These blend an image with black, its
    grey version, its mean grey level, or its smoothed version, respectively.

    All four are weighted sums in fixed-point arithmetic. `weights` [N, 4] are the weights of the image, its
    grey version, its mean grey level and its smoothed version. Weights that an operation does not use are
    zero.
    """
    for_image, for_grey, for_mean, for_smooth = weights.view(-1, 4, 1, 1, 1).unbind(1)
    wide = images.to(torch.int32)
    grey = lightness(wide)
    count = images.shape[2] * images.shape[3]
    mean = (2 * grey.sum((1, 2, 3), keepdim=True, dtype=torch.int32) + count) // (2 * count)
    flat = grey * for_grey + mean * for_mean
    blend = smooth(images).mul_(for_smooth).add_(wide.mul_(for_image)).add_(flat)
    blend >>= FRACTION
    return blend.to(torch.uint8)


def lightness(images: Tensor) -> Tensor:
    """Returns int32 images [N, C, H, W] converted to grey, [N, 1, H, W], with the same rounding as Pillow."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).unsqueeze(1)


def smooth(images: Tensor) -> Tensor:
    """Returns images as int32 after Pillow's filter SMOOTH: a 3x3 kernel of ones with 5 in the middle,
    divided by 13. Pixels at the border stay unchanged."""
    short = images.to(torch.int16)  # holds every sum below
    rows = short[..., :-2, :] + short[..., 1:-1, :] + short[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    total = total.add_(short[..., 1:-1, 1:-1], alpha=4).to(torch.int32)
    # Rounded division: (n + 6) // 13 is (n + 6) * 5042 >> 16 for all n up to 13 * 255.
    total = total.add_(6).mul_(5042)
    total >>= 16
    smooth = images.to(torch.int32)
    smooth[..., 1:-1, 1:-1] = total
    return smooth


def _tables_for(images: Tensor) -> _Tables:
    height, width = images.shape[-2:]
    key = (height, width, images.device)
    if key not in _TABLES:  # a plain dict: torch.compile uses its entries, but ignores lru_cache
        moves, sources = move_tables(height, width)
        tables = (moves, sources, level_table(), stretch_table(), weight_table())
        _TABLES[key] = _Tables(*(table.to(images.device) for table in tables))
    return _TABLES[key]
