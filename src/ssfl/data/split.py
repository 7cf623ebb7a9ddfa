"""Splits of images among a server and users: the split with skew R of the paper (Zhang et al. 2020), and
other schemes.

Functions take and return arrays of image numbers. Every image has exactly one owner, which depends only on
the seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ssfl.core import draws
from ssfl.data.apportion import apportion, main_classes, round_to_sums
from ssfl.data.hands import Hands, Index, dealt, gather, handed_out
from ssfl.errors import ConfigError


@dataclass(frozen=True)
class Parts:
    """Who owns which images of a data set, as arrays of image numbers."""

    server: Index
    """Labelled images of the server (D_s)."""
    users: Sequence[Index]
    """Unlabelled images of each user (D_k): `users[k]` is an array."""
    labelled: Sequence[Index] | None = None
    """Labelled images of each user, in addition to `users`; None if users have no labels."""


def skewed(labels: ArrayLike, users: int, skew: float, server_labels: int = 0, seed: int = 2019) -> Parts:
    """Returns the split with skew R (`skew`) of the paper (Zhang et al. 2020, Appendix A.2), generalised to
    any number of users and classes.

    A user whose main classes are the set J gets R · n_i · [i in J] + (1 - R) · n_i · (sum of q_j over J)
    images of class i. Users with the same main class share this number equally. Here n_i is the number of
    images of class i, and q_j is the share of class j in all images. Counts are rounded so that every image
    has one owner, and every count is within one of its exact value.
    """
    if not 0 <= skew <= 1:
        raise ConfigError(
            f"split.skew = {skew} must lie between 0 (iid) and 1 (one class each)",
            key="split.skew",
            value=skew,
        )
    server, pools = _take_server(labels, server_labels, seed)
    sizes = np.array([len(pool) for pool in pools])
    mains, sharers = main_classes(sizes, users)
    holds = np.zeros((len(mains), len(sizes)))
    for row, classes in enumerate(mains):
        holds[row, classes] = 1
    main_share = (holds * sizes).sum(1, keepdims=True) / max(sizes.sum(), 1)  # sum of q_j over J
    counts = round_to_sums(sizes * (skew * holds + (1 - skew) * main_share))
    images: list[Index] = []
    owners: list[Index] = []
    ends, first = counts.cumsum(0), 0
    for row, among in enumerate(sharers):
        images += [pool[e - c : e] for pool, e, c in zip(pools, ends[row], counts[row], strict=True)]
        owners.append(first + dealt(int(counts[row].sum()), among))
        first += among
    return Parts(server, gather(np.concatenate(images), np.concatenate(owners), users))


def iid(labels: ArrayLike, users: int, server_labels: int = 0, seed: int = 2019) -> Parts:
    """Returns an even split: the users' numbers of images differ by at most one, in each class and in
    total."""
    server, pools = _take_server(labels, server_labels, seed)
    images = np.concatenate(pools)
    return Parts(server, gather(images, dealt(len(images), users), users))


def dirichlet(
    labels: ArrayLike,
    users: int,
    alpha: float,
    server_labels: int = 0,
    seed: int = 2019,
    capped: bool = False,
) -> Parts:
    """Returns a split in which each class is divided by proportions from Dirichlet(alpha). A small alpha
    means a large skew.

    With `capped`, users that already have their fair share of the images get none of the following classes,
    as in SemiFL's code. The users' numbers of images then differ less.

    The proportions are drawn again, up to a hundred times, while a user has fewer than ten images (or than
    half its fair share, if that is less). After that they are drawn again, up to a hundred times, while a
    user has none. Drawing stops early if more than a thousand users have too few images, or more than fifty
    have none, because another draw would not help.
    """
    if not alpha > 0:
        raise ConfigError(
            f"split.alpha = {alpha} must be above 0; 0.1 is very skewed, 100 is even",
            key="split.alpha",
            value=alpha,
        )
    server, pools = _take_server(labels, server_labels, seed)
    sizes = np.array([len(pool) for pool in pools])
    generator = np.random.default_rng(seed)
    for least, hopeless in ((min(10, int(sizes.sum()) // (2 * users)), 1000), (1, 50)):
        for _ in range(100):
            shares = generator.dirichlet(np.full(users, alpha), size=len(pools)).T
            counts = _capped(shares, sizes) if capped else apportion(shares, sizes)
            short = int((counts.sum(1) < least).sum())
            if not short:
                return Parts(server, handed_out(pools, counts))
            if short > hopeless:
                break
    raise ConfigError(
        f"split.alpha = {alpha} leaves some of the {users} users without images: "
        "raise split.alpha or lower split.users",
        key="split.alpha",
        value=alpha,
    )


def _capped(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the numbers of images [users, classes] for Dirichlet proportions `shares` [users, classes] of
    classes with these sizes. A user gets no further class once it has its fair share of all images."""
    fair, held = sizes.sum() / len(shares), np.zeros(len(shares), np.int64)
    columns = []
    for number, size in enumerate(sizes):
        share = shares[:, number] * (held < fair)
        share = share if share.sum() > 0 else (held < fair).astype(float)
        columns.append(apportion((share / share.sum())[:, None], np.array([size])))
        held += columns[-1][:, 0]
    return np.concatenate(columns, 1)


