"""Checks and converts the arguments of `ssfl.Data`. In these functions, `what` is the name of the argument,
for error messages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssfl.data.hands import Hands, Index
from ssfl.data.npz import as_images
from ssfl.errors import ConfigError, DataError, one_line

Array = Any
"""A numpy array, a torch tensor, or a list of numbers."""
_IMAGE_KEYS = ("image", "img")
_LABEL_KEYS = ("label", "labels", "fine_label")


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Turns a DataError that is raised inside the `with` block into a ConfigError about the argument
    `what`."""
    try:
        yield
    except DataError as error:
        raise ConfigError(str(error), key=what) from error


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Returns an array, tensor or list as a numpy array; raises if that is not possible. `what` is the name
    of the argument, for the error message."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # type: ignore[no-any-return]
    try:
        return np.asarray(values)
    except ValueError as error:
        reason = one_line(error)
        raise ConfigError(
            f"{what}: cannot be converted to an array ({reason}): pass an array or tensor, or a list whose "
            "items all have the same shape",
            key=what,
        ) from error


def image_tensor(values: Array, what: str) -> Tensor:
    """Returns images given as an array [N, H, W] or [N, H, W, C] as a uint8 tensor [N, C, H, W]. It is a
    copy, so later changes of the argument have no effect."""
    array = as_array(values, what)
    if not array.size:
        raise ConfigError(f"{what} is empty: pass at least one image", key=what, value=0)
    with as_config_error(what):
        return as_images(np.array(array), what)  # a copy, which nobody else can change


def require_same_shape(parts: Mapping[str, Tensor]) -> None:
    """Raises unless all images have the same channels, height and width. `parts` maps the name of each
    argument of `ssfl.Data` to its images [N, C, H, W]."""
    shape = tuple(parts["images"].shape[1:])
    for what, images in parts.items():
        if tuple(images.shape[1:]) != shape:
            raise ConfigError(
                f"the images of {what} have the shape {_shown(images)} (channels x height x width), but "
                f"those of images have {_shown(parts['images'])}: give all images the same shape",
                key=what,
                value=_shown(images),
            )


def _shown(images: Tensor) -> str:
    return "x".join(map(str, images.shape[1:]))


def require_same_length(images: Tensor, labels: Index, what: str) -> None:
    if len(images) != len(labels):
        raise ConfigError(
            f"{what}: {len(images)} images but {len(labels)} labels: pass one label for each image",
            key=what,
            value=len(labels),
        )


def _labels(values: Array, what: str) -> NDArray[Any]:
    """Returns labels as an array [N] of int64, or of objects if there are class names. These objects are the
    names, and None for an image without a label. An argument of shape N x 1 is accepted too."""
    array = as_array(values, what)
    if array.dtype.kind == "U":  # a list as objects, because numpy has turned a -1 among names into text
        array = np.array(values, dtype=object)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "biuO":
        raise ConfigError(
            f"{what} is an array of {array.dtype} with shape {list(array.shape)}, which cannot be labels: "
            "pass a list of whole numbers or of class names",
            key=what,
            value=str(array.dtype),
        )
    if array.dtype.kind != "O":
        return array.astype(np.int64)
    labels = [None if _is_number(label) and label == -1 else label for label in array.tolist()]
    if all(label is None or _is_number(label) for label in labels):
        return np.array([-1 if label is None else label for label in labels], np.int64)
    strange = [label for label in labels if label is not None and not isinstance(label, str)]
    if strange:
        label = next((label for label in strange if not _is_number(label)), strange[0])
        raise ConfigError(
            f"{what}: the label {str(label)[:100]} is of type {type(label).__name__}: pass only class names "
            "or only class numbers, and -1 or None for an image without a label",
            key=what,
            value=label,
        )
    return np.array(labels, object)


def _is_number(label: Any) -> bool:
    return isinstance(label, int | np.integer) and -1 << 63 <= int(label) < 1 << 63


