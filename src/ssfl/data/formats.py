"""Reads the official files of public data sets, and resizes images. Every error is one line that names the
file."""

import gzip
import struct
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from ssfl.core.plain_files import open_plain
from ssfl.errors import DataError, one_line

SMALLEST, LARGEST = 4, 1024  # pixels on a side
_BATCH = 2_000  # images that are copied or converted at once


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Turns any error inside the `with` block into a DataError of one line that names the file `where`."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(
            f"{where}: damaged, or too large for this machine's memory; check the file or use a smaller one"
        ) from error
    except Exception as error:  # decoders of other libraries may raise any exception
        if isinstance(error, OSError) and error.strerror:
            raise DataError(
                f"{where}: cannot be read ({error.strerror}); check that it is there and that you may read it"
            ) from error
        reason = one_line(error, 120)
        raise DataError(
            f"{where}: cannot be decoded ({reason}); if it is damaged or cut short, replace it with a fresh "
            "copy"
        ) from error


# Files inside folders and archives


@dataclass(frozen=True)
class Member:
    """A file that was opened for reading, either in a folder or inside an archive."""

    name: str  # without its folder and without ".gz"
    where: str  # how messages name it
    size: int
    stream: IO[bytes]

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes of the file; raises if fewer are left."""
        with reading(self.where):
            data = self.stream.read(count)
        if len(data) < count:
            raise DataError(f"{self.where}: cut short; replace it with a fresh copy")
        return data

    def take_all(self) -> bytes:
        """Returns the whole content of the file. Gzipped content is unpacked."""
        data = self.take(self.size)
        with reading(self.where):
            return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def members(source: Path, wanted: Collection[str]) -> Iterator[Member]:
    """Yields those files in `source` whose names are in `wanted`. `source` is a folder, a tar.gz archive or a
    zip archive. A gzipped file, whose name has .gz added to the wanted name, is found too."""
    with reading(source):
        if source.is_dir():
            for name in wanted:
                for path in (source / name, source / f"{name}.gz"):
                    if path.exists():
                        with reading(path), open_plain(path) as stream:
                            yield Member(name, str(path), path.stat().st_size, stream)
                        break
        elif source.suffix == ".zip":
            with zipfile.ZipFile(source) as zipped:
                for entry in zipped.infolist():
                    name = Path(entry.filename).name.removesuffix(".gz")
                    if name in wanted:
                        with zipped.open(entry) as stream:
                            where = f"{source} ({entry.filename})"
                            yield Member(name, where, entry.file_size, stream)
        else:
            with tarfile.open(source, "r:gz") as tar:
                for info in tar:
                    name = Path(info.name).name.removesuffix(".gz")
                    if name in wanted and (inner := tar.extractfile(info)):
                        yield Member(name, f"{source} ({info.name})", info.size, inner)


# Official formats


def read_cifar(member: Member) -> tuple[Tensor, Tensor]:
    """Returns the images, uint8 [N, 3, 32, 32], and labels [N] of a CIFAR-10 binary file. In the file, each
    image is a byte with the label, followed by the pixels of each channel."""
    record = 1 + 3 * 32 * 32
    count = _records(member, record)
    records = np.frombuffer(member.take(member.size), np.uint8).reshape(count, record)
    labels = _labels_below(records[:, 0].astype(np.int64), 10, member.where)
    return torch.from_numpy(records[:, 1:].copy()).view(count, 3, 32, 32), labels


def read_idx(member: Member, axes: int) -> np.ndarray:
    """Returns the uint8 array with `axes` dimensions in an idx file, the format of MNIST: a magic number, the
    shape, the data."""
    data = member.take_all()
    head = 4 + 4 * axes
    if data[:4] != bytes((0, 0, 8, axes)) or len(data) < head:
        raise DataError(f"{member.where}: not an idx{axes} file of bytes; replace it with a fresh copy")
    shape = struct.unpack(f">{axes}I", data[4:head])
    expected = int(np.prod(shape, dtype=object))
    if len(data) - head != expected:
        raise DataError(
            f"{member.where}: {len(data) - head} bytes of data, but its header says "
            f"{expected}; replace it with a fresh copy"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def read_emnist_images(member: Member) -> Tensor:
    """Returns EMNIST images as uint8 [N, 1, 28, 28], upright. In the file they are transposed."""
    images = read_idx(member, 3)
    return torch.from_numpy(images.transpose(0, 2, 1).copy()).unsqueeze(1)


def read_emnist_labels(member: Member, classes: int) -> Tensor:
    return _labels_below(read_idx(member, 1).astype(np.int64), classes, member.where)


def read_svhn(path: Path) -> tuple[Tensor, Tensor]:
    """Returns the images, uint8 [N, 3, 32, 32], and labels [N] of a MATLAB file of SVHN. In the file, X has
    the shape 32x32x3xN, and in y the label 10 means the digit 0."""
    from scipy.io import loadmat

    with reading(path):
        content = loadmat(str(path), variable_names=["X", "y"])
    if "X" not in content or "y" not in content:
        raise DataError(f"{path}: holds no X and y; replace it with the official file")
    with reading(path):
        pixels, labels = np.asarray(content["X"]), np.asarray(content["y"])
        content.clear()
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
            raise DataError(
                f"{path}: X is {pixels.dtype} {pixels.shape}, not uint8 (32, 32, 3, N); "
                "replace it with the official file"
            )
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
        digits = labels.reshape(-1).astype(np.int64)
    return images, _labels_below(np.where(digits == 10, 0, digits), 10, path)


def read_stl_images(member: Member, size: int | None) -> list[Tensor]:
    """Returns the images of an STL-10 binary file as batches, uint8 [n, 3, H, W] each. They are resized to
    size x size pixels, unless `size` is None. In the file, images have 96x96 pixels per channel, stored
    column by column.

    Images are read and resized batch by batch, because the unlabelled images alone take 2.8 GB.
    """
    record = 3 * 96 * 96
    count = _records(member, record)
    parts = []
    for start in range(0, count, _BATCH):
        data = member.take(min(_BATCH, count - start) * record)
        columns = np.frombuffer(data, np.uint8).reshape(-1, 3, 96, 96)
        parts.append(resized(torch.from_numpy(columns.transpose(0, 1, 3, 2).copy()), size))
    return parts


def read_stl_labels(member: Member) -> Tensor:
    """Returns the labels [N] of an STL-10 binary file, from 0 to 9. In the file, they are 1 to 10."""
    labels = np.frombuffer(member.take(member.size), np.uint8).astype(np.int64) - 1
    return _labels_below(labels, 10, member.where)


def read_names(member: Member, count: int) -> tuple[str, ...]:
    """Returns the class names in a file with one name per line; raises unless there are `count` different
    ones."""
    with reading(member.where):
        text = member.take(member.size).decode()
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(set(names)) != count or len(names) != count:
        raise DataError(
            f"{member.where}: does not name {count} classes, one per line; "
            "replace it with a fresh copy or remove it"
        )
    return names


def _records(member: Member, record: int) -> int:
    """Returns the number of records in a file, each `record` bytes long. Raises if the file is empty or its
    size is not a multiple of `record`."""
    if member.size == 0 or member.size % record:
        raise DataError(
            f"{member.where}: {member.size} bytes are not a multiple of the record size {record}; "
            "replace it with a fresh copy"
        )
    return member.size // record


def _labels_below(labels: np.ndarray, classes: int, where: object) -> Tensor:
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataError(f"{where}: holds a label outside its {classes} classes; replace it with a fresh copy")
    return torch.from_numpy(labels)


# Images


def batches(images: Tensor, count: int) -> Iterator[Tensor]:
    """Yields batches of `count` images, so that a caller need not convert or copy all images at once."""
    return (images[start : start + count] for start in range(0, len(images), count))


def resized(images: Tensor, size: int | None) -> Tensor:
    """Returns images [N, C, H, W] resized to size x size pixels, with bilinear interpolation and antialiasing
    as in Pillow. They are unchanged if `size` is None."""
    if size is None or images.shape[2:] == (size, size):
        return images
    return join(
        [
            torch.nn.functional.interpolate(
                batch, size=(size, size), mode="bilinear", antialias=True
            ).contiguous()
            for batch in batches(images, _BATCH)
        ]
    )


def join(parts: list[Tensor]) -> Tensor:
    """Returns all parts as one uint8 tensor [N, ...]. The list `parts` is emptied step by step: each part is
    removed once it is copied, so that its memory is freed."""
    if len(parts) == 1:
        return parts.pop()
    whole = torch.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=torch.uint8)
    end = len(whole)
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole


def check_side(height: int, width: int, where: object) -> None:
    if not (min(height, width) >= SMALLEST and max(height, width) <= LARGEST):
        raise DataError(
            f"{where}: the images have {width}x{height} pixels, but each side must have {SMALLEST} to "
            f"{LARGEST}; --set data.size=N resizes all images to NxN pixels"
        )
