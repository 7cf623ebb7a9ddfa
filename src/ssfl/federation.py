"""One round of semi-supervised federated learning, as sections 2 and 3 of the paper write it.

A round is a pure function State -> State. It reads no file, prints nothing and knows no device; the
engine that trains is handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ssfl import averaging
from ssfl.cohort import Cohort
from ssfl.rows import placed
from ssfl.work import TOLD, Trained

Train = Callable[[Tensor, Tensor, slice], Trained]
"""(rows, momentum, which of the trainers) -> rows, momentum, numbers: T local steps of each."""
Combine = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(a group's rows, its users' numbers, their weights if they have some) -> one row."""
Gate = Callable[[Tensor, Tensor], list[str]]
"""(what was sent, what came back) -> why each is refused, "" where it is not."""
Guard = Callable[[Tensor], float]
"""(a row) -> how much better than chance it tells the server's labelled images apart."""


class Crowd(Protocol):
    """Processes that share the users of a round."""

    def share(self, count: int) -> slice:
        """The places of a cohort that this process trains."""

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """The sum of everybody's streams, and each of the rows of all users, in their order."""


@dataclass(frozen=True)
class State:
    """Everything that passes from one round to the next."""

    round: int
    """t, how many rounds are done."""
    streams: Tensor
    """[S, P + Q]: w_avg,i, the model that members of group i start from; one row without groups."""
    average: Tensor
    """[P + Q]: w_avg, the model that the server starts from, and that is evaluated."""
    momentum: Tensor
    """[slots + 1, P]: momentum kept between rounds, the server's row last; empty when it is not.
    FedMatch has none and keeps what each user sent last, zeros of one never seen."""
    strikes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[K]: how often each user's model was refused; empty without a gate."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What some methods keep besides: "velocity" [S, P] of the server's momentum, "slow" [P + Q] and "stored"
    [P + Q], averages over rounds, "shares" [classes], how often each class was a pseudo-label, and "best",
    the guard's."""


@dataclass(frozen=True)
class Moved:
    """What training did, a number for each trainer."""

    stats: dict[str, Tensor]
    """[n] each: loss, mask rate, ..."""
    norms: Tensor
    """[n]: the lengths of the updates."""
    updates: Tensor | None
    """[n, P + Q]: what they did to the rows, where that was asked for."""


@dataclass(frozen=True)
class Outcome:
    """What a round tells besides its new state."""

    users: Moved | None
    """None where nobody came back."""
    server_sent: Tensor | None
    """[P + Q]: what the server started from, where it trained."""
    server: Moved | None
    refused: dict[int, str] = field(default_factory=dict)
    """Why models were refused, by their users' places in the cohort."""
    alone: bool = False
    """Whether the guard played the round without the users."""
    counted: bool = True
    """Whether any user's model did."""


