"""The class `Dataset` (images with labels and owners, in memory), the checks that every data set must pass,
and the mean and standard deviation for normalisation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.data import augment, formats
from ssfl.data.hands import Hands, Index
from ssfl.errors import DataError

WHITE = 65_535
"""The largest value of a 16-bit pixel. When a 16-bit image is converted to 8 bits, this value becomes white
(255), unless a smaller value is chosen to become white."""
UNLABELLED = ("unlabelled", "unlabeled")
"""The two accepted spellings of "unlabelled", in names of folders and, after "x_", in names of arrays in .npz
files."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: its images, labels, classes, normalisation and owners. Pixels are stored as uint8, and
    converted to floats batch by batch."""

    name: str
    images: Tensor  # uint8 [N, C, H, W]: all images except the test images
    labels: Tensor  # int64 [N]; -1 if unknown
    test_images: Tensor  # uint8 [M, C, H, W]
    test_labels: Tensor  # int64 [M]
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of x/255 in each channel
    std: tuple[float, ...]
    flip: bool  # whether a mirrored image keeps its class
    white: int = WHITE  # the value that became 255 in image files of more than 8 bits
    deep: bool = False  # whether there are image files of more than 8 bits
    grey: int | None = None  # how many images show no colours, even if stored as RGB; None: not known
    broken: int = 0  # image files that were left out because they cannot be read
    server: Index | None = None  # the server's labelled images, if the data name them
    users: Hands | None = None  # each user's images, if the data name them
    names: tuple[str, ...] = ()  # the names of those users
    loose: int = 0  # images beside the users' folders; they belong to the last user
    groups: Index | None = None  # for each image up to the last labelled one; equal for one patient
    validation: Index | None = None  # the validation images, if the data name them
    weak: augment.View = augment.WEAK
    strong: augment.View = augment.STRONG

    @property
    def labelled(self) -> int:
        """How many of the training images have a label."""
        return int((self.labels >= 0).sum())

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image: channels, height and width."""
        _, channels, height, width = self.images.shape
        return channels, height, width


def checked(data: Dataset, where: object, tested: bool = True) -> Dataset:
    """Returns the data set unchanged; raises DataError if it cannot be used, for example because a class has
    no images. `where` names the source of the data in the message. With `tested` = False, test images may be
    missing."""
    if not data.labelled:
        raise DataError(f"{where}: has no labelled training images; add some of each class")
    if tested and not len(data.test_labels):
        raise DataError(f"{where}: has no test images; add some of each class")
    for images, labels, what in (
        (data.images, data.labels, "training"),
        (data.test_images, data.test_labels, "test"),
    ):
        if len(images) != len(labels):
            raise DataError(
                f"{where}: {len(images)} {what} images but {len(labels)} labels, so the data are damaged; "
                "replace them with a fresh copy"
            )
    formats.check_side(*data.shape[1:], where)
    known = torch.unique(data.labels[data.labels >= 0])
    if len(known) < 2:
        raise DataError(
            f"{where}: has only one class ({data.classes[int(known[0])]}); add images of at least one more "
            "class"
        )
    strange = data.test_labels[~torch.isin(data.test_labels, known)]
    if len(strange):
        raise DataError(
            f"{where}: class {data.classes[int(strange[0])]} has test images but no labelled training "
            "images; add training images of this class, or remove it from the test set"
        )
    return data


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and the standard deviation of each channel, for normalisation. Pixel values are
    divided by 255 first. Sums are exact, so the result does not depend on the order of the images.

    The standard deviation of a constant channel is set to 1, to avoid a division by zero.
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
