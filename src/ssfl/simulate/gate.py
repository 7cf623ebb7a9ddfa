"""federation.gate: refuses broken models before they are averaged, cuts updates that are too long, and lowers
the weight of users whose updates work against the server's labels, round after round.

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
"""How many of the last rounds are remembered."""
LENGTH = 3.0
"""An update is refused if it is longer than this multiple of the usual length."""
SHARE = 0.3
"""An update shorter than this share of the model's norm is cut, not refused: early on, a single user may be
sure of its labels and learn while the others hardly move."""
STRIKES = 3
"""A user that was refused this often is left out."""
DOUBT = 0.2
"""A user whose trust is this far below zero gets no weight. On digits, the trust of honest users stays above
-0.22, also with a Dirichlet split of 0.1. Users that reverse their updates fall to between -0.2 and -0.46."""
NAMED = 0.25
"""A user with less weight than this is named in the events."""
KEEPS = 0.8
"""The part of a user's trust that stays from round to round."""
VIEWS = 256
"""About the number of views of labelled images that the server's direction is computed from."""


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
    weights: Tensor
    """[n]: the weight of each model that is not refused, from 0 to 1."""


def judge(
    sent: Tensor,
    rows: Tensor,
    strikes: Tensor,
    before: Tensor | None = None,
    trust: Tensor | None = None,
) -> GateResult:
    """Returns which models [n, P + Q] are refused or cut, and their weights.

    `strikes` counts how often each user was refused. `before` holds the usual lengths of earlier rounds (the
    larger of the users' and the server's), 0 if unknown. `trust` [n] is from `trusted`.

    A single update must not outweigh the others, whatever its direction. So its length is limited by the
    median of the others, and by earlier rounds, since most users of one round may be bad by chance. This
    median includes users that are not trusted, so that nobody who gains trust by a trick escapes the cut. The
    accuracy of a single model on the server's labels is not used: in the middle of training, honest users
    with few classes return models no better than chance, although their average is good.
    """
    reasons = ["excluded after three refusals" if count >= STRIKES else "" for count in strikes.tolist()]
    finite = torch.isfinite(rows).all(1)
    updates = torch.where(finite[:, None], rows - sent, 0.0)
    lengths = torch.linalg.vector_norm(updates, dim=1)
    judged = [i for i, reason in enumerate(reasons) if not reason and finite[i]]
    usual = _usual(lengths[judged], before)
    least = SHARE * torch.linalg.vector_norm(sent, dim=1)
    far = (lengths > LENGTH * usual) & (lengths > least)
    for i, reason in enumerate(reasons):
        if not reason and not finite[i]:
            reasons[i] = "a model with values that are not finite"
        elif not reason and far[i]:
            reasons[i] = f"an update {float(lengths[i] / usual):.1f} times as long as the median"
    passed = [i for i in judged if not reasons[i]]
    usual = _usual(lengths[passed], before)
    times = (lengths / usual.clamp(min=torch.finfo(lengths.dtype).tiny)).tolist()
    long = [i for i in passed if times[i] > REACH]
    if long:
        rows = rows.clone()
        rows[long] = sent[long] + (REACH * usual / lengths[long])[:, None] * updates[long]
    weights = lengths.new_ones(len(rows))
    if trust is not None:
        weights[passed] = weighted(trust[passed]).to(weights)
    return GateResult(reasons, rows, usual, times, weights)


def trusted(trust: Tensor, updates: Tensor, direction: Tensor) -> Tensor:
    """Returns the users' trust [n] after one more round, from their updates [n, P]:

        trust = 0.8 · trust + 0.2 · cos(update, direction)

    The direction is the one in which the loss of strong views of the server's labelled images falls fastest.
    This follows FLTrust (Cao et al. 2021), which weights updates by their cosine with the server's own
    update, with two changes. The server memorises its few labelled images, so their plain gradient is
    uninformative; it has not memorised their strong views, on which users train too. And a single round's
    cosine is too noisy for skewed users, whose updates may oppose the direction once. So it is averaged over
    rounds, from 0.
    """
    cosines = torch.nn.functional.cosine_similarity(updates, direction[None], dim=1)
    return KEEPS * trust + (1 - KEEPS) * torch.where(cosines.isfinite(), cosines, 0.0)


def weighted(trust: Tensor) -> Tensor:
    """Returns the users' weights [n] in the average:

        weight = clamp(1 + (trust - min(0, median trust)) / 0.2, 0, 1)

    Users that oppose the server's direction count less, unless most users do: then the direction is
    uninformative for this method or these images.
    """
    if not len(trust):
        return trust
    usual = trust.quantile(0.5).clamp(max=0)
    return (1 + (trust - usual) / DOUBT).clamp(0, 1)


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
