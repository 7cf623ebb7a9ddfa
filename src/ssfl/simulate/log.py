"""Collects what happens in a round: the metrics and updates of users and server, and what the gate did."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssfl.federation import Named


@dataclass(frozen=True)
class TrainedUpdates:
    """The metrics and updates of n trainers (users, or copies of the server's model) in a round."""

    metrics: Named
    """The metrics by name, such as loss and mask rate. Each is a tensor [n] with one number for each of n
    users, or for each of n copies of the server's model."""
    norms: Tensor
    """[n]: for each user, or for each copy of the server's model, the norm of the update of its weights."""
    updates: Tensor | None
    """[n, P + Q]: for each user, or for each copy of the server's model, its update of P weights and Q
    running statistics. None unless gradient diversity is measured."""


@dataclass
class Log:
    """Collects what happened in a round. The round's events are made from it."""

    users: TrainedUpdates | None = None
    """The metrics and updates of the round's users; None if no user returned a model."""
    server: TrainedUpdates | None = None
    server_sent: Tensor | None = None
    """[P + Q]: the server's model before its training (P weights and Q running statistics); None if it did
    not train."""
    server_row: Tensor | None = None
    """[P + Q]: the server's model after its training (P weights and Q running statistics); None if it did not
    train."""
    server_steps: int = 0
    """How many models the server trained in this round: 1, or more if it trains a copy for each group. (The
    number counts models, not training steps.)"""
    refused: dict[int, str] = field(default_factory=dict)
    """The users whose models the gate refused. Maps a user's position in the cohort to the reason."""
    cut: dict[int, float] = field(default_factory=dict)
    """The users whose updates were more than three times as long as allowed, and which the gate shortened but
    did not refuse. Maps a user's position in the cohort to this multiple (see `GateResult.times`)."""
    usual: Tensor | None = None
    """The usual norm of an update in this round (the median over users); None if the gate is off."""
    trust: Tensor | None = None
    """[n]: the trust in each of the cohort's n users after this round (see `gate.py`). None if the gate is
    off or the server has no labels."""
    against: dict[int, float] = field(default_factory=dict)
    """The users to which the gate gives little weight, because their updates work against the server's
    labels. Maps a user's position in the cohort to its weight, from 0 to 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics of the round, by name, which the method recorded with `Round.record`."""
    sent: Named = field(default_factory=dict)
    """The tensors that the server sent to the n users besides the models, by name, [n, ...] each. Empty
    unless gradient diversity is measured."""
    sent_bytes: int = 0
    """The number of bytes that the server sent to users in addition to the models."""
    reported_bytes: int = 0
    """The number of bytes that users sent to the server in addition to their models."""


def together(parts: list[TrainedUpdates], names: Sequence[str], like: Tensor, keep: bool) -> TrainedUpdates:
    """Joins the metrics and updates of all `parts` in which a cohort was trained. The whole updates are
    included only if `keep` is true; otherwise only their norms are. If there are no parts, the result has no
    users. Its metrics then have these `names`, and its tensors have the type and device of `like`."""
    if not parts:
        nobody = like.new_zeros(0)
        return TrainedUpdates(dict.fromkeys(names, nobody), nobody, like[:0] if keep else None)
    return TrainedUpdates(
        {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        torch.cat([part.norms for part in parts]),
        torch.cat([part.updates for part in parts if part.updates is not None]) if keep else None,
    )
