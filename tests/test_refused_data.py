"""Images that cannot be used are refused in one clear line."""

import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from image_files import (
    cifar_files,
    emnist_files,
    refusal,
    stl_files,
    write_files,
    write_folder,
    write_image,
    write_npz,
    write_svhn,
)
from ssfl.data.dataset import Dataset
from ssfl.data.download import OFFICIAL
from ssfl.data.sources import load
from ssfl.errors import SsflWarning


def test_names_and_paths(tmp_path: Path) -> None:
    refusal(lambda: load(root=tmp_path), "data.name", "data.path")
    refusal(lambda: load("digits", tmp_path, root=tmp_path), "data.name", "data.path")
    refusal(lambda: load("", tmp_path, root=tmp_path), "data.name", "data.path")
    refusal(lambda: load("", root=tmp_path), "data.name", "digits")
    refusal(
        lambda: load("CIFAR-10", root=tmp_path),
        *("digits, cifar10, svhn, emnist, stl10", "did you mean cifar10?"),
    )
    assert "mean" not in refusal(lambda: load("zzzzz", root=tmp_path), "zzzzz", "digits")
    gone = tmp_path / "gone.npz"
    refusal(lambda: load(path=gone, root=tmp_path), gone, "no such", "data.path")
    text = tmp_path / "text.csv"
    text.write_text("1,2")
    refusal(lambda: load(path=text, root=tmp_path), text, ".npz", "data.path")
    for size in (3, 1025):
        refusal(lambda size=size: load("digits", root=tmp_path, size=size), "data.size", size)  # type: ignore[misc]
    for part in (-0.1, 1.0):
        refusal(
            lambda part=part: load("digits", root=tmp_path, test_fraction=part),  # type: ignore[misc]
            "data.test_fraction",
        )


@pytest.mark.parametrize("name", sorted(OFFICIAL))
def test_missing_files_name_their_address(tmp_path: Path, name: str) -> None:
    remote = OFFICIAL[name].remotes[0]
    refusal(
        lambda: load(name, root=tmp_path / "data"),
        *(tmp_path / "data" / name / remote.file, remote.url, remote.checksum),
        "--set data.download=true",
    )
    assert not (tmp_path / "data").exists()


def nan(shape: tuple[int, ...]) -> np.ndarray:
    array = np.zeros(shape)
    array[1, 2, 3] = np.nan
    return array


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, ("y_test", "x_train")),
        ({"x_unlabled": [1]}, ("x_unlabled", "x_unlabelled", "rename")),
        ({"x_train": np.zeros((0, 8, 8), np.uint8)}, ("x_train", "empty")),
        ({"x_train": np.zeros((6, 64), np.uint8)}, ("x_train", "(6, 64)", "N x H x W")),
        ({"x_train": np.zeros((6, 3, 8, 8), np.uint8)}, ("x_train", "(6, 3, 8, 8)")),
        ({"x_train": nan((6, 8, 8))}, ("x_train", "NaN")),
        ({"x_test": np.full((3, 8, 8), np.inf)}, ("x_test", "infinite")),
        ({"x_test": np.full((3, 8, 8), 1.5)}, ("x_test", "outside 0..1")),
        ({"x_test": np.full((3, 8, 8), 256)}, ("x_test", "outside 0..255")),
        ({"x_test": np.full((3, 8, 8), -1)}, ("x_test", "outside 0..255")),
        ({"x_test": np.full((3, 8, 8), "a")}, ("x_test", "<U1", "uint8")),
        ({"x_test": np.full((3, 8, 8), 1j)}, ("x_test", "complex", "uint8")),
        ({"x_train": np.zeros((5, 8, 8), np.uint8)}, ("x_train", "5 images", "6 labels")),
        ({"x_test": np.zeros((4, 8, 8), np.uint8)}, ("x_test", "4 images", "y_test 3 labels")),
        ({"x_test": np.zeros((3, 9, 8), np.uint8)}, ("x_test", "1x9x8", "data.size=N")),
        ({"x_test": np.zeros((3, 8, 8, 3), np.uint8)}, ("x_test", "3x8x8", "1x8x8")),
        ({"x_unlabelled": np.zeros((3, 9, 8), np.uint8)}, ("x_unlabelled", "data.size=N")),
        (
            {"x_train": np.zeros((6, 3, 8), np.uint8), "x_test": np.zeros((3, 3, 8), np.uint8)},
            ("8x3", "1024", "data.size=N"),
        ),
        (
            {f"x_{p}": np.zeros((n, 4, 1025), np.uint8) for p, n in (("train", 6), ("test", 3))},
            ("1025x4", "1024"),
        ),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, ("class (0)", "add")),
        ({"y_test": [0, 1, 7]}, ("label 7", "y_test", "unknown in y_train")),
        ({"y_test": ["0", "1", "2"]}, ("y_train and y_test", "strings")),
        ({"y_train": np.zeros(6)}, ("y_train", "float64", "whole numbers")),
        ({"y_train": np.eye(6, dtype=int)}, ("y_train", "(6, 6)", "whole numbers")),
        ({"y_train": np.array([], int)}, ("y_train", "empty")),
        ({"y_train": np.array([None] * 6)}, ("y_train", "Python objects")),
        ({"classes": ["a", "b"]}, ("classes", "2 names", "3 different labels")),
        ({"classes": ["a", "b", "b", "c"]}, ("classes", "name each class once")),
        (
            {"y_train": list("abcabc"), "y_test": list("abc"), "classes": list("abd")},
            ("label c", "classes"),
        ),
    ],
)
def test_npz_refused(tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]) -> None:
    path = write_npz(tmp_path / "bad.npz", **changes)
    refusal(lambda: load(path=path, root=tmp_path), path, *words)


