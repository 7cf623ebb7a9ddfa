"""The images of many owners, stored as two arrays so that a split with a hundred thousand users is fast."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssfl.errors import ConfigError

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Hands(Sequence[Index]):
    """Which images each owner has: a list of arrays of image numbers, stored one after another in `flat`.

    As in a card game, the images of one owner are its hand.
    """

    flat: Index
    """The image numbers of all owners, one owner after another."""
    edges: Index
    """[owners + 1]: the position in `flat` at which each owner's images start, and the end of the last
    owner's."""

    @classmethod
    def of(cls, lists: Sequence[ArrayLike]) -> "Hands":
        """Returns the images of several owners as a `Hands`. Each owner has an array of image numbers, or a
        mask over all images. A `Hands` is returned unchanged."""
        if isinstance(lists, Hands):
            return lists
        arrays = [np.asarray(owned) for owned in lists]
        arrays = [np.flatnonzero(a) if a.dtype == bool else a.astype(np.int64) for a in arrays]
        flat = np.concatenate([np.zeros(0, np.int64), *arrays])
        return cls(flat, _edges(np.array([len(a) for a in arrays], np.int64)))

    @overload
    def __getitem__(self, owner: int) -> Index: ...
    @overload
    def __getitem__(self, owner: slice) -> list[Index]: ...
    def __getitem__(self, owner: int | slice) -> Index | list[Index]:
        if isinstance(owner, slice):
            return [self[one] for one in range(*owner.indices(len(self)))]
        place = operator.index(owner)
        if not -len(self) <= place < len(self):
            raise IndexError(f"there is no owner {place} among {len(self)}")
        place %= len(self)
        return self.flat[self.edges[place] : self.edges[place + 1]]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def sizes(self) -> Index:
        """The number of images of each owner."""
        return np.diff(self.edges)

    @property
    def owners(self) -> Index:
        """The owner of each entry of `flat`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def renamed(self, names: Index) -> "Hands":
        """Returns the same hands in which every image number i is replaced by names[i]."""
        return Hands(names[self.flat], self.edges)

    def where(self, mask: NDArray[np.bool_]) -> "Hands":
        """Returns each owner's images for which `mask` [images] is true, in the same order."""
        chosen = mask[self.flat]
        return Hands(self.flat[chosen], np.concatenate([[0], chosen.cumsum()])[self.edges])


def _edges(sizes: Index) -> Index:
    return np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])


def gather(images: Index, owners: Index, count: int) -> Hands:
    """Returns which images each of `count` owners has, given the image numbers and the owner of each image.
    The images of every owner are sorted.

    Each pair of owner and image is sorted as one whole number, which is many times faster than sorting by two
    keys.
    """
    span = int(images.max(initial=0)) + 1
    pairs = np.sort(owners * span + images)
    return Hands(pairs % span, _edges(np.bincount(owners, minlength=count)))


def dealt(count: int, users: int) -> Index:
    """Returns the owner of each of `count` images, dealt to the users in turn like cards. If the images are
    ordered by class, every class is divided evenly."""
    if users < 1:
        raise ConfigError(f"split.users = {users} must be at least 1", key="split.users", value=users)
    return np.arange(count) % users


def handed_out(pools: list[Index], counts: NDArray[np.int64]) -> Hands:
    """Returns the images of each user. `pools` are the images of each class, and `counts` [users, classes]
    says how many of them each user takes; every column sums to the size of its pool."""
    users = np.arange(len(counts))
    owners = np.concatenate([np.repeat(users, column) for column in counts.T])
    return gather(np.concatenate(pools), owners, len(counts))