def play_round(
    state: State,
    cohort: Cohort,
    *,
    train_users: Train,
    train_server: Train,
    server: str,
    server_weight: float | None = None,
    replicas: int = 1,
    slots: Sequence[int] = (),
    statistics_from_server: bool = False,
    at_once: int | None = None,
    keep_updates: bool = False,
    crowd: Crowd | None = None,
    gate: Gate | None = None,
    combine: Combine | None = None,
    server_momentum: float = 0.0,
    guard: Guard | None = None,
) -> tuple[State, Outcome]:
    """Send, train, average.

    `server` is "parallel" (the paper: the server trains while the users do and joins the average),
    "alternate" (users, average, then the server trains the average) or "none" (it holds no data).
    Of a parallel server, `replicas` copies train, one for each group, or one for all.
    `slots` are the rows of kept momentum that belong to the cohort's users. With
    `statistics_from_server` every model takes the server's own normalisation statistics instead of
    the average's. Users train `at_once` together, all by default, and are added to the average as
    they come, so that no more models are held at a time. A `crowd` of processes shares them. With a `gate`
    that may refuse some, or where groups `combine` their users otherwise than by their mean, all are held;
    who weighs nothing counts as if it had not come back.
    With `server_momentum` the users' average is a direction in which the streams go on as well as a place.
    With a `guard`, a server that trains last does so without the users where it would otherwise end less than
    half as far above chance, on its own labels, as it ever was.
    """
    momentum = state.momentum.clone()
    weights = momentum.shape[1]
    trained = partial(_trained, momentum, keep_updates)
    streams, average = state.streams, state.average
    users = own = server_sent = None
    refused: dict[int, str] = {}
    alone = False
    count, together = len(cohort.users), gate is not None or combine is not None
    matrix = averaging.mixing(cohort.groups, server == "parallel", server_weight) if count else None
    if matrix is not None:
        matrix = placed(matrix.to(streams.dtype), streams.device)
        streams = torch.zeros_like(streams)
        moved, held = [], []
        share = slice(0, count) if crowd is None else crowd.share(count)
        for start in range(share.start, share.stop, at_once or count):
            part = slice(start, min(start + (at_once or count), share.stop))
            # "The server sends the averaged model weights": user k of group i receives w_avg,i.
            sent = state.streams[placed(cohort.streams[part], streams.device)]
            # "Each user locally updates its own model weights to w_k."
            rows, told = trained(train_users, sent, slots[part], part)
            # Equations (7) and (8): each group averages its users (with the server, below).
            if together:
                held.append((sent, rows))
            else:
                streams = streams.addmm(matrix[:, 1 + part.start : 1 + part.stop], rows)
            moved.append(told)
        users = _together(moved, streams, keep_updates)
        if crowd is not None:
            kept = placed(slots, streams.device) if len(momentum) else None
            streams, users = _exchanged(crowd, state, streams, users, count, momentum, kept)
        if together:
            sent, rows = (torch.cat(parts) for parts in zip(*held, strict=True))
            reasons = gate(sent, rows) if gate is not None else [""] * count
            refused = {place: reason for place, reason in enumerate(reasons) if reason}
            weighed = users.stats.get("weight")
            heavy = [True] * count if weighed is None else (weighed > 0).tolist()
            passed = [place for place in range(count) if heavy[place] and place not in refused]
            if len(passed) < count and len(momentum):
                out = [slots[place] % len(momentum) for place in range(count) if place not in passed]
                back = placed(out, momentum.device)
                momentum[back] = state.momentum[back]
            matrix, streams = None, state.streams
            if passed:
                groups = _passed(cohort, passed)
                matrix = averaging.mixing(groups, server == "parallel", server_weight).to(rows)
                who = placed(cohort.users, rows.device)[passed]
                weighed = None if weighed is None else weighed[passed]
                centres = [_combined(combine, rows[passed], who, weighed, group) for group in groups]
                streams = (1 - matrix[:, :1]) * torch.stack(centres)
        average = streams.mean(0)

    memory = state.memory
    if server_momentum and matrix is not None:
        velocity = streams[:, :weights] - state.streams[:, :weights]
        velocity = server_momentum * memory["velocity"] + velocity
        streams = torch.cat([state.streams[:, :weights] + velocity, streams[:, weights:]], 1)
        average = streams.mean(0)
        memory = memory | {"velocity": velocity}

    if server == "parallel":
        # "At the same time, the server also updates its own weights from w_avg to w_s."
        server_sent = state.average
        own_slots = range(-replicas, 0)
        rows, own = trained(train_server, server_sent.repeat(replicas, 1), own_slots, slice(0, replicas))
        streams = rows.expand_as(streams).clone() if matrix is None else streams + matrix[:, :1] * rows
        average = streams.mean(0)
    elif server == "alternate":
        # The server trains the users' average: its few labels have the last word.
        server_sent = average
        rows, own = trained(train_server, server_sent[None], [-1], slice(0, 1))
        if guard is not None:
            good, best = guard(rows[0]), memory["best"]
            alone = matrix is not None and 2 * good < float(best)
            if alone:
                server_sent = state.average
                momentum.copy_(state.momentum)
                rows, own = trained(train_server, server_sent[None], [-1], slice(0, 1))
                if server_momentum:
                    memory = memory | {"velocity": torch.zeros_like(memory["velocity"])}
            memory = memory | {"best": best.clamp(min=good)}
        average = rows[0]
        streams = average.repeat(len(streams), 1)

    if statistics_from_server and own is not None:
        streams, average = streams.clone(), average.clone()
        streams[:, weights:] = average[weights:] = rows[0, weights:]
    strikes = state.strikes
    if refused:
        strikes = strikes.clone()
        strikes[[cohort.users[place] for place in refused]] += 1
    new = State(state.round + 1, streams, average, momentum, strikes, memory)
    return new, Outcome(users, server_sent, own, refused, alone, matrix is not None)


