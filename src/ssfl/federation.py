"""One round of semi-supervised federated learning, as sections 2 and 3 of the paper write it.

A round is a pure function State -> State. It reads no file, prints nothing and knows no device; the
engine that trains is handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl import averaging, draws
from ssfl.work import Trained

Train = Callable[[Tensor, Tensor], Trained]
"""(rows, momentum) -> rows, momentum, numbers: T local steps of each row's owner."""


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
    """[slots + 1, P]: momentum kept between rounds, the server's row last; empty when it is not."""


@dataclass(frozen=True)
class Cohort:
    """Who takes part in a round."""

    drawn: tuple[int, ...]
    """C_t: the users that were sent a model."""
    users: tuple[int, ...]
    """Those of them that came back, in the order of `drawn`."""
    groups: tuple[tuple[int, ...], ...]
    """G_1 .. G_S: places in `users`."""
    streams: tuple[int, ...]
    """The group of each of `users`."""
    slots: tuple[int, ...] = ()
    """Where each of `users` was dealt, 0 to C - 1: the seat it takes for this round."""


@dataclass(frozen=True)
class Outcome:
    """What a round tells besides its new state."""

    sent: Tensor
    """[C, P + Q]: what the users started from."""
    users: Trained | None
    """What came back from them, or None where nobody did."""
    server_sent: Tensor | None
    """[P + Q]: what the server started from, where it trained."""
    server: Trained | None


def draw_cohort(
    round: int, *, seed: int, users: int, participants: int, groups: int, dropout: float
) -> Cohort:
    """C of K users at random, dealt at random into S groups; each fails to return by chance."""

    def hashes(purpose: str, members: Tensor) -> Tensor:
        return draws.fold(torch.tensor(draws.key(seed, purpose, round)), members)

    everybody = torch.arange(users)
    # the C least of K hashes, no two of which are equal: a selection, where sorting K would be slow
    least = hashes("participants", everybody).topk(participants, largest=False, sorted=False).indices
    drawn = least.sort().values
    back = drawn[draws.uniform(hashes("return", drawn)) >= dropout]
    dealt = hashes("groups", drawn).argsort(stable=True)
    seat = {int(drawn[place]): deal for deal, place in enumerate(dealt.tolist())}
    slots = tuple(seat[user] for user in back.tolist())
    streams = tuple(slot % groups for slot in slots)
    members = tuple(
        tuple(place for place, stream in enumerate(streams) if stream == group) for group in range(groups)
    )
    return Cohort(tuple(drawn.tolist()), tuple(back.tolist()), members, streams, slots)


def play_round(
    state: State,
    cohort: Cohort,
    *,
    train_users: Train,
    train_server: Train,
    server: str,
    server_weight: float | None = None,
    slots: Sequence[int] = (),
    statistics: slice | None = None,
) -> tuple[State, Outcome]:
    """Send, train, average.

    `server` is "parallel" (the paper: the server trains while the users do and joins the average),
    "alternate" (users, average, then the server trains the average) or "none" (it holds no data).
    `slots` are the rows of kept momentum that belong to the cohort's users. `statistics` are columns
    in which every model takes the server's own values instead of the average.
    """
    momentum = state.momentum.clone()

    def trained(train: Train, rows: Tensor, slots: Sequence[int]) -> Trained:
        if not len(momentum):  # reset: everybody starts from rest
            return train(rows, torch.zeros_like(rows[:, : momentum.shape[1]]))
        result = train(rows, momentum[list(slots)])
        momentum[list(slots)] = result.momentum
        return result

    # "The server sends the averaged model weights": user k of group i receives w_avg,i.
    sent = state.streams[list(cohort.streams)]
    # "Each user locally updates its own model weights to w_k."
    users = trained(train_users, sent, slots) if cohort.users else None
    own = server_sent = None

    if server == "parallel":
        # "At the same time, the server also updates its own weights from w_avg to w_s."
        server_sent = state.average
        own = trained(train_server, server_sent[None], [-1])
        # Equations (7) and (8): each group averages its users with the server, then the groups.
        matrix = averaging.mixing(cohort.groups, True, server_weight)
        w_k = sent if users is None else users.rows
        streams, average = averaging.average(own.rows[0], w_k, matrix)
    else:
        streams, average = state.streams, state.average
        if users is not None:
            matrix = averaging.mixing(cohort.groups, False)
            streams, average = averaging.average(None, users.rows, matrix)
        if server == "alternate":
            # The server trains the users' average: its few labels have the last word.
            server_sent = average
            own = trained(train_server, server_sent[None], [-1])
            average = own.rows[0]
            streams = average.repeat(len(streams), 1)

    if statistics is not None and own is not None:
        streams[:, statistics] = average[statistics] = own.rows[0, statistics]
    return State(state.round + 1, streams, average, momentum), Outcome(sent, users, server_sent, own)
