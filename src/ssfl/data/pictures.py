"""Image files and the folders they lie in: each gives arrays, or one line that says what is wrong."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from ssfl.core.plain_files import require_plain
from ssfl.data.dataset import WHITE
from ssfl.data.formats import check_side, reading
from ssfl.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
)
Read = TypeVar("Read")
TOLD = 20
"""How many broken files are named besides the first."""
_GREY_MODES = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"))
_ALPHA_MODES = frozenset(("RGBA", "RGBa", "LA", "La", "PA"))


def list_folders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    with reading(folder):
        inner = (entry for entry in folder.iterdir() if entry.is_dir())
        return sorted(entry for entry in inner if not entry.name.startswith("."))


def list_images(folder: Path, nested: bool = True) -> list[Path]:
    """The image files in a folder and, if wanted, in those inside it: sorted, none hidden."""

    def unreadable(error: OSError) -> None:
        raise error

    found: list[Path] = []
    with reading(folder):
        if not folder.is_dir():
            return found
        for place, inner, files in os.walk(folder, onerror=unreadable):
            inner[:] = [name for name in inner if nested and not name.startswith(".")]
            found += [
                Path(place) / name
                for name in files
                if Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".")
            ]
    return sorted(found)


def _opened(path: Path) -> "Image.Image":
    """An image file; what is no plain file, such as a FIFO, would block for ever."""
    from PIL import Image

    require_plain(path)
    return Image.open(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Pillow's warnings, which would stand beside the one line on a damaged file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def header(path: Path) -> tuple[int, int, bool]:
    """Width and height of an image file, upright, and whether it has no colours."""
    with reading(path), _quiet(), _opened(path) as image:
        width, height = image.size
        turned = image.getexif().get(274, 1) >= 5  # its EXIF orientation swaps the sides
        return *((height, width) if turned else (width, height)), image.mode in _GREY_MODES


def survey(path: Path) -> tuple[bool, int]:
    """Whether an image file has no colours, and its largest value where it has more than 8 bits (or 0)."""
    with reading(path), _quiet(), _opened(path) as image:
        grey = image.mode in _GREY_MODES
        return grey, int(_deep(image).max()) if image.mode.startswith("I") else 0


def white_of(largest: int) -> int:
    """The largest number of as many bits as the largest value of all images has: scans of 12 bits are often
    saved in 16."""
    return (1 << max(largest.bit_length(), 8)) - 1 if largest else WHITE


def _deep(image: "Image.Image") -> np.ndarray:
    """The values of an image of more than 8 bits."""
    return np.asarray(image).astype(np.int64).clip(0, WHITE)


def decode(path: Path, channels: int, size: tuple[int, int] | None = None, white: int = WHITE) -> np.ndarray:
    """An image file, upright, as uint8 [channels, height, width], resized if a size is given.

    What is transparent becomes white; more than 8 bits become 8, where `white` becomes 255.
    """
    from PIL import Image, ImageOps

    with reading(path), _quiet(), _opened(path) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode == "F":
            raise DataError(f"{path}: has floating-point pixels; save it with 8 bits per channel")
        if image.mode.startswith("I"):
            deep = _deep(image).clip(0, white)
            image = Image.fromarray(((deep * 255 + white // 2) // white).astype(np.uint8))
        elif image.mode in _ALPHA_MODES or "transparency" in image.info:
            paper = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(paper, image.convert("RGBA"))
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None and image.size != (size[1], size[0]):
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return np.array(image).reshape(image.height, image.width, channels).transpose(2, 0, 1)


def each(files: Sequence[Path], read: Callable[[Path], Read]) -> Iterator[tuple[Path, Read]]:
    """Every file and what is read of it; those that cannot be read are named together, at the end."""
    broken: list[tuple[Path, DataError]] = []
    for file in files:
        try:
            found = read(file)
        except DataError as error:
            broken.append((file, error))
            continue
        yield file, found
    if broken:
        more = [str(file) for file, _ in broken[1:]]
        named = ", ".join(more[:TOLD]) + (", ..." if len(more) > TOLD else "")
        also = f"; and {len(more):,} more like it: {named}" if more else ""
        raise DataError(f"{broken[0][1]}{also}")


def decode_all(files: Sequence[Path], channels: int, size: int | None, white: int) -> Tensor:
    """Image files of one size, or resized to size x size, as uint8 [N, channels, height, width]."""
    target = None if size is None else (size, size)
    images, first = np.empty((len(files), channels, 0, 0), np.uint8), files[0]
    read = each(files, lambda file: decode(file, channels, target, white))
    for index, (file, pixels) in enumerate(read):
        _, height, width = pixels.shape
        if index == 0:
            first = file
            check_side(height, width, first)
            images = np.empty((len(files), *pixels.shape), np.uint8)
        elif pixels.shape != images.shape[1:]:
            raise DataError(
                f"{file}: {width}x{height} pixels where {first} has {images.shape[3]}x{images.shape[2]}; "
                "--set data.size=N resizes all images to NxN"
            )
        images[index] = pixels
    return torch.from_numpy(images)
