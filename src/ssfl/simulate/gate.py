"""The gate that every model passes before it is averaged: what is broken is refused, what is long is cut."""

from dataclasses import dataclass

import torch
from torch import Tensor

REACH = 1.0
"""An update is cut to so many times the usual length. Honest lengths differ little, also with skew."""
GROWTH = 2.0
"""The usual length is at most so many times that of any of the last rounds."""
ROUNDS = 10
"""How many rounds are the last ones."""
LENGTH = 3.0
"""An update is far outside when it is so many times as long as is usual."""
SHARE = 0.3
"""An update shorter than so much of the model is cut and not refused: early on, one user is sure of something
and learns, while the others hardly move."""
STRIKES = 3
"""Who was refused so often is left out."""


@dataclass(frozen=True)
class Verdict:
    """What the gate makes of a round's models."""

    reasons: list[str]
    """Why each model is refused, "" where it is not."""
    rows: Tensor
    """The models, their updates cut to the length that is allowed."""
    usual: Tensor
    """The usual length of an update in this round, a number."""
    times: list[float]
    """How many times as long as is usual each update was."""


def judge(sent: Tensor, rows: Tensor, strikes: Tensor, before: Tensor | None = None) -> Verdict:
    """The verdict about models [n, P + Q]; `strikes` counts how often each was refused before, and `before`
    has the lengths of earlier rounds, users' and the server's, 0 where nothing is known.

    One update among few must not outweigh the others, whatever its direction: its length is limited by the
    others' median, and by earlier rounds, since in one round most may be bad by chance. How a single model
    does on the server's labels is no reason: in the middle of training honest users with few classes return
    models that are no better than chance, and their average is good.
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
    return Verdict(reasons, rows, usual, times)


def _usual(lengths: Tensor, before: Tensor | None) -> Tensor:
    """The median of lengths, as far as earlier rounds allow."""
    usual = lengths.median() if len(lengths) else lengths.new_zeros(())
    if before is not None and bool((before > 0).any()):
        usual = torch.minimum(usual, GROWTH * before.max().to(usual))
    return usual


def remembered(before: Tensor, usual: Tensor, server: Tensor | float) -> Tensor:
    """The lengths of the last rounds with those of one more."""
    longest = torch.maximum(usual.to(before), torch.as_tensor(server).to(before))
    return torch.cat([before[1:], longest.reshape(1)])
