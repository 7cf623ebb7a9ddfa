"""Averages of models. Each averaging rule is a small matrix of weights, which is multiplied with the matrix
of models (one model per row).

The new model of group i is s_i · w_s + (1 - s_i) · mean of w_k over the users of the group, G_i. Here w_s is
the server's model, w_k is the model of user k, and s_i is the server's weight. FedAvg has one group of all C
users, with s = 1/(C+1). The grouping of the paper (Zhang et al. 2020) has S groups, with s_i = 1/(|G_i|+1). A
server-weighted average has one group and any s. In shapes such as [C, P], P is the length of a model stored
as one vector.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def mixing(groups: Sequence[Sequence[int]], server: bool, server_weight: float | None = None) -> Tensor:
    """Returns the averaging rule as a matrix [S, 1 + C]: the weights of the server and of C users in each of
    S group models. `average` multiplies this matrix with the models.

    Column 0 belongs to the server, and each row sums to one. `groups` lists for each group the positions of
    its users, from 0 to C - 1; every user is in exactly one group. If `server` is false, there is no server
    model, and column 0 is zero. `server_weight` is the server's weight in each group; None means 1 / (number
    of the group's users + 1). A group without users gets the server's model, or the mean of all users if
    there is no server.
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
    """Returns the average [P] of the n models in `rows` [n, P], computed by one of three rules. The rule
    "mean" is the mean, weighted by `weights` [n] if given.

    The rules "median" and "trimmed" are robust: a few extreme models have little influence on them. They take
    the median or the trimmed mean of each coordinate, and ignore `weights`. The trimmed mean leaves out the
    smallest and the largest fifth of the values, at least one value each. With one or two models, the robust
    rules give the unweighted mean.
    """
    count = len(rows)
    if weights is not None and rule == "mean":
        return (weights / weights.sum()) @ rows
    if rule == "mean" or count <= 2:
        return rows.mean(0)
    cut = max(1, round(count / 5)) if rule == "trimmed" else (count - 1) // 2
    return rows.sort(0).values[cut : count - cut].mean(0)


def better_of_median(aggregate: Tensor, rows: Tensor, loss: Callable[[Tensor], float]) -> Tensor:
    """Returns either `aggregate`, which is an average [P] of the models `rows` [n, P], or their
    coordinate-wise median: whichever has the smaller `loss`.

    This protects against a few harmful models, which change a mean more than a median. It is used if the
    setting `federation.median_fallback` is on.
    """
    return min((aggregate, combined("median", rows)), key=loss)


def average(server: Tensor | None, users: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the new models of S groups [S, P] and the mean of these models [P]. This is the averaging step
    of a round, the paper's equation (7).

    `server` is the server's model [P] or None, and `users` are the models of C users [C, P]. `matrix` [S, 1 +
    C] is the averaging rule, from `mixing`.
    """
    rows = users if server is None else torch.cat([server[None], users])
    weights = matrix.to(rows)
    streams = (weights[:, 1:] if server is None else weights) @ rows
    return streams, streams.mean(0)


def fedavg(server: Any, users: Any) -> Tensor:
    """Returns the FedAvg average [P] of a server's model w_s and the models w_k of C users: (w_s + sum of
    w_k) / (C + 1). If `server` is None, it is the mean of the users' models.

    This is equation (8) of the paper (Zhang et al. 2020). Models may be tensors, arrays or lists.
    """
    return grouping(server, users, [range(len(users))])[1]


def weighted(server: Any, users: Any, server_weight: float) -> Tensor:
    """Returns the average model [P] in which the server has the weight `server_weight` (from 0 to 1), and the
    users share the rest equally.

    `server` is one model [P], and `users` are C models [C, P]. Models may be tensors, arrays or lists.
    """
    rows = as_rows(users)
    everybody = [list(range(len(rows)))]
    return average(as_rows(server), rows, mixing(everybody, True, server_weight))[1]


def grouping(server: Any, users: Any, groups: Iterable[Iterable[int]]) -> tuple[Tensor, Tensor]:
    """Returns the models of S groups [S, P], and the mean of these models [P], called w_avg in the paper.
    Each group's model is the average of its users and the server with equal weights.

    This is equation (7) of the paper (Zhang et al. 2020). `groups` lists for each group the positions of its
    users. Models may be tensors, arrays or lists. If `server` is None, only users are averaged.
    """
    members = [[int(user) for user in group] for group in groups]
    rows = as_rows(users)
    if sum(map(len, members)) != len(rows):
        raise ValueError(f"groups contain {sum(map(len, members))} users, but there are {len(rows)} rows")
    server_row = None if server is None else as_rows(server).to(rows)
    return average(server_row, rows, mixing(members, server_row is not None))


def as_rows(rows: Any) -> Tensor:
    """Returns models as a floating-point tensor. They may be given as a tensor, an array or a (nested) list
    of numbers."""
    if isinstance(rows, list | tuple) and rows and isinstance(rows[0], Tensor):
        rows = torch.stack(list(rows))
    tensor = torch.as_tensor(rows)
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
