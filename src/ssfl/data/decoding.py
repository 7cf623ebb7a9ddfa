"""Decodes image files into one array of pixels. This is done once and on all CPU cores. The result is kept in
a cache folder, so that later commands need not decode the files again.

A cache entry is a file of pixels and an `index.json`. Its name is a hash of the image files (paths, sizes,
modification times) and of the wanted size, channels and scale. The version of Pillow is part of the hash too.
The pixel file is memory-mapped: pixels are read when a batch needs them, so the images may be larger than the
memory.
"""

import errno
import hashlib
import json
import math
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ssfl.core import cache, machine, progress
from ssfl.data import pictures
from ssfl.data.formats import check_side
from ssfl.errors import DataError

FORMAT = 1
SPOKEN = 2.0
"""If decoding takes at least this many seconds, a message says in which folder the result is cached."""
MAP_NORESERVE = 0x4000
"""A flag of mmap on Linux: reserve no swap space, so that a file may be larger than the memory. Python
defines its name only since version 3.13."""
NAMED = 20
"""A message about broken files names at most this many of them."""
Read = TypeVar("Read")
Size = tuple[int, int]
Broken = dict[int, str]
"""Which files cannot be read: maps a file's position in the list of files to the reason."""


@dataclass(frozen=True)
class Decoded:
    """The decoded images of a list of files, and facts about the files."""

    images: Tensor
    """uint8 [N, C, H, W]: the images of the files that can be read, in the order of the files."""
    broken: Broken
    white: int
    """In files with more than 8 bits per channel, the pixel value that was converted to 255 (white). It has
    no meaning if there are no such files."""
    deep: int
    """The number of files with more than 8 bits per channel."""
    grey: int
    """The number of images that show no colours, including those that are stored as RGB."""
    cut: int
    """The number of images with pixel values above `white`. These pixels became 255 too, so brighter details
    are lost."""


def decoded(
    files: Sequence[Path],
    size: Size | None = None,
    channels: int | None = None,
    white: int | None = None,
) -> Decoded:
    """Returns the images of all files, resized to `size` (height, width). Without `size`, all files must
    already have the same size. Files that cannot be read are left out, and listed in the result.

    Without `channels`, the images are grey if all files are grey, otherwise RGB. In files with more than 8
    bits per channel, values are scaled so that `white` becomes 255. Without `white`, it is chosen from the
    largest value in all files.
    """
    wanted = (size, channels, white)
    try:
        entry, new = cache.obtain(
            "images", fingerprint(files, wanted), lambda place: _write(files, *wanted, place)
        )
        info = json.loads((entry / "index.json").read_text("utf-8"))
        shape = tuple(info.pop("shape"))
        mapped = map_pixels(entry / "pixels", shape)
    except (OSError, ValueError) as error:  # the disk is full, or the cache is not writable
        reason = getattr(error, "strerror", None) or str(error)
        progress.say(
            f"decoded images cannot be kept in {cache.root()} ({reason}), so every command decodes them "
            f"again into memory; free some disk space, or set the environment variable {cache.PLACE} to "
            "another folder"
        )
        mapped, info = _in_memory(files, *wanted)
        new = False
    if new and info["seconds"] >= SPOKEN:
        progress.say(
            f"decoded {len(mapped):,} images in {info['seconds']:.0f} s; cached in {cache.root()} for later "
            "commands (you may delete it)"
        )
    broken = {int(number): why for number, why in info.pop("broken")}
    del info["seconds"]
    return Decoded(torch.from_numpy(mapped), broken, **info)


