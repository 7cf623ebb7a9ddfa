"""Users that send garbage, for simulations: to see what a federation withstands."""

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.rows import Layout


def who(users: int, share: float, seed: int) -> frozenset[int]:
    """Which of K users are attackers: a share of them, the same in every round."""
    count = round(share * users)
    keys = draws.fold(torch.tensor(draws.key(seed, "attack")), torch.arange(users))
    return frozenset(keys.argsort()[:count].tolist())


def corrupt(kind: str, sent: Tensor, row: Tensor, layout: Layout, key: int, scale: float = 1.0) -> Tensor:
    """What an attacker sends instead of the model [P + Q] that it trained, its update `scale` times as long.

    "sign": the update in the opposite direction. "noise": random weights of the size of the true ones.
    "shift": a model that takes every class for the next one, its last layer moved by one.
    """
    return sent + scale * (_garbage(kind, sent, row, layout, key) - sent)


def _garbage(kind: str, sent: Tensor, row: Tensor, layout: Layout, key: int) -> Tensor:
    if kind == "sign":
        return sent - (row - sent)
    tensors = layout.unflatten(row)
    if kind == "noise":
        uniform = draws.uniform(draws.bits(torch.tensor(key), len(row)).to(row.device)).to(row.dtype)
        sizes = layout.flatten({name: t.abs().mean().expand_as(t) for name, t in tensors.items()})
        return row + (uniform - 0.5) * 12**0.5 * sizes
    weight, bias = layout.names[: layout.trained][-2:]
    moved = {name: tensors[name].roll(1, 0) for name in (weight, bias)}
    return layout.flatten(tensors | moved)
