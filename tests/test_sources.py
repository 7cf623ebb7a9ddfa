"""Sources of images: right pixels from small files in the real formats, or a clear refusal."""

import gzip
import hashlib
import io
import os
import struct
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from ssfl.data import download, formats
from ssfl.data.dataset import Dataset
from ssfl.data.download import OFFICIAL, Official, Remote
from ssfl.data.sources import EMNIST_CLASSES, load, read_image_files
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


# The right pixels


def test_digits_have_a_fixed_stratified_test_set(tmp_path: Path) -> None:
    data = load("digits", root=tmp_path)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    again = load("digits", root=tmp_path)
    assert data.images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert torch.bincount(data.test_labels).tolist() == [36] * 10
    assert torch.equal(data.test_images, again.test_images)
    assert data.images.max() == 255
    assert data.classes == tuple("0123456789")
    assert (data.flip, data.labelled, data.shape) == (False, 1437, (1, 8, 8))
    values = data.images.double() / 255
    assert data.mean[0] == pytest.approx(values.mean().item())
    assert data.std[0] == pytest.approx(values.std(correction=0).item())
    rows = {image.numpy().tobytes() for image in data.images}
    assert sum(image.numpy().tobytes() in rows for image in data.test_images) < 3


@pytest.mark.parametrize("layout", ["tar", "root/tar", "folder", "root/folder", "loose"])
def test_cifar10(tmp_path: Path, layout: str) -> None:
    files, pixels, labels = cifar_files()
    if layout.endswith("tar"):
        folder = tmp_path / ("cifar10" if "root" in layout else "")
        folder.mkdir(exist_ok=True)
        write_tar(folder / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", files)
    elif layout == "loose":
        write_files(tmp_path / "cifar10", files)
    else:
        folder = tmp_path / ("cifar10" if "root" in layout else "")
        write_files(folder / "cifar-10-batches-bin", files)
    data = load("cifar10", root=tmp_path)
    assert same(data.images, pixels[:20])
    assert same(data.test_images, pixels[20:])
    assert data.labels.tolist() == labels[:20].tolist()
    assert data.labels.dtype == data.test_labels.dtype == torch.int64
    assert data.classes[3] == "class 3"
    assert data.flip
    assert data.mean == (0.4914, 0.4822, 0.4465)


def test_cifar10_knows_its_classes_without_the_meta_file(tmp_path: Path) -> None:
    files, _, _ = cifar_files()
    del files["batches.meta.txt"]
    write_files(tmp_path / "cifar-10-batches-bin", files)
    data = load("cifar10", root=tmp_path, size=16)
    assert data.classes[::9] == ("airplane", "truck")
    assert data.shape == (3, 16, 16)


def test_svhn(tmp_path: Path) -> None:
    pixels = write_svhn(tmp_path)
    data = load("svhn", root=tmp_path)
    assert same(data.images, pixels)
    assert data.labels.tolist() == [0, 1, 9]
    assert not data.flip
    expected = pixels.mean((0, 2, 3)) / 255, pixels.std((0, 2, 3)) / 255
    assert data.mean == pytest.approx(expected[0])
    assert data.std == pytest.approx(expected[1])


@pytest.mark.parametrize("layout", ["gz", "plain", "zip", "unpacked zip"])
def test_emnist_is_upright(tmp_path: Path, layout: str) -> None:
    files, pixels = emnist_files()
    if layout == "zip":
        write_zip(tmp_path / "gzip.zip", files)
    elif layout == "plain":
        write_files(tmp_path / "emnist", files)
    else:
        packed = {f"{name}.gz": gzip.compress(data) for name, data in files.items()}
        write_files(tmp_path / ("emnist/gzip" if layout == "unpacked zip" else ""), packed)
    data = load("emnist", root=tmp_path)
    assert same(data.images, pixels[:4, None])
    assert same(data.test_images, pixels[4:, None])
    assert [data.classes[i] for i in data.labels.tolist()] == ["0", "A", "t", "0"]
    assert data.classes == EMNIST_CLASSES
    assert (len(data.classes), data.flip, data.mean) == (47, False, (0.1307,))


@pytest.mark.parametrize("layout", ["tar", "folder"])
@pytest.mark.parametrize("order", [1, -1])
def test_stl10(tmp_path: Path, layout: str, order: int) -> None:
    files, pixels = stl_files()
    names = ("plane", *"bcdefghi", "truck")
    files = dict(list(files.items())[::order]) | {"class_names.txt": "\n".join(names).encode()}
    if layout == "tar":
        write_tar(tmp_path / "stl10_binary.tar.gz", "stl10_binary", files)
    else:
        write_files(tmp_path / "stl10" / "stl10_binary", files)
    data = load("stl10", root=tmp_path)
    assert same(data.images, np.concatenate([pixels["train_X.bin"], pixels["unlabeled_X.bin"]]))
    assert same(data.test_images, pixels["test_X.bin"])
    assert data.labels.tolist() == [0, 9, 1, 9, -1, -1, -1, -1]
    assert data.test_labels.tolist() == [9, 1, 0, 0]
    assert data.classes == names
    assert (data.labelled, data.flip) == (4, True)
    values = data.images.double() / 255
    assert data.mean == pytest.approx(values.mean((0, 2, 3)).tolist())
    assert data.std == pytest.approx(values.std((0, 2, 3), correction=0).tolist())


def test_stl10_resized_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, pixels = stl_files()
    write_files(tmp_path / "stl10_binary", files)
    monkeypatch.setattr(formats, "_BATCH", 3)
    data = load("stl10", root=tmp_path, size=32)
    assert data.images.shape == (8, 3, 32, 32)
    upright = Image.fromarray(pixels["unlabeled_X.bin"][3].transpose(1, 2, 0))
    expected = np.asarray(upright.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(data.images[7].numpy().transpose(1, 2, 0) - expected).max() <= 1
    assert data.classes[::9] == ("airplane", "truck")


def test_npz_grey(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz")
    data = load(path=path, root=tmp_path)
    assert same(data.images, random_images(6, 8, 8)[:, None])
    assert (data.name, data.classes, data.flip) == ("own", ("0", "1", "2"), False)
    assert data.test_labels.tolist() == [2, 1, 0]
    wide = load(path=str(path), root=tmp_path, size=12)
    assert wide.shape == (1, 12, 12)


def test_npz_colour_and_unlabelled(tmp_path: Path) -> None:
    train, test, more = (random_images(n, 8, 6, 3, seed=n) for n in (6, 3, 5))
    for spelling in ("x_unlabelled", "x_unlabeled"):
        path = write_npz(tmp_path / "c.npz", x_train=train, x_test=test, **{spelling: more})
        data = load(path=path, root=tmp_path)
        assert same(data.images, np.concatenate([train, more]).transpose(0, 3, 1, 2))
        assert data.images.is_contiguous()
        assert data.labels.tolist() == [0, 1, 2, 0, 1, 2] + [-1] * 5
        assert (data.flip, data.labelled) == (True, 6)
        assert data.shape == (3, 8, 6)


@pytest.mark.parametrize(("dtype", "scale"), [("int64", 1), (">i2", 1), ("float32", 255), ("float16", 255)])
def test_npz_other_numbers(tmp_path: Path, dtype: str, scale: int) -> None:
    pixels = random_images(6, 8, 8, 1)
    path = write_npz(
        tmp_path / "n.npz",
        x_train=(pixels / scale).astype(dtype),
        x_test=np.zeros((3, 8, 8), bool),
        y_train=np.array([[7], [-3], [7], [-3], [40], [40]], "int16"),
        y_test=np.array([40, 7, -3], "int32"),
    )
    data = load(path=path, root=tmp_path)
    assert same(data.images, pixels.transpose(0, 3, 1, 2))
    assert data.classes == ("-3", "7", "40")
    assert data.labels.tolist() == [1, 0, 1, 0, 2, 2]
    assert data.test_labels.tolist() == [2, 1, 0]


def test_npz_true_is_white(tmp_path: Path) -> None:
    pixels = random_images(6, 8, 8) > 99
    data = load(path=write_npz(tmp_path / "b.npz", x_train=pixels), root=tmp_path)
    assert same(data.images, pixels[:, None] * np.uint8(255))


def test_npz_strings_and_names(tmp_path: Path) -> None:
    words = np.array(["cat", "ant", "bee"] * 2)
    for kind in ("U", "S"):
        path = write_npz(tmp_path / "s.npz", y_train=words.astype(kind), y_test=["bee", "cat", "ant"])
        data = load(path=path, root=tmp_path)
        assert data.classes == ("ant", "bee", "cat")
        assert data.labels[:3].tolist() == [2, 0, 1]
        assert data.test_labels.tolist() == [1, 2, 0]
    path = write_npz(tmp_path / "o.npz", y_train=words, y_test=words[:3], classes=["cat", "bee", "ant"])
    data = load(path=path, root=tmp_path)
    assert data.classes == ("cat", "bee", "ant")
    assert data.labels[:3].tolist() == [0, 2, 1]
    data = load(path=write_npz(tmp_path / "i.npz", classes=["x", "y", "z"]), root=tmp_path)
    assert data.classes == ("x", "y", "z")
    assert data.labels[:3].tolist() == [0, 1, 2]


def test_a_channel_that_never_changes_can_be_divided_by(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "k.npz", x_train=np.full((6, 8, 8), 51, np.uint8))
    data = load(path=path, root=tmp_path)
    assert (data.mean, data.std) == ((0.2,), (1.0,))


@pytest.mark.parametrize("spelling", ["unlabelled", "unlabeled"])
def test_folder_with_train_and_test(tmp_path: Path, spelling: str) -> None:
    folder = write_folder(
        tmp_path / "set",
        *("train/dog/1.png", "train/cat/2.png", "train/cat/deeper/1.PNG", "train/loose.png"),
        *("test/cat/1.png", "test/dog/1.png", f"{spelling}/a/b/1.png", f"{spelling}/0.bmp"),
        *("over.png", "train/.hidden.png", "train/.git/x.png", ".cache/y.png"),
    )
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load(path=folder, root=tmp_path)
    assert (data.name, data.classes, data.flip) == ("set", ("cat", "dog"), False)
    assert data.images[:, 0, 0, 0].tolist() == [10, 20, 0, 30, 80, 70, 60]
    assert data.labels.tolist() == [0, 0, 1, -1, -1, -1, -1]
    assert data.test_images[:, 0, 0, 0].tolist() == [40, 50]
    assert data.test_labels.tolist() == [0, 1]


@pytest.mark.parametrize("inside", ["", "train/"])
def test_folder_without_test_holds_some_out(tmp_path: Path, inside: str) -> None:
    names = [f"{inside}{label}/{i}.png" for label in ("a", "b") for i in range(10)]
    folder = write_folder(tmp_path / "f", *names, f"{inside}c/0.png", f"{inside}c/1.png", "u.png")

    def held_out(**options: float) -> tuple[list[int], list[int], Dataset]:
        data = load(path=folder, root=tmp_path, **options)  # type: ignore[arg-type]
        test = data.test_images[:, 0, 0, 0].tolist()
        train = data.images[:, 0, 0, 0].tolist()
        assert sorted(train + test) == list(range(0, 230, 10))
        assert train[-1] == 220
        return test, torch.bincount(data.test_labels).tolist(), data

    test, counts, data = held_out()
    assert counts == [2, 2, 1]
    assert data.labels.tolist() == [0] * 8 + [1] * 8 + [2, -1]
    assert held_out()[0] == test
    assert held_out(test_fraction=0.5)[1] == [5, 5, 1]
    assert held_out(test_fraction=0.01)[1] == [1, 1, 1]
    assert held_out(test_fraction=0.99)[1] == [9, 9, 1]


def test_folder_may_hold_a_class_called_train(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "v", "bus/1.png", "bus/2.png", "train/1.png", "train/2.png")
    assert load(path=folder, root=tmp_path).classes == ("bus", "train")


def test_folder_is_colour_if_one_image_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", "a/1.png", "a/2.png", "b/1.png")
    colours = random_images(1, 8, 8, 3)[0]
    write_image(folder / "b" / "2.png", colours)
    data = load(path=folder, root=tmp_path)
    assert data.shape == (3, 8, 8)
    assert data.flip
    both = torch.cat([data.images, data.test_images]).numpy()
    assert any(np.array_equal(image, colours.transpose(2, 0, 1)) for image in both)


def test_folder_of_photographs_resized(tmp_path: Path) -> None:
    for place, (height, width) in enumerate(((40, 30), (1100, 20), (16, 16), (50, 60))):
        smooth = np.linspace(0, 255, height * width * 3).reshape(height, width, 3).astype(np.uint8)
        write_image(tmp_path / "f" / "ab"[place % 2] / f"{place}.jpg", smooth)
    assert load(path=tmp_path / "f", root=tmp_path, size=16).shape == (3, 16, 16)
    refusal(lambda: load(path=tmp_path / "f", root=tmp_path), "pixels", "--set data.size=N")


def test_read_image_files_of_every_kind(tmp_path: Path) -> None:
    grey = random_images(1, 8, 6)[0]
    colour = random_images(1, 8, 6, 3)[0]
    alpha = np.dstack([colour, np.full((8, 6), 255, np.uint8)])
    alpha[0, :, 3] = 0  # a transparent row becomes white
    deep = grey.astype(np.uint16) * 257
    turned = Image.fromarray(np.rot90(colour).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey > 99).save(tmp_path / "bits.png")
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(deep).save(tmp_path / "deep.tiff")
    Image.fromarray(colour).save(tmp_path / "colour.bmp")
    Image.fromarray(colour).quantize(256).save(tmp_path / "palette.png")
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    Image.fromarray(alpha).convert("LA").save(tmp_path / "grey-alpha.png")
    turned.save(tmp_path / "turned.png", exif=exif)

    def one(name: str, channels: int) -> np.ndarray:
        read = read_image_files([tmp_path / name], channels, 8, 6)
        assert read.shape == (1, channels, 8, 6)
        assert read.dtype == torch.uint8
        return read[0].numpy()

    planes = colour.transpose(2, 0, 1)
    white = planes.copy()
    white[:, 0] = 255
    assert np.array_equal(one("grey.png", 1)[0], grey)
    assert np.array_equal(one("grey.png", 3), np.stack([grey] * 3))
    assert np.array_equal(one("bits.png", 1)[0], np.where(grey > 99, 255, 0))
    assert np.array_equal(one("deep.png", 1)[0], grey)
    assert np.array_equal(one("deep.tiff", 1)[0], grey)
    assert np.array_equal(one("colour.bmp", 3), planes)
    assert np.array_equal(one("palette.png", 3), planes)
    assert np.array_equal(one("alpha.png", 3), white)
    assert (one("grey-alpha.png", 1)[0, 0] == 255).all()
    assert np.array_equal(one("turned.png", 3), planes)
    assert np.array_equal(one("colour.bmp", 1)[0], np.asarray(Image.fromarray(colour).convert("L")))
    small = read_image_files([str(tmp_path / "colour.bmp")] * 2, 3, 4, 5)
    expected = Image.fromarray(colour).resize((5, 4), Image.Resampling.BILINEAR)
    assert same(small[1], np.asarray(expected).transpose(2, 0, 1))
    assert read_image_files([], 3, 4, 5).shape == (0, 3, 4, 5)


def test_read_image_files_refuses(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    refusal(lambda: read_image_files([text], 1, 8, 8), text, "fresh copy")
    gone = tmp_path / "gone.png"
    refusal(lambda: read_image_files([gone], 1, 8, 8), gone, "check that it is there")
    real = tmp_path / "real.tiff"
    Image.fromarray(np.zeros((8, 8), np.float32)).save(real)
    refusal(lambda: read_image_files([real], 1, 8, 8), real, "8 bits")


# What cannot be used


def test_names_and_paths(tmp_path: Path) -> None:
    refusal(lambda: load(root=tmp_path), "data.name", "data.path")
    refusal(lambda: load("digits", tmp_path, root=tmp_path), "data.name", "data.path")
    refusal(lambda: load("", tmp_path, root=tmp_path), "data.name", "data.path", "not both")
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
    for part in (0.0, 1.0):
        refusal(
            lambda part=part: load("digits", root=tmp_path, test_fraction=part),  # type: ignore[misc]
            "data.test_fraction",
        )


@pytest.mark.parametrize("name", sorted(OFFICIAL))
def test_missing_files_name_their_address(tmp_path: Path, name: str) -> None:
    remote = OFFICIAL[name].remotes[0]
    refusal(
        lambda: load(name, root=tmp_path / "data"),
        *(tmp_path / "data" / name / remote.file, remote.url, remote.md5),
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
        ({"y_test": None}, ("y_test", "it needs x_train")),
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
        ({"x_test": np.zeros((3, 8, 8, 3), np.uint8)}, ("x_test", "3x8x8", "all grey")),
        ({"x_unlabelled": np.zeros((3, 9, 8), np.uint8)}, ("x_unlabelled", "data.size=N")),
        (
            {"x_train": np.zeros((6, 3, 8), np.uint8), "x_test": np.zeros((3, 3, 8), np.uint8)},
            ("8x3", "between 4 and 1024", "data.size=N"),
        ),
        (
            {f"x_{p}": np.zeros((n, 4, 1025), np.uint8) for p, n in (("train", 6), ("test", 3))},
            ("1025x4", "between 4 and 1024"),
        ),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, ("one class only", "two")),
        ({"y_test": [0, 1, 7]}, ("label 7", "y_test", "unknown in y_train")),
        ({"y_test": ["0", "1", "2"]}, ("y_train and y_test", "strings")),
        ({"y_train": np.zeros(6)}, ("y_train", "float64", "whole numbers")),
        ({"y_train": np.eye(6, dtype=int)}, ("y_train", "(6, 6)", "whole numbers")),
        ({"y_train": np.array([], int)}, ("y_train", "empty")),
        ({"y_train": np.array([None] * 6)}, ("y_train", "Python objects")),
        ({"classes": ["a", "b"]}, ("classes", "2 classes", "3 different labels")),
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
    refused(only, "one class only")
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
    refused({images: files[images] + b"x"}, tmp_path / images, "header promises")
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
    refused("loose", ("1.png", "2.png"), tmp_path / "loose", "no folders", "each class")
    refused("one", ("a/1.png", "a/2.png"), tmp_path / "one", "one class only (a)")
    refused("single", (*two, "c/1.png"), tmp_path / "single" / "c", "one image only")
    refused("val", (*split, "val/a/1.png"), tmp_path / "val" / "val", "rename")
    refused("late", (*split, "test/c/1.png"), "late/test/c", "class c is not in")
    refused("unsure", (*split, "test/1.png"), "unsure/test/1.png", "needs a label")
    (tmp_path / "empty").mkdir()
    refused("empty", (), tmp_path / "empty", "no folders")
    (tmp_path / "hollow" / "c").mkdir(parents=True)
    refused("hollow", two, tmp_path / "hollow" / "c", "no images")
    (tmp_path / "untested" / "test" / "a").mkdir(parents=True)
    refused("untested", tuple(f"train/{file}" for file in two), "untested/test", "no images")
    write_image(tmp_path / "tiny" / "a" / "0.png", np.zeros((3, 8), np.uint8))
    refused("tiny", two, "tiny/a/0.png", "8x3", "between 4 and 1024")
    odd = write_image(tmp_path / "mixed" / "b" / "9.png", np.zeros((8, 9), np.uint8))
    refused("mixed", two, "mixed/", "9x8", "8x8", "--set data.size=N")
    assert load(path=tmp_path / "mixed", root=tmp_path, size=8).shape == (1, 8, 8)
    odd.write_bytes(b"no image")
    refusal(lambda: load(path=tmp_path / "mixed", root=tmp_path), odd, "fresh copy")


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
            Image.new("L", (8, 8), 20 * number).save(file)
    for name in ("cat/0", "cat/4", "dog/2"):
        (tmp_path / f"{name}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"0\.png.*; and 2 more like it: .*2\.png, .*4\.png"):
        load(path=tmp_path, root=tmp_path)


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


# Damaged files of every format


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
        return lambda: load(path=path, root=tmp_path)

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


# Downloads


class Handler(BaseHTTPRequestHandler):
    """Serves `files`; paths that begin with /short end too early, with /stall never."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        _, behaviour, name = self.path.split("/")
        if name not in self.files:
            self.send_error(404)
            return
        body = self.files[name]
        self.send_response(200)
        if behaviour != "unannounced":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if behaviour in ("good", "unannounced") else body[:-10])
        if behaviour == "stall":
            self.wfile.flush()
            time.sleep(1.5)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that offers small SVHN files."""
    origin = tmp_path / "origin"
    origin.mkdir()
    write_svhn(origin)
    files = {path.name: path.read_bytes() for path in origin.iterdir()}
    handler = type("Files", (Handler,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    offer(monkeypatch, f"{base}/good", files)
    yield base
    server.shutdown()
    server.server_close()


def offer(monkeypatch: pytest.MonkeyPatch, base: str, files: dict[str, bytes]) -> None:
    remotes = tuple(
        Remote(name, f"{base}/{name}", hashlib.md5(files[name]).hexdigest(), len(files[name]))
        for name in ("train_32x32.mat", "test_32x32.mat")
    )
    monkeypatch.setitem(OFFICIAL, "svhn", Official(remotes))


def move(monkeypatch: pytest.MonkeyPatch, base: str, **changes: str) -> Remote:
    """Put the offered files elsewhere."""
    remotes = tuple(
        replace(remote, url=f"{base}/{remote.file}", **changes)  # type: ignore[arg-type]
        for remote in OFFICIAL["svhn"].remotes
    )
    monkeypatch.setitem(OFFICIAL, "svhn", Official(remotes))
    return remotes[0]


@pytest.mark.parametrize("behaviour", ["good", "unannounced"])
def test_download(
    tmp_path: Path,
    address: str,
    behaviour: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    move(monkeypatch, f"{address}/{behaviour}")
    root = tmp_path / "root"
    data = load("svhn", root=root, download=True)
    assert data.labels.tolist() == [0, 1, 9]
    assert sorted(p.name for p in root.rglob("*")) == ["svhn", "test_32x32.mat", "train_32x32.mat"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "train_32x32.mat" in shown.err
    move(monkeypatch, "http://127.0.0.1:9")  # what is there is neither fetched nor verified again
    move(monkeypatch, "http://127.0.0.1:9", md5="0" * 32)
    assert len(load("svhn", root=root, download=True).images) == 3


def test_download_of_the_missing_one_only(tmp_path: Path, address: str) -> None:
    write_svhn(tmp_path)
    (tmp_path / "test_32x32.mat").unlink()
    load("svhn", root=tmp_path, download=True)
    assert [p.name for p in (tmp_path / "svhn").iterdir()] == ["test_32x32.mat"]


def failed_download(root: Path, remote: Remote, *words: str) -> None:
    refusal(
        lambda: load("svhn", root=root, download=True),
        *(remote.file, remote.url, remote.md5, root / "svhn"),
        *words,
    )
    assert list((root / "svhn").iterdir()) == []


def test_download_with_a_wrong_checksum(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = move(monkeypatch, f"{address}/good", md5="0" * 32)
    failed_download(tmp_path, remote, "md5", "removed", "try again")


@pytest.mark.parametrize("behaviour", ["short", "stall", "good/absent", "nowhere"])
def test_download_that_fails(
    tmp_path: Path, address: str, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.5)
    base = "http://127.0.0.1:9" if behaviour == "nowhere" else f"{address}/{behaviour}"
    start = time.monotonic()
    failed_download(tmp_path, move(monkeypatch, base), "cannot be downloaded", "by hand")
    assert time.monotonic() - start < 5


def test_download_into_a_folder_that_cannot_be(tmp_path: Path, address: str) -> None:
    (tmp_path / "svhn").write_text("in the way")
    refusal(lambda: load("svhn", root=tmp_path, download=True), tmp_path / "svhn", "http")


def test_interrupted_download_leaves_nothing(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(remote: Remote, part: Path) -> str:
        part.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_stream", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load("svhn", root=tmp_path, download=True)
    assert list((tmp_path / "svhn").iterdir()) == []
