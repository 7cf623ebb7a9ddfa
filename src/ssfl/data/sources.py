"""Loads data sets from their sources: the digits of scikit-learn, public data sets, an .npz file or a folder
of images."""

import difflib
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssfl.data import copies, formats, pictures
from ssfl.data.dataset import WHITE, Dataset, checked, statistics
from ssfl.data.download import OFFICIAL, obtain
from ssfl.data.formats import LARGEST, SMALLEST, reading
from ssfl.data.npz import load_npz
from ssfl.data.own import load_folder
from ssfl.errors import DataError, warn_user

DIGITS = tuple("0123456789")
_ADDRESS = re.compile(r"(https?|ftp|s3|gs):/+", re.IGNORECASE)
EMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
CIFAR_CLASSES: tuple[str, ...] = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
STL_CLASSES: tuple[str, ...] = (
    *("airplane", "bird", "car", "cat", "deer"),
    *("dog", "horse", "monkey", "ship", "truck"),
)


def load(
    name: str | None = None,
    path: str | Path | None = None,
    *,
    root: Path,
    download: bool = False,
    size: int | None = None,
    test_fraction: float = 0.2,
    broken: str = "skip",
) -> Dataset:
    """Returns a data set. Either `name` is a built-in or public data set, or `path` is your own: an .npz file
    or a folder of images. The official files of public data sets are searched in `root`. Missing ones are
    downloaded if `download` is true; otherwise raises DataError.

    `size` resizes all images to size x size pixels. `test_fraction` is the part that is held out for testing
    from folders without test images; with 0, no images are held out. `broken` ("skip" or "stop") says what to
    do about files of a folder that cannot be read.
    """
    if (name is None) == (path is None):
        raise DataError(
            f"data.name = {name!r} and data.path = {str(path)!r} are both set: keep only one of them"
            if name is not None
            else "the config names no images: set data.name to a known data set, or data.path to an .npz "
            "file or a folder of images"
        )
    if size is not None and not SMALLEST <= size <= LARGEST:
        raise DataError(
            f"data.size = {size}: it must be between {SMALLEST} and {LARGEST}", key="data.size", value=size
        )
    if not 0 <= test_fraction < 1:
        raise DataError(
            f"data.test_fraction = {test_fraction}: it must be at least 0 and below 1",
            key="data.test_fraction",
            value=test_fraction,
        )
    if name is not None:
        if name not in NAMED:
            close = difflib.get_close_matches(name.lower(), NAMED, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise DataError(
                f"data.name = {name!r}: there is no such dataset, only {', '.join(NAMED)}{hint}",
                key="data.name",
                value=name,
                fix=f"data.name={close[0]}" if close else None,
            )
        return checked(NAMED[name](Path(root), download, size), name)
    source = Path(path or "")
    with reading(source):
        folder, there = source.is_dir(), source.exists()
    if folder:
        loaded = load_folder(source, size, test_fraction, broken)
        return checked(loaded, source, tested=test_fraction > 0)
    if not there:
        raise DataError(
            f"{source}: there is no such file or folder; check the path of your images (data.path or --data)"
        )
    if source.suffix.lower() != ".npz":
        raise DataError(
            f"{source}: neither an .npz file nor a folder of images; check the path of your images "
            "(data.path or --data)"
        )
    loaded = checked(load_npz(source, size), source)
    if line := copies.of_test_images(loaded.images, loaded.test_images):
        warn_user(f"{source}: {line}")
    return loaded


def image_files(paths: Iterable[str | Path]) -> list[Path]:
    """Returns the image files at these paths. A folder is replaced by all image files in it. Raises if a
    folder has none, or if a path is an address of the web."""
    files: list[Path] = []
    for path in map(Path, paths):
        if address := _ADDRESS.match(str(path)):
            where = f"{address[1]}://{str(path)[address.end() :]}"  # Path turned // into /
            raise DataError(f"{where}: ssfl reads no addresses; download the image first, and name its file")
        inside = pictures.list_images(path) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{pictures.nothing_in(path)}; give image files, or a folder with images")
        files += inside
    return files


def read_image_files(
    paths: Iterable[str | Path], channels: int, height: int, width: int, white: int = WHITE
) -> Tensor:
    """Returns image files as uint8 [N, channels, height, width]. They are converted to grey or RGB, and
    resized if needed. In files with more than 8 bits per channel, `white` becomes 255."""
    images = [pictures.decode(Path(path), channels, (height, width), white) for path in paths]
    if not images:
        return torch.empty((0, channels, height, width), dtype=torch.uint8)
    return torch.from_numpy(np.stack(images))


# Datasets by name


def _load_digits(root: Path, download: bool, size: int | None) -> Dataset:
    """Returns the 1,797 handwritten digits of 8x8 pixels that come with scikit-learn.

    The test images are always the same: 36 of each class, evenly spaced over the images of the class.
    """
    numbers = _digits_table()
    pixels = np.rint(numbers[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = formats.resized(torch.from_numpy(pixels).unsqueeze(1), size)
    labels = torch.from_numpy(numbers[:, -1].astype(np.int64))
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        places = (labels == digit).nonzero().squeeze(1)
        test[places[torch.arange(36) * len(places) // 36]] = True
    train = images[~test]
    return Dataset(
        "digits", train, labels[~test], images[test], labels[test], DIGITS,
        *statistics(train), flip=False,
    )  # fmt: skip


def _digits_table() -> np.ndarray:
    """Returns scikit-learn's table of digits [1797, 65]: each row has 64 grey levels from 0 to 16 and the
    label.

    The file is read directly, because importing scikit-learn takes nearly as long as importing torch.
    """
    package = importlib.util.find_spec("sklearn")
    for place in (package and package.submodule_search_locations) or ():
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    content = load_digits()
    return np.column_stack([content.data, content.target])


def _load_cifar10(root: Path, download: bool, size: int | None) -> Dataset:
    """Returns the data set CIFAR-10 (Krizhevsky 2009), read from its binary version."""
    classes = CIFAR_CLASSES
    read: dict[str, tuple[Tensor, Tensor]] = {}
    [source] = obtain("cifar10", root, download)
    for member in formats.members(source, _wanted("cifar10")):
        if member.name == "batches.meta.txt":
            classes = formats.read_names(member, 10)
        else:
            read[member.name] = formats.read_cifar(member)
    _need_all("cifar10", source, read)
    test_images, test_labels = read.pop("test_batch.bin")
    batches = [read[name] for name in sorted(read)]
    return Dataset(
        "cifar10",
        formats.resized(formats.join([images for images, _ in batches]), size),
        torch.cat([labels for _, labels in batches]),
        formats.resized(test_images, size),
        test_labels,
        classes,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2471, 0.2435, 0.2616),
        flip=True,
    )


def _load_svhn(root: Path, download: bool, size: int | None) -> Dataset:
    """Returns the data set SVHN, Street View House Numbers (Netzer et al. 2011): the cropped digits, without
    the "extra" set."""
    train, test = obtain("svhn", root, download)
    images, labels = formats.read_svhn(train)
    test_images, test_labels = formats.read_svhn(test)
    images = formats.resized(images, size)
    return Dataset(
        "svhn", images, labels, formats.resized(test_images, size), test_labels, DIGITS,
        *statistics(images), flip=False,
    )  # fmt: skip


def _load_emnist(root: Path, download: bool, size: int | None) -> Dataset:
    """Returns the data set EMNIST balanced (Cohen et al. 2017): 47 classes of handwritten digits and
    letters."""
    read: dict[str, Tensor] = {}
    [source] = obtain("emnist", root, download)
    for member in formats.members(source, _wanted("emnist")):
        if "images" in member.name:
            read[member.name] = formats.resized(formats.read_emnist_images(member), size)
        else:
            read[member.name] = formats.read_emnist_labels(member, len(EMNIST_CLASSES))
    _need_all("emnist", source, read)
    images, labels, test_images, test_labels = (read[name] for name in OFFICIAL["emnist"].members)
    return Dataset(
        "emnist", images, labels, test_images, test_labels, EMNIST_CLASSES,
        mean=(0.1307,), std=(0.3081,), flip=False,
    )  # fmt: skip


def _load_stl10(root: Path, download: bool, size: int | None) -> Dataset:
    """Returns the data set STL-10 (Coates et al. 2011): 5,000 labelled training images, followed by 100,000
    images without labels, and test images."""
    classes = STL_CLASSES
    images: dict[str, list[Tensor]] = {}
    labels: dict[str, Tensor] = {}
    [source] = obtain("stl10", root, download)
    for member in formats.members(source, _wanted("stl10")):
        if member.name == "class_names.txt":
            classes = formats.read_names(member, 10)
        elif member.name.endswith("_X.bin"):
            images[member.name] = formats.read_stl_images(member, size)
        else:
            labels[member.name] = formats.read_stl_labels(member)
    _need_all("stl10", source, images | labels)
    train, unlabelled = images.pop("train_X.bin"), images.pop("unlabeled_X.bin")
    known, unknown = (sum(len(batch) for batch in part) for part in (train, unlabelled))
    if known != len(labels["train_y.bin"]):
        raise DataError(
            f"{source}: train_X.bin holds {known} images but train_y.bin "
            f"{len(labels['train_y.bin'])} labels; replace it with a fresh copy"
        )
    while unlabelled:  # one batch at a time, so that no batch is in memory twice
        train.append(unlabelled.pop(0))
    joined = formats.join(train)
    return Dataset(
        "stl10",
        joined,
        torch.cat([labels["train_y.bin"], torch.full((unknown,), -1)]),
        formats.join(images["test_X.bin"]),
        labels["test_y.bin"],
        classes,
        *statistics(joined),
        flip=True,
    )


NAMED: dict[str, Callable[[Path, bool, int | None], Dataset]] = {
    "digits": _load_digits,
    "cifar10": _load_cifar10,
    "svhn": _load_svhn,
    "emnist": _load_emnist,
    "stl10": _load_stl10,
}


def _wanted(name: str) -> tuple[str, ...]:
    return OFFICIAL[name].members + OFFICIAL[name].extras


def _need_all(name: str, source: Path, read: Iterable[str]) -> None:
    missing = sorted(set(OFFICIAL[name].members).difference(read))
    if missing:
        raise DataError(
            f"{source}: {missing[0]} is missing from it; replace it with a fresh copy of "
            f"{OFFICIAL[name].remotes[0].url}"
        )
