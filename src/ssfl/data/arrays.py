"""`ssfl.Data`: images from Python, with their owners, test images and augmentations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssfl.core import draws as named
from ssfl.core.outside import IN_MEMORY
from ssfl.data import augment, formats
from ssfl.data.dataset import Dataset, checked, statistics
from ssfl.data.hands import Hands, Index
from ssfl.data.own import as_images
from ssfl.errors import ConfigError, DataError

DRAWS = 16
"""How many random numbers an augmentation of one's own gets for each image."""
PROBED = 4
"""Images on which an augmentation is tried."""
Array = Any
"""A numpy array, a torch tensor, or a list of numbers."""
Augment = Callable[[Tensor, Tensor], Tensor]
_IMAGE_KEYS = ("image", "img")
_LABEL_KEYS = ("label", "labels", "fine_label")


class Data:
    """Your own images in memory, and who owns them.

    `images` and `test_images` are numpy or torch arrays [N, H, W] or [N, H, W, C] with C 1 or 3, uint8, or
    floats from 0 to 1. `labels` are whole numbers from 0 on, or names; -1 marks an image without a label.
    `unlabelled` holds further images without labels, which are numbered after `images`.

    `server` is an array of image numbers, `users` a list of such arrays, or a dict of them by name. No two
    owners may share an image. [split] deals what is missing of the two. If `users` are given, images without
    an owner are not used. `validation` is an array of image numbers, or a pair (images, labels). `mean` and
    `std` of each channel are measured unless given.

    `weak` and `strong` are functions (uint8 images [N, C, H, W], draws [N, 16]) -> uint8 images of the same
    shape. All their randomness must come from the draws: `ssfl.augment.uniform(draws[:, 0])` lies in [0, 1),
    and `ssfl.augment.below(draws[:, 1], n)` is a whole number below n. `flip` says whether the package's own
    augmentations may mirror an image.
    """

    def __init__(
        self,
        images: Array,
        labels: Array,
        test_images: Array,
        test_labels: Array,
        *,
        classes: Sequence[str] | None = None,
        server: Array | None = None,
        users: Sequence[Array] | Mapping[str, Array] | None = None,
        unlabelled: Array | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        flip: bool | None = None,
        weak: Augment | None = None,
        strong: Augment | None = None,
        validation: Array | tuple[Array, Array] | None = None,
    ) -> None:
        parts = {"images": _images(images, "images")}
        codes, test_codes, names = _codes(labels, test_labels, classes)
        if unlabelled is not None:
            parts["unlabelled"] = _images(unlabelled, "unlabelled")
        numbered = sum(map(len, parts.values()))
        known = [codes, np.full(numbered - len(parts["images"]), -1)]
        held: Index | None = None
        if isinstance(validation, tuple) and len(validation) == 2:
            parts["validation"] = _images(validation[0], "validation")
            known.append(_coded(validation[1], names, "the labels of validation"))
            held = np.arange(numbered, numbered + len(parts["validation"]))
            _same_length(parts["validation"], known[-1], "validation")
        elif validation is not None:
            held = _index(validation, numbered, "validation")
        parts["test_images"] = _images(test_images, "test_images")
        _same_shape(parts)
        _same_length(parts["images"], codes, "images")
        _same_length(parts["test_images"], test_codes, "test_images")
        test = parts.pop("test_images")
        everything = formats.join(list(parts.values()))
        every_label = np.concatenate(known)
        if held is not None and (every_label[held] < 0).any():
            raise ConfigError(
                "validation: every image needs a label, and some have none (-1)", key="validation", value=-1
            )
        own_server = None if server is None else _index(server, numbered, "server")
        own_users = None if users is None else _hands(users, numbered)
        named_users = tuple(map(str, users)) if isinstance(users, Mapping) else ()
        _check_owners(own_server, own_users, held, named_users)
        if own_server is not None and (every_label[own_server] < 0).any():
            raise ConfigError(
                "server: every image needs a label, and some have none (-1)", key="server", value=-1
            )
        channels = everything.shape[1]
        found = statistics(everything)
        flips = channels == 3 if flip is None else bool(flip)
        dataset = Dataset(
            IN_MEMORY, everything, torch.from_numpy(every_label), test, torch.from_numpy(test_codes), names,
            _per_channel(mean, channels, "mean") or found[0], _per_channel(std, channels, "std") or found[1],
            flips, server=own_server, users=own_users, names=named_users, validation=held,
            weak=_view(weak) or augment.WEAK, strong=_view(strong) or augment.STRONG,
        )  # fmt: skip
        with _as_config_error("data"):
            self.dataset = checked(dataset, "ssfl.Data")
        self._measured = mean is None, std is None
        check_views(dataset, dataset.images[:PROBED])

    @classmethod
    def of(cls, train: Any, test: Any, *, unlabelled: Any = None, **more: Any) -> "Data":
        """From map-style data sets of torch or Hugging Face: `len(train)` is their number of items, and
        `train[i]` a pair (image, label) or a dict with "image" (or "img") and "label".

        Images may be PIL images, numpy arrays [H, W] or [H, W, C], or tensors [C, H, W]. Each item is read
        once, which would freeze random transforms of the data set: pass those as `weak` and `strong`. Image i
        of `server` and `users` is train[i]. `more` is what `ssfl.Data` takes.
        """
        images, labels = _read(train, "train")
        test_images, test_labels = _read(test, "test")
        if unlabelled is not None:
            more["unlabelled"], _ = _read(unlabelled, "unlabelled")
        if "classes" not in more:
            more["classes"] = _class_names(train)
        return cls(images, labels, test_images, test_labels, **more)

    def resized(self, size: int | None) -> Dataset:
        """The images for a run, made square where `data.size` asks for it."""
        if size is None:
            return self.dataset
        images, test = (formats.resized(i, size) for i in (self.dataset.images, self.dataset.test_images))
        mean, std = statistics(images)
        mean = mean if self._measured[0] else self.dataset.mean
        std = std if self._measured[1] else self.dataset.std
        return replace(self.dataset, images=images, test_images=test, mean=mean, std=std)

    def __repr__(self) -> str:
        users = "" if self.dataset.users is None else f", {len(self.dataset.users)} users"
        return f"ssfl.Data({len(self.dataset.images)} images, {len(self.dataset.classes)} classes{users})"


