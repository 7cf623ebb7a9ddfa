"""Small files in the official formats, and the refusal of those that are wrong."""

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from ssfl.errors import DataError


def refusal(call: Callable[[], object], *words: object) -> str:
    """The one line with which a call refuses; it must contain all the words."""
    with pytest.raises(DataError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert str(word) in text, f"{word!r} is not in: {text}"
    return text


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def same(tensor: Tensor, array: np.ndarray) -> bool:
    return tensor.dtype == torch.uint8 and np.array_equal(tensor.numpy(), array)


# Small files in the official formats. Pixels are given as [N, C, H, W].


def cifar_files(count: int = 4) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """Five training batches and a test batch of `count` images each."""
    pixels = random_images(6 * count, 3, 32, 32)
    labels = np.arange(6 * count) % 4
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    files = {}
    for batch, name in enumerate(names):
        places = range(batch * count, (batch + 1) * count)
        files[name] = b"".join(bytes([labels[i]]) + pixels[i].tobytes() for i in places)
    files["batches.meta.txt"] = "\n".join(f"class {i}" for i in range(10)).encode() + b"\n\n"
    return files, pixels, labels


def stl_files() -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    pixels = {name: random_images(4, 3, 96, 96, seed=i) for i, name in enumerate("abc")}
    parts = dict(zip(("train_X.bin", "test_X.bin", "unlabeled_X.bin"), "abc", strict=True))
    files = {name: pixels[key].transpose(0, 1, 3, 2).tobytes() for name, key in parts.items()}
    files["train_y.bin"], files["test_y.bin"] = bytes([1, 10, 2, 10]), bytes([10, 2, 1, 1])
    return files, {name: pixels[key] for name, key in parts.items()}


def emnist_files() -> tuple[dict[str, bytes], np.ndarray]:
    pixels = random_images(6, 28, 28)
    labels = [0, 10, 46, 0, 46, 10]
    files = {}
    for split, part in (("train", slice(0, 4)), ("test", slice(4, 6))):
        images = pixels[part]
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, len(images), 28, 28)
        files[f"emnist-balanced-{split}-images-idx3-ubyte"] = head + images.transpose(0, 2, 1).tobytes()
        head = struct.pack(">BBBBI", 0, 0, 8, 1, len(images))
        files[f"emnist-balanced-{split}-labels-idx1-ubyte"] = head + bytes(labels[part])
    return files, pixels


def write_svhn(folder: Path, labels: tuple[int, ...] = (10, 1, 9)) -> np.ndarray:
    pixels = random_images(len(labels), 3, 32, 32)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        content = {"X": pixels.transpose(2, 3, 1, 0), "y": np.array(labels, np.uint8)[:, None]}
        savemat(folder / name, content, do_compression=True)
    return pixels


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def write_tar(path: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("gzip/emnist-letters-mapping.txt", "1 65 97")
        for name, data in files.items():
            zipped.writestr(f"gzip/{name}.gz", gzip.compress(data))


def write_npz(path: Path, **changes: object) -> Path:
    arrays: dict[str, object] = {
        "x_train": random_images(6, 8, 8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": random_images(3, 8, 8, seed=1),
        "y_test": np.array([2, 1, 0]),
        **changes,
    }
    kept: dict[str, Any] = {k: np.asarray(v) for k, v in arrays.items() if v is not None}
    np.savez_compressed(path, **kept)
    return path


def write_image(path: Path, pixels: np.ndarray | None = None, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random_images(1, 8, 8, seed=seed)[0] if pixels is None else pixels).save(path)
    return path


def write_folder(folder: Path, *files: str) -> Path:
    """A folder of grey images: each of one value, 10 times its place in the list."""
    for place, file in enumerate(files):
        write_image(folder / file, np.full((8, 8), 10 * place, np.uint8))
    return folder
