"""A user's round, wherever it trains: label, train, scale the update. Simulator and real sites share it."""

from typing import NamedTuple

import torch
from torch import Tensor

from ssfl.engines.contract import Engine
from ssfl.engines.work import Work
from ssfl.errors import MethodError
from ssfl.federation import NEEDS, Labels, Look, Method, Named


class Returned(NamedTuple):
    """What n users give back."""

    rows: Tensor
    momentum: Tensor
    metrics: Named
    """[n] each."""
    weight: Tensor | None = None
    """[n]: each user's weight in the average, if they differ."""
    report: Named = {}  # noqa: RUF012 (never changed)
    """[n, ...] each: what `label` reported."""


def train(
    engine: Engine, method: Method, weights: int, rows: Tensor, momentum: Tensor, work: Work
) -> Returned:
    """One round of n users that received these rows, of which the first `weights` numbers are trained."""
    labels = None
    if method.label is not None:
        labels = made_labels(engine, method, rows, work)
        work = work.with_labels(labels)
    trained = engine.train(rows, momentum, work)
    if labels is None:
        return Returned(trained.rows, trained.momentum, trained.metrics)
    moved = scaled(rows, trained.rows, weights, labels.reach)
    return Returned(moved, trained.momentum, trained.metrics | labels.metrics, labels.weight, labels.report)


def made_labels(engine: Engine, method: Method, rows: Tensor, work: Work) -> Labels:
    """What the method decides from the received models' predictions."""
    answers = engine.answers(rows, work)
    if work.taken is not None:  # of images that belong to no step nothing is known, on every engine
        missing = work.steps * work.batches.shape[2] - answers.shape[1]
        answers = torch.nn.functional.pad(answers, (0, 0, 0, missing))
    look = Look(answers, work.batches, work.keys[2], work.sent, work.labelled is not None, work.taken)
    if work.taken is not None:
        look = look._replace(answers=torch.where(look.drawn[:, :, None], answers, 0.0))
    labels: Labels = method.label(look)
    if (labels.weight is not None or labels.report) and "reports" not in method.needs():
        raise MethodError(f"label() returns {NEEDS['reports']}: add 'reports' to what needs() returns")
    return labels


def scaled(sent: Tensor, rows: Tensor, weights: int, reach: Tensor | None) -> Tensor:
    """Rows whose weights moved `reach` times as far, [n]; running statistics stay as they are."""
    if reach is None:
        return rows
    moved = sent[:, :weights] + reach[:, None] * (rows[:, :weights] - sent[:, :weights])
    return torch.cat([moved, rows[:, weights:]], 1)