def unlabelled(given: Any, what: str) -> Tensor:
    """uint8 [N, C, H, W] of an array of images, or of an `ssfl.Data`, whose labels are not looked at."""
    return given.dataset.images if isinstance(given, Data) else _images(given, what)


def check_views(data: Dataset, images: Tensor) -> None:
    """Raises if an augmentation that was passed in does not keep the rules, tried on these images."""
    for name, view in (("weak", data.weak), ("strong", data.strong)):
        if view in (augment.WEAK, augment.STRONG):
            continue
        drawn = named.bits(torch.arange(len(images), device=images.device), view.draws)
        before = images.clone()
        try:
            made, again = (view.make(images, drawn, data.flip) for _ in range(2))
            alone = view.make(images[:1], drawn[:1], data.flip)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{name}: your function raised {type(error).__name__}: {reason}", key=name, value=error
            ) from error
        if not isinstance(made, Tensor) or made.dtype != torch.uint8 or made.shape != images.shape:
            gave = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise ConfigError(
                f"{name}: your function must return uint8 {list(images.shape)} for images of that shape, and "
                f"gave {gave}",
                key=name,
                value=gave,
            )
        if not torch.equal(images, before):
            raise ConfigError(
                f"{name}: your function changes the images that it gets: work on a copy", key=name
            )
        if not torch.equal(made, again):
            raise ConfigError(
                f"{name}: your function gives another result when it is called again: take all randomness "
                "from its draws",
                key=name,
            )
        if int((made[:1].int() - alone.int()).abs().max()) > 1:  # one level: sums may round differently
            raise ConfigError(
                f"{name}: the view of an image depends on the other images of its batch: use its own draws "
                "alone",
                key=name,
            )


@contextmanager
def _as_config_error(what: str) -> Iterator[None]:
    """What is wrong with a file is here wrong with an argument."""
    try:
        yield
    except DataError as error:
        raise ConfigError(str(error), key=what) from error


