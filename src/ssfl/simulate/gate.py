"""federation.gate: refuses broken models before they are averaged, and cuts updates that are too long.

The length of an update is its norm. Its usual length in a round is the median over the users.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

REACH = 1.0
"""An update is cut to this multiple of the usual length. Honest lengths differ little, also with skew."""
GROWTH = 2.0
"""The usual length is at most this multiple of the largest of the last rounds."""
ROUNDS = 10
"""The number of last rounds that are remembered."""
LENGTH = 3.0
"""An update is refused if it is longer than this multiple of the usual length."""
SHARE = 0.3
"""An update shorter than this share of the model's norm is cut, not refused: early on, a single user may be
sure of its labels and learn while the others hardly move."""
STRIKES = 3
"""A user that was refused this often is left out."""


@dataclass(frozen=True)
class GateResult:
    """What the gate decides about a round's models."""

    reasons: list[str]
    """Why each model is refused, "" if it is not."""
    rows: Tensor
    """The models, with long updates cut."""
    usual: Tensor
    """The usual length of an update in this round, a number."""
    times: list[float]
    """Each update's length as a multiple of the usual one, before the cut."""


def judge(sent: Tensor, rows: Tensor, strikes: Tensor, before: Tensor | None = None) -> GateResult:
    """Decides about models [n, P + Q]; `strikes` counts how often each user was refused, and `before` holds
    the usual lengths of earlier rounds (the larger of users' and server's), 0 where unknown.

    A single update must not outweigh the others, whatever its direction. So its length is limited by the
    median of the others, and by earlier rounds, since most users of one round may be bad by chance. The
    accuracy of a single model on the server's labels is not used: in the middle of training, honest users
    with few classes return models no better than chance, although their average is good.
    """
    reasons = ["left out after three refusals" if count >= STRIKES else "" for count in strikes.tolist()]
    finite = torch.isfinite(rows).all(1)
    updates = torch.where(finite[:, None], rows - sent, 0.0)
    lengths = torch.linalg.vector_norm(updates, dim=1)
    judged = [i for i, reason in enumerate(reasons) if not reason and finite[i]]
    usual = _usual(lengths[judged], before)
    least = SHARE * torch.linalg.vector_norm(sent, dim=1)
    far = (lengths > LENGTH * usual) & (lengths > least)
    for i, reason in enumerate(reasons):
        if not reason and not finite[i]:
            reasons[i] = "not finite"
        elif not reason and far[i]:
            reasons[i] = f"its update is {float(lengths[i] / usual):.1f} times as long as the others'"
    passed = [i for i in judged if not reasons[i]]
    usual = _usual(lengths[passed], before)
    times = (lengths / usual.clamp(min=torch.finfo(lengths.dtype).tiny)).tolist()
    long = [i for i in passed if times[i] > REACH]
    if long:
        rows = rows.clone()
        rows[long] = sent[long] + (REACH * usual / lengths[long])[:, None] * updates[long]
    return GateResult(reasons, rows, usual, times)


def _usual(lengths: Tensor, before: Tensor | None) -> Tensor:
    """Returns the median length, limited by earlier rounds."""
    usual = lengths.median() if len(lengths) else lengths.new_zeros(())
    if before is not None and bool((before > 0).any()):
        usual = torch.minimum(usual, GROWTH * before.max().to(usual))
    return usual


def remembered(before: Tensor, usual: Tensor, server: Tensor | float) -> Tensor:
    """Returns the usual lengths of the last rounds, with this round's in place of the oldest."""
    longest = torch.maximum(usual.to(before), torch.as_tensor(server).to(before))
    return torch.cat([before[1:], longest.reshape(1)])
