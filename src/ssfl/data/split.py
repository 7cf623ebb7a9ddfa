"""Who gets what: the paper's skew R and other schemes; index arrays in, index arrays out.

No image is lost and none is owned twice. Which image goes where is a function of the seed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ssfl import draws
from ssfl.errors import ConfigError

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """The owners of a data set's images, as arrays of indices."""

    server: Index
    """Labelled images of the server (D_s)."""
    users: list[Index]
    """Unlabelled images of each user (D_k)."""
    labelled: list[Index] | None = None
    """Labelled images of each user, where users have labels."""


def skewed(labels: ArrayLike, users: int, skew: float, server_labels: int = 0, seed: int = 2019) -> Parts:
    """The paper's assignment for a given non-iidness R (Appendix A.2), for any K and any classes.

    A user whose main classes are J gets  R · n_i · [i in J] + (1 - R) · n_i · sum of q_j over J  of
    class i, shared equally by the users of the same main class. Counts are rounded so that every
    image has one owner and each user's count of each class, and of all, is within one of that.
    """
    if not 0 <= skew <= 1:
        raise ConfigError(f"split.skew = {skew} must lie between 0 (iid) and 1 (one class each)")
    server, pools = _take_server(labels, server_labels, seed)
    sizes = np.array([len(pool) for pool in pools])
    mains, sharers = main_classes(sizes, users)
    holds = np.zeros((len(mains), len(sizes)))
    for row, classes in enumerate(mains):
        holds[row, classes] = 1
    main_share = (holds * sizes).sum(1, keepdims=True) / max(sizes.sum(), 1)  # sum of q_j over J
    counts = round_to_sums(sizes * (skew * holds + (1 - skew) * main_share))
    owners: list[Index] = []
    ends = counts.cumsum(0)
    for row, among in enumerate(sharers):
        taken = [pool[e - c : e] for pool, e, c in zip(pools, ends[row], counts[row], strict=True)]
        owners += _deal(np.concatenate(taken), among)
    return Parts(server, owners)


def iid(labels: ArrayLike, users: int, server_labels: int = 0, seed: int = 2019) -> Parts:
    """Every class dealt evenly to all users: each holds each class, and all, to within one image."""
    server, pools = _take_server(labels, server_labels, seed)
    return Parts(server, _deal(np.concatenate(pools), users))


