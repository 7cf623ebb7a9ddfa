"""A user's part of a round: make pseudo-labels, train, and scale the update. Simulations and real sites use
the same code."""

from typing import NamedTuple

import torch
from torch import Tensor

from ssfl.engines.contract import Engine
from ssfl.engines.work import Work
from ssfl.errors import MethodError
from ssfl.federation import NEEDS, Labels, Look, Method, Named


class Returned(NamedTuple):
    """The results of n users' training."""

    rows: Tensor
    momentum: Tensor
    metrics: Named
    """The metrics of the n users by name, [n] each."""
    weight: Tensor | None = None
    """[n]: the weight of each of the n users in the average; None if all have the same weight."""
    report: Named = {}  # noqa: RUF012 (never changed)
    """The numbers that the method's `label` reported for each of the n users, by name, [n, ...] each."""


def train(
    engine: Engine, method: Method, weights: int, rows: Tensor, momentum: Tensor, work: Work
) -> Returned:
    """Returns the results of one round of n users that received these models, one per row. In each row the
    first `weights` numbers are weights, and the rest are running statistics."""
    labels = None
    if method.label is not None:
        labels = made_labels(engine, method, rows, work)
        work = work.with_labels(labels)
    trained = engine.train(rows, momentum, work)
    if labels is None:
        return Returned(trained.rows, trained.momentum, trained.metrics)
    moved = scaled(rows, trained.rows, weights, labels.update_scale)
    return Returned(moved, trained.momentum, trained.metrics | labels.metrics, labels.weight, labels.report)


def made_labels(engine: Engine, method: Method, rows: Tensor, work: Work) -> Labels:
    """Returns the method's pseudo-labels, made from the predictions of the received models."""
    probabilities = engine.predict(rows, work)
    if work.taken is not None:  # zeros for images that belong to no step, the same on every engine
        missing = work.steps * work.batches.shape[2] - probabilities.shape[1]
        probabilities = torch.nn.functional.pad(probabilities, (0, 0, 0, missing))
    look = Look(probabilities, work.batches, work.keys[2], work.sent, work.labelled is not None, work.taken)
    if work.taken is not None:
        look = look._replace(probabilities=torch.where(look.drawn[:, :, None], probabilities, 0.0))
    labels: Labels = method.label(look)
    if (labels.weight is not None or labels.report) and "reports" not in method.needs():
        raise MethodError(
            f"label() returns {NEEDS['reports']}: add 'reports' to what needs() returns", key="reports"
        )
    return labels


def scaled(sent: Tensor, rows: Tensor, weights: int, update_scale: Tensor | None) -> Tensor:
    """Returns the users' models, where each user's change of the weights is multiplied by `update_scale` [n].
    Running statistics stay as they are."""
    if update_scale is None:
        return rows
    moved = sent[:, :weights] + update_scale[:, None] * (rows[:, :weights] - sent[:, :weights])
    return torch.cat([moved, rows[:, weights:]], 1)
