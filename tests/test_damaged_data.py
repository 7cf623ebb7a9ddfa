"""Damaged files of every format are read as they were or refused, and nothing else happens."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from image_files import (
    cifar_files,
    emnist_files,
    random_images,
    stl_files,
    write_files,
    write_image,
    write_npz,
    write_svhn,
    write_tar,
    write_zip,
)
from ssfl.data.dataset import Dataset
from ssfl.data.sources import load
from ssfl.errors import DataError


def damaged_sources(tmp_path: Path) -> dict[str, tuple[Path, Callable[[], Dataset]]]:
    """For each format, one file of it, and the call that reads it."""
    cifar, stl, emnist = cifar_files(2)[0], stl_files()[0], emnist_files()[0]
    write_tar(tmp_path / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", cifar)
    write_tar(tmp_path / "stl10_binary.tar.gz", "stl10_binary", stl)
    write_zip(tmp_path / "gzip.zip", emnist)
    write_svhn(tmp_path)
    plain = tmp_path / "plain"
    write_files(plain / "cifar-10-batches-bin", cifar)
    write_files(plain / "stl10_binary", stl)
    packed = {f"{name}.gz": gzip.compress(data) for name, data in emnist.items()}
    write_files(plain / "emnist", packed)
    loose = tmp_path / "loose"
    write_files(loose, emnist)
    savemat(loose / "train_32x32.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1], [2]]})
    savemat(loose / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1], [2]]})
    npz = write_npz(tmp_path / "x.npz")
    raw = tmp_path / "raw.npz"
    with np.load(npz) as content:
        np.savez(raw, **content)

    def named(name: str, root: Path) -> Callable[[], Dataset]:
        return lambda: load(name, root=root)

    def own(path: Path) -> Callable[[], Dataset]:
        return lambda: load(path=path, root=tmp_path, broken="stop")

    sources = {
        "cifar tar": (tmp_path / "cifar-10-binary.tar.gz", named("cifar10", tmp_path)),
        "cifar bin": (plain / "cifar-10-batches-bin/data_batch_3.bin", named("cifar10", plain)),
        "stl tar": (tmp_path / "stl10_binary.tar.gz", named("stl10", tmp_path)),
        "stl images": (plain / "stl10_binary/unlabeled_X.bin", named("stl10", plain)),
        "stl labels": (plain / "stl10_binary/train_y.bin", named("stl10", plain)),
        "emnist zip": (tmp_path / "gzip.zip", named("emnist", tmp_path)),
        "emnist gz": (plain / "emnist" / next(iter(packed)), named("emnist", plain)),
        "emnist idx": (loose / list(emnist)[1], named("emnist", loose)),
        "svhn packed": (tmp_path / "train_32x32.mat", named("svhn", tmp_path)),
        "svhn plain": (loose / "test_32x32.mat", named("svhn", loose)),
        "npz packed": (npz, own(npz)),
        "npz plain": (raw, own(raw)),
    }
    for suffix in ("png", "jpg", "gif", "tiff", "webp", "bmp", "ppm"):
        folder = tmp_path / suffix
        for name in ("a/1", "a/2", "b/1", "b/2"):
            write_image(folder / f"{name}.{suffix}", random_images(1, 24, 24, 3)[0])
        sources[suffix] = (folder / f"b/1.{suffix}", own(folder))
    return sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Callable]]:
    return damaged_sources(tmp_path_factory.mktemp("sources"))


FORMATS = [
    *("cifar tar", "cifar bin", "stl tar", "stl images", "stl labels"),
    *("emnist zip", "emnist gz", "emnist idx", "svhn packed", "svhn plain"),
    *("npz packed", "npz plain", "png", "jpg", "gif", "tiff", "webp", "bmp", "ppm"),
]


def attempt(read: Callable[[], Dataset]) -> tuple[Dataset | None, str]:
    """What was read, or the one line of the refusal; anything else fails the test."""
    try:
        return read(), ""
    except DataError as error:
        text = str(error)
    assert "\n" not in text
    return None, text


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_files(sources: dict[str, tuple[Path, Callable]], kind: str) -> None:
    path, read = sources[kind]
    whole = path.read_bytes()
    lengths = {0, 1, 3, 10, 100, 127, 128, 135, 150, *range(0, len(whole), len(whole) // 12 + 1)}
    lengths |= {len(whole) - 1, len(whole) - 9, len(whole) - 30}
    intact: Dataset = read()
    harmless = 0
    try:
        for length in sorted(n for n in lengths if 0 <= n < len(whole)):
            path.write_bytes(whole[:length])
            data, text = attempt(read)
            if data is None:
                assert str(path) in text or str(path.parent) in text
            else:  # only what follows the pixels is missing
                harmless += 1
                assert torch.equal(data.images, intact.images), f"{kind} cut at {length}"
                assert torch.equal(data.labels, intact.labels), f"{kind} cut at {length}"
                assert torch.equal(data.test_images, intact.test_images), f"{kind} cut at {length}"
                assert torch.equal(data.test_labels, intact.test_labels), f"{kind} cut at {length}"
    finally:
        path.write_bytes(whole)
    assert harmless <= 4


@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bytes(sources: dict[str, tuple[Path, Callable]], kind: str) -> None:
    """Wrong bytes may go unnoticed, but never end in anything but a clear refusal."""
    path, read = sources[kind]
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    try:
        for trial in range(15):
            broken = bytearray(whole)
            span = len(whole) if trial % 2 else min(len(whole), 200)  # headers do the most harm
            for place in rng.integers(0, span, 4):
                broken[place] = rng.integers(256)
            path.write_bytes(broken)
            attempt(read)
    finally:
        path.write_bytes(whole)
