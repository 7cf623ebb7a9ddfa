"""Simulated attackers: users that send manipulated models, to test how robust a federation is."""

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.rows import Layout

ASCENT = 0.29
"""The attack "ascent" reverses the attacker's update and changes its norm to this share of the model's
norm."""


def attacking_users(users: int, share: float, seed: int) -> frozenset[int]:
    """Returns the numbers of the users that are attackers: a `share` of all `users`, chosen at random. They
    are the same in every round."""
    count = round(share * users)
    keys = draws.fold(torch.tensor(draws.key(seed, "attack")), torch.arange(users))
    return frozenset(keys.argsort()[:count].tolist())


def kind_in(attack: str, round: int) -> str | None:
    """Returns the attack to simulate in this round, or None if attackers behave honestly in this round. With
    "alternating", attackers reverse their updates (the attack "sign") in every second round, and are honest
    in the rounds between."""
    if attack == "alternating":
        return "sign" if round % 2 else None
    return attack


def corrupt(kind: str, sent: Tensor, row: Tensor, layout: Layout, key: int, scale: float = 1.0) -> Tensor:
    """Returns the model [P + Q] that an attacker sends instead of the model `row` that it trained from
    `sent`. A model is a row of P weights and Q running statistics. The manipulated update is multiplied by
    `scale`. `kind` is one of these attacks:

    "sign": the update in the opposite direction. "ascent": the same, but with a norm of 0.29 of the model's
    norm, however small the true update is. "noise": random noise as large as the weights, drawn with the
    random `key`, is added. "shift": the outputs of the last layer are shifted by one, so that the model
    predicts the next class instead of the right one. "slow": a step from `sent` towards the model that
    "shift" makes of `sent`; the step has the norm of the true update.
    """
    return sent + scale * (_manipulated(kind, sent, row, layout, key) - sent)


def _manipulated(kind: str, sent: Tensor, row: Tensor, layout: Layout, key: int) -> Tensor:
    """Returns the model [P + Q] that an attack of this kind makes of the trained model `row`. `corrupt` then
    scales the update. A model is a row of P weights and Q running statistics."""
    if kind == "sign":
        return sent - (row - sent)
    if kind == "ascent":
        return sent - ASCENT * _norm(sent) * _direction(row - sent)
    if kind == "slow":
        target = _manipulated("shift", sent, sent, layout, key)
        return sent + _norm(row - sent) * _direction(target - sent)
    tensors = layout.unflatten(row)
    if kind == "noise":
        uniform = draws.uniform(draws.bits(torch.tensor(key), len(row)).to(row.device)).to(row.dtype)
        sizes = layout.flatten({name: t.abs().mean().expand_as(t) for name, t in tensors.items()})
        return row + (uniform - 0.5) * 12**0.5 * sizes
    weight, bias = layout.names[: layout.trained][-2:]
    shifted = {name: tensors[name].roll(1, 0) for name in (weight, bias)}
    return layout.flatten(tensors | shifted)


def _norm(update: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(update)
    return norm


def _direction(update: Tensor) -> Tensor:
    return update / _norm(update).clamp(min=torch.finfo(update.dtype).tiny)
