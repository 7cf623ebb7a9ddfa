"""Divides images among a server and users: the paper's split with skew R (Zhang et al. 2020), and other
schemes.

An image is identified by its number, which is its position in the data set. Every image has exactly one owner
(except after `share`). The same arguments and seed always give the same split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ssfl.core import draws
from ssfl.data import folds
from ssfl.data.apportion import apportion, main_classes, round_to_sums
from ssfl.data.hands import Hands, Index, dealt, gather, handed_out
from ssfl.errors import ConfigError


@dataclass(frozen=True)
class Parts:
    """A split: which images of a data set the server and each user own, as arrays of image numbers."""

    server: Index
    """The labelled images of the server (D_s)."""
    users: Sequence[Index]
    """The unlabelled images of the users (D_k): `users[k]` is the array of user k."""
    labelled: Sequence[Index] | None = None
    """The labelled images of each user, which are not in `users`; None if users have no labels."""


def skewed(labels: ArrayLike, users: int, skew: float, server_labels: int = 0, seed: int = 2019) -> Parts:
    """Returns the paper's split with skew R = `skew` (Zhang et al. 2020, Appendix A.2), for any number of
    users and classes. The server first gets `server_labels` images, equally many of each class.

    Let J be the set of main classes of a user, n_i the number of images of class i, and q_j the share of
    class j in all images. The user gets R · n_i · [i in J] + (1 - R) · n_i · (sum of q_j over J) images of
    class i. Users with the same main class share this number equally. Counts are rounded so that every image
    has one owner; each is within one of its exact value.
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
    """Returns an even split: the users' numbers of images differ by at most one, in each class and in total.
    The server first gets `server_labels` images, equally many of each class."""
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
    """Returns a split in which each class is divided among users in proportions drawn from Dirichlet(alpha).
    With a small alpha, users' class mixtures differ much. The server first gets `server_labels` images,
    equally many of each class.

    Classes are divided one after another. With `capped`, a user that already has its fair share of all images
    gets none of the remaining classes, as in SemiFL's code. The users' numbers of images then differ less.

    The proportions are drawn up to a hundred times, until every user has ten images (or half its fair share,
    if that is less). If no draw achieves this, they are drawn up to a hundred more times, until every user
    has an image. If that fails too, raises ConfigError. The first series of draws ends early if a draw leaves
    more than a thousand users with too few images. The second series ends early if a draw leaves more than
    fifty users without images.
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
    """Returns the numbers of images [users, classes] for a Dirichlet split with a limit: a user that has its
    fair share of all images gets no further class. `shares` [users, classes] are the drawn proportions, and
    `sizes` the number of images of each class."""
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
    divided evenly among the users that have it. The server first gets `server_labels` images, equally many of
    each class."""
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
    """Returns a matrix [users, classes] that is 1 if the user has the class, else 0. One user after another
    takes the `each` classes that the fewest users have so far; ties are broken at random.

    After classes / gcd(classes, each) users, all classes have been taken equally often, and the choice starts
    anew. These users form a period. For speed, the first users of all periods choose at once, then the second
    ones, and so on.
    """
    turn = classes // math.gcd(classes, each)
    holds = np.zeros((users, classes))
    held = np.zeros((-(-users // turn), classes), int)  # how many users have each class, within each period
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
    """Returns a split in which the class mixture of each user is given. `mixtures` are m rows of class
    weights; user u has row u mod m. The server first gets `server_labels` images, equally many of each class.

    Each class is divided in proportion to its weights in the users' rows, so every image is used. Users get
    exactly their mixture only if every class has the same total weight and the same number of images.
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
    """Returns the skew R of a split (Definition 2 of Zhang et al. 2020): the total variation distance between
    the class distributions of two users, averaged over all pairs of users. `users` has the image numbers of
    each user."""
    return skew_of(class_counts(labels, users))


def skew_of(counts: NDArray[np.int64]) -> float:
    """Returns the skew R (Definition 2 of Zhang et al. 2020) from the number of images of each class that
    each user has, `counts` [users, classes]. Users without any counted image are left out. With fewer than
    two users left, the skew is 0.

    The shares of each class are sorted, which takes O(d · K · log K) for d classes and K users. Visiting all
    pairs of users would take O(d · K²).
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
    """Returns how many images of each class each owner has, [owners, classes]. Images without a label (-1)
    are not counted."""
    known = _labels(labels)
    classes = int(known.max(initial=0)) + 1
    hands = Hands.of(owners)
    mine = known[hands.flat]
    places = (hands.owners * classes + mine)[mine >= 0]
    return np.bincount(places, minlength=len(hands) * classes).reshape(len(hands), classes)


def hold_out(
    labels: ArrayLike, fraction: float, seed: int, groups: Index | None = None
) -> tuple[Index, Index]:
    """Returns the numbers of the validation images, which are the same `fraction` of every class, and the
    numbers of all other images. Both are sorted. With `groups` (a number for each image up to the last
    labelled one, or more), images with the same number stay together, so the fraction is only near
    `fraction`."""
    known = _labels(labels)
    held = np.zeros(len(known), bool)
    pools = _pools(known, seed) if fraction else []
    if groups is None:
        for pool in pools:
            held[pool[: round(fraction * len(pool))]] = True
    elif pools:
        wanted = np.array([round(fraction * len(pool)) for pool in pools])
        labelled = np.flatnonzero(known >= 0)
        order = np.searchsorted(labelled, np.concatenate(pools))
        held[labelled[folds.hold_out(known[labelled], groups[labelled], wanted, order)]] = True
    return np.flatnonzero(held), np.flatnonzero(~held)


def label_some(labels: ArrayLike, parts: Parts, count: int, seed: int) -> Parts:
    """Returns the split after `count` of the users' images, equally many of each class, became labelled
    images of their owners."""
    known, users = _labels(labels), Hands.of(parts.users)
    owned = np.sort(users.flat)
    chosen, _ = _take_server(known[owned], count, seed + 1, "split.user_labels")
    marked = np.zeros(len(known), bool)
    marked[owned[chosen]] = True
    return Parts(parts.server, users.where(~marked), users.where(marked))


def share(parts: Parts) -> Parts:
    """Returns the split after the server's images were added to the unlabelled images of every user. The
    server keeps them too."""
    users = Hands.of(parts.users)
    count = len(users)
    images = np.concatenate([users.flat, np.tile(parts.server, count)])
    owners = np.concatenate([users.owners, np.repeat(np.arange(count), len(parts.server))])
    return Parts(parts.server, gather(images, owners, count), parts.labelled)


def deal_unlabelled(parts: Parts, images: Index, seed: int) -> Parts:
    """Returns the split after `images`, which have no labels, were divided evenly and at random among the
    users, in addition to their own."""
    users = Hands.of(parts.users)
    shuffled = _shuffled(images, seed, 0)
    owners = np.concatenate([users.owners, dealt(len(shuffled), len(users))])
    return Parts(parts.server, gather(np.concatenate([users.flat, shuffled]), owners, len(users)))


def _take_server(
    labels: ArrayLike, count: int, seed: int, key: str = "split.server_labels"
) -> tuple[Index, list[Index]]:
    """Takes `count` images for the server, equally many of each class. If `count` is not a multiple of the
    number of classes, the first classes give one image more. Returns the images' numbers, and for each class
    the remaining images in random order. `key` is the setting that asks for `count`, for error messages."""
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
                f"{key} = {count} needs {needed} labelled images of class {label}, which has only "
                f"{len(pool)}: lower {key} to at most {most}",
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
    """Returns for each class the numbers of its images, in random order. Images without a label are left
    out."""
    classes = int(labels.max(initial=-1)) + 1
    if classes < 1:
        raise ConfigError("no image has a label, so the images cannot be split by class: use labelled images")
    # numpy sorts 16-bit numbers faster (radix sort)
    narrow = labels.astype(np.int16) if classes < 1 << 15 else labels
    order = np.argsort(narrow, kind="stable")
    edges = np.searchsorted(narrow[order], np.arange(classes + 1))
    return [_shuffled(order[edges[label] : edges[label + 1]], seed, -1 - label) for label in range(classes)]


def _shuffled(images: Index, seed: int, part: int) -> Index:
    """Returns the image numbers in a random order that depends only on `seed`, `part` and the numbers
    themselves. `part` is a number for the list that is shuffled, such as a class. The numbers are sorted by a
    keyed hash; no two hashes are equal, so the order is unique."""
    base = torch.tensor(draws.key(seed, "split", part))
    return images[np.argsort(draws.fold(base, torch.from_numpy(images)).numpy())]