def test_npz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for data in (b"", b"PK\x03\x04", b"no arrays here", b"\x80\x04N."):
        path.write_bytes(data)
        refusal(lambda: load(path=path, root=tmp_path), path, "fresh copy")
    with path.open("wb") as out:
        np.save(out, np.zeros(3))
    refusal(lambda: load(path=path, root=tmp_path), path, "single array")
    with zipfile.ZipFile(path, "w") as zipped:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            zipped.writestr(name, b"text")
    refusal(lambda: load(path=path, root=tmp_path), path, "not an array")


def test_cifar10_refused(tmp_path: Path) -> None:
    files, _, _ = cifar_files()
    folder = tmp_path / "cifar-10-batches-bin"

    def refused(changes: dict[str, bytes], *words: object) -> None:
        write_files(folder, files | changes)
        refusal(lambda: load("cifar10", root=tmp_path), *words)

    refused({"data_batch_2.bin": b""}, folder / "data_batch_2.bin", "fresh copy")
    refused({"data_batch_2.bin": b"\x0a" + bytes(3072)}, folder / "data_batch_2.bin", "label")
    refused({"batches.meta.txt": b"a\nb\n"}, folder / "batches.meta.txt", "10 classes")
    refused({"batches.meta.txt": b"\xff\xfe"}, folder / "batches.meta.txt", "fresh copy")
    refused({"test_batch.bin": b"\x09" + bytes(3072)}, "class 9", "no labelled training images")
    only = {name: bytes(3073) for name in files if name != "batches.meta.txt"}
    refused(only, "(class 0)")
    (folder / "data_batch_4.bin").unlink()
    refusal(lambda: load("cifar10", root=tmp_path), folder, "data_batch_4.bin is missing", "http")


def test_svhn_refused(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    write_svhn(tmp_path, labels=(10, 1, 11))
    refusal(lambda: load("svhn", root=tmp_path), path, "label")
    savemat(path, {"Z": np.zeros(3)})
    refusal(lambda: load("svhn", root=tmp_path), path, "X and y", "official")
    savemat(path, {"X": np.zeros((32, 32, 3, 2)), "y": np.zeros(2)})
    refusal(lambda: load("svhn", root=tmp_path), path, "float64", "official")
    write_svhn(tmp_path)
    savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones(3, np.uint8)})
    refusal(lambda: load("svhn", root=tmp_path), "2 training images but 3 labels")


def test_emnist_refused(tmp_path: Path) -> None:
    files, _ = emnist_files()
    images, labels = list(files)[:2]

    def refused(changes: dict[str, bytes], *words: object) -> None:
        write_files(tmp_path, files | changes)
        refusal(lambda: load("emnist", root=tmp_path), *words)

    refused({images: b"\0\0\x08\x01" + files[images][4:]}, tmp_path / images, "idx3")
    refused({images: files[images] + b"x"}, tmp_path / images, "3137", "3136")
    refused({images: b""}, tmp_path / images, "idx3")
    refused({labels: files[labels][:-1] + b"\x2f"}, tmp_path / labels, "label", "47 classes")
    refused({labels: files[list(files)[3]]}, "4 training images but 2 labels")
    (tmp_path / labels).unlink()
    refusal(lambda: load("emnist", root=tmp_path), f"{labels} is missing")


def test_stl10_refused(tmp_path: Path) -> None:
    files, _ = stl_files()
    folder = tmp_path / "stl10_binary"

    def refused(changes: dict[str, bytes], *words: object) -> None:
        write_files(folder, files | changes)
        refusal(lambda: load("stl10", root=tmp_path), *words)

    refused({"train_y.bin": bytes([1, 2, 3])}, folder, "train_X.bin", "4 images", "3 labels")
    refused({"test_y.bin": bytes([1, 2, 10])}, "4 test images but 3 labels")
    refused({"train_y.bin": bytes([0, 1, 2, 3])}, folder / "train_y.bin", "label")
    refused({"unlabeled_X.bin": b""}, folder / "unlabeled_X.bin", "fresh copy")


