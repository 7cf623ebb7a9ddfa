"""Evaluates networks: accuracy, loss and logits on images, and the gradient of the loss on labelled
images."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssfl.core.rows import Layout
from ssfl.engines.work import VALUES, Pool

BATCH = 1000
STEP = 64
"""The batch size when `descent` computes a gradient, which needs more memory than an evaluation."""


class ModelScore(NamedTuple):
    """A network's accuracy and loss on labelled images."""

    accuracy: float
    loss: float
    per_class: list[float | None]
    """The accuracy on each class; None for a class without images."""


def score(model: nn.Module, pool: Pool, images: Tensor, labels: Tensor, classes: int) -> ModelScore:
    """Returns the accuracy and the mean cross-entropy loss of a network on N uint8 images [N, C, H, W], which
    are on the pool's device. `labels` [N] are on the CPU."""
    return score_of_logits(logits(model, pool, images), labels, classes)


def score_of_logits(outputs: Tensor, labels: Tensor, classes: int) -> ModelScore:
    """Returns the accuracy and the mean cross-entropy loss of logits [N, classes] for N images with these
    labels [N]. Both tensors are on the CPU."""
    loss = nn.functional.cross_entropy(outputs, labels)
    correct = outputs.argmax(1) == labels
    hits = torch.bincount(labels[correct], minlength=classes).tolist()
    totals = torch.bincount(labels, minlength=classes).tolist()
    per_class = [hit / total if total else None for hit, total in zip(hits, totals, strict=True)]
    return ModelScore(float(correct.double().mean()), float(loss), per_class)


def logits(model: nn.Module, pool: Pool, images: Tensor) -> Tensor:
    """Returns the network's logits [N, classes], on the CPU, for N uint8 images on the pool's device. The
    logits are averaged over each image and its test views (data.test_views)."""
    model.eval()
    with torch.no_grad(), tensor_cores(pool.dtype != pool.wide):
        batch = BATCH
        if pool.features is None and pool.images.device.type == "cpu":
            batch = at_once(images.shape[1:])
        parts = [averaged(model, pool.test_inputs(part, pool.wide)) for part in images.split(batch)]
        return torch.cat(parts).cpu()


def averaged(model: Callable[[Tensor], Tensor], inputs: Iterator[Tensor]) -> Tensor:
    """Returns the mean of the network's logits [N, classes] over several versions of the same N images, such
    as their test views. `inputs` yields one batch [N, C, H, W] for each version."""
    total, count = model(next(inputs)), 1
    for one in inputs:
        total, count = total + model(one), count + 1
    return total / count if count > 1 else total


def at_once(shape: Sequence[int]) -> int:
    """Returns how many images of this shape [C, H, W] are evaluated at once: 1000, or fewer if the images are
    large, to limit memory."""
    return max(1, min(BATCH, VALUES // math.prod(shape)))


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Allows TF32 arithmetic on GPUs inside the `with` block, if `allowed`. TF32 keeps ten bits of each
    number. Callers allow it if training keeps only eight (bfloat16) anyway."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    if allowed:
        cudnn.allow_tf32 = matmul.allow_tf32 = True
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def descent(
    model: nn.Module, layout: Layout, pool: Pool, row: Tensor, places: Tensor, keys: Tensor
) -> Tensor:
    """Returns the direction [P] in which the P weights must change so that the loss on labelled images falls
    fastest.

    This is the negative gradient at the model `row` [P + Q], a row of P weights and Q running statistics. The
    gradient is summed over one strong view of each image, or a weak view if the pool has no strong ones.
    `places` are the positions of the images in the pool, and `keys` the random keys of their views.
    """
    kind = "strong" if pool.features is None or len(pool.features.views) > 1 else "weak"
    tensors = {name: tensor.detach().clone() for name, tensor in layout.unflatten(row).items()}
    weights = [tensors[name].requires_grad_() for name in layout.names[: layout.trained]]
    total = row.new_zeros(layout.weights)
    model.eval()
    with torch.enable_grad():
        for part, names in zip(places.split(STEP), keys.split(STEP), strict=True):
            views = pool.views(kind, pool.source(part), names).to(pool.wide)
            answers = torch.func.functional_call(model, tensors, (views,))
            loss = nn.functional.cross_entropy(answers, pool.labels[part], reduction="sum")
            slopes = torch.autograd.grad(loss, weights)
            total -= torch.cat([slope.flatten() for slope in slopes])
    return total
