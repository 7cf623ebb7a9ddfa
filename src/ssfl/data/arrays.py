"""`ssfl.Data`: a data set made in Python from arrays. It can also say who owns which images, and contain
user-defined augmentations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssfl.core import draws as named
from ssfl.core.outside import IN_MEMORY
from ssfl.data import augment, copies, formats
from ssfl.data.array_checks import (
    Array,
    as_config_error,
    by_owner,
    class_names,
    class_numbers,
    coded_labels,
    group_numbers,
    image_numbers,
    image_tensor,
    per_channel,
    read_items,
    require_one_owner,
    require_same_length,
    require_same_shape,
    user_images,
)
from ssfl.data.dataset import Dataset, checked, statistics
from ssfl.data.hands import Index
from ssfl.errors import ConfigError, warn_user, with_class

DRAWS = 16
"""How many random 64-bit numbers a user-defined augmentation gets for each image."""
PROBED = 4
"""The number of images on which a user-defined augmentation is tried, to check that it follows the rules
(`check_views`)."""
Augment = Callable[[Tensor, Tensor], Tensor]


class Data:
    """Your own images in memory, and who owns them.

    `images` and `test_images` are numpy or torch arrays [N, H, W] or [N, H, W, C], where C is 1 or 3. They
    are uint8, or floats from 0 to 1. `labels` are class numbers, starting at 0, or class names; -1 or None
    marks an image without a label. `classes` are the names of the classes, in the order of their numbers.
    `unlabelled` has further images without labels, which are numbered after `images`.

    `server` is an array of image numbers: the server's labelled images. `users` is a list of such arrays, or
    a dict of them by user name. It may also be a list or array with the name or number of the owner of each
    image, such as its site, also of those in `unlabelled`; None, NaN or -1 marks an image without an owner.
    No two owners may share an image. If you leave out `server` or `users`, the settings in [split] choose the
    images of the server or of the users. If you pass `users`, images without an owner are not used.
    `validation` is an array of image numbers, or a pair (images, labels). `mean` and `std` of each channel
    are measured unless you pass them.

    `groups` has a name or number for each of the `images`, without those in `unlabelled`. It is equal for
    images that belong together, such as those of one patient; None, NaN or -1 marks an image that belongs
    with no other. If the settings hold out images (data.validation, run.folds, train.server_held_out), images
    of one group stay together.

    `weak` and `strong` are augmentations: functions (uint8 images [N, C, H, W], draws [N, 16]) -> uint8
    images of the same shape. All their randomness must come from the draws: `ssfl.augment.uniform(draws[:,
    0])` lies in [0, 1), and `ssfl.augment.below(draws[:, 1], n)` is a whole number below n. `flip` says
    whether the package's own augmentations may mirror an image.
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
        users: Sequence[Array] | Mapping[str, Array] | Array | None = None,
        unlabelled: Array | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        flip: bool | None = None,
        weak: Augment | None = None,
        strong: Augment | None = None,
        validation: Array | tuple[Array, Array] | None = None,
        groups: Array | None = None,
    ) -> None:
        parts = {"images": image_tensor(images, "images")}
        codes, test_codes, names = class_numbers(labels, test_labels, classes)
        if unlabelled is not None:
            parts["unlabelled"] = image_tensor(unlabelled, "unlabelled")
        numbered = sum(map(len, parts.values()))
        known = [codes, np.full(numbered - len(parts["images"]), -1)]
        validation_index: Index | None = None
        if isinstance(validation, tuple) and len(validation) == 2:
            parts["validation"] = image_tensor(validation[0], "validation")
            known.append(coded_labels(validation[1], names, "the labels of validation"))
            validation_index = np.arange(numbered, numbered + len(parts["validation"]))
            require_same_length(parts["validation"], known[-1], "validation")
        elif validation is not None:
            validation_index = image_numbers(validation, numbered, "validation")
        parts["test_images"] = image_tensor(test_images, "test_images")
        require_same_shape(parts)
        require_same_length(parts["images"], codes, "images")
        require_same_length(parts["test_images"], test_codes, "test_images")
        test = parts.pop("test_images")
        everything = formats.join(list(parts.values()))
        every_label = np.concatenate(known)
        if validation_index is not None and (every_label[validation_index] < 0).any():
            raise ConfigError(
                "validation: some of these images have no label (-1), but every validation image needs one: "
                "add the labels, or leave these images out",
                key="validation",
                value=-1,
            )
        own_server = None if server is None else image_numbers(server, numbered, "server")
        users = None if users is None else by_owner(users, numbered)
        own_users = None if users is None else user_images(users, numbered)
        named_users = tuple(map(str, users)) if isinstance(users, Mapping) else ()
        require_one_owner(own_server, own_users, validation_index, named_users)
        if own_server is not None and (every_label[own_server] < 0).any():
            raise ConfigError(
                "server: some of these images have no label (-1), but every image at the server needs one: "
                "add the labels, or leave these images out",
                key="server",
                value=-1,
            )
        channels = everything.shape[1]
        measured = statistics(everything)
        flips = channels == 3 if flip is None else bool(flip)
        dataset = Dataset(
            IN_MEMORY, everything, torch.from_numpy(every_label), test, torch.from_numpy(test_codes), names,
            per_channel(mean, channels, "mean") or measured[0],
            per_channel(std, channels, "std") or measured[1], flips,
            server=own_server, users=own_users, names=named_users, validation=validation_index,
            groups=None if groups is None else group_numbers(groups, len(codes)),
            weak=_view(weak) or augment.WEAK, strong=_view(strong) or augment.STRONG,
        )  # fmt: skip
        with as_config_error("data"):
            self.dataset = checked(dataset, "ssfl.Data")
        if int(everything.max()) <= 1:
            warn_user(
                "no image has a grey level above 1, but white is 255: if the images were floats from 0 to 1, "
                "multiply them by 255 before they become uint8"
            )
        if line := copies.of_test_images(everything, test):
            warn_user(line)
        self._measured = mean is None, std is None
        check_views(dataset, dataset.images[:PROBED])

    @classmethod
    def of(cls, train: Any, test: Any, *, unlabelled: Any = None, **options: Any) -> "Data":
        """Returns an `ssfl.Data` made from map-style data sets of torch or Hugging Face. Such a data set has
        a length. Its items, such as `train[i]`, are pairs (image, label), or dicts with "image" (or "img")
        and "label".

        Images may be PIL images, numpy arrays [H, W] or [H, W, C], or tensors [C, H, W]. Each item is read
        only once, so a random transform of the data set would be the same in every epoch. Instead, write the
        transform as a function for the option `weak` or `strong`. The image numbers in `server` and `users`
        are positions in `train`. `options` are those of `ssfl.Data`.
        """
        images, labels = read_items(train, "train")
        test_images, test_labels = read_items(test, "test")
        if unlabelled is not None:
            options["unlabelled"], _ = read_items(unlabelled, "unlabelled")
        if "classes" not in options:
            options["classes"] = class_names(train)
        return cls(images, labels, test_images, test_labels, **options)

    def resized(self, size: int | None) -> Dataset:
        """Returns the data set for a run. If `size` is not None, its images are resized to `size` x `size`
        pixels. The mean and the standard deviation are then measured again, unless they were passed to
        `ssfl.Data`."""
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


