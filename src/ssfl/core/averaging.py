"""Averages of models. Every linear rule is a small matrix that multiplies the models, one model per row.

The new model of group i is s_i · w_s + (1 - s_i) · mean of w_k over its users G_i. Here w_s is the server's
model, w_k the model of user k, and s_i the weight of the server. FedAvg is one group of all C users with s =
1/(C+1). The grouping of the paper (Zhang et al. 2020) is S groups with s_i = 1/(|G_i|+1). A server-weighted
average is one group with any s.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def mixing(groups: Sequence[Sequence[int]], server: bool, server_weight: float | None = None) -> Tensor:
    """Returns the matrix [S, 1 + C] that turns the models of the server and of C users into S group models.

    Each row of the matrix sums to one. `groups` lists for each group the positions of its users, 0 to C - 1;
    every user is in one group. `server` says whether there is a server model; if not, the first column is
    zero. `server_weight` is the server's weight in each group; None means 1 / (number of the group's users +
    1). A group without users gets the server's model, or the mean of all users if there is no server.
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
    """Returns one average of n models, given as the rows of a matrix. The rule "mean" is their mean, weighted
    by `weights` [n] if given. "median" and "trimmed" take the median or a trimmed mean of each coordinate, so
    that a few extreme models have little influence.

    The trimmed mean leaves out the smallest and the largest fifth of the values, at least one each. With two
    models or fewer, every rule is the mean.
    """
    count = len(rows)
    if weights is not None and rule == "mean":
        return (weights / weights.sum()) @ rows
    if rule == "mean" or count <= 2:
        return rows.mean(0)
    cut = max(1, round(count / 5)) if rule == "trimmed" else (count - 1) // 2
    return rows.sort(0).values[cut : count - cut].mean(0)


def better_of_median(aggregate: Tensor, rows: Tensor, loss: Callable[[Tensor], float]) -> Tensor:
    """Returns the coordinate-wise median of the models (one per row) if its `loss` is smaller than that of
    `aggregate`, their average; otherwise returns `aggregate`.

    It is used if `federation.median_fallback` is set.
    """
    return min((aggregate, combined("median", rows)), key=loss)


def average(server: Tensor | None, users: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the groups' models [S, P] and the mean of these [P], as in the paper's equation (7).

    `server` is the server's model [P] or None, `users` are the users' models [C, P], and `matrix` comes from
    `mixing`.
    """
    rows = users if server is None else torch.cat([server[None], users])
    weights = matrix.to(rows)
    streams = (weights[:, 1:] if server is None else weights) @ rows
    return streams, streams.mean(0)


def fedavg(server: Any, users: Any) -> Tensor:
    """Returns (w_s + sum of w_k) / (C + 1), the average of the server's model w_s and the models w_k of C
    users. If `server` is None, it is the mean of the users. This is equation (8) of the paper (Zhang et al.
    2020)."""
    return grouping(server, users, [range(len(users))])[1]


def weighted(server: Any, users: Any, server_weight: float) -> Tensor:
    """Returns the average of server and users in which the server has the weight `server_weight`, from 0 to
    1. The users share the rest equally."""
    rows = as_rows(users)
    everybody = [list(range(len(rows)))]
    return average(as_rows(server), rows, mixing(everybody, True, server_weight))[1]


def grouping(server: Any, users: Any, groups: Iterable[Iterable[int]]) -> tuple[Tensor, Tensor]:
    """Returns the models of the groups, each the average of a group's users and the server, and the mean
    w_avg of these models. This is equation (7) of the paper (Zhang et al. 2020).

    Models may be tensors, arrays or lists. `groups` lists for each group the positions of its users.
    """
    members = [[int(user) for user in group] for group in groups]
    rows = as_rows(users)
    if sum(map(len, members)) != len(rows):
        raise ValueError(f"groups contain {sum(map(len, members))} users, but there are {len(rows)} rows")
    server_row = None if server is None else as_rows(server).to(rows)
    return average(server_row, rows, mixing(members, server_row is not None))


def as_rows(rows: Any) -> Tensor:
    """Converts a tensor, an array or a (nested) list of numbers to a floating-point tensor."""
    if isinstance(rows, list | tuple) and rows and isinstance(rows[0], Tensor):
        rows = torch.stack(list(rows))
    tensor = torch.as_tensor(rows)
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
