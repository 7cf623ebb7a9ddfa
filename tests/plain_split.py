"""The splits once more, user by user with lists and loops: slow, and easy to check against the words."""

import numpy as np
import torch

from ssfl.core import draws
from ssfl.data.apportion import round_to_sums

Lists = list[np.ndarray]


def shuffled(images: np.ndarray, seed: int, part: int) -> np.ndarray:
    order = sorted(range(len(images)), key=lambda i: draws.key(seed, "split", part, int(images[i])))
    return np.take(images, np.array(order, int))


def pools_of(labels: np.ndarray, server: int, seed: int) -> tuple[np.ndarray, Lists]:
    """The server's images, and the other images of each class in their order."""
    classes = labels.max() + 1
    pools = [shuffled(np.flatnonzero(labels == label), seed, -1 - label) for label in range(classes)]
    wanted = [server // classes + (label < server % classes) for label in range(classes)]
    taken = np.concatenate([pool[:n] for pool, n in zip(pools, wanted, strict=True)])
    return np.sort(taken), [pool[n:] for pool, n in zip(pools, wanted, strict=True)]


def deal(images: np.ndarray, users: int) -> Lists:
    return [np.sort(images[user::users]) for user in range(users)]


def dean(sizes: np.ndarray, users: int) -> list[int]:
    """How many users each class gets, one user after another to where they are most needed."""
    sharers = np.ones(len(sizes), int)
    for _ in range(users - len(sizes)):
        sharers[np.argmax(sizes / (2 * sharers * (sharers + 1) / (2 * sharers + 1)))] += 1
    return sharers.tolist()


def skewed(labels: np.ndarray, users: int, skew: float, server: int, seed: int) -> tuple[np.ndarray, Lists]:
    """With at least as many users as classes, and images of every class."""
    at_server, pools = pools_of(labels, server, seed)
    sizes = np.array([len(pool) for pool in pools])
    amounts = sizes * (skew * np.eye(len(sizes)) + (1 - skew) * sizes[:, None] / sizes.sum())
    counts = round_to_sums(amounts)
    owners: Lists = []
    for main, among in enumerate(dean(sizes, users)):
        before = counts[:main].sum(0)
        taken = [pool[b : b + c] for pool, b, c in zip(pools, before, counts[main], strict=True)]
        owners += deal(np.concatenate(taken), among)
    return at_server, owners


def hand_out(pools: Lists, shares: np.ndarray) -> Lists:
    """Each class by largest remainders of shares [users, classes], the first users first in a draw."""
    owners: list[Lists] = [[] for _ in shares]
    for label, pool in enumerate(pools):
        wanted = shares[:, label] * len(pool)
        counts = np.floor(wanted).astype(int)
        ranked = sorted(range(len(shares)), key=lambda user: counts[user] - wanted[user])
        for user in ranked[: len(pool) - int(counts.sum())]:
            counts[user] += 1
        for user, end in enumerate(counts.cumsum()):
            owners[user].append(pool[end - counts[user] : end])
    return [np.sort(np.concatenate(owned)) for owned in owners]


def shards(labels: np.ndarray, users: int, each: int, server: int, seed: int) -> tuple[np.ndarray, Lists]:
    at_server, pools = pools_of(labels, server, seed)
    holds = np.zeros((users, len(pools)))
    held = np.zeros(len(pools))
    for user in range(users):
        order = shuffled(np.arange(len(pools)), seed, 1 + user)
        chosen = sorted(order.tolist(), key=held.__getitem__)[:each]
        holds[user, chosen] = 1
        held[chosen] += 1
    return at_server, hand_out(pools, holds / held)


def dirichlet(
    labels: np.ndarray, users: int, alpha: float, server: int, seed: int
) -> tuple[np.ndarray, Lists]:
    """Drawn again until every user has ten images."""
    at_server, pools = pools_of(labels, server, seed)
    generator = np.random.default_rng(seed)
    owners: Lists = [np.zeros(0)]
    while min(len(owned) for owned in owners) < 10:
        shares = generator.dirichlet(np.full(users, alpha), size=len(pools)).T
        owners = hand_out(pools, shares)
    return at_server, owners


def cohort(seed: int, round: int, users: int, participants: int) -> list[int]:
    hashes = draws.fold(torch.tensor(draws.key(seed, "participants", round)), torch.arange(users))
    return sorted(hashes.argsort(stable=True)[:participants].tolist())
