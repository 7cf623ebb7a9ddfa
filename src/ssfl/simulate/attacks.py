"""Users that send garbage, for simulations: to see what a federation withstands."""

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.rows import Layout

ASCENT = 0.29
"""How long the update of an "ascent" is, as a share of the model."""


def who(users: int, share: float, seed: int) -> frozenset[int]:
    """Which of K users are attackers: a share of them, the same in every round."""
    count = round(share * users)
    keys = draws.fold(torch.tensor(draws.key(seed, "attack")), torch.arange(users))
    return frozenset(keys.argsort()[:count].tolist())


def corrupt(kind: str, sent: Tensor, row: Tensor, layout: Layout, key: int, scale: float = 1.0) -> Tensor:
    """What an attacker sends instead of the model [P + Q] that it trained, its update `scale` times as long.

    "sign": the update in the opposite direction. "ascent": the same, three tenths of the model long, however
    short the true update is. "noise": random weights of the size of the true ones. "shift": a model that
    takes every class for the next one, its last layer moved by one. "slow": a small step towards such a
    model, as long as the true update, in every round.
    """
    return sent + scale * (_garbage(kind, sent, row, layout, key) - sent)


def _garbage(kind: str, sent: Tensor, row: Tensor, layout: Layout, key: int) -> Tensor:
    if kind == "sign":
        return sent - (row - sent)
    if kind == "ascent":
        return sent - ASCENT * _length(sent) * _direction(row - sent)
    if kind == "slow":
        target = _garbage("shift", sent, sent, layout, key)
        return sent + _length(row - sent) * _direction(target - sent)
    tensors = layout.unflatten(row)
    if kind == "noise":
        uniform = draws.uniform(draws.bits(torch.tensor(key), len(row)).to(row.device)).to(row.dtype)
        sizes = layout.flatten({name: t.abs().mean().expand_as(t) for name, t in tensors.items()})
        return row + (uniform - 0.5) * 12**0.5 * sizes
    weight, bias = layout.names[: layout.trained][-2:]
    moved = {name: tensors[name].roll(1, 0) for name in (weight, bias)}
    return layout.flatten(tensors | moved)


def _length(update: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(update)
    return length


def _direction(update: Tensor) -> Tensor:
    return update / _length(update).clamp(min=torch.finfo(update.dtype).tiny)