def shards(
    labels: ArrayLike, users: int, classes_per_user: int, server_labels: int = 0, seed: int = 2019
) -> Parts:
    """Returns a split in which every user has exactly `classes_per_user` classes. The images of a class are
    divided evenly among the users that have it."""
    server, pools = _take_server(labels, server_labels, seed)
    classes = len(pools)
    if not 1 <= classes_per_user <= classes:
        raise ConfigError(
            f"split.classes_per_user = {classes_per_user} must lie between 1 and the {classes} classes",
            key="split.classes_per_user",
            value=classes_per_user,
        )
    if users * classes_per_user < classes:
        raise ConfigError(
            f"{users} users with {classes_per_user} classes each cannot hold all {classes} classes: "
            "raise split.users or split.classes_per_user",
            key="split.users",
            value=users,
        )
    holds = _shards(users, classes, classes_per_user, seed)
    counts = apportion(holds / holds.sum(0), np.array([len(pool) for pool in pools]))
    return Parts(server, handed_out(pools, counts))


def _shards(users: int, classes: int, each: int, seed: int) -> NDArray[np.float64]:
    """Returns a matrix [users, classes] that is 1 if the user has the class, else 0. Each user in turn takes
    the `each` classes that the fewest users have; ties are broken at random.

    After classes / gcd(classes, each) users, all classes have been taken equally often, and the choice starts
    anew. For speed, the first users of all such periods choose at once, then the second ones, and so on.
    """
    turn = classes // math.gcd(classes, each)
    holds = np.zeros((users, classes))
    held = np.zeros((-(-users // turn), classes), int)  # within each turn
    base = torch.tensor(draws.key(seed, "split"))
    for first in range(min(turn, users)):
        chooser = torch.arange(first, users, turn)
        rows = np.arange(len(chooser))[:, None]
        names = draws.fold(draws.fold(base, 1 + chooser)[:, None], torch.arange(classes))
        order = np.argsort(names.numpy(), axis=1)
        least = np.argsort(held[rows, order], axis=1, kind="stable")[:, :each]
        chosen = order[rows, least]
        holds[chooser.numpy()[:, None], chosen] = 1
        held[rows, chosen] += 1
    return holds


def mixture(
    labels: ArrayLike,
    users: int,
    mixtures: Sequence[Sequence[float]],
    server_labels: int = 0,
    seed: int = 2019,
) -> Parts:
    """Returns a split by given mixtures, which are rows of class weights. With m mixtures, user u gets
    mixture u mod m.

    Each class is divided in proportion to its weights in the users' mixtures, so every image is used. Users
    get exactly their mixture if every class has the same total weight and size.
    """
    server, pools = _take_server(labels, server_labels, seed)
    table = np.asarray(mixtures, float)
    if table.ndim != 2 or table.shape[1] != len(pools):
        raise ConfigError(
            f"split.mixtures must be rows of {len(pools)} numbers, one for each class",
            key="split.mixtures",
            value=mixtures,
        )
    if not np.isfinite(table).all() or (table < 0).any():
        raise ConfigError(
            "split.mixtures must hold finite numbers of at least 0", key="split.mixtures", value=mixtures
        )
    weights = table[np.arange(users) % len(table)]
    totals = weights.sum(0)
    if (totals <= 0).any():
        raise ConfigError(
            f"split.mixtures gives class {int(np.argmin(totals))} to no user: give it a weight above 0",
            key="split.mixtures",
            value=mixtures,
        )
    counts = apportion(weights / totals, np.array([len(pool) for pool in pools]))
    return Parts(server, handed_out(pools, counts))


def measured_skew(labels: ArrayLike, users: Sequence[ArrayLike]) -> float:
    """Returns the skew R of Definition 2 of the paper (Zhang et al. 2020): the total variation distance
    between the class distributions of two users, averaged over all pairs of users."""
    return skew_of(class_counts(labels, users))


def skew_of(counts: NDArray[np.int64]) -> float:
    """Returns the skew R of the paper's Definition 2 from class counts [users, classes]. Users without known
    labels are left out.

    It sorts the shares of each class, in O(d · K · log K) for d classes and K users, instead of visiting all
    pairs of users.
    """
    known = counts[counts.sum(1) > 0]
    count = len(known)
    if count < 2:
        return 0.0
    shares = np.sort(known / known.sum(1, keepdims=True), axis=0)
    # |p_a - p_b| summed over pairs: the i-th smallest is added i times and taken off count-1-i times
    signs = 2 * np.arange(count) - (count - 1)
    return float((signs[:, None] * shares).sum() / (count * (count - 1)))


def class_counts(labels: ArrayLike, owners: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """Returns how many images of each class each owner has, [owners, classes]. Images of unknown label are
    not counted."""
    known = _labels(labels)
    classes = int(known.max(initial=0)) + 1
    hands = Hands.of(owners)
    mine = known[hands.flat]
    places = (hands.owners * classes + mine)[mine >= 0]
    return np.bincount(places, minlength=len(hands) * classes).reshape(len(hands), classes)


def hold_out(labels: ArrayLike, fraction: float, seed: int) -> tuple[Index, Index]:
    """Returns a stratified part of the labelled images, for validation, and all other images. Both are
    sorted."""
    known = _labels(labels)
    held = np.zeros(len(known), bool)
    for pool in _pools(known, seed) if fraction else []:
        held[pool[: round(fraction * len(pool))]] = True
    return np.flatnonzero(held), np.flatnonzero(~held)


def label_some(labels: ArrayLike, parts: Parts, count: int, seed: int) -> Parts:
    """Returns the same split, except that `count` of the users' images, equally many of each class, now count
    as labelled."""
    known, users = _labels(labels), Hands.of(parts.users)
    owned = np.sort(users.flat)
    chosen, _ = _take_server(known[owned], count, seed + 1, "split.user_labels")
    marked = np.zeros(len(known), bool)
    marked[owned[chosen]] = True
    return Parts(parts.server, users.where(~marked), users.where(marked))


def share(parts: Parts) -> Parts:
    """Returns the same split, except that every user also has the server's images."""
    users = Hands.of(parts.users)
    count = len(users)
    images = np.concatenate([users.flat, np.tile(parts.server, count)])
    owners = np.concatenate([users.owners, np.repeat(np.arange(count), len(parts.server))])
    return Parts(parts.server, gather(images, owners, count), parts.labelled)


def deal_unlabelled(parts: Parts, images: Index, seed: int) -> Parts:
    """Returns the same split, except that `images`, which have no labels, are divided evenly among the users,
    in addition to their own."""
    users = Hands.of(parts.users)
    shuffled = _shuffled(images, seed, 0)
    owners = np.concatenate([users.owners, dealt(len(shuffled), len(users))])
    return Parts(parts.server, gather(np.concatenate([users.flat, shuffled]), owners, len(users)))


def _take_server(
    labels: ArrayLike, count: int, seed: int, key: str = "split.server_labels"
) -> tuple[Index, list[Index]]:
    """Returns `count` images, equally many of each class, and the remaining images of each class in random
    order. `key` is the setting that asks for `count`, for error messages."""
    pools = _pools(_labels(labels), seed)
    if count < 0:
        raise ConfigError(f"{key} = {count} must be at least 0", key=key, value=count)
    share, remainder = divmod(count, len(pools))
    most = len(pools) * min(map(len, pools))
    taken: list[Index] = []
    for label, pool in enumerate(pools):
        needed = share + (label < remainder)
        if needed > len(pool):
            raise ConfigError(
                f"{key} = {count} asks for {needed} images of class {label}, which has {len(pool)}: "
                f"lower it to at most {most}",
                key=key,
                value=count,
                fix=f"{key}={most}",
            )
        taken.append(pool[:needed])
        pools[label] = pool[needed:]
    return np.sort(np.concatenate(taken)), pools


def _labels(labels: ArrayLike) -> NDArray[np.int64]:
    return np.asarray(labels).astype(np.int64)


def _pools(labels: NDArray[np.int64], seed: int) -> list[Index]:
    """Returns the images of each class in random order. Images without a label are left out."""
    classes = int(labels.max(initial=-1)) + 1
    if classes < 1:
        raise ConfigError("nothing to split: no image has a label")
    narrow = labels.astype(np.int16) if classes < 1 << 15 else labels  # numpy sorts 16 bits by radix
    order = np.argsort(narrow, kind="stable")
    edges = np.searchsorted(narrow[order], np.arange(classes + 1))
    return [_shuffled(order[edges[label] : edges[label + 1]], seed, -1 - label) for label in range(classes)]


def _shuffled(images: Index, seed: int, part: int) -> Index:
    """Returns the image numbers in random order. They are sorted by a hash of each number; `seed` and `part`
    (a number for what is shuffled, such as a class) are its key. No two hashes are equal, so the order is
    unique."""
    base = torch.tensor(draws.key(seed, "split", part))
    return images[np.argsort(draws.fold(base, torch.from_numpy(images)).numpy())]
