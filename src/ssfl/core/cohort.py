"""Draws the cohort of a round: the users that take part, and the group that each of them joins."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.core import draws


@dataclass(frozen=True)
class Cohort:
    """The users that take part in one round, those of them that drop out, and their groups."""

    drawn: tuple[int, ...]
    """The numbers of the users that are sent a model in this round. The paper calls this set C_t."""
    users: tuple[int, ...]
    """The numbers of the users that return a model, in the order of `drawn`. The other users in `drawn` have
    dropped out."""
    groups: tuple[tuple[int, ...], ...]
    """For each of the S groups (G_1 to G_S in the paper), the positions of its members in `users`."""
    streams: tuple[int, ...]
    """For each of `users`, the number of the model that it starts from. Usually this is the number of its
    group. If each user continues its own model (`own_streams` in `draw_cohort`), it is the number of the
    user."""
    slots: tuple[int, ...] = ()
    """For each of `users`, its position (0 to C - 1) in a random order of the round's C participants. With
    `train.momentum_policy` = "slot", optimizer momentum is kept between rounds for each position, whichever
    user has it."""


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
    """Returns the cohort of a round. It draws `participants` of the `users` at random, divides them at random
    into `groups` groups, and lets each one drop out with probability `dropout`.

    Equal arguments give the same cohort, so every process can draw it for itself. Before users drop out, the
    sizes of the groups differ by at most one. With `filled`, groups are filled one after another instead, so
    that the last group may be smaller. With `own_streams`, there are no shared groups: each user is a group
    and starts from its own model. `groups` must then be equal to `users`.
    """

    def hashes(purpose: str, members: Tensor) -> Tensor:
        return draws.fold(torch.tensor(draws.key(seed, purpose, round)), members)

    everybody = torch.arange(users)
    # the participants are the users with the C smallest hashes; topk is faster than sorting all K hashes
    least = hashes("participants", everybody).topk(participants, largest=False, sorted=False).indices
    drawn = least.sort().values
    returned = drawn[draws.uniform(hashes("return", drawn)) >= dropout]
    shuffled = hashes("groups", drawn).argsort(stable=True)
    slot_of = {int(drawn[place]): slot for slot, place in enumerate(shuffled.tolist())}
    slots = tuple(slot_of[user] for user in returned.tolist())
    if own_streams:
        streams = tuple(returned.tolist())
    elif filled:
        streams = tuple(slot // -(-participants // groups) for slot in slots)
    else:
        streams = tuple(slot % groups for slot in slots)
    return Cohort(tuple(drawn.tolist()), tuple(returned.tolist()), _members(streams, groups), streams, slots)


def _members(streams: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(place for place, stream in enumerate(streams) if stream == group) for group in range(groups)
    )


def only(cohort: Cohort, sent: Collection[int], returned: Collection[int]) -> Cohort:
    """Returns the cohort of the users that really took part, for a real federation in which some users
    failed. Its `drawn` are the users that were `sent` a model, and its `users` are those that `returned`
    one."""
    places = [place for place, user in enumerate(cohort.users) if user in returned]
    users, streams, slots = (
        tuple(values[place] for place in places) for values in (cohort.users, cohort.streams, cohort.slots)
    )
    drawn = tuple(user for user in cohort.drawn if user in sent)
    return Cohort(drawn, users, _members(streams, len(cohort.groups)), streams, slots)
