"""How good a network is on labelled images."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssfl.engines.work import Pool

BATCH = 1000


class Evaluation(NamedTuple):
    """What a network's answers are worth."""

    accuracy: float
    loss: float
    per_class: list[float | None]
    """The accuracy on each class; None where the class has no image."""


def score(model: nn.Module, pool: Pool, images: Tensor, labels: Tensor, classes: int) -> Evaluation:
    """uint8 images on the pool's device, normalised as its own are; the device is waited for once."""
    found = logits(model, pool, images)
    loss = nn.functional.cross_entropy(found, labels)
    right = found.argmax(1) == labels
    hits = torch.bincount(labels[right], minlength=classes).tolist()
    totals = torch.bincount(labels, minlength=classes).tolist()
    per_class = [hit / total if total else None for hit, total in zip(hits, totals, strict=True)]
    return Evaluation(float(right.double().mean()), float(loss), per_class)


def logits(model: nn.Module, pool: Pool, images: Tensor) -> Tensor:
    """What a network says of uint8 images on the pool's device, [B, classes] on the CPU."""
    model.eval()
    with torch.no_grad(), _tensor_cores(pool.dtype != pool.wide):
        parts = [model(pool.normalised(part, pool.wide)) for part in images.split(BATCH)]
        return torch.cat(parts).cpu()


@contextmanager
def _tensor_cores(allowed: bool) -> Iterator[None]:
    """Where training rounds to eight bits, products may round their float32 inputs to ten."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    if allowed:
        cudnn.allow_tf32 = matmul.allow_tf32 = True
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
