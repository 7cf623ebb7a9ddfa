"""What a user does in a round: it makes pseudo-labels, trains, and scales its update. Simulations and real
sites run the same code."""

from typing import NamedTuple

import torch
from torch import Tensor

from ssfl.engines.contract import Engine
from ssfl.engines.work import Work
from ssfl.errors import MethodError, in_words
from ssfl.federation import NEEDS, Labels, Look, Method, Named


class Returned(NamedTuple):
    """The results that n users return after a round."""

    rows: Tensor
    momentum: Tensor
    metrics: Named
    """The metrics of the n users by name, [n] each."""
    weight: Tensor | None = None
    """[n]: the weight of each of the n users in the average; None if all have the same weight."""
    report: Named = {}  # noqa: RUF012 (never changed)
    """Numbers that the method's function `label` reported for each of the n users, by name, [n, ...] each.
    The server's side of the method reads them."""


def train(
    engine: Engine, method: Method, weights: int, rows: Tensor, momentum: Tensor, work: Work
) -> Returned:
    """Returns the results of n users that train for one round, after making pseudo-labels if the method does
    so. They start from the models `rows` [n, P + Q] and the optimizer's `momentum` [n, P]. In each row, the
    first P = `weights` numbers are weights, and the other Q are running statistics. `work` has the users'
    images, learning rates and random keys."""
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
    """Returns the pseudo-labels that the method's function `label` makes from predictions. The predictions
    are those of the models `rows`, which the users received. Raises MethodError if the result of `label`
    cannot be used, or has a weight or a report that the method did not declare."""
    probabilities = engine.predict(rows, work)
    if work.taken is not None:  # images of steps that are not taken get zeros, on every engine
        missing = work.steps * work.batches.shape[2] - probabilities.shape[1]
        probabilities = torch.nn.functional.pad(probabilities, (0, 0, 0, missing))
    look = Look(probabilities, work.batches, work.keys[2], work.sent, work.labelled is not None, work.taken)
    if work.taken is not None:
        look = look._replace(probabilities=torch.where(look.drawn[:, :, None], probabilities, 0.0))
    labels = checked_labels(method.label(look), look)
    _require_numbers(labels)
    if (labels.weight is not None or labels.report) and "reports" not in method.needs():
        raise MethodError(
            f"label() returns {NEEDS['reports']}: add 'reports' to what needs() returns", key="reports"
        )
    return labels


def checked_labels(labels: Labels, look: Look) -> Labels:
    """Returns the result of a method's function `label`, after checking its types, shapes and images. Raises
    MethodError if it cannot be used."""
    if not isinstance(labels, Labels):
        raise MethodError(
            f"label() returned {in_words(labels)}: return ssfl.Labels(images, tensors)", key="Labels"
        )
    for name in ("tensors", "extra_images", "report", "metrics"):
        if not isinstance(getattr(labels, name), dict):
            raise MethodError(
                f"label() returned {in_words(getattr(labels, name))} as Labels.{name}: return a dict of "
                "tensors by name",
                key=name,
            )
    users, steps, size = look.images.shape
    each_image, each_step, each_user = (users, steps, size), (users, steps), (users,)
    images = {"images": labels.images}
    images |= {f"extra_images[{name!r}]": value for name, value in labels.extra_images.items()}
    wanted: list[tuple[str, object, tuple[int, ...], bool]] = []
    wanted += [(name, value, each_image, True) for name, value in images.items()]
    wanted += [(f"tensors[{name!r}]", value, each_step, False) for name, value in labels.tensors.items()]
    wanted += [(f"report[{name!r}]", value, each_user, False) for name, value in labels.report.items()]
    wanted += [(f"metrics[{name!r}]", value, each_user, True) for name, value in labels.metrics.items()]
    for name in ("weight", "lr_scale", "steps", "update_scale"):
        value = getattr(labels, name)
        wanted += [] if value is None else [(name, value, each_user, True)]
    for name, value, shape, whole in wanted:
        if not isinstance(value, Tensor) or (value.shape if whole else value.shape[: len(shape)]) != shape:
            more = "" if whole else ", ..."
            raise MethodError(
                f"label() returned {in_words(value)} as Labels.{name}: return a tensor of shape "
                f"[{', '.join(map(str, shape))}{more}]",
                key=name,
            )
    for name, value in images.items():
        # numbers that are those of `look` are not compared, so that the CPU need not wait for a GPU
        if not value.is_set_to(look.images) and not _are_among(value, look.images):
            raise MethodError(
                f"label() returned numbers as Labels.{name} that are not in look.images: choose them from "
                "the same user's numbers in look.images, without changing their values or type",
                key=name,
            )
    return labels


def _are_among(images: Tensor, known: Tensor) -> bool:
    """Returns whether each user's image numbers in `images` [n, T, B] are among its own in `known` [n, T,
    B]."""
    if images.dtype != known.dtype:
        return False
    images, known = images.flatten(1), known.flatten(1).sort(1).values
    place = torch.searchsorted(known, images.contiguous()).clamp(max=known.shape[1] - 1)
    return bool((known.gather(1, place) == images).all())


def _require_numbers(labels: Labels) -> None:
    """Raises MethodError if a user's weight, learning rate factor or number of steps is negative or not
    finite."""
    values = {name: getattr(labels, name) for name in ("weight", "lr_scale", "steps")}
    usable = {
        name: ((value >= 0) & value.isfinite()).all() for name, value in values.items() if value is not None
    }
    # all at once, because the CPU waits for a GPU here
    for name, is_usable in zip(
        usable, torch.stack([*usable.values()]).tolist() if usable else [], strict=True
    ):
        if not is_usable:
            raise MethodError(
                f"label() returned numbers as Labels.{name} that are negative or not finite: return numbers "
                "of at least 0",
                key=name,
            )


def scaled(sent: Tensor, rows: Tensor, weights: int, update_scale: Tensor | None) -> Tensor:
    """Returns the models [n, P + Q] of n users after their updates are scaled. `sent` are the models that the
    users received, and `rows` the models after training. The change of each user's P = `weights` weights is
    multiplied by the user's factor in `update_scale` [n]. The Q running statistics are not scaled. If
    `update_scale` is None, returns `rows`."""
    if update_scale is None:
        return rows
    moved = sent[:, :weights] + update_scale[:, None] * (rows[:, :weights] - sent[:, :weights])
    return torch.cat([moved, rows[:, weights:]], 1)