def map_pixels(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of a file as a memory-mapped uint8 array of this shape, which may be larger than the
    memory. Writing to the array does not change the file."""
    if not math.prod(shape):
        return np.empty(shape, np.uint8)
    with file.open("rb") as opened:
        if sys.platform != "linux":
            return np.memmap(opened, np.uint8, "c", shape=shape)
        # without MAP_NORESERVE, Linux refuses a mapping that is larger than the memory
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        pages = mmap.mmap(
            opened.fileno(), math.prod(shape), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return np.frombuffer(pages, np.uint8).reshape(shape)


def fingerprint(files: Sequence[Path], wanted: Any) -> str:
    """Returns a hash that names the cache entry of these files. It changes if a file's path, size in bytes or
    modification time changes. It also depends on the version of Pillow and on `wanted`: the size in pixels,
    channels and scale of the images."""
    import PIL

    digest = hashlib.sha256(repr((FORMAT, PIL.__version__, wanted)).encode())
    for file in files:
        try:
            status = file.stat()
            status_text = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            status_text = "unreadable"
        digest.update(f"{file.absolute()}\0{status_text}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:40]


def each(
    files: Sequence[Path], read: Callable[[Path], Read], label: str
) -> Iterator[tuple[int, Read | DataError]]:
    """Calls `read` for each file, in threads on all cores. Yields the position of a file, and the result or
    the DataError that `read` raised. The order is that of `files`. `label` is the text of the progress bar.

    Threads are enough, because Pillow's decoders release Python's global interpreter lock.
    """

    def one(number: int) -> tuple[int, Read | DataError]:
        try:
            return number, read(files[number])
        except DataError as error:
            return number, error

    threads = machine.cores()
    with pictures.quiet(), ThreadPoolExecutor(threads) as pool, progress.bar(label, len(files)) as advance:
        for start in range(0, len(files), 16 * threads):  # so that only few results wait in memory
            for result in pool.map(one, range(start, min(start + 16 * threads, len(files)))):
                advance(1)
                yield result


def headers(files: Sequence[Path]) -> tuple[dict[int, pictures.Header], Broken]:
    """Returns two dicts by position in `files`: the headers of the files that can be read, and the reasons
    why the others cannot be read."""
    good: dict[int, pictures.Header] = {}
    broken: Broken = {}
    for number, result in each(files, pictures.header, "reading image headers"):
        if isinstance(result, DataError):
            broken[number] = str(result)
        else:
            good[number] = result
    return good, broken


def describe_broken(broken: Broken, count: int) -> str:
    """Returns one line of text about files that cannot be read, with the names of the first ones. `count` is
    the number of all files, including those that can be read."""
    reasons = [broken[number] for number in sorted(broken)]
    rest = f", and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return f"{len(reasons):,} of {count:,} images cannot be read: {'; '.join(reasons[:NAMED])}{rest}"


Room = Callable[[tuple[int, ...]], np.ndarray]


def _write(
    files: Sequence[Path], size: Size | None, channels: int | None, white: int | None, place: Path
) -> None:
    """Decodes the files into a new cache entry: writes the pixels and `index.json` into the folder
    `place`."""
    pixels = place / "pixels"

    def room(shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        if shutil.disk_usage(place).free < 1.05 * count:
            raise OSError(errno.ENOSPC, f"{count / 1e9:.1f} GB do not fit on its disk", str(place))
        with pixels.open("wb") as file:
            if hasattr(os, "posix_fallocate") and count:
                os.posix_fallocate(file.fileno(), 0, count)  # fails now if the disk is full, not later
            file.truncate(count)
        return np.memmap(pixels, np.uint8, "r+", shape=shape) if count else np.empty(shape, np.uint8)

    images, about = _decode(files, size, channels, white, room)
    if isinstance(images, np.memmap):
        images.flush()
    about["shape"] = images.shape
    with pixels.open("r+b") as file:
        file.truncate(images.size)
    (place / "index.json").write_text(json.dumps(about), "utf-8")


def _in_memory(
    files: Sequence[Path], size: Size | None, channels: int | None, white: int | None
) -> tuple[np.ndarray, dict[str, Any]]:
    return _decode(files, size, channels, white, lambda shape: np.empty(shape, np.uint8))


def _decode(
    files: Sequence[Path], size: Size | None, channels: int | None, white: int | None, room: Room
) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the images of all files that can be read, as one array [N, C, H, W], and facts about them for
    `index.json`. `room` is a function that returns an empty array of a given shape, in memory or in a
    file."""
    began = time.monotonic()
    good, broken = headers(files)
    if channels is None:
        channels = 1 if all(header.grey for header in good.values()) else 3
    deep = [number for number, header in good.items() if header.deep]
    brightest = dict.fromkeys(good, 0)
    for place, result in each([files[n] for n in deep], pictures.largest, "reading 16-bit images"):
        if isinstance(result, DataError):
            broken[deep[place]] = str(result)
            del good[deep[place]]
        else:
            brightest[deep[place]] = result
    scale = pictures.white_of(max(brightest.values(), default=0)) if white is None else white
    order = sorted(good)
    if size is None:
        size = _common_size(files, good)
    images = room((len(order), channels, *size))
    rows = {number: row for row, number in enumerate(order)}
    grey = np.zeros(len(order), bool)
    read = partial(pictures.decode, channels=channels, size=size, white=scale)
    for place, pixels in each([files[n] for n in order], read, "decoding images"):
        if isinstance(pixels, DataError):
            broken[order[place]] = str(pixels)
        else:
            images[place] = pixels
            grey[place] = pictures.grey_pixels(pixels)
    readable = [number for number in order if number not in broken]
    for row, number in enumerate(readable):  # close the gaps that broken files left
        if rows[number] != row:
            images[row] = images[rows[number]]
            grey[row] = grey[rows[number]]
    return images[: len(readable)], {
        "broken": sorted(broken.items()),
        "white": scale,
        "deep": len(set(readable) & set(deep)),
        "grey": int(grey[: len(readable)].sum()),
        "cut": sum(brightest[number] > scale for number in readable),
        "seconds": time.monotonic() - began,
    }


def _common_size(files: Sequence[Path], good: dict[int, pictures.Header]) -> Size:
    """Returns the height and width that all images have; raises if they differ. `good` maps positions in
    `files` to headers. If `good` is empty, the result is (1, 1)."""
    if not good:
        return 1, 1
    first = min(good)
    width, height = good[first].width, good[first].height
    check_side(height, width, files[first])
    for number in sorted(good):
        other = good[number]
        if (other.width, other.height) != (width, height):
            raise DataError(
                f"{files[number]}: has {other.width}x{other.height} pixels, but {files[first]} has "
                f"{width}x{height}, and all images must have one size; --set data.size=N resizes all images "
                "to NxN pixels"
            )
    return height, width