def unlabelled(images: Any, what: str) -> Tensor:
    """Returns images as a uint8 tensor [N, C, H, W]. `images` is an array, or an `ssfl.Data` whose labels are
    ignored. `what` is the name of the argument, for error messages."""
    return images.dataset.images if isinstance(images, Data) else image_tensor(images, what)


def check_views(data: Dataset, images: Tensor) -> None:
    """Raises if a user-defined augmentation of `data` breaks a rule. It must return uint8 images of the same
    shape, must not change its input, and must depend on nothing but each image and its draws. The rules are
    tested on `images`."""
    for name, view in (("weak", data.weak), ("strong", data.strong)):
        if view in (augment.WEAK, augment.STRONG):
            continue
        drawn = named.bits(torch.arange(len(images), device=images.device), view.draws)
        before = images.clone()
        try:
            views, repeated = (view.make(images, drawn, data.flip) for _ in range(2))
            alone = view.make(images[-1:], drawn[-1:], data.flip)
        except Exception as error:
            reason = with_class(error, 200)
            raise ConfigError(f"{name}: your function raised {reason}", key=name, value=error) from error
        if not isinstance(views, Tensor) or views.dtype != torch.uint8 or views.shape != images.shape:
            returned = (
                f"{views.dtype} {list(views.shape)}" if isinstance(views, Tensor) else type(views).__name__
            )
            raise ConfigError(
                f"{name}: your function must return uint8 {list(images.shape)} for images of that shape, and "
                f"returned {returned}",
                key=name,
                value=returned,
            )
        if not torch.equal(images, before):
            raise ConfigError(
                f"{name}: your function changes the images that it gets: change a copy instead", key=name
            )
        if not torch.equal(views, repeated):
            raise ConfigError(
                f"{name}: your function returns another result when it is called again: take all "
                "randomness from its second argument, the draws",
                key=name,
            )
        # a difference of one level is allowed, because sums may be rounded differently
        if int((views[-1:].int() - alone.int()).abs().max()) > 1:
            raise ConfigError(
                f"{name}: what your function returns for an image depends on the other images of the batch: "
                "for image i use only images[i] and draws[i]",
                key=name,
            )


def _view(function: Augment | None) -> augment.View | None:
    """Returns a user-defined augmentation as a `View`, the form in which the package's own augmentations are
    used; None if there is none."""
    if function is None:
        return None

    def make(images: Tensor, drawn: Tensor, flip: bool) -> Tensor:
        return function(images, drawn)

    return augment.View(make, DRAWS)
