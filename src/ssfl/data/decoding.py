"""Image files as one array: decoded once, on all cores, into a memory-mapped file that commands share.

An entry of the cache is a file of pixels and `index.json`. Its key is a fingerprint of the files (paths,
sizes, times of change) and of what was asked for. Pixels are read from the file when a batch needs them, so
that there may be more images than memory holds.
"""

import errno
import hashlib
import json
import os
import shutil
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

from ssfl.core import cache, progress
from ssfl.data import pictures
from ssfl.data.formats import check_side
from ssfl.errors import DataError

FORMAT = 1
SPOKEN = 2.0
"""Seconds of decoding after which a line says where the result is kept."""
NAMED = 20
"""How many broken files a line names."""
Read = TypeVar("Read")
Size = tuple[int, int]
Broken = dict[int, str]
"""Files that cannot be read, by their number, and why."""


@dataclass(frozen=True)
class Decoded:
    """The images of a list of files."""

    images: Tensor
    """uint8 [N, C, H, W], without the broken ones."""
    broken: Broken
    white: int
    """What became 255 in files of more than 8 bits."""
    deep: int
    """How many files have more than 8 bits."""
    grey: int
    """How many images show no colours, however they are stored."""
    cut: int
    """How many have values above `white`."""


def decoded(
    files: Sequence[Path],
    size: Size | None = None,
    channels: int | None = None,
    white: int | None = None,
) -> Decoded:
    """All files as images of one size (height, width); without one all must have the same.

    They are grey if all files are, unless `channels` says otherwise. The largest value of all files says how
    many bits those of more than 8 have, unless `white` does: the same scale for every image.
    """
    wanted = (size, channels, white)
    try:
        entry, new = cache.obtain(
            "images", fingerprint(files, wanted), lambda place: _write(files, *wanted, place)
        )
        about = json.loads((entry / "index.json").read_text("utf-8"))
        shape = tuple(about.pop("shape"))
        mapped = (
            np.memmap(entry / "pixels", np.uint8, "c", shape=shape) if shape[0] else np.empty(shape, "u1")
        )
    except (OSError, ValueError) as error:  # no room, or nowhere to write
        reason = getattr(error, "strerror", None) or str(error)
        progress.say(f"cannot use the cache {cache.root()} ({reason}): images are decoded into memory")
        mapped, about = _in_memory(files, *wanted)
        new = False
    if new and about["seconds"] >= SPOKEN:
        progress.say(
            f"decoded {len(mapped):,} images in {about['seconds']:.0f} s; kept in {cache.root()} for later "
            "commands (safe to delete)"
        )
    broken = {int(number): why for number, why in about.pop("broken")}
    del about["seconds"]
    return Decoded(torch.from_numpy(mapped), broken, **about)


def fingerprint(files: Sequence[Path], wanted: Any) -> str:
    """A checksum of which files these are, as they are now, and of what is wanted of them."""
    import PIL

    digest = hashlib.sha256(repr((FORMAT, PIL.__version__, wanted)).encode())
    for file in files:
        try:
            status = file.stat()
            known = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            known = "unreadable"
        digest.update(f"{file.absolute()}\0{known}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:40]


def each(
    files: Sequence[Path], read: Callable[[Path], Read], label: str
) -> Iterator[tuple[int, Read | DataError]]:
    """What is read of every file, or why it cannot be, in any order, on all cores: Pillow's decoders let
    other threads work."""

    def one(number: int) -> tuple[int, Read | DataError]:
        try:
            return number, read(files[number])
        except DataError as error:
            return number, error

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with pictures.quiet(), ThreadPoolExecutor(cores) as pool, progress.bar(label, len(files)) as advance:
        for start in range(0, len(files), 16 * cores):  # few results wait at a time
            for found in pool.map(one, range(start, min(start + 16 * cores, len(files)))):
                advance(1)
                yield found


def headers(files: Sequence[Path]) -> tuple[dict[int, pictures.Header], Broken]:
    """What each file says of itself, and those that cannot be read."""
    good: dict[int, pictures.Header] = {}
    broken: Broken = {}
    for number, found in each(files, pictures.header, "looking at images"):
        if isinstance(found, DataError):
            broken[number] = str(found)
        else:
            good[number] = found
    return good, broken


def told(broken: Broken, count: int) -> str:
    """One line about all broken files."""
    reasons = [broken[number] for number in sorted(broken)]
    more = f", and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return f"{len(reasons):,} of {count:,} images cannot be read: {'; '.join(reasons[:NAMED])}{more}"


Room = Callable[[tuple[int, ...]], np.ndarray]


def _write(
    files: Sequence[Path], size: Size | None, channels: int | None, white: int | None, place: Path
) -> None:
    """Write an entry of the cache."""
    pixels = place / "pixels"

    def room(shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        if shutil.disk_usage(place).free < 1.05 * count:
            raise OSError(errno.ENOSPC, f"{count / 1e9:.1f} GB do not fit on its disk", str(place))
        with pixels.open("wb") as file:
            if hasattr(os, "posix_fallocate") and count:
                os.posix_fallocate(file.fileno(), 0, count)  # a full disk shows here, not as a crash later
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
    """The images of all files that can be read, written into `room`, and what is known of them."""
    began = time.monotonic()
    good, broken = headers(files)
    if channels is None:
        channels = 1 if all(header.grey for header in good.values()) else 3
    deep = [number for number, header in good.items() if header.deep]
    brightest = dict.fromkeys(good, 0)
    for place, found in each([files[n] for n in deep], pictures.largest, "looking at values"):
        if isinstance(found, DataError):
            broken[deep[place]] = str(found)
            del good[deep[place]]
        else:
            brightest[deep[place]] = found
    scale = pictures.white_of(max(brightest.values(), default=0)) if white is None else white
    order = sorted(good)
    if size is None:
        size = _common_size(files, good)
    images = room((len(order), channels, *size))
    rows = {number: row for row, number in enumerate(order)}
    grey = np.zeros(len(order), bool)
    read = partial(pictures.decode, channels=channels, size=size, white=scale)
    for place, made in each([files[n] for n in order], read, "decoding images"):
        if isinstance(made, DataError):
            broken[order[place]] = str(made)
        else:
            images[place] = made
            grey[place] = pictures.grey_pixels(made)
    kept = [number for number in order if number not in broken]
    for row, number in enumerate(kept):  # close the gaps that broken files left
        if rows[number] != row:
            images[row] = images[rows[number]]
            grey[row] = grey[rows[number]]
    return images[: len(kept)], {
        "broken": sorted(broken.items()),
        "white": scale,
        "deep": len(set(kept) & set(deep)),
        "grey": int(grey[: len(kept)].sum()),
        "cut": sum(brightest[number] > scale for number in kept),
        "seconds": time.monotonic() - began,
    }


def _common_size(files: Sequence[Path], good: dict[int, pictures.Header]) -> Size:
    """The size that all images have."""
    if not good:
        return 1, 1
    first = min(good)
    width, height = good[first].width, good[first].height
    check_side(height, width, files[first])
    for number in sorted(good):
        other = good[number]
        if (other.width, other.height) != (width, height):
            raise DataError(
                f"{files[number]}: {other.width}x{other.height} pixels where {files[first]} has "
                f"{width}x{height}; --set data.size=N resizes all images to NxN"
            )
    return height, width
