"""Stores which images each of many owners has. Two arrays hold all of it, so that a split with a hundred
thousand users is fast."""

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
    """Which images each owner has. It can be used like a list: `hands[k]` is the array of image numbers of
    owner k.

    The name is from card games, where a hand is the cards of one player.
    """

    flat: Index
    """The image numbers of all owners, one owner after another."""
    edges: Index
    """[owners + 1]: the images of owner k are flat[edges[k] : edges[k + 1]]."""

    @classmethod
    def of(cls, lists: Sequence[ArrayLike]) -> "Hands":
        """Returns a `Hands`, given for each owner an array of image numbers or a boolean mask over all
        images. A `Hands` is returned unchanged."""
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
        """[owners]: the number of images of each owner."""
        return np.diff(self.edges)

    @property
    def owners(self) -> Index:
        """For each entry of `flat`, the number of the owner of that image."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def renamed(self, names: Index) -> "Hands":
        """Returns a `Hands` in which every image number i is replaced by names[i]. It is used after a split
        of some of the images, to return to the numbers in the whole data set."""
        return Hands(names[self.flat], self.edges)

    def where(self, mask: NDArray[np.bool_]) -> "Hands":
        """Returns a `Hands` with only those images of each owner for which `mask` [images] is true."""
        chosen = mask[self.flat]
        return Hands(self.flat[chosen], np.concatenate([[0], chosen.cumsum()])[self.edges])


def _edges(sizes: Index) -> Index:
    return np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])


def gather(images: Index, owners: Index, count: int) -> Hands:
    """Returns which images each of `count` owners has. `images` are image numbers, and `owners` has the owner
    of each. The images of every owner are sorted.

    For speed, each pair of owner and image is turned into one whole number before sorting.
    """
    span = int(images.max(initial=0)) + 1
    pairs = np.sort(owners * span + images)
    return Hands(pairs % span, _edges(np.bincount(owners, minlength=count)))


def dealt(count: int, users: int) -> Index:
    """Returns the owner of each of `count` images, [count], if they are dealt to the users in turn, like
    cards. Image i belongs to user i mod users. If the images are ordered by class, every class is divided
    evenly."""
    if users < 1:
        raise ConfigError(f"split.users = {users} must be at least 1", key="split.users", value=users)
    return np.arange(count) % users


def handed_out(pools: list[Index], counts: NDArray[np.int64]) -> Hands:
    """Returns which images each user has. `pools` are the image numbers of each class, and `counts` [users,
    classes] is how many of them each user takes. Every column of `counts` sums to the size of its pool."""
    users = np.arange(len(counts))
    owners = np.concatenate([np.repeat(users, column) for column in counts.T])
    return gather(np.concatenate(pools), owners, len(counts))