def _passed(cohort: Cohort, passed: list[int]) -> list[list[int]]:
    """The groups without the models that were refused, as places among those that passed."""
    now = {place: number for number, place in enumerate(passed)}
    return [[now[place] for place in group if place in now] for group in cohort.groups]


def _combined(
    combine: Combine | None, rows: Tensor, users: Tensor, weights: Tensor | None, group: list[int]
) -> Tensor:
    """One row of a group's, or of everybody's where the group is empty."""
    some = group or list(range(len(rows)))
    weighed = None if weights is None else weights[some]
    if combine is None:
        return averaging.combined("mean", rows[some], weighed)
    return combine(rows[some], users[some], weighed)


def play_own_streams(
    state: State,
    cohort: Cohort,
    *,
    train_users: Train,
    rule: str,
    elasticity: float,
    slots: Sequence[int] = (),
    keep_updates: bool = False,
) -> tuple[State, Outcome]:
    """A round of EASGD or OverlapSGD: every user goes on from its own model; the server holds no data."""
    momentum, streams = state.momentum.clone(), state.streams.clone()
    if not cohort.users:
        return State(state.round + 1, streams, state.average, momentum), Outcome(None, None, None)
    who = placed(cohort.users, streams.device)
    everybody = slice(0, len(cohort.users))
    rows, moved = _trained(momentum, keep_updates, train_users, streams[who], slots, everybody)
    streams[who], average = averaging.drawn_together(rule, state.average, rows, elasticity)
    return State(state.round + 1, streams, average, momentum), Outcome(moved, None, None)


def _trained(
    momentum: Tensor, keep_updates: bool, train: Train, sent: Tensor, slots: Sequence[int], part: slice
) -> tuple[Tensor, Moved]:
    """What became of the rows that were sent; kept momentum is written back into its rows."""
    weights = momentum.shape[1]
    if len(momentum):
        kept = placed([slot % len(momentum) for slot in slots], momentum.device)
        result = train(sent, momentum[kept], part)
        momentum[kept] = result.momentum
    else:  # reset: everybody starts from rest
        result = train(sent, torch.zeros_like(sent[:, :weights]), part)
    updates = result.rows - sent
    norms = torch.linalg.vector_norm(updates[:, :weights], dim=1)
    return result.rows, Moved(result.stats, norms, updates if keep_updates else None)


def _together(parts: list[Moved], like: Tensor, keep_updates: bool) -> Moved:
    """Several parts as one; none at all is a cohort of nobody."""
    if not parts:
        nobody = like.new_zeros(0)
        return Moved(dict.fromkeys(TOLD, nobody), nobody, like[:0] if keep_updates else None)
    return Moved(
        {name: torch.cat([part.stats[name] for part in parts]) for name in parts[0].stats},
        torch.cat([part.norms for part in parts]),
        torch.cat([p.updates for p in parts if p.updates is not None]) if keep_updates else None,
    )


def _exchanged(
    crowd: Crowd,
    state: State,
    streams: Tensor,
    own: Moved,
    count: int,
    momentum: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Moved]:
    """The streams and what is told of all users, from those of this process; momentum is written back."""
    numbers = torch.stack([*own.stats.values(), own.norms], dim=1).to(streams.dtype)
    each = [numbers]
    if kept is not None:
        each.append(momentum[kept[crowd.share(count)]])
    if own.updates is not None:
        each.append(own.updates)
    streams, numbers, *rest = crowd.exchange(state.average, streams, each, count)
    if kept is not None:
        momentum[kept] = rest.pop(0)
    *stats, norms = numbers.unbind(1)
    told = dict(zip(own.stats, stats, strict=True))
    return streams, Moved(told, norms, rest[0] if rest else None)
