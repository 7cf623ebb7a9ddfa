"""The gate (federation.gate) checks the models that users return before they are averaged. It refuses broken
models, shortens updates that are too long, and gives less weight to users whose updates repeatedly work
against the server's labels.

The length of an update is its norm. The usual length in a round is the median over the users.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REACH = 1.0
"""The largest allowed length of an update, as a multiple of the usual length. Longer updates are shortened to
this limit. The usual length is the median norm of the users' updates. The limit can be low because honest
lengths differ little, even if users have different classes."""
PART = 1.0
"""The largest allowed length of one tensor's part of an update, such as that of the last layer. It is a
multiple of the median length of this part over the users. Otherwise an attacker could put its whole update
into one layer, where honest updates are short."""
FEWEST = 3
"""The limit for each tensor needs at least this many users. With two, the median would be the smaller length,
so one user could stop any layer of the other."""
MOST = 1e6
"""The largest number that is reported for how many times too long an update is."""
GROWTH = 2.0
"""Limits how fast the usual length (the median norm of the users' updates) may grow. In a new round, it is at
most this multiple of the largest usual length in the remembered rounds."""
LEAST = 0.1
"""If half of the users return the model unchanged, the median is 0, and the updates of the others would be
shortened to nothing. So if the two middle lengths differ, the usual length may lie between them. Then it is
at most this multiple of the largest usual length in the remembered rounds."""
ROUNDS = 10
"""The number of past rounds whose usual length (the median norm of the users' updates) is remembered."""
LENGTH = 3.0
"""An update is refused if two things are true. Its norm is above this multiple of the usual length (the
median over users), and above `SHARE` times the norm of the model."""
SHARE = 0.3
"""An update whose norm is below this share of the model's norm is never refused for its length, only
shortened. In early rounds, one honest user may already learn while the updates of the others are almost
zero."""
STRIKES = 3
"""A user whose models were refused this many times is excluded for the rest of the run."""
DOUBT = 0.2
"""A user gets no weight if its trust is this far below zero, or this far below the median trust if the median
is negative. Trust is the cosine between a user's updates and the direction in which the server's loss falls,
averaged over rounds.

On digits, the trust of honest users stays above -0.22, even with a Dirichlet split of 0.1. The trust of users
that reverse their updates falls to between -0.2 and -0.46.
"""
NAMED = 0.25
"""A round's event lists the users whose weight in the average is below this. Weights are from 0 to 1."""
KEEPS = 0.8
"""The share of a user's trust that is kept from one round to the next. The rest comes from the user's new
update."""
VIEWS = 256
"""About how many strong views of the server's labelled images are used to compute the direction in which its
loss falls."""


@dataclass(frozen=True)
class GateResult:
    """What the gate decided about the models that n users returned in a round."""

    reasons: list[str]
    """For each of the n models, why it is refused; "" if it is accepted."""
    rows: Tensor
    """[n, P + Q]: the models (P weights and Q running statistics each) after updates that were too long have
    been shortened."""
    usual: Tensor
    """The usual length of an update in this round: the median norm over the accepted users. It is limited to
    twice the largest usual length of the remembered rounds."""
    times: list[float]
    """For each of the n models, how many times as long as allowed its update is. This is the norm of the
    update, divided by the usual length or by its norm after shortening, whichever gives more."""
    weights: Tensor
    """[n]: the weight of each model in the average, from 0 to 1. Refused models have weight 1 here, but the
    caller leaves them out of the average."""


def judge(
    sent: Tensor,
    rows: Tensor,
    strikes: Tensor,
    before: Tensor | None = None,
    trust: Tensor | None = None,
    sizes: Sequence[int] = (),
) -> GateResult:
    """Decides which of the n models `rows` [n, P + Q] are refused, which updates are shortened, and each
    model's weight in the average. `sent` [n, P + Q] are the models that the n users received. A model is a
    row of P weights and Q running statistics.

    `strikes` [n] counts how often each user was refused before. `before` has the usual lengths of earlier
    rounds as `remembered` returns them, or 0 where unknown. If it is None, earlier rounds set no limit.
    `trust` [n] comes from `trusted`. If it is None, all models have weight 1. `sizes` are the sizes of the
    tensors in a row. If given, the part of an update in each tensor is also limited, see `PART`.

    A single update must not outweigh the others, whatever its direction. So its length is limited by the
    median length of the users' updates. The median itself is limited by earlier rounds, since most users of
    one round may be attackers by chance. The median includes users that are not trusted, so that a user that
    gains trust by a trick cannot escape the limit. The accuracy of a single model on the server's labels is
    not used. In the middle of training, honest users with few classes return models no better than chance,
    although their average is good.
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
    tiny = torch.finfo(lengths.dtype).tiny
    times = (lengths / usual.clamp(min=tiny)).clamp(max=MOST).tolist()
    long = [i for i in passed if times[i] > REACH]
    rows = rows.clone()
    rows[long] = sent[long] + (REACH * usual / lengths[long])[:, None] * updates[long]
    # if half of the users are idle, the median would be 0 in every tensor
    half_idle = bool(passed) and bool(lengths[passed].median() < usual)
    active = [i for i in passed if lengths[i] >= usual] if half_idle else passed
    if len(active) >= FEWEST and sizes:
        _even(rows, sent, active, sizes)
        kept = torch.linalg.vector_norm(rows[passed] - sent[passed], dim=1).clamp(min=tiny)
        for i, factor in zip(passed, (lengths[passed] / kept).clamp(max=MOST).tolist(), strict=True):
            times[i] = max(times[i], factor)
    weights = lengths.new_ones(len(rows))
    if trust is not None:
        weights[passed] = weighted(trust[passed]).to(weights)
    return GateResult(reasons, rows, usual, times, weights)


def _even(rows: Tensor, sent: Tensor, users: list[int], sizes: Sequence[int]) -> None:
    """Shortens the updates of these users, in place: the part in each tensor to at most `PART` times its
    median length over the users. `rows` and `sent` [n, P + Q] are the models after and before training, and
    `sizes` are the sizes of the tensors."""
    for after, before in zip(rows.split(list(sizes), 1), sent.split(list(sizes), 1), strict=True):
        part = after[users] - before[users]
        lengths = torch.linalg.vector_norm(part, dim=1)
        limit = PART * lengths.median()
        for place in (lengths > limit).nonzero().flatten().tolist():
            user = users[place]
            after[user] = before[user] + limit / lengths[place] * part[place]


def trusted(trust: Tensor, updates: Tensor, direction: Tensor) -> Tensor:
    """Returns the trust [n] in n users after one more round, from their previous `trust` [n] and their
    `updates` [n, P] of P weights:

        trust = 0.8 · trust + 0.2 · cos(update, direction)

    `direction` [P] is the one in which the loss on strong views of the server's labelled images falls
    fastest. The rule follows FLTrust (Cao et al. 2021), which weights updates by their cosine with the
    server's own update, with two changes. First, strong views replace plain images: the server memorises its
    few labelled images, so that their gradient becomes uninformative. Second, the cosine is averaged over
    rounds, starting from 0: in a single round, the update of an honest user with few classes may oppose the
    direction.
    """
    cosines = torch.nn.functional.cosine_similarity(updates, direction[None], dim=1)
    return KEEPS * trust + (1 - KEEPS) * torch.where(cosines.isfinite(), cosines, 0.0)


def weighted(trust: Tensor) -> Tensor:
    """Returns the weights [n] of n users in the average, from 0 to 1, given their trust [n] (see `trusted`):

        weight = clamp(1 + (trust - min(0, median trust)) / 0.2, 0, 1)

    Users whose updates oppose the direction in which the server's loss falls get less weight. If most users'
    updates oppose it, the direction is uninformative for this method or these images; so trust is compared
    with the median.
    """
    if not len(trust):
        return trust
    usual = trust.quantile(0.5).clamp(max=0)
    return (1 + (trust - usual) / DOUBT).clamp(0, 1)


def _usual(lengths: Tensor, before: Tensor | None) -> Tensor:
    """Returns the usual length of an update in a round: the median of the `lengths`, but at most twice the
    largest number in `before`. `before` has the usual lengths of earlier rounds. If it is None or all zero,
    there is no limit.

    If the number of users is even, the median is the smaller one of the two middle lengths, so that one user
    of two cannot raise it. It is raised to a tenth of the largest number in `before`, or to the larger middle
    length if that is less.
    """
    if not len(lengths):
        return lengths.new_zeros(())
    usual, larger = lengths.median(), -(-lengths).median()
    if before is not None and bool((before > 0).any()):
        longest = before.max().to(usual)
        usual = torch.maximum(usual, torch.minimum(larger, LEAST * longest))
        usual = torch.minimum(usual, GROWTH * longest)
    return usual


def remembered(before: Tensor, usual: Tensor, server: Tensor | float) -> Tensor:
    """Returns the usual lengths of the last rounds, for the gate to use in the next rounds. The oldest entry
    of `before` is dropped. The new entry is the larger of the users' usual length (`usual`) and the length of
    the server's update (`server`)."""
    longest = torch.maximum(usual.to(before), torch.as_tensor(server).to(before))
    return torch.cat([before[1:], longest.reshape(1)])
