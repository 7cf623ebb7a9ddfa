"""How models are averaged: every linear rule is a small mixing matrix times the rows.

The model of group i becomes  s_i · w_s + (1 - s_i) · mean of w_k over its users G_i,  where w_s is the
server's model, w_k that of user k, and s_i the server's share. FedAvg is one group of all C users with s =
1/(C+1); grouping is S groups with s_i = 1/(|G_i|+1); a server-weighted average is one group with any s.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def mixing(groups: Sequence[Sequence[int]], server: bool, server_weight: float | None = None) -> Tensor:
    """Returns the matrix [S, 1 + C] that maps the rows (server, users) to the groups' models.

    Each row sums to one. `groups` lists the users' positions, 0 to C - 1, each in one group. Without a server
    its column is zero. A group without users gets the server's model, or without a server the mean of all
    users.
    """
    everybody = sorted(user for group in groups for user in group)
    if everybody != list(range(len(everybody))):
        raise ValueError(f"groups must contain every user from 0 to C - 1 once, not {everybody}")
    if not everybody and not server:
        raise ValueError("there is nothing to average: no users and no server")
    matrix = torch.zeros(len(groups), 1 + len(everybody), dtype=torch.float64)
    for stream, group in enumerate(groups):
        share = 1 / (len(group) + 1) if server_weight is None else server_weight
        if not server:
            share = 0.0
        elif not group:
            share = 1.0
        members = group or everybody
        matrix[stream, 0] = share
        for user in members:
            matrix[stream, 1 + user] = (1 - share) / len(members)
    return matrix


def combined(rule: str, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the average of rows by a rule: their "mean", weighted by `weights` [n] if given, or coordinate
    by coordinate their "median" or "trimmed" mean. The trimmed mean leaves out the smallest and the largest
    fifth (at least one each). Two rows or fewer are averaged by their mean."""
    count = len(rows)
    if weights is not None and rule == "mean":
        return (weights / weights.sum()) @ rows
    if rule == "mean" or count <= 2:
        return rows.mean(0)
    cut = max(1, round(count / 5)) if rule == "trimmed" else (count - 1) // 2
    return rows.sort(0).values[cut : count - cut].mean(0)


def better_of_median(aggregate: Tensor, rows: Tensor, loss: Callable[[Tensor], float]) -> Tensor:
    """Returns the aggregate of the rows, or their median if that has a smaller loss.

    For `federation.median_fallback`.
    """
    return min((aggregate, combined("median", rows)), key=loss)


def average(server: Tensor | None, users: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the groups' models [S, P] and their mean [P]: equation (7) with this mixing matrix."""
    rows = users if server is None else torch.cat([server[None], users])
    weights = matrix.to(rows)
    streams = (weights[:, 1:] if server is None else weights) @ rows
    return streams, streams.mean(0)


def fedavg(server: Any, users: Any) -> Tensor:
    """Returns equation (8), (w_s + sum of w_k) / (C + 1); without a server (None) the mean of the users."""
    return grouping(server, users, [range(len(users))])[1]


def weighted(server: Any, users: Any, server_weight: float) -> Tensor:
    """Returns the average of server and users in which the server has the share `server_weight`."""
    rows = as_rows(users)
    everybody = [list(range(len(rows)))]
    return average(as_rows(server), rows, mixing(everybody, True, server_weight))[1]


def grouping(server: Any, users: Any, groups: Iterable[Iterable[int]]) -> tuple[Tensor, Tensor]:
    """Returns equation (7): the average of each group's users with the server, and w_avg, the groups' mean.

    Rows may be tensors, arrays or lists; `groups` lists each group's positions among the users.
    """
    members = [[int(user) for user in group] for group in groups]
    rows = as_rows(users)
    if sum(map(len, members)) != len(rows):
        raise ValueError(f"groups contain {sum(map(len, members))} users, but there are {len(rows)} rows")
    server_row = None if server is None else as_rows(server).to(rows)
    return average(server_row, rows, mixing(members, server_row is not None))


def as_rows(rows: Any) -> Tensor:
    """Returns a floating-point tensor from a tensor, an array, or a list of numbers or rows."""
    if isinstance(rows, list | tuple) and rows and isinstance(rows[0], Tensor):
        rows = torch.stack(list(rows))
    tensor = torch.as_tensor(rows)
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
