"""Arithmetic in whole numbers for splits: chooses the main classes of each user, and rounds shares to numbers
of images."""

import numpy as np
from numpy.typing import NDArray

from ssfl.data.hands import Index
from ssfl.errors import ConfigError


def main_classes(sizes: Index, users: int) -> tuple[list[list[int]], list[int]]:
    """Chooses the main classes of each user for the paper's split with skew R. `sizes` is the number of
    images of each class. Returns a list of sets of main classes, and the number of users that have each set.

    The choice makes the users' numbers of images as equal as the classes allow. With at least as many users
    as classes, each set is a single class, which several users may have. Otherwise each set has one or more
    classes and belongs to one user.
    """
    if users < 1:
        raise ConfigError(f"split.users = {users} must be at least 1", key="split.users", value=users)
    present = np.flatnonzero(sizes)  # a class without images cannot be a main class
    if users >= len(present) > 0:
        # Dean's rule of apportionment: moving a user between two classes never brings the sizes of
        # their users closer. A class with m users has priority n_j over the harmonic mean of m and
        # m + 1, which lies between m + 1/3 and m + 1/2. So all users with a priority above N / n,
        # computed with m + 1/2, are surely among the first n, and only the rest needs the loop.
        extra, total = users - len(present), int(sizes.sum())
        sharers = 1 + np.maximum((2 * extra * sizes[present] - total) // (2 * total), 0)
        for _ in range(users - int(sharers.sum())):
            harmonic = 2 * sharers * (sharers + 1) / (2 * sharers + 1)
            sharers[np.argmax(sizes[present] / harmonic)] += 1
        return [[label] for label in present.tolist()], sharers.tolist()
    mains: list[list[int]] = [[] for _ in range(users)]
    loads = np.zeros(users)
    # the largest class goes to the user with the fewest images
    for label in np.argsort(-np.asarray(sizes), kind="stable"):
        user = int(np.argmin(loads))
        mains[user].append(int(label))
        loads[user] += sizes[label]
    _even_out(mains, sizes)
    return [sorted(row) for row in mains], [1] * users


def _even_out(mains: list[list[int]], sizes: Index) -> None:
    """Makes the users' numbers of images more equal. It moves a main class to a user with fewer images, or
    swaps a main class of one user with that of another. It stops when no single move or swap helps. `mains`
    lists the main classes of each user and is changed in place."""

    def trade() -> bool:
        loads = [sum(int(sizes[label]) for label in row) for row in mains]
        order = sorted(range(len(mains)), key=lambda user: loads[user])
        for heavy, light in ((h, i) for h in reversed(order) for i in order if loads[h] > loads[i]):
            for give in mains[heavy]:
                for take in [*mains[light], None]:
                    change = int(sizes[give]) - (0 if take is None else int(sizes[take]))
                    if 0 < change < loads[heavy] - loads[light] and (
                        take is not None or len(mains[heavy]) > 1
                    ):
                        mains[heavy].remove(give)
                        mains[light].append(give)
                        if take is not None:
                            mains[light].remove(take)
                            mains[heavy].append(take)
                        return True
        return False

    while trade():
        pass


def round_to_sums(amounts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns a matrix of whole numbers: each entry of `amounts` is rounded up or down such that all row sums
    and column sums stay the same. The sums must be whole numbers. Splits need this so that every image has
    exactly one owner.

    Such a rounding exists because network flows have integral solutions. It is found as a maximum flow: rows
    send their remainders to columns along the entries that may be rounded up.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    amounts = np.where(np.abs(amounts - np.rint(amounts)) < 1e-6, np.rint(amounts), amounts)
    down = np.floor(amounts).astype(np.int64)
    give = np.rint(amounts.sum(1)).astype(np.int64) - down.sum(1)
    take = np.rint(amounts.sum(0)).astype(np.int64) - down.sum(0)
    rows, columns = (amounts > down).nonzero()
    count, width = amounts.shape
    source, sink = count + width, count + width + 1
    tails = np.concatenate([np.full(count, source), rows, count + np.arange(width)])
    heads = np.concatenate([np.arange(count), count + columns, np.full(width, sink)])
    capacity = np.concatenate([give, np.ones(len(rows), np.int64), take]).astype(np.int32)
    shape = (sink + 1, sink + 1)
    graph = coo_array((capacity, (tails, heads)), shape=shape).tocsr()
    flow = maximum_flow(graph, source, sink).flow.tocoo()
    inner = (flow.data > 0) & (flow.row < count) & (flow.col >= count) & (flow.col < source)
    down[flow.row[inner], flow.col[inner] - count] += flow.data[inner]
    return down


def apportion(shares: NDArray[np.float64], sizes: Index) -> NDArray[np.int64]:
    """Returns the number of images of each class that each user gets, [users, classes]. `shares` [users,
    classes] is the part of each class that a user should get, and `sizes` the number of images of each class.

    Counts are shares · sizes, rounded by largest remainders. Each column sums to the size of its class.
    """
    wanted = shares * sizes
    counts = np.floor(wanted).astype(np.int64)
    for label, missing in enumerate((sizes - counts.sum(0)).tolist()):
        if missing > 0:
            remainder = wanted[:, label] - counts[:, label]
            least = np.partition(remainder, -missing)[-missing]
            counts[remainder > least, label] += 1
            equal = np.flatnonzero(remainder == least)  # as many of these as are still missing
            counts[equal[: sizes[label] - counts[:, label].sum()], label] += 1
    return counts