def class_numbers(
    labels: Array, test_labels: Array, classes: Sequence[str] | None
) -> tuple[Index, Index, tuple[str, ...]]:
    """Returns the labels and the test labels as class numbers, starting at 0, and the names of the classes.
    Labels may be numbers or names. Without `classes`, the names come from the labels."""
    train = _labels(labels, "labels")
    if classes is not None:
        names = tuple(map(str, classes))
    elif train.dtype.kind == "O":
        names = tuple(sorted({str(name) for name in train.tolist() if name is not None}))
        for name in ("-1", ""):
            if name in names:
                raise ConfigError(
                    f"labels: some labels are the text {name!r}, which may be a class, or mark images "
                    "without a label: pass a list with -1 (a number) or None for these images, or pass "
                    "classes=... if it is a class",
                    key="labels",
                    value=name,
                )
    else:
        names = tuple(map(str, range(int(train.max(initial=-1)) + 1)))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"classes: two classes have the name {twice!r}: give each class its own name",
            key="classes",
            value=twice,
        )
    coded, test = coded_labels(train, names, "labels"), coded_labels(test_labels, names, "test_labels")
    if (test < 0).any():
        raise ConfigError(
            "test_labels: some labels are -1 (no label), but every test image needs a label: add the "
            "labels, or leave these images out",
            key="test_labels",
            value=-1,
        )
    counts = np.bincount(coded[coded >= 0], minlength=len(names))
    if (counts == 0).any():
        name = names[int(np.argmin(counts))]
        raise ConfigError(
            f"labels: no image has the class {name!r}: add one, or number the classes without gaps",
            key="labels",
            value=name,
        )
    return coded, test, names


def coded_labels(labels: Array, names: tuple[str, ...], what: str) -> Index:
    """Returns labels (numbers or names) as class numbers: positions in `names`, or -1 for no label. Raises
    for a label that is not a class."""
    array = _labels(labels, what)
    if array.dtype.kind == "O":
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)} | {None: -1}
        unknown = set(array.tolist()) - set(numbers)
        if unknown:
            raise ConfigError(
                f"{what}: {sorted(unknown)[0]!r} is not a class. The classes are {', '.join(names[:12])}: "
                "correct the label",
                key=what,
                value=sorted(unknown)[0],
            )
        return np.array([numbers[name] for name in array.tolist()], np.int64)
    strange = array[(array < -1) | (array >= len(names))]
    if len(strange):
        raise ConfigError(
            f"{what}: {strange[0]} is not a class. Use the class numbers 0 to {len(names) - 1}, or -1 for "
            "an image without a label. If there are more classes, name all of them in classes=",
            key=what,
            value=int(strange[0]),
        )
    return array


def image_numbers(values: Array, count: int, what: str) -> Index:
    """Returns sorted image numbers, given image numbers in any order or a boolean mask over all `count`
    images."""
    array = as_array(values, what)
    if array.dtype == bool:
        if array.shape != (count,):
            raise ConfigError(
                f"{what} is a boolean mask of shape {list(array.shape)}, but there are {count} images: pass "
                "one value for each image, or a list of image numbers",
                key=what,
                value=list(array.shape),
            )
        array = np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{what} is an array of {array.dtype} with shape {list(array.shape)}, which cannot select "
            "images: pass a list of image numbers, or a boolean mask",
            key=what,
            value=str(array.dtype),
        )
    strange = array[(array < 0) | (array >= count)]
    if len(strange):
        raise ConfigError(
            f"{what}: there is no image {strange[0]}: the {count} images are numbered 0 to {count - 1}",
            key=what,
            value=int(strange[0]),
        )
    return np.sort(array.astype(np.int64))


def by_owner(
    users: Sequence[Array] | Mapping[str, Array] | Array, count: int
) -> Sequence[Array] | Mapping[str, Array]:
    """Returns the image numbers of each user. If `users` has the owner's name or number for each of all
    `count` images, these are the image numbers by owner, sorted by name or number. Otherwise they are `users`
    itself, as a list or dict."""
    if isinstance(users, Mapping):
        return users
    values = _items(users)
    if not values or not all(map(_is_scalar, values)):
        return values
    if len(values) != count:
        raise ConfigError(
            f"users has {len(values)} names or numbers, but there are {count} images, with those of "
            "unlabelled: pass the owner of each image (None for no owner), or a list with the image numbers "
            "of each user",
            key="users",
            value=len(values),
        )
    owned: dict[str | int, list[int]] = {}
    for number, value in enumerate(values):
        owner = _name(value, "users")
        if owner is not None:
            owned.setdefault(owner, []).append(number)
    return {str(owner): owned[owner] for owner in sorted(owned, key=lambda one: (isinstance(one, str), one))}


