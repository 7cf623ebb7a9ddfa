"""How rows are averaged: every linear rule is one small mixing matrix times the rows.

A stream i becomes  s_i · w_s + (1 - s_i) · mean of w_k over its group G_i.  FedAvg is one group of
everybody with s = 1/(C+1); grouping is S groups with s_i = 1/(|G_i|+1); a server-weighted average is
one group with s given.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def mixing(groups: Sequence[Sequence[int]], server: bool, server_weight: float | None = None) -> Tensor:
    """The matrix [S, 1 + C] that takes (server, users) to streams; each row sums to one.

    `groups` lists the users of each group by their place among the C rows. Without a server its
    column is zero. A group without users takes the server's model, or without a server everybody's
    mean.
    """
    everybody = [user for group in groups for user in group]
    matrix = torch.zeros(len(groups), 1 + len(everybody), dtype=torch.float64)
    for stream, group in enumerate(groups):
        share = 1 / (len(group) + 1) if server_weight is None else server_weight
        if not server:
            share = 0.0
        elif not group:
            share = 1.0
        members = list(group) or everybody
        matrix[stream, 0] = share
        for user in members:
            matrix[stream, 1 + user] = (1 - share) / len(members)
    return matrix


def average(server: Tensor | None, users: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Streams [S, P] and their mean [P]: equation (7) with the given mixing matrix."""
    rows = users if server is None else torch.cat([server[None], users])
    weights = matrix.to(rows)
    streams = (weights[:, 1:] if server is None else weights) @ rows
    return streams, streams.mean(0)


def fedavg(server: Tensor | None, users: Tensor) -> Tensor:
    """Equation (8): (w_s + sum of w_k) / (C + 1); without a server the mean of the users."""
    everybody = [list(range(len(users)))]
    return average(server, users, mixing(everybody, server is not None))[1]


def weighted(server: Tensor, users: Tensor, server_weight: float) -> Tensor:
    """One average in which the server's share is a given number."""
    everybody = [list(range(len(users)))]
    return average(server, users, mixing(everybody, True, server_weight))[1]


def grouping(server: Tensor | None, users: Tensor, groups: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Equation (7): every group averages its users with the server; w_avg is the groups' mean."""
    return average(server, users, mixing(groups, server is not None))
