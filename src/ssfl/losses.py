"""The loss of one local step, from the network's answers to its views; the same for every engine."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssfl import draws, objectives
from ssfl.objectives import Losses
from ssfl.rows import lengths
from ssfl.work import Batch, Given, Objective

Forward = Callable[[Tensor, bool, Tensor], Tensor]
"""(images [n, B, ...], whether in training mode, dropout keys [n]) -> logits [n, B, classes]."""
Logits = Callable[[Tensor, bool, int], Tensor]
"""(images, whether in training mode, which of the step's passes) -> logits."""


def local_loss(forward: Forward, batch: Batch, objective: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each trainer's step, [n], and what is told about it."""

    def logits(images: Tensor, training: bool, number: int) -> Tensor:
        return forward(images, training, draws.fold(batch.keys, number)).to(batch.weights.dtype)

    if batch.given is not None:
        found = _with_labels(logits, batch, batch.given, objective)
    else:
        found = _labelling(logits, batch, objective)
    loss = (found.loss * batch.weights).sum(1)
    if batch.own is not None and batch.own_labels is not None:
        labelled = objectives.supervised(logits(batch.own, True, 2), batch.own_labels.clamp(min=0))
        loss = loss + (labelled.loss * (batch.own_labels >= 0)).mean(1)
    mask = found.mask
    known = batch.labels >= 0
    right = (found.label == batch.labels).to(mask.dtype) * mask
    stats = {
        "loss": loss.detach(),
        "masked": mask.mean(1),
        "told": (mask * known).mean(1),
        "right": right.mean(1),
    }
    return loss, stats


def answered(forward: Forward, batch: Batch) -> Tensor:
    """The probabilities of every class for weak views, [n, B, classes], in evaluation mode."""
    logits = forward(batch.weak, False, batch.keys)
    return logits.to(batch.weights.dtype).softmax(-1)


def _labelling(logits: Logits, batch: Batch, objective: Objective) -> Losses:
    """Of a step that makes its own pseudo-labels, or has true ones."""
    views = batch.weak

    def teacher() -> Tensor:
        with torch.no_grad():
            return logits(views, objective.teacher_mode == "train", 0)

    joint = objective.views == "joint"
    if objective.name == "supervised":
        return objectives.supervised(logits(views, True, 1), batch.labels)
    if objective.name == "self-training":
        own = None if joint else teacher()
        student = logits(views, True, 1)
        return objectives.self_training(student if own is None else own, student, objective.threshold)
    if batch.strong is None:
        raise ValueError("the consistency loss needs strong views")
    if joint:
        weak, strong = logits(torch.cat([views, batch.strong], 1), True, 1).chunk(2, 1)
    else:
        # the teacher first: with batch normalisation its pass also moves the statistics
        weak = teacher()
        strong = logits(batch.strong, True, 1)
    return objectives.consistency(weak, strong, objective.threshold)


def _with_labels(logits: Logits, batch: Batch, given: Given, objective: Objective) -> Losses:
    """Of a step whose pseudo-labels were made before the round."""
    if batch.strong is None:
        raise ValueError("given labels are those of strong views")
    found = objectives.given(logits(batch.strong, True, 1), given.labels, given.mask)
    if batch.partner is None:
        return found
    assert given.partner_labels is not None
    assert given.shares is not None
    share = given.shares[:, None]
    wide = share.reshape(-1, *[1] * (batch.weak.dim() - 1))
    images = (wide * batch.weak + (1 - wide) * batch.partner).to(batch.weak.dtype)
    mixed = objectives.mixture(logits(images, True, 3), given.labels, given.partner_labels, share)
    return found._replace(loss=found.loss + objective.mix * mixed * given.mask)


def certain(batch: Batch) -> Batch:
    """The batch with the labels alone that are all but certain."""
    assert batch.given is not None
    assert batch.given.certain is not None
    return batch._replace(given=batch.given._replace(mask=batch.given.certain), partner=None)


def disagreement(here: Forward, moved: Forward, batch: Batch) -> Tensor:
    """(FL)²'s consistency of each trainer, [n]: KL( f(w) ‖ f(w + ε) ) of strong views, as in its authors'
    code, over the images with a certain label; it moves w + ε towards what w says."""
    assert batch.strong is not None
    assert batch.given is not None
    assert batch.given.certain is not None
    keys, wide = draws.fold(batch.keys, 1), batch.weights.dtype
    with torch.no_grad():
        said = here(batch.strong, True, keys).to(wide).log_softmax(-1)
    says = moved(batch.strong, True, keys).to(wide).log_softmax(-1)
    apart = (said.exp() * (said - says)).sum(-1)
    return (apart * batch.given.certain * batch.weights).sum(1)


LEAST = 0.01
"""ASAM's η: how far a weight of zero may go."""


def uphill(weights: dict[str, Tensor], slopes: Sequence[Tensor], distance: float) -> list[Tensor]:
    """ASAM's step of n models, tensors [n, ...]: so far uphill, larger weights further; biases all alike."""
    sizes = [w.abs() + LEAST if "weight" in name else torch.ones_like(w) for name, w in weights.items()]
    scaled = [size * slope for size, slope in zip(sizes, slopes, strict=True)]
    rate = distance / lengths(scaled).clamp(min=1e-12)
    return [
        (size * part * rate.reshape(-1, *[1] * (part.dim() - 1))).to(size.dtype)
        for size, part in zip(sizes, scaled, strict=True)
    ]
