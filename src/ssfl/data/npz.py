"""Loads your own images from an .npz file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssfl.core.plain_files import open_plain
from ssfl.data import formats
from ssfl.data.dataset import UNLABELLED, Dataset, statistics
from ssfl.data.formats import reading
from ssfl.errors import DataError

BATCH = 2_000  # images that are converted at once


def load_npz(path: Path, size: int | None) -> Dataset:
    """Returns the data set in an .npz file, which has the arrays x_train, y_train, x_test, y_test and,
    optionally, x_unlabelled and `classes`. All images are resized to size x size pixels, unless `size` is
    None.

    Images have the shape N x H x W, or N x H x W x C with 1 or 3 channels. Labels are whole numbers or
    strings, and each different value is a class. The classes are in the sorted order of these values. If
    labels are numbers, the array `classes` has the names of the classes in this order. If labels are strings,
    `classes` has the same strings, and its order replaces the sorted order.

    By default, augmentation may mirror colour images but not grey ones, which often show writing.
    """
    needed = ("x_train", "y_train", "x_test", "y_test")
    extra = tuple(f"x_{spelling}" for spelling in UNLABELLED)
    with reading(path):
        stream = open_plain(path)
    with stream:
        with reading(path):
            content = np.load(stream, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise DataError(
                f"{path}: holds a single array, but several are needed; save {', '.join(needed)} with "
                "numpy's savez"
            )
        for name in needed:
            if name not in content.files:
                raise DataError(f"{path}: has no array {name}; save it with the arrays {', '.join(needed)}")
        for name in content.files:
            if name.startswith(("x_", "y_")) and name not in needed + extra:
                raise DataError(
                    f"{path}: unknown array {name}; rename it to one of {', '.join(needed)}, {extra[0]}"
                )
        y_train, y_test = (npz_labels(content, path, name) for name in ("y_train", "y_test"))
        names = None
        if "classes" in content.files:
            names = [str(name) for name in npz_labels(content, path, "classes")]
        labels, test_labels, classes = _encoded(y_train, y_test, names, path)
        parts = {
            name: formats.resized(npz_images(content, path, name), size)
            for name in ("x_train", *extra, "x_test")
            if name in content.files
        }
    shape = parts["x_train"].shape[1:]
    for name, images in parts.items():
        if images.shape[1:] != shape:
            same = images.shape[1] == shape[0]
            raise DataError(
                f"{path}: the images of {name} have the shape {_shape(images)} (channels x height x width), "
                f"but those of x_train have {_shape(parts['x_train'])}; "
                + (
                    "--set data.size=N resizes all images to NxN pixels"
                    if same
                    else "make all images grey or all colour"
                )
            )
        known = {"x_train": labels, "x_test": test_labels}.get(name)
        if known is not None and len(known) != len(images):
            raise DataError(
                f"{path}: {name} holds {len(images)} images but {name.replace('x', 'y')} "
                f"{len(known)} labels; give each image one label"
            )
    test_images = parts.pop("x_test")
    images = formats.join(list(parts.values()))
    unknown = torch.full((len(images) - len(labels),), -1)
    return Dataset(
        path.stem, images, torch.cat([labels, unknown]), test_images, test_labels, classes,
        *statistics(images), flip=len(images[0]) == 3,
    )  # fmt: skip


def _shape(images: Tensor) -> str:
    return "x".join(str(length) for length in images.shape[1:])


def _encoded(
    y_train: np.ndarray, y_test: np.ndarray, names: list[str] | None, path: Path
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Returns y_train and y_test as class numbers, starting at 0, and the names of the classes. Classes are
    numbered in the sorted order of the labels. If labels are strings and `names` is given, the order of
    `names` is used instead. If labels are numbers, `names` has the classes' names in sorted order of the
    labels. `path` is for error messages."""
    if y_train.dtype.kind != y_test.dtype.kind:
        raise DataError(f"{path}: y_train and y_test must both be numbers or both be strings")
    values = np.unique(y_train)
    strange = np.setdiff1d(y_test, values)
    if len(strange):
        raise DataError(
            f"{path}: label {strange[0]} of y_test is unknown in y_train; "
            "add labelled training images of it, or remove it from the test set"
        )
    classes = names or [str(value) for value in values]
    if len(set(classes)) != len(values) or len(classes) != len(values):
        raise DataError(
            f"{path}: the array classes has {len(classes)} names, {len(set(classes))} of them different, but "
            f"y_train has {len(values)} different labels; name each class once"
        )
    codes = np.arange(len(values))
    if names and values.dtype.kind == "U":
        absent = sorted(set(values.tolist()).difference(names))
        if absent:
            raise DataError(f"{path}: label {absent[0]} of y_train is not in the array classes; add it there")
        codes = np.array([names.index(value) for value in values.tolist()])
    train, test = (codes[np.searchsorted(values, labels)] for labels in (y_train, y_test))
    return torch.from_numpy(train), torch.from_numpy(test), tuple(classes)