def group_numbers(groups: Array, count: int) -> Index:
    """Returns a number for each of `count` images, equal for images of the same group. `groups` has a name or
    number for each image; an image without one is a group of its own."""
    values = _items(groups)
    if len(values) != count or not all(map(_is_scalar, values)):
        shape = list(np.shape(groups)) if isinstance(groups, np.ndarray | Tensor) else [len(values)]
        raise ConfigError(
            f"groups is an array of shape {shape}, but there are {count} images, without those of "
            "unlabelled: pass the group's name or number for each of them (None for no group)",
            key="groups",
            value=shape,
        )
    numbers: dict[object, int] = {}
    for position, value in enumerate(values):
        name = _name(value, "groups")
        values[position] = numbers.setdefault((position,) if name is None else name, len(numbers))
    return np.array(values, np.int64)


def _items(values: Any) -> list[Any]:
    """Returns the items of an array, tensor, column of a table, list or generator."""
    return values.tolist() if isinstance(values, np.ndarray | Tensor) else list(values)


def _is_scalar(value: Any) -> bool:
    """Returns whether a value is a name, a number, or marks a missing one."""
    return _is_missing(value) or isinstance(value, str | int | float | np.generic)


def _is_missing(value: Any) -> bool:
    """Returns whether a value is None, NaN, or what pandas uses for a missing value."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or _is_nan(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _name(value: Any, what: str) -> str | int | None:
    """Returns the name or number of an owner or a group; None if the value is missing or -1. Tables turn
    whole numbers into floats if some are missing, so 3.0 is 3."""
    if _is_missing(value):
        return None
    if isinstance(value, str):
        return str(value)
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or value % 1:
        raise ConfigError(
            f"{what}: {value} is of type {type(value).__name__}: pass names or whole numbers, and None for "
            "an image without one",
            key=what,
            value=str(value),
        )
    return None if int(value) == -1 else int(value)


def user_images(users: Sequence[Array] | Mapping[str, Array], count: int) -> Hands:
    """Returns which images each user owns. For each user, `users` has image numbers or a boolean mask over
    all `count` images."""
    keyed = users.items() if isinstance(users, Mapping) else enumerate(users)
    arrays = []
    for user, numbers in keyed:
        arrays.append(image_numbers(numbers, count, f"users[{user!r}]"))
        if not len(arrays[-1]):
            raise ConfigError(f"users[{user!r}] has no images: leave that user out", key=f"users[{user!r}]")
    if not arrays:
        raise ConfigError("users is empty: leave it out, or pass the images of each user", key="users")
    return Hands.of(arrays)


def require_one_owner(
    server: Index | None, users: Hands | None, validation: Index | None, names: Sequence[str]
) -> None:
    """Raises if an image belongs to two owners, or is listed twice for the same owner. Owners are the server,
    each user, and the validation set; None means no images. `names` are the names of the users, for the error
    message. If there are no names, the message shows numbers of users."""
    nobody = np.zeros(0, np.int64)
    first_two = [nobody if numbers is None else numbers for numbers in (server, validation)]
    hands = Hands.of([*first_two, *(users or [])])
    order = np.argsort(hands.flat, kind="stable")
    images, owners = hands.flat[order], hands.owners[order]
    twice = np.flatnonzero(images[1:] == images[:-1])
    if not len(twice):
        return
    called = ["server", "validation", *(f"users[{name!r}]" for name in names or range(len(users or [])))]
    called = [called[owner] for owner in owners[twice[0] : twice[0] + 2]]
    both = f"is twice in {called[0]}" if called[0] == called[1] else f"is in {called[0]} and in {called[1]}"
    raise ConfigError(
        f"image {images[twice[0]]} {both}, but every image may have only one owner: list it once",
        key=called[1],
        value=int(images[twice[0]]),
    )


def per_channel(values: Sequence[float] | None, channels: int, what: str) -> tuple[float, ...] | None:
    """Returns the mean or standard deviation of each channel as a tuple; None if `values` is None. Raises
    unless there is one finite number for each channel. `what` is "mean" or "std"; a standard deviation must
    also be above 0."""
    if values is None:
        return None
    numbers = tuple(float(number) for number in np.atleast_1d(as_array(values, what)).tolist())
    low = 0.0 if what == "std" else -np.inf
    if len(numbers) != channels or not all(np.isfinite(number) and number > low for number in numbers):
        above = " above 0" if what == "std" else ""
        raise ConfigError(
            f"{what} = {values}: pass {channels} finite numbers{above}, one for each channel",
            key=what,
            value=values,
        )
    if max(map(abs, numbers)) > 1:
        raise ConfigError(
            f"{what} = {values}: pass numbers on the scale from 0 (black) to 1 (white), so divide by 255",
            key=what,
            value=values,
        )
    return numbers


def read_items(dataset: Any, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns all images [N, H, W, C] and labels [N] of a map-style data set. A missing label is None."""
    try:
        count = len(dataset)
    except TypeError:
        raise ConfigError(
            f"{what} has no len(): pass a map-style data set, or a list of its items", key=what
        ) from None
    if not count:
        raise ConfigError(f"{what} is empty: pass at least one image", key=what, value=0)
    images, labels = [], []
    for place in range(count):
        image, label = _item(dataset[place], f"{what}[{place}]")
        images.append(_pixels(image, f"{what}[{place}]"))
        labels.append(label if label is None or isinstance(label, str) else int(label))
    channels = max(image.shape[2] for image in images)
    images = [np.repeat(i, channels, 2) if i.shape[2] < channels else i for i in images]
    for place, image in enumerate(images):
        if image.shape != images[0].shape:
            sizes = [f"{i.shape[1]}x{i.shape[0]}" for i in (image, images[0])]
            raise ConfigError(
                f"{what}[{place}] is {sizes[0]} pixels, but {what}[0] is {sizes[1]}: resize the images first",
                key=f"{what}[{place}]",
                value=sizes[0],
            )
    return np.stack(images), np.array(labels, object)