def dirichlet(labels: ArrayLike, users: int, alpha: float, server_labels: int = 0, seed: int = 2019) -> Parts:
    """Each class is shared out by proportions drawn from Dirichlet(alpha); small alpha, large skew.

    Drawn again, up to a hundred times, while a user would be left with fewer than ten images (or
    than half its fair share, where that is less), and then a hundred times while one has none.
    """
    if not alpha > 0:
        raise ConfigError(f"split.alpha = {alpha} must be above 0; 0.1 is very skewed, 100 is even")
    server, pools = _take_server(labels, server_labels, seed)
    sizes = np.array([len(pool) for pool in pools])
    generator = np.random.default_rng(seed)
    for least in (min(10, int(sizes.sum()) // (2 * users)), 1):
        for _ in range(100):
            shares = generator.dirichlet(np.full(users, alpha), size=len(pools)).T
            counts = _apportion(shares, sizes)
            if counts.sum(1).min() >= least:
                return Parts(server, _hand_out(pools, counts))
    raise ConfigError(
        f"split.alpha = {alpha} leaves some of the {users} users without images: "
        "raise split.alpha or lower split.users"
    )


def shards(
    labels: ArrayLike, users: int, classes_per_user: int, server_labels: int = 0, seed: int = 2019
) -> Parts:
    """Every user holds images of exactly `classes_per_user` classes; a class's holders share evenly."""
    server, pools = _take_server(labels, server_labels, seed)
    classes = len(pools)
    if not 1 <= classes_per_user <= classes:
        raise ConfigError(
            f"split.classes_per_user = {classes_per_user} must lie between 1 and the {classes} classes"
        )
    if users * classes_per_user < classes:
        raise ConfigError(
            f"{users} users with {classes_per_user} classes each cannot hold all {classes} classes: "
            "raise split.users or split.classes_per_user"
        )
    holds = np.zeros((users, classes))
    held = np.zeros(classes, int)
    for user in range(users):  # the least held classes first, ties in a fresh random order
        order = _shuffled(np.arange(classes), seed, 1 + user)
        chosen = order[np.argsort(held[order], kind="stable")][:classes_per_user]
        holds[user, chosen] = 1
        held[chosen] += 1
    counts = _apportion(holds / held, np.array([len(pool) for pool in pools]))
    return Parts(server, _hand_out(pools, counts))


def mixture(
    labels: ArrayLike,
    users: int,
    mixtures: Sequence[Sequence[float]],
    server_labels: int = 0,
    seed: int = 2019,
) -> Parts:
    """Given mixtures of classes: user u takes the mixture u mod their number.

    Each class is shared out in proportion to its weights in the users' mixtures, so nothing is lost;
    users hold exactly their mixture when every class has the same total weight and size.
    """
    server, pools = _take_server(labels, server_labels, seed)
    table = np.asarray(mixtures, float)
    if table.ndim != 2 or table.shape[1] != len(pools):
        raise ConfigError(f"split.mixtures must be rows of {len(pools)} numbers, one for each class")
    if not np.isfinite(table).all() or (table < 0).any():
        raise ConfigError("split.mixtures must hold finite numbers of at least 0")
    weights = table[np.arange(users) % len(table)]
    totals = weights.sum(0)
    if (totals <= 0).any():
        raise ConfigError(
            f"split.mixtures gives class {int(np.argmin(totals))} to no user: give it a weight above 0"
        )
    counts = _apportion(weights / totals, np.array([len(pool) for pool in pools]))
    return Parts(server, _hand_out(pools, counts))


def measured_skew(labels: ArrayLike, users: Sequence[ArrayLike]) -> float:
    """Definition 2: the mean total variation distance between two users' class distributions.

    By sorting each class's shares, in O(d · K · log K) instead of over all pairs.
    """
    counts = class_counts(labels, users)
    known = counts[counts.sum(1) > 0]
    count = len(known)
    if count < 2:
        return 0.0
    shares = np.sort(known / known.sum(1, keepdims=True), axis=0)
    # |p_a - p_b| summed over pairs: the i-th smallest is added i times and taken off count-1-i times
    signs = 2 * np.arange(count) - (count - 1)
    return float((signs[:, None] * shares).sum() / (count * (count - 1)))


def class_counts(labels: ArrayLike, owners: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """How many images of each class each owner holds: [owners, classes]; unknown labels left out."""
    known = _labels(labels)
    classes = int(known.max(initial=0)) + 1
    rows = []
    for owned in owners:
        index = np.asarray(owned)
        mine = known[index if index.dtype == bool else index.astype(np.int64)]
        rows.append(np.bincount(mine[mine >= 0], minlength=classes))
    return np.array(rows, dtype=np.int64).reshape(len(rows), classes)


def hold_out(labels: ArrayLike, fraction: float, seed: int) -> tuple[Index, Index]:
    """A stratified part of the labelled images for validation, and the rest, both sorted."""
    chosen = [pool[: round(fraction * len(pool))] for pool in _pools(_labels(labels), seed)]
    held = np.sort(np.concatenate(chosen))
    rest = np.setdiff1d(np.arange(len(_labels(labels))), held)
    return held, rest


def label_some(labels: ArrayLike, parts: Parts, count: int, seed: int) -> Parts:
    """The same owners, with labels on `count` of the users' images, uniform over the classes."""
    known = _labels(labels)
    owned = np.sort(np.concatenate(parts.users))
    chosen, _ = _take_server(known[owned], count, seed + 1, "split.user_labels")
    marked = np.zeros(len(known), bool)
    marked[owned[chosen]] = True
    return Parts(
        parts.server,
        [user[~marked[user]] for user in parts.users],
        [user[marked[user]] for user in parts.users],
    )


def deal_unlabelled(parts: Parts, images: Index, seed: int) -> Parts:
    """Images without labels dealt evenly to the users, on top of what they have."""
    dealt = _deal(_shuffled(images, seed, 0), len(parts.users))
    users = [np.sort(np.concatenate(pair)) for pair in zip(parts.users, dealt, strict=True)]
    return Parts(parts.server, users)


def main_classes(sizes: Index, users: int) -> tuple[list[list[int]], list[int]]:
    """Main classes such that users come out as equal in size as the classes allow.

    Returns rows of main classes and how many users share each row: with at least as many users as
    classes a row is one class and its m_j users; otherwise a row is one user and its classes J.
    """
    if users < 1:
        raise ConfigError(f"split.users = {users} must be at least 1")
    present = np.flatnonzero(sizes)  # a class without images is nobody's main class
    if users >= len(present) > 0:
        sharers = np.ones(len(present), int)
        for _ in range(users - len(present)):
            # Dean's rule: no user moved between two classes brings their users' sizes closer
            harmonic = 2 * sharers * (sharers + 1) / (2 * sharers + 1)
            sharers[np.argmax(sizes[present] / harmonic)] += 1
        return [[label] for label in present.tolist()], sharers.tolist()
    mains: list[list[int]] = [[] for _ in range(users)]
    loads = np.zeros(users)
    for label in np.argsort(-np.asarray(sizes), kind="stable"):  # the largest class to the lightest
        user = int(np.argmin(loads))
        mains[user].append(int(label))
        loads[user] += sizes[label]
    _even_out(mains, sizes)
    return [sorted(row) for row in mains], [1] * users


def _even_out(mains: list[list[int]], sizes: Index) -> None:
    """Move a class to a lighter user, or swap two, while that brings the two users closer."""

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
    """Round a matrix whose row and column sums are whole: every entry up or down, every sum kept.

    That such a rounding exists is the integrality of network flows, and a maximal flow finds it:
    rows give their remainders to columns along the entries that may be rounded up.
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


def _take_server(
    labels: ArrayLike, count: int, seed: int, key: str = "split.server_labels"
) -> tuple[Index, list[Index]]:
    """`count` images uniform over the classes, and each class's remaining images, shuffled."""
    pools = _pools(_labels(labels), seed)
    if count < 0:
        raise ConfigError(f"{key} = {count} must be at least 0")
    share, more = divmod(count, len(pools))
    taken: list[Index] = []
    for label, pool in enumerate(pools):
        wanted = share + (label < more)
        if wanted > len(pool):
            raise ConfigError(
                f"{key} = {count} asks for {wanted} images of class {label}, which has {len(pool)}: "
                f"lower it to at most {len(pools) * min(len(p) for p in pools)}"
            )
        taken.append(pool[:wanted])
        pools[label] = pool[wanted:]
    return np.sort(np.concatenate(taken)), pools


def _labels(labels: ArrayLike) -> NDArray[np.int64]:
    return np.asarray(labels).astype(np.int64)


def _pools(labels: NDArray[np.int64], seed: int) -> list[Index]:
    """The images of each class in a random order; images without a label are in none."""
    classes = int(labels.max(initial=-1)) + 1
    if classes < 1:
        raise ConfigError("nothing to split: no image has a label")
    order = np.argsort(labels, kind="stable")
    edges = np.searchsorted(labels[order], np.arange(classes + 1))
    return [_shuffled(order[edges[label] : edges[label + 1]], seed, -1 - label) for label in range(classes)]


def _shuffled(images: Index, seed: int, part: int) -> Index:
    """The same indices in the order of their hashes."""
    base = torch.tensor(draws.key(seed, "split", part))
    order: Index = draws.fold(base, torch.from_numpy(images)).argsort(stable=True).numpy()
    return images[order]


def _deal(images: Index, users: int) -> list[Index]:
    """Dealt one by one like cards, so that runs of a class are shared evenly; each hand sorted."""
    if users < 1:
        raise ConfigError(f"split.users = {users} must be at least 1")
    return [np.sort(images[user::users]) for user in range(users)]


def _apportion(shares: NDArray[np.float64], sizes: Index) -> NDArray[np.int64]:
    """Counts [users, classes] nearest to shares · sizes by largest remainders; columns sum to sizes."""
    wanted = shares * sizes
    counts = np.floor(wanted).astype(np.int64)
    order = np.argsort(counts - wanted, axis=0, kind="stable")
    short = sizes - counts.sum(0)
    for label, missing in enumerate(short):
        counts[order[:missing, label], label] += 1
    return counts


def _hand_out(pools: list[Index], counts: NDArray[np.int64]) -> list[Index]:
    """The images themselves, from counts [users, classes]."""
    ends = counts.cumsum(0)
    return [
        np.sort(np.concatenate(
            [pool[e - c : e] for pool, e, c in zip(pools, ends[user], row, strict=True)]
        ))
        for user, row in enumerate(counts)
    ]  # fmt: skip