def npz_array(content: np.lib.npyio.NpzFile, path: Path, name: str) -> np.ndarray:
    """Returns the array `name` of an .npz file; raises if it cannot be read, is empty, or holds Python
    objects."""
    with reading(f"{path} ({name})"):
        try:
            array = content[name]
        except ValueError as error:
            if "allow_pickle" not in str(error):
                raise
            raise DataError(
                f"{path}: array {name} holds Python objects; save plain numbers or strings"
            ) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: {name} is not an array; save it with numpy's savez")
    if not array.size:
        raise DataError(f"{path}: array {name} is empty; it needs at least one entry")
    return array


def npz_images(content: np.lib.npyio.NpzFile, path: Path, name: str) -> Tensor:
    return as_images(npz_array(content, path, name), f"{path}: array {name}")


def as_images(array: np.ndarray, where: str) -> Tensor:
    """Returns images given as an array [N, H, W] or [N, H, W, C] as a uint8 tensor [N, C, H, W]. `where`
    names their source in error messages."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        raise DataError(
            f"{where} has shape {array.shape}; images are N x H x W, or N x H x W x 1, or N x H x W x 3"
        )
    return torch.from_numpy(as_bytes(array, where)).permute(0, 3, 1, 2).contiguous()


def npz_labels(content: np.lib.npyio.NpzFile, path: Path, name: str) -> np.ndarray:
    """Returns the array `name` of an .npz file as labels [N]: int64 or strings. An array N x 1 is accepted
    too."""
    array = npz_array(content, path, name)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "biuUS":
        raise DataError(
            f"{path}: array {name} is {array.dtype} {array.shape}; it must be a list of whole "
            "numbers or strings"
        )
    with reading(f"{path} ({name})"):
        if array.dtype.kind == "S":
            return np.char.decode(array, "utf-8")
        return array if array.dtype.kind == "U" else array.astype(np.int64)


def as_bytes(array: np.ndarray, where: str) -> np.ndarray:
    """Returns pixels of any accepted type as uint8: whole numbers from 0 to 255, floats from 0 to 1
    (multiplied by 255), or booleans. `where` names their source in error messages."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    kinds: dict[str, tuple[int, int]] = {"b": (1, 255), "i": (255, 1), "u": (255, 1), "f": (1, 255)}
    if array.dtype.kind not in kinds:
        raise DataError(f"{where}: has type {array.dtype}; save images as uint8")
    highest, scale = kinds[array.dtype.kind]
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise DataError(f"{where}: holds NaN or infinite values; remove them")
    if low < 0 or high > highest:
        raise DataError(
            f"{where}: {array.dtype} values from {low} to {high} lie outside 0..{highest}; "
            "save images as uint8 from 0 to 255 or as floats from 0 to 1"
        )
    pixels = np.empty(array.shape, np.uint8)
    for start in range(0, len(array), BATCH):
        batch = array[start : start + BATCH].astype(np.float32)
        pixels[start : start + BATCH] = np.rint(batch * scale)
    return pixels