def test_folder_refused(tmp_path: Path) -> None:
    def refused(name: str, files: tuple[str, ...], *words: object) -> None:
        folder = write_folder(tmp_path / name, *files)
        refusal(lambda: load(path=folder, root=tmp_path), *words)

    two = ("a/1.png", "a/2.png", "b/1.png", "b/2.png")
    split = tuple(f"{part}/{file}" for part in ("train", "test") for file in two)
    refused("loose", ("1.png", "2.png"), tmp_path / "loose", "each class")
    refused("one", ("a/1.png", "a/2.png"), tmp_path / "one", "class (a)")
    refused("single", (*two, "c/1.png"), tmp_path / "single" / "c", "only image")
    refused("val", (*split, "val/a/1.png"), tmp_path / "val" / "val", "rename")
    refused("late", (*split, "test/c/1.png"), "late/test/c", "class c is not in")
    refused("unsure", (*split, "test/1.png"), "unsure/test/1.png", "label")
    (tmp_path / "empty").mkdir()
    refused("empty", (), tmp_path / "empty", "each class")
    (tmp_path / "hollow" / "c").mkdir(parents=True)
    refused("hollow", two, tmp_path / "hollow" / "c", "no images")
    (tmp_path / "untested" / "test" / "a").mkdir(parents=True)
    refused("untested", tuple(f"train/{file}" for file in two), "untested/test", "no images")
    write_image(tmp_path / "tiny" / "a" / "0.png", np.zeros((3, 8), np.uint8))
    refused("tiny", two, "tiny/a/0.png", "8x3", "1024")
    odd = write_image(tmp_path / "mixed" / "b" / "9.png", np.zeros((8, 9), np.uint8))
    refused("mixed", two, "mixed/", "9x8", "8x8", "--set data.size=N")
    assert load(path=tmp_path / "mixed", root=tmp_path, size=8).shape == (1, 8, 8)
    odd.write_bytes(b"no image")
    refusal(lambda: load(path=tmp_path / "mixed", root=tmp_path, broken="stop"), odd, "fresh copy")


def test_unreadable_files(tmp_path: Path) -> None:
    """Folders in the place of files, and files that may not be read."""
    (tmp_path / "train_32x32.mat").mkdir()
    refusal(lambda: load("svhn", root=tmp_path), "test_32x32.mat")
    (tmp_path / "test_32x32.mat").mkdir()
    refusal(lambda: load("svhn", root=tmp_path), "train_32x32.mat", "directory")
    (tmp_path / "cifar-10-binary.tar.gz").mkdir()
    refusal(lambda: load("cifar10", root=tmp_path), "cifar-10-binary.tar.gz")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").mkdir(parents=True)
    refusal(lambda: load("cifar10", root=tmp_path), "data_batch_1.bin", "directory")


@contextmanager
def powerless() -> Iterator[None]:
    """Without the rights of an administrator, who may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_every_broken_image_of_a_folder_is_named(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        for number in range(6):
            file = tmp_path / label / f"{number}.png"
            file.parent.mkdir(exist_ok=True)
            Image.new("L", (8, 8), 20 * number + (label == "dog")).save(file)
    for name in ("cat/0", "cat/4", "dog/2"):
        (tmp_path / f"{name}.png").write_bytes(b"no picture")
    refusal(
        lambda: load(path=tmp_path, root=tmp_path, broken="stop"),
        "3 of 12", "cat/0.png", "cat/4.png", "dog/2.png", "data.broken=skip",
    )  # fmt: skip
    with pytest.warns(SsflWarning) as told:
        data = load(path=tmp_path, root=tmp_path)
    (line,) = [str(one.message) for one in told]
    assert "3 of 12" in line
    assert all(name in line for name in ("cat/0.png", "cat/4.png", "dog/2.png"))
    assert data.broken == 3
    assert len(data.labels) + len(data.test_labels) == 9
    for name in ("cat/1", "cat/2", "cat/3", "cat/5"):
        (tmp_path / f"{name}.png").write_bytes(b"no picture")
    refusal(lambda: load(path=tmp_path, root=tmp_path), tmp_path / "cat", "none of its")


def test_forbidden_files() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        path = write_npz(root / "x.npz")
        folder = write_folder(root / "f", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
        write_svhn(root)
        write_files(root / "stl10_binary", stl_files()[0])
        calls: dict[Path, Callable[[], Dataset]] = {
            path: lambda: load(path=path, root=root),
            folder / "b": lambda: load(path=folder, root=root),
            root / "train_32x32.mat": lambda: load("svhn", root=root),
            root / "stl10_binary" / "train_X.bin": lambda: load("stl10", root=root),
        }
        for secret, call in calls.items():
            call()
            secret.chmod(0)
        with powerless():
            for secret, call in calls.items():
                refusal(call, secret, "ermission", "you may read it")
        for secret in calls:
            secret.chmod(0o755)
