"""Engines differ in speed alone: one contract, `train(rows, momentum, work)`, and a choice by name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssfl.engines import loop, vmap
from ssfl.rows import Layout
from ssfl.work import Optimizer, Pool, Trained, Work

SMALL = 200_000
"""On a CPU, models of up to this many numbers are small: they train faster together, in one thread."""


@dataclass(frozen=True)
class Engine:
    """How the local work of a round is done."""

    train: Callable[[Tensor, Tensor, Work], Trained]
    gradients: Callable[[Tensor, Work, Tensor], Tensor]
    """(rows, work, sizes) -> each trainer's gradient over all its data, [n, P]."""


def choose(device: torch.device, layout: Layout) -> str:
    """The engine for this device and model when nobody chose one."""
    return "vmap" if device.type != "cpu" or layout.length <= SMALL else "loop"


def threads(device: torch.device, layout: Layout) -> int:
    """CPU threads when nobody chose: a small model's steps are too short to be shared out."""
    small = device.type == "cpu" and layout.length <= SMALL
    return 1 if small else torch.get_num_threads()


def make(
    name: str,
    model: nn.Module,
    layout: Layout,
    pool: Pool,
    optimizer: Optimizer,
    users_at_once: int,
) -> Engine:
    """An engine over one network and one pool of images."""
    module = {"loop": loop, "vmap": vmap}[name]

    def slices(count: int) -> list[slice]:
        return [slice(i, i + users_at_once) for i in range(0, count, users_at_once)]

    def train(rows: Tensor, momentum: Tensor, work: Work) -> Trained:
        parts = [
            module.train(model, layout, pool, optimizer, rows[s], momentum[s], work.of(s))
            for s in slices(len(rows))
        ]
        return Trained(
            torch.cat([part.rows for part in parts]),
            torch.cat([part.momentum for part in parts]),
            {name: torch.cat([part.stats[name] for part in parts]) for name in parts[0].stats},
        )

    def gradients(rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        return torch.cat(
            [module.gradients(model, layout, pool, rows[s], work.of(s), sizes[s]) for s in slices(len(rows))]
        )

    return Engine(train, gradients)