def _item(item: Any, what: str) -> tuple[Any, Any]:
    """Returns the image and the label of one item of a data set, which is a pair or a dict. The label of a
    dict without one is None."""
    if isinstance(item, Mapping):
        for key in _IMAGE_KEYS:
            if key in item:
                return item[key], next((item[label] for label in _LABEL_KEYS if label in item), None)
        raise ConfigError(
            f"{what} has no column 'image' or 'img', only {', '.join(map(repr, item))}: rename the column "
            "of the images",
            key=what,
            value=list(item),
        )
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    raise ConfigError(
        f"{what} is of type {type(item).__name__}, but it must be a pair (image, label) or a dict with an "
        "image",
        key=what,
    )


def _pixels(image: Any, what: str) -> NDArray[Any]:
    """Returns an image as an array [H, W, C]. The argument is a PIL image, an array [H, W] or [H, W, C], or a
    tensor [C, H, W]."""
    if hasattr(image, "convert") and hasattr(image, "mode"):
        if image.mode.startswith(("I", "F")):
            raise ConfigError(
                f"{what} is a PIL image of mode {image.mode}, which does not have 8 bits per channel: "
                "convert it to mode L or RGB first",
                key=what,
                value=image.mode,
            )
        image = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    first = isinstance(image, Tensor)
    array = as_array(image, what)
    if array.ndim == 2:
        return array[..., None]
    places = (0, 2) if first else (2, 0)
    for place in places if array.ndim == 3 else ():
        if array.shape[place] in (1, 3):
            return array.transpose(1, 2, 0) if place == 0 else array
    raise ConfigError(
        f"{what} has shape {list(array.shape)}, which is not an image: pass height x width, with 1 or 3 "
        "channels",
        key=what,
        value=list(array.shape),
    )


def class_names(dataset: Any) -> list[str] | None:
    """Returns the class names of a data set of torch or Hugging Face, or None if it does not list them."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        for key in _LABEL_KEYS:
            if names := getattr(features.get(key), "names", None):
                return list(names)
    names = getattr(dataset, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else None