def _array(given: Any, what: str) -> NDArray[Any]:
    """A numpy array of whatever was passed."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        return (given.float() if given.dtype == torch.bfloat16 else given).numpy()  # type: ignore[no-any-return]
    try:
        return np.asarray(given)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what}: cannot be made an array: {reason}", key=what) from error


def _images(given: Array, what: str) -> Tensor:
    """uint8 [N, C, H, W]."""
    array = _array(given, what)
    if not array.size:
        raise ConfigError(f"{what}: holds no images", key=what, value=0)
    with _as_config_error(what):
        return as_images(np.array(array), what)  # a copy, which nobody else can change


def _same_shape(parts: Mapping[str, Tensor]) -> None:
    """Raises unless all images have one shape."""
    shape = tuple(parts["images"].shape[1:])
    for what, images in parts.items():
        if tuple(images.shape[1:]) != shape:
            raise ConfigError(
                f"{what} are {_shown(images)} (channels x height x width) where images are "
                f"{_shown(parts['images'])}: make them alike",
                key=what,
                value=_shown(images),
            )


def _shown(images: Tensor) -> str:
    return "x".join(map(str, images.shape[1:]))


def _same_length(images: Tensor, labels: Index, what: str) -> None:
    if len(images) != len(labels):
        raise ConfigError(
            f"{what}: {len(images)} images but {len(labels)} labels: give each image one",
            key=what,
            value=len(labels),
        )


def _labels(given: Array, what: str) -> NDArray[Any]:
    """int64 or strings, one for each image; N x 1 will do as well."""
    array = _array(given, what)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "biuU":
        raise ConfigError(
            f"{what}: {array.dtype} {list(array.shape)} must be a list of whole numbers or of names",
            key=what,
            value=str(array.dtype),
        )
    return array if array.dtype.kind == "U" else array.astype(np.int64)


def _codes(
    labels: Array, test_labels: Array, classes: Sequence[str] | None
) -> tuple[Index, Index, tuple[str, ...]]:
    """Labels as class numbers, and the names of the classes."""
    train = _labels(labels, "labels")
    if classes is not None:
        names = tuple(map(str, classes))
    elif train.dtype.kind == "U":
        names = tuple(str(name) for name in np.unique(train))
    else:
        names = tuple(map(str, range(int(train.max(initial=-1)) + 1)))
    if len(set(names)) < len(names):
        raise ConfigError("classes: two classes have the same name: give each its own", key="classes")
    coded, test = _coded(train, names, "labels"), _coded(test_labels, names, "test_labels")
    if (test < 0).any():
        raise ConfigError(
            "test_labels: every test image needs a label, and some have none (-1)",
            key="test_labels",
            value=-1,
        )
    counts = np.bincount(coded[coded >= 0], minlength=len(names))
    if (counts == 0).any():
        name = names[int(np.argmin(counts))]
        raise ConfigError(
            f"labels: no image is of class {name!r}: add one, or number the classes without gaps",
            key="labels",
            value=name,
        )
    return coded, test, names


def _coded(labels: Array, names: tuple[str, ...], what: str) -> Index:
    """Labels as class numbers; -1 is unknown."""
    array = _labels(labels, what)
    if array.dtype.kind == "U":
        numbers = {name: number for number, name in enumerate(names)}
        unknown = set(array.tolist()) - set(names)
        if unknown:
            raise ConfigError(
                f"{what}: {sorted(unknown)[0]!r} is not one of the classes: {', '.join(names[:12])}",
                key=what,
                value=sorted(unknown)[0],
            )
        return np.array([numbers[name] for name in array.tolist()], np.int64)
    strange = array[(array < -1) | (array >= len(names))]
    if len(strange):
        raise ConfigError(
            f"{what}: {strange[0]} is out of range: there are {len(names)} classes, 0 to {len(names) - 1} "
            "(-1: no label)",
            key=what,
            value=int(strange[0]),
        )
    return array


def _index(given: Array, count: int, what: str) -> Index:
    """Sorted numbers of images, from numbers or a mask."""
    array = _array(given, what)
    if array.dtype == bool:
        array = np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{what}: {array.dtype} {list(array.shape)} must be a list of image numbers",
            key=what,
            value=str(array.dtype),
        )
    strange = array[(array < 0) | (array >= count)]
    if len(strange):
        raise ConfigError(
            f"{what}: image {strange[0]} is out of range: there are {count}, 0 to {count - 1}",
            key=what,
            value=int(strange[0]),
        )
    return np.sort(array.astype(np.int64))


def _hands(users: Sequence[Array] | Mapping[str, Array], count: int) -> Hands:
    """Each user's images."""
    keyed = users.items() if isinstance(users, Mapping) else enumerate(users)
    arrays = []
    for user, given in keyed:
        arrays.append(_index(given, count, f"users[{user!r}]"))
        if not len(arrays[-1]):
            raise ConfigError(f"users[{user!r}] holds no image: leave that user out", key=f"users[{user!r}]")
    if not arrays:
        raise ConfigError("users: nobody is in it: leave it out, or give each user's images", key="users")
    return Hands.of(arrays)


