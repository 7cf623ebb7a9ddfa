"""The gate that every model passes before it is averaged: refused is what is broken or far from the rest."""

import torch
from torch import Tensor

LENGTH = 3.0
"""An update is far outside when it is so many times as long as the others' median."""
SHARE = 0.3
"""An update shorter than so much of the model is never far outside: early on, one user is sure of something
and learns, while the others hardly move."""
STRIKES = 3
"""Who was refused so often is left out."""


def judge(sent: Tensor, rows: Tensor, strikes: Tensor) -> list[str]:
    """Why each model is refused, "" where it is not; `strikes` counts how often each was before.

    How a single model does on the server's labels is no reason: in the middle of training honest users
    with few classes return models that are no better than chance, and their average is good.
    """
    reasons = ["left out after three refusals" if count >= STRIKES else "" for count in strikes.tolist()]
    finite = torch.isfinite(rows).all(1)
    lengths = torch.linalg.vector_norm(torch.where(finite[:, None], rows - sent, 0.0), dim=1)
    judged = [i for i, reason in enumerate(reasons) if not reason and finite[i]]
    usual = lengths[judged].median() if judged else lengths.new_zeros(())
    least = SHARE * torch.linalg.vector_norm(sent, dim=1)
    for i, reason in enumerate(reasons):
        if not reason and not finite[i]:
            reasons[i] = "not finite"
        elif not reason and max(LENGTH * usual, least[i]) < lengths[i]:
            reasons[i] = f"its update is {float(lengths[i] / usual):.1f} times as long as the others'"
    return reasons
