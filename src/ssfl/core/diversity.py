"""Gradient diversity Δ measures how much the gradients (or updates) of users and server differ in direction.
It is Definition 1 of the paper (Zhang et al. 2020). `variants` also computes the variants in Appendix D of
the paper. The functions `gradient_diversity` and `authors_diversity` differ in their normalisation.

Low diversity means that all users and the server move in the same direction. They may agree, or the model may
have collapsed. The mask rate and the accuracy show which of the two it is.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ssfl.core.averaging import as_rows


def gradient_diversity(gradients: Any, order: int = 2, squared: bool = True) -> float:
    """Returns the gradient diversity Δ of n gradients g_k, the rows of `gradients` [n, P], for a model of P
    weights. It is (sum over k of ‖g_k‖^q) / ‖sum over k of g_k‖^q.

    The exponent q is 2 if `squared`, else 1. `order` is the order of the norm, 1 or 2. The defaults give
    Definition 1 of the paper. If the gradients sum to zero, the result is inf; if all of them are zero, it is
    nan.
    """
    rows = as_rows(gradients).double()
    norms = torch.linalg.vector_norm(rows, order, dim=1)
    total = torch.linalg.vector_norm(rows.sum(0), order)
    power = 2 if squared else 1
    return float((norms**power).sum() / total**power)


def authors_diversity(gradients: Any, order: int = 2, squared: bool = True) -> float:
    """Returns the gradient diversity as the scripts of the paper's authors compute it: the mean over k of
    (‖g_k‖ / ‖mean of all g_k‖)^q. It equals n^(q-1) · Δ. The arguments, n, q, g_k and Δ are those of
    `gradient_diversity`.

    With the default arguments, the result is 1 if all gradients are equal (Δ is then 1/n). It is n if they
    are orthogonal and equally long (Δ is then 1), so larger cohorts look more diverse. It is even larger if
    the gradients oppose each other.
    """
    count = len(gradients) if squared else 1
    return count * gradient_diversity(gradients, order, squared)


def variants(
    rows: dict[str, Tensor],
    server: dict[str, Tensor | None],
    groups: Sequence[Sequence[int]],
) -> dict[str, dict[str, float | None]]:
    """Returns a table of all sixteen variants of gradient diversity by name. Each variant has four values:
    the results of `gradient_diversity` and `authors_diversity`, each over all users and within groups.

    A variant is a choice of gradient or update, L1 or L2 norm, squared or not, and with or without the
    server. `rows` holds two tensors [C, P] for C users and P weights. The tensor "gradient" has the users'
    gradients over all their images, and "update" has the changes of their models. `server` holds the server's
    gradient and update under the same names, as vectors [P]. If one of them is None, its variants with the
    server are left out. `groups` lists for each group the positions of its users. The value within groups is
    the mean over groups, weighted by their numbers of users; the server is a member of every group. Undefined
    values are None.
    """
    table: dict[str, dict[str, float | None]] = {}
    for (kind, users), order, squared, with_server in product(
        rows.items(), (2, 1), (True, False), (False, True)
    ):
        server_row = server.get(kind) if with_server else None
        if with_server and server_row is None:
            continue
        head = users[:0] if server_row is None else server_row[None]
        everybody = torch.cat([head, users])
        within = [torch.cat([head, users[list(group)]]) for group in groups if group]
        shares = [len(group) / len(users) for group in groups if group]
        name = f"{kind}_l{order}{'_squared' if squared else ''}{'_server' if with_server else ''}"
        table[name] = {}
        for label, measure in (("definition", gradient_diversity), ("authors", authors_diversity)):
            values = [measure(members, order, squared) for members in within]
            mean = sum(share * value for share, value in zip(shares, values, strict=True))
            table[name][label] = _finite(measure(everybody, order, squared))
            table[name][f"{label}_groups"] = _finite(mean)
    return table


def _finite(value: float) -> float | None:
    """Returns the value, or None if it is nan or infinite, because JSON cannot store these."""
    return value if math.isfinite(value) else None