def _check_owners(
    server: Index | None, users: Hands | None, held: Index | None, names: Sequence[str]
) -> None:
    """Raises if two owners share an image."""
    nobody = np.zeros(0, np.int64)
    owned = [nobody if server is None else server, nobody if held is None else held, *(users or [])]
    hands = Hands.of(owned)
    order = np.argsort(hands.flat, kind="stable")
    images, owners = hands.flat[order], hands.owners[order]
    twice = np.flatnonzero(images[1:] == images[:-1])
    if not len(twice):
        return
    called = ["server", "validation", *(f"users[{name!r}]" for name in names or range(len(users or [])))]
    called = [called[owner] for owner in owners[twice[0] : twice[0] + 2]]
    both = f"is twice in {called[0]}" if called[0] == called[1] else f"is in {called[0]} and in {called[1]}"
    raise ConfigError(
        f"image {images[twice[0]]} {both}: every image has one owner",
        key=called[1],
        value=int(images[twice[0]]),
    )


def _per_channel(given: Sequence[float] | None, channels: int, what: str) -> tuple[float, ...] | None:
    """One number for each channel."""
    if given is None:
        return None
    numbers = tuple(float(number) for number in np.atleast_1d(_array(given, what)).tolist())
    low = 0.0 if what == "std" else -np.inf
    if len(numbers) != channels or not all(np.isfinite(number) and number > low for number in numbers):
        above = " above 0" if what == "std" else ""
        raise ConfigError(
            f"{what} = {given}: give {channels} finite numbers{above}, one for each channel",
            key=what,
            value=given,
        )
    return numbers


def _view(function: Augment | None) -> augment.View | None:
    """An augmentation of one's own as the package's own are called."""
    if function is None:
        return None

    def make(images: Tensor, drawn: Tensor, flip: bool) -> Tensor:
        return function(images, drawn)

    return augment.View(make, DRAWS)


# Data sets of torch and Hugging Face


def _read(dataset: Any, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Every image [N, H, W, C] and label of a map-style data set."""
    try:
        count = len(dataset)
    except TypeError:
        raise ConfigError(
            f"{what}: has no length: pass a map-style data set, or a list of its items", key=what
        ) from None
    if not count:
        raise ConfigError(f"{what}: holds no images", key=what, value=0)
    images, labels = [], []
    for place in range(count):
        image, label = _item(dataset[place], f"{what}[{place}]")
        images.append(_pixels(image, f"{what}[{place}]"))
        labels.append(-1 if label is None else label if isinstance(label, str) else int(label))
    channels = max(image.shape[2] for image in images)
    images = [np.repeat(i, channels, 2) if i.shape[2] < channels else i for i in images]
    for place, image in enumerate(images):
        if image.shape != images[0].shape:
            sizes = [f"{i.shape[1]}x{i.shape[0]}" for i in (image, images[0])]
            raise ConfigError(
                f"{what}[{place}] is {sizes[0]} where {what}[0] is {sizes[1]}: resize the images first",
                key=f"{what}[{place}]",
                value=sizes[0],
            )
    return np.stack(images), np.asarray(labels)


def _item(item: Any, what: str) -> tuple[Any, Any]:
    """The image and the label of an item."""
    if isinstance(item, Mapping):
        for key in _IMAGE_KEYS:
            if key in item:
                return item[key], next((item[label] for label in _LABEL_KEYS if label in item), None)
        raise ConfigError(
            f"{what} has no 'image' or 'img', only {', '.join(map(repr, item))}: rename its columns",
            key=what,
            value=list(item),
        )
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    raise ConfigError(
        f"{what} is a {type(item).__name__}: it must be a pair (image, label) or a dict", key=what
    )


def _pixels(image: Any, what: str) -> NDArray[Any]:
    """[H, W, C] of a PIL image, an array [H, W] or [H, W, C], or a tensor [C, H, W]."""
    if hasattr(image, "convert") and hasattr(image, "mode"):
        if image.mode.startswith(("I", "F")):
            raise ConfigError(
                f"{what} is a PIL image of mode {image.mode}: convert it to 8 bits first",
                key=what,
                value=image.mode,
            )
        image = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    first = isinstance(image, Tensor)
    array = _array(image, what)
    if array.ndim == 2:
        return array[..., None]
    places = (0, 2) if first else (2, 0)
    for place in places if array.ndim == 3 else ():
        if array.shape[place] in (1, 3):
            return array.transpose(1, 2, 0) if place == 0 else array
    raise ConfigError(
        f"{what} has shape {list(array.shape)}: an image has height, width and 1 or 3 channels",
        key=what,
        value=list(array.shape),
    )


def _class_names(dataset: Any) -> list[str] | None:
    """The names of the classes, where the data set tells them."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        for key in _LABEL_KEYS:
            if names := getattr(features.get(key), "names", None):
                return list(names)
    names = getattr(dataset, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else None
