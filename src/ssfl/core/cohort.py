"""Draws the users that take part in a round, and the group that each of them joins."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.core import draws


@dataclass(frozen=True)
class Cohort:
    """The users that take part in a round, with their groups."""

    drawn: tuple[int, ...]
    """C_t: the users that were sent a model."""
    users: tuple[int, ...]
    """The users that did not drop out, in the order of `drawn`."""
    groups: tuple[tuple[int, ...], ...]
    """G_1 .. G_S: the members of each group, as positions in `users`."""
    streams: tuple[int, ...]
    """For each of `users`, the number of the group whose model it receives. If users keep models of their own
    (`own_streams` of `draw_cohort`), it is the number of the user."""
    slots: tuple[int, ...] = ()
    """For each of `users`, its place (0 to C - 1) in a random order of the round's C participants. Momentum
    can be kept for each place, whichever user has it in a round (`train.momentum_policy` = "slot")."""


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
    """Draws `participants` of the `users` at random, divides them at random into `groups` groups, and draws
    which of them drop out, each with probability `dropout`.

    The groups are as even as possible. With `filled` each group is filled before the next one gets users.
    With `own_streams` every user is a group of its own.
    """

    def hashes(purpose: str, members: Tensor) -> Tensor:
        return draws.fold(torch.tensor(draws.key(seed, purpose, round)), members)

    everybody = torch.arange(users)
    # the users with the C smallest hashes, which are all different; sorting all K would be slow
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
    """Returns the cohort of the users that really took part, if some failed. Its `drawn` are the users that
    were `sent` a model, and its `users` are those that `returned` one."""
    places = [place for place, user in enumerate(cohort.users) if user in returned]
    users, streams, slots = (
        tuple(values[place] for place in places) for values in (cohort.users, cohort.streams, cohort.slots)
    )
    drawn = tuple(user for user in cohort.drawn if user in sent)
    return Cohort(drawn, users, _members(streams, len(cohort.groups)), streams, slots)
