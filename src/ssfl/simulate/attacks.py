"""Simulated attackers: users that send manipulated models, to test how robust a federation is."""

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.rows import Layout
from ssfl.errors import ConfigError
from ssfl.methods.fedmatch import HALVES

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


def corrupt(
    kind: str, sent: Tensor, row: Tensor, layout: Layout, classes: int, key: int, scale: float = 1.0
) -> Tensor:
    """Returns the model [P + Q] that an attacker sends instead of the model `row` that it trained from
    `sent`. A model is a row of P weights and Q running statistics. The manipulated update is multiplied by
    `scale`. `kind` is one of these attacks:

    "sign": the update in the opposite direction. "ascent": the same, but with a norm of 0.29 of the model's
    norm, however small the true update is. "noise": random noise as large as the weights, drawn with the
    random `key`, is added. "shift": the outputs of the last layer are shifted by one, so that the model
    predicts the next class instead of the right one. "slow": a step from `sent` towards the model that
    "shift" makes of `sent`; the step has the norm of the true update.
    """
    return sent + scale * (_manipulated(kind, sent, row, layout, classes, key) - sent)


def _manipulated(kind: str, sent: Tensor, row: Tensor, layout: Layout, classes: int, key: int) -> Tensor:
    """Returns the model [P + Q] that an attack of this kind makes of the trained model `row`. `corrupt` then
    scales the update. A model is a row of P weights and Q running statistics."""
    if kind == "sign":
        return sent - (row - sent)
    if kind == "ascent":
        return sent - ASCENT * _norm(sent) * _direction(row - sent)
    if kind == "slow":
        target = _manipulated("shift", sent, sent, layout, classes, key)
        return sent + _norm(row - sent) * _direction(target - sent)
    tensors = layout.unflatten(row)
    if kind == "noise":
        uniform = draws.uniform(draws.bits(torch.tensor(key), len(row)).to(row.device)).to(row.dtype)
        sizes = layout.flatten({name: t.abs().mean().expand_as(t) for name, t in tensors.items()})
        return row + (uniform - 0.5) * 12**0.5 * sizes
    return layout.flatten(tensors | {name: tensors[name].roll(1, 0) for name in _last_layer(layout, classes)})


def _last_layer(layout: Layout, classes: int) -> list[str]:
    """Returns the names of the last layer's trained tensors that have a row for each class: its weight, and
    its bias if it has one. Raises if there is no such layer."""
    layers = {
        name: _layer(name)
        for name, shape in zip(layout.names[: layout.trained], layout.shapes, strict=False)
        if shape[:1] == (classes,)
    }
    if not layers:
        raise ConfigError(
            "federation.attack = 'shift' or 'slow': no layer of this network has a row of weights for each "
            "class: choose another attack",
            key="federation.attack",
        )
    last = list(layers.values())[-1]
    return [name for name, layer in layers.items() if layer == last]


def _layer(name: str) -> str:
    """Returns the name of the layer that has this tensor. Both halves of FedMatch's weights have the same
    one."""
    for half in HALVES:
        name = name.removeprefix(half)
    return name.rpartition(".")[0]


def _norm(update: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(update)
    return norm


def _direction(update: Tensor) -> Tensor:
    return update / _norm(update).clamp(min=torch.finfo(update.dtype).tiny)
