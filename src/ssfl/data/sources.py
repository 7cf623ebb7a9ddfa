"""Where images come from: bundled digits, public datasets, an .npz file or a folder of images."""

import difflib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssfl.data import formats
from ssfl.data.download import OFFICIAL, obtain
from ssfl.data.formats import LARGEST, SMALLEST, reading
from ssfl.errors import DataError

UNLABELLED = ("unlabelled", "unlabeled")  # both spellings, of folders and after "x_" in .npz files
DIGITS = tuple("0123456789")
EMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
CIFAR_CLASSES: tuple[str, ...] = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
STL_CLASSES: tuple[str, ...] = (
    *("airplane", "bird", "car", "cat", "deer"),
    *("dog", "horse", "monkey", "ship", "truck"),
)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and what is known of them; pixels stay uint8 until a batch needs them."""

    name: str
    images: Tensor  # uint8 [N, C, H, W]: the training images, then those that come without labels
    labels: Tensor  # int64 [N]; -1 where unknown
    test_images: Tensor  # uint8 [M, C, H, W]
    test_labels: Tensor  # int64 [M]
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of x/255 in each channel
    std: tuple[float, ...]
    flip: bool  # whether a mirrored image is still of its class

    @property
    def labelled(self) -> int:
        """How many of the images come with a label."""
        return int((self.labels >= 0).sum())

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        _, channels, height, width = self.images.shape
        return channels, height, width


def load(
    name: str | None = None,
    path: str | Path | None = None,
    *,
    root: Path,
    download: bool = False,
    size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A dataset by its name (official files under `root`), or from an .npz file or image folder.

    `size` resizes all images to size x size. `test_fraction` and `seed` matter only for folders
    that have no test images of their own.
    """
    if (name is None) == (path is None):
        raise DataError(
            "give either data.name or data.path, not both"
            if name is not None
            else "no data; set data.name to a dataset or data.path to an .npz file or image folder"
        )
    if size is not None and not SMALLEST <= size <= LARGEST:
        raise DataError(f"data.size is {size}; it must lie between {SMALLEST} and {LARGEST}")
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction is {test_fraction}; it must lie between 0 and 1")
    if name is not None:
        if name not in NAMED:
            close = difflib.get_close_matches(name.lower(), NAMED, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise DataError(f"data.name: no dataset is called {name}, only {', '.join(NAMED)}{hint}")
        return _checked(NAMED[name](Path(root), download, size), name)
    source = Path(path or "")
    with reading(source):
        folder, there = source.is_dir(), source.exists()
    if folder:
        return _checked(_load_folder(source, size, test_fraction, seed), source)
    if not there:
        raise DataError(f"{source}: there is no such file or folder; check data.path")
    if source.suffix.lower() != ".npz":
        raise DataError(f"{source}: neither an .npz file nor a folder of images; check data.path")
    return _checked(_load_npz(source, size), source)


def image_files(paths: Iterable[str | Path]) -> list[Path]:
    """The image files among paths, where a folder stands for the images in it."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = formats.list_images(path) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: holds no images")
        found += inside
    return found


def read_image_files(paths: Iterable[str | Path], channels: int, height: int, width: int) -> Tensor:
    """Image files as uint8 [N, channels, height, width]: grey or RGB, resized if needed."""
    images = [formats.decode(Path(path), channels, (height, width)) for path in paths]
    if not images:
        return torch.empty((0, channels, height, width), dtype=torch.uint8)
    return torch.from_numpy(np.stack(images))


def _checked(data: Dataset, where: object) -> Dataset:
    """What every source must fulfil."""
    if not data.labelled:
        raise DataError(f"{where}: has no labelled training images; add some of each class")
    if not len(data.test_labels):
        raise DataError(f"{where}: has no test images; add some of each class")
    for images, labels, what in (
        (data.images, data.labels, "training"),
        (data.test_images, data.test_labels, "test"),
    ):
        if len(images) != len(labels):
            raise DataError(
                f"{where}: {len(images)} {what} images but {len(labels)} labels; replace it with a fresh copy"
            )
    formats.check_side(*data.shape[1:], where)
    known = torch.unique(data.labels[data.labels >= 0])
    if len(known) < 2:
        raise DataError(f"{where}: one class only ({data.classes[int(known[0])]}); at least two are needed")
    strange = data.test_labels[~torch.isin(data.test_labels, known)]
    if len(strange):
        raise DataError(
            f"{where}: class {data.classes[int(strange[0])]} has test images but no labelled "
            "training images; add some, or remove it from the test set"
        )
    return data


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x/255 in each channel, the same in any order of adding.

    A channel that never changes gets 1 as its deviation, so that it can be divided by.
    """
    total = torch.zeros(images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for batch in formats.batches(images, max(1, (1 << 20) // images[0].numel())):
        values = batch.double()  # whole numbers, which float64 adds up without rounding
        total += values.sum((0, 2, 3))
        squares += values.square_().sum((0, 2, 3))
    count = images.numel() // images.shape[1]
    means = [int(t) / count for t in total]
    spreads = [
        max(int(q) * count - int(t) ** 2, 0) ** 0.5 / count for t, q in zip(total, squares, strict=True)
    ]
    return tuple(m / 255 for m in means), tuple(s / 255 if s else 1.0 for s in spreads)


# Datasets by name


def _load_digits(root: Path, download: bool, size: int | None) -> Dataset:
    """The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn.

    The test images are 36 of each class, evenly spaced over its images: the same ones always.
    """
    from sklearn.datasets import load_digits

    content = load_digits()
    pixels = np.rint(content.images * (255 / 16)).astype(np.uint8)
    images = formats.resized(torch.from_numpy(pixels).unsqueeze(1), size)
    labels = torch.from_numpy(content.target.astype(np.int64))
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        places = (labels == digit).nonzero().squeeze(1)
        test[places[torch.arange(36) * len(places) // 36]] = True
    train = images[~test]
    return Dataset(
        "digits", train, labels[~test], images[test], labels[test], DIGITS,
        *_statistics(train), flip=False,
    )  # fmt: skip


def _load_cifar10(root: Path, download: bool, size: int | None) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009), binary version."""
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
    """Street View House Numbers (Netzer et al. 2011), cropped digits, without the extra ones."""
    train, test = obtain("svhn", root, download)
    images, labels = formats.read_svhn(train)
    test_images, test_labels = formats.read_svhn(test)
    images = formats.resized(images, size)
    return Dataset(
        "svhn", images, labels, formats.resized(test_images, size), test_labels, DIGITS,
        *_statistics(images), flip=False,
    )  # fmt: skip


def _load_emnist(root: Path, download: bool, size: int | None) -> Dataset:
    """EMNIST balanced (Cohen et al. 2017): 47 classes of handwritten digits and letters."""
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
    """STL-10 (Coates et al. 2011): 5,000 labelled images, then 100,000 without labels."""
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
    while unlabelled:  # moved one by one, so that no batch is held twice
        train.append(unlabelled.pop(0))
    joined = formats.join(train)
    return Dataset(
        "stl10",
        joined,
        torch.cat([labels["train_y.bin"], torch.full((unknown,), -1)]),
        formats.join(images["test_X.bin"]),
        labels["test_y.bin"],
        classes,
        *_statistics(joined),
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


def _need_all(name: str, source: Path, found: Iterable[str]) -> None:
    missing = sorted(set(OFFICIAL[name].members).difference(found))
    if missing:
        raise DataError(
            f"{source}: {missing[0]} is missing from it; replace it with a fresh copy of "
            f"{OFFICIAL[name].remotes[0].url}"
        )


# An .npz file


def _load_npz(path: Path, size: int | None) -> Dataset:
    """An .npz file with x_train, y_train, x_test, y_test, perhaps x_unlabelled and classes.

    Images are N x H x W or N x H x W x 1 or 3; labels are any whole numbers or strings, which
    become classes in sorted order; `classes` names them. As a rule of thumb, colour images may be
    mirrored and grey ones, often of writing, may not.
    """
    needed = ("x_train", "y_train", "x_test", "y_test")
    extra = tuple(f"x_{spelling}" for spelling in UNLABELLED)
    with reading(path):
        stream = path.open("rb")
    with stream:
        with reading(path):
            content = np.load(stream, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: a single array; save {', '.join(needed)} with numpy's savez")
        for name in needed:
            if name not in content.files:
                raise DataError(f"{path}: holds no array {name}; it needs {', '.join(needed)}")
        for name in content.files:
            if name.startswith(("x_", "y_")) and name not in needed + extra:
                raise DataError(
                    f"{path}: array {name} is none of {', '.join(needed)} or {extra[0]}; rename it"
                )
        y_train, y_test = (formats.npz_labels(content, path, name) for name in ("y_train", "y_test"))
        names = None
        if "classes" in content.files:
            names = [str(name) for name in formats.npz_labels(content, path, "classes")]
        labels, test_labels, classes = _encoded(y_train, y_test, names, path)
        parts = {
            name: formats.resized(formats.npz_images(content, path, name), size)
            for name in ("x_train", *extra, "x_test")
            if name in content.files
        }
    shape = parts["x_train"].shape[1:]
    for name, images in parts.items():
        if images.shape[1:] != shape:
            same = images.shape[1] == shape[0]
            raise DataError(
                f"{path}: images of {name} are {_shape(images)} where those of x_train are "
                f"{_shape(parts['x_train'])}; "
                + ("--set data.size=N resizes all" if same else "make all grey or all colour")
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
        *_statistics(images), flip=len(images[0]) == 3,
    )  # fmt: skip


def _shape(images: Tensor) -> str:
    return "x".join(str(length) for length in images.shape[1:])


def _encoded(
    y_train: np.ndarray, y_test: np.ndarray, names: list[str] | None, path: Path
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Labels as 0..d-1 in sorted order, or in that of `names` if the labels are strings."""
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
            f"{path}: classes names {len(set(classes))} classes but y_train has {len(values)} "
            "different labels; name each class once"
        )
    codes = np.arange(len(values))
    if names and values.dtype.kind == "U":
        absent = sorted(set(values.tolist()).difference(names))
        if absent:
            raise DataError(f"{path}: label {absent[0]} of y_train is not in classes; add it there")
        codes = np.array([names.index(value) for value in values.tolist()])
    train, test = (codes[np.searchsorted(values, labels)] for labels in (y_train, y_test))
    return torch.from_numpy(train), torch.from_numpy(test), tuple(classes)


# A folder of images


def _load_folder(folder: Path, size: int | None, test_fraction: float, seed: int) -> Dataset:
    """Images in a folder for each class; loose ones, and those in "unlabelled", have no label.

    With folders "train" and "test" the classes lie inside those; without "test", a part of each
    class is held out. Images are grey if all of them are.
    """
    inner = {entry.name: entry for entry in formats.list_folders(folder)}
    split = "train" in inner and ("test" in inner or bool(formats.list_folders(inner["train"])))
    places = [inner["train"], folder] if split else [folder]
    if split:
        for name in inner:
            if name not in ("train", "test", *UNLABELLED):
                raise DataError(
                    f"{inner[name]}: beside train there may be only test and unlabelled; "
                    "rename it or move it away"
                )
    classes = [entry for entry in formats.list_folders(places[0]) if entry.name not in UNLABELLED]
    if not classes:
        raise DataError(f"{places[0]}: holds no folders; put the images of each class in a folder")
    train = {entry.name: formats.list_images(entry) for entry in classes}
    for entry in classes:
        if not train[entry.name]:
            raise DataError(f"{entry}: holds no images; add some or remove the folder")
    if split and "test" in inner:
        test = {entry.name: formats.list_images(entry) for entry in formats.list_folders(inner["test"])}
        for loose in formats.list_images(inner["test"], nested=False):
            raise DataError(f"{loose}: a test image needs a label; move it into a class folder")
        for name in test:
            if name not in train:
                raise DataError(
                    f"{inner['test'] / name}: class {name} is not in {places[0]}; "
                    "add training images of it or remove the folder"
                )
    else:
        test = {name: _held_out(files, test_fraction, seed) for name, files in train.items()}
        train = {name: sorted(set(files) - set(test[name])) for name, files in train.items()}
    unlabelled = [
        file
        for place in places
        for file in (
            *formats.list_images(place, nested=False),
            *(file for name in UNLABELLED for file in formats.list_images(place / name)),
        )
    ]
    names = tuple(train)
    train_files, test_files = ([f for files in part.values() for f in files] for part in (train, test))
    if not test_files:
        raise DataError(f"{inner['test']}: holds no images; add some of each class")
    everything = train_files + unlabelled + test_files
    channels = 1 if all(formats.is_grey(file) for file in everything) else 3
    images = formats.decode_all(everything, channels, size)
    images, test_images = images[: -len(test_files)], images[-len(test_files) :]
    labels = [names.index(name) for name, files in train.items() for _ in files]
    return Dataset(
        folder.resolve().name,
        images,
        torch.tensor(labels + [-1] * len(unlabelled)),
        test_images,
        torch.tensor([names.index(name) for name, files in test.items() for _ in files]),
        names,
        *_statistics(images),
        flip=channels == 3,
    )


def _held_out(files: Sequence[Path], fraction: float, seed: int) -> list[Path]:
    """At least one image of a class for testing, drawn by a hash of the seed and the names."""
    if len(files) < 2:
        raise DataError(f"{files[0].parent}: one image only; each class needs two, one of them for testing")

    def draw(file: Path) -> bytes:
        return hashlib.sha256(f"{seed} {file.parent.name}/{file.name}".encode()).digest()

    count = min(max(round(len(files) * fraction), 1), len(files) - 1)
    return sorted(sorted(files, key=draw)[:count])
