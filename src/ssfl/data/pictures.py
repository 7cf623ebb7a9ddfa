"""Reads image files and lists the image files of a folder. Every error is one line that names the file."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ssfl.core.plain_files import require_plain
from ssfl.core.words import count
from ssfl.data.dataset import WHITE
from ssfl.data.formats import reading
from ssfl.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
)
OTHER_FORMATS = {
    ".dcm": "DICOM", ".dicom": "DICOM", ".nii": "NIfTI",
    ".heic": "HEIC", ".avif": "AVIF", ".jp2": "JPEG 2000",
    ".svs": "whole slides",
}  # fmt: skip
"""Formats of images that ssfl does not read, by the ending of the file name."""
SILENT = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini", "ssfl.toml"))
"""Names of files that are usual in folders of images, so that no message says that they are ignored."""
LISTED_KINDS = 5
"""A message about ignored files names at most this many kinds."""
APART, MARKED = 24, 0.01
"""Two limits for `grey_pixels`. An image is grey if its channels differ by more than 24 levels in less than 1
% of its pixels."""
MOST_PIXELS = 64 * 2**20
"""The largest number of pixels of an image file, 8192 × 8192. A larger image is refused, because a small file
can hold very many pixels and fill the memory."""
_GREY_MODES = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"))
_ALPHA_MODES = frozenset(("RGBA", "RGBa", "LA", "La", "PA"))


def list_folders(folder: Path) -> list[Path]:
    """Returns the sub-folders of a folder, sorted by name. Hidden ones are left out."""
    with reading(folder):
        inner = (entry for entry in folder.iterdir() if entry.is_dir())
        return sorted(entry for entry in inner if not entry.name.startswith("."))


def list_images(folder: Path, nested: bool = True) -> list[Path]:
    """Returns the image files in a folder, sorted by path. With `nested`, those in its sub-folders are
    included. Hidden files and folders are left out. If there is no such folder, the list is empty."""
    return sorted(file for file in _files(folder, nested) if file.suffix.lower() in IMAGE_SUFFIXES)


def _files(folder: Path, nested: bool) -> Iterator[Path]:
    """Yields the files in a folder that are not hidden. With `nested`, those in its sub-folders are
    included."""

    def unreadable(error: OSError) -> None:
        raise error

    with reading(folder):
        if not folder.is_dir():
            return
        for place, inner, files in os.walk(folder, onerror=unreadable):
            inner[:] = [name for name in inner if nested and not name.startswith(".")]
            yield from (Path(place) / name for name in files if not name.startswith("."))


def ignored(folder: Path) -> str:
    """Returns one line about the files of a folder and its sub-folders that are no images that ssfl reads;
    an empty text if there are none. Hidden files and those in `SILENT` do not count."""
    others = [file for file in _files(folder, True) if file.name.lower() not in SILENT]
    kinds = Counter(file.suffix.lower() for file in others)
    for suffix in IMAGE_SUFFIXES:
        kinds.pop(suffix, None)
    if not kinds:
        return ""
    shown, number = kinds.most_common(LISTED_KINDS), sum(kinds.values())
    named = [f"{many:,} {_kind(suffix)}" for suffix, many in shown]
    rest = number - sum(many for _, many in shown)
    named += [f"{rest:,} others"] if rest else []
    are = (
        "is not an image that ssfl reads and is" if number == 1 else "are not images that ssfl reads and are"
    )
    return f"{count(number, 'file')} {are} ignored: {', '.join(named)}"


def _kind(suffix: str) -> str:
    """Returns the ending of a file name, and what to do with such files if they are images."""
    name = OTHER_FORMATS.get(suffix)
    return (suffix or "without an ending") + (f" ({name}; convert them to PNG first)" if name else "")


def nothing_in(folder: Path) -> str:
    """Returns a text that says that a folder has no images, and which other files it has."""
    line = ignored(folder)
    return f"{folder}: holds no images" + (f" ({line})" if line else "")


def _opened(path: Path) -> "Image.Image":
    """Returns the image file, opened with Pillow. Raises if the path is not a regular file, because reading
    from a named pipe (FIFO) would wait forever. Also raises if the image has more than `MOST_PIXELS`."""
    from PIL import Image, UnidentifiedImageError

    require_plain(path)
    try:
        image = Image.open(path)
    except UnidentifiedImageError:
        if path.suffix.lower() in IMAGE_SUFFIXES:
            raise
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(
            f"{path}: ssfl does not read this kind of file: {_kind(path.suffix.lower())}; it reads {kinds}"
        ) from None
    except Image.DecompressionBombError:
        size = "far too many pixels"
    else:
        if image.width * image.height <= MOST_PIXELS:
            return image
        image.close()
        size = f"{image.width:,} × {image.height:,} pixels"
    raise DataError(f"{path}: has {size}, more than {MOST_PIXELS:,}: make it smaller")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses Pillow's warnings inside the `with` block, since ssfl reports each damaged file itself. Use
    this in the main thread only, because all threads share the warning filters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Header(NamedTuple):
    """What the header of an image file says. Reading it is fast, because the pixels are not decoded."""

    width: int
    """The width in pixels of the upright image, after the rotation that the file's EXIF data ask for. The
    same holds for `height`."""
    height: int
    grey: bool
    """Whether the file stores grey levels only, without colour channels."""
    deep: bool
    """Whether the file has more than 8 bits per channel."""


def header(path: Path) -> Header:
    """Reads the header of an image file. Returns the width and height of the upright image, whether it is
    grey, and whether it has more than 8 bits per channel."""
    with reading(path), _opened(path) as image:
        width, height = image.size
        turned = image.getexif().get(274, 1) >= 5  # its EXIF orientation swaps the sides
        width, height = (height, width) if turned else (width, height)
        return Header(width, height, image.mode in _GREY_MODES, image.mode.startswith("I"))


def largest(path: Path) -> int:
    """Returns the largest pixel value of an image file with more than 8 bits per channel, or 0 for other
    files."""
    with reading(path), _opened(path) as image:
        return int(_deep(image).max()) if image.mode.startswith("I") else 0


def white_of(largest: int) -> int:
    """Returns the pixel value that is converted to white, given the largest value in all files: the largest
    number with the same number of bits. For scans of 12 bits, which are often saved in 16-bit files, it is
    4095."""
    return (1 << max(largest.bit_length(), 8)) - 1 if largest else WHITE


def _deep(image: "Image.Image") -> np.ndarray:
    """Returns the pixel values of an image with more than 8 bits per channel, from 0 to 65535."""
    return np.asarray(image).clip(0, WHITE).astype(np.int32)


def grey_pixels(pixels: np.ndarray) -> bool:
    """Returns whether an image [C, H, W] shows no colours. Scans, for example, are often saved as RGB
    although they are grey. Compression noise and small coloured marks are ignored."""
    if len(pixels) == 1:
        return True
    apart = pixels.max(0).astype(np.int16) - pixels.min(0)
    return bool((apart > APART).mean() < MARKED)


def decode(path: Path, channels: int, size: tuple[int, int] | None = None, white: int = WHITE) -> np.ndarray:
    """Returns an image file as uint8 [channels, height, width], rotated upright, and resized to `size`
    (height, width) if it is not None.

    Transparent pixels become white. In files with more than 8 bits per channel, values are scaled so that
    `white` becomes 255. Values above `white` become 255 too.
    """
    from PIL import Image, ImageOps

    with reading(path), _opened(path) as opened:
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
        pixels = np.array(image).reshape(image.height, image.width, channels)
        # later steps are much faster on a contiguous array
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
