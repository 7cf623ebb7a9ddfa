"""Who takes part in a round, and which group each joins."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.core import draws


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


def draw_cohort(
    round: int,
    *,
    seed: int,
    users: int,
    participants: int,
    groups: int,
    dropout: float,
    filled: bool = False,
    own_streams: bool = False,
) -> Cohort:
    """C of K users at random, dealt at random into S groups; each fails to return by chance.

    Groups are as even as possible, or `filled` one after another. With `own_streams` every user is a group.
    """

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
    if own_streams:
        streams = tuple(back.tolist())
    elif filled:
        streams = tuple(slot // -(-participants // groups) for slot in slots)
    else:
        streams = tuple(slot % groups for slot in slots)
    return Cohort(tuple(drawn.tolist()), tuple(back.tolist()), _members(streams, groups), streams, slots)


def _members(streams: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(place for place, stream in enumerate(streams) if stream == group) for group in range(groups)
    )


def only(cohort: Cohort, sent: Collection[int], back: Collection[int]) -> Cohort:
    """The cohort, of which a model was sent to some alone, and fewer came back."""
    places = [place for place, user in enumerate(cohort.users) if user in back]
    users, streams, slots = (
        tuple(values[place] for place in places) for values in (cohort.users, cohort.streams, cohort.slots)
    )
    drawn = tuple(user for user in cohort.drawn if user in sent)
    return Cohort(drawn, users, _members(streams, len(cohort.groups)), streams, slots)
