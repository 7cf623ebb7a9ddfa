"""Engines differ in speed alone: one contract, `train(rows, momentum, work)`, and a choice by name."""

import torch
from torch import nn

from ssfl.engines import loop, spread, vmap
from ssfl.engines.contract import Engine
from ssfl.rows import Layout
from ssfl.work import Optimizer, Pool

__all__ = ["LONG", "SMALL", "Engine", "can_compile", "choose", "make", "on_all_cores", "threads"]

SMALL = 200_000
"""On a CPU, models of up to this many numbers are small: they train faster together."""
LONG = 2000
"""So many steps take longer than compiling them."""


def choose(device: torch.device, layout: Layout) -> str:
    """The engine for this device and model when nobody chose one."""
    return "vmap" if device.type != "cpu" or layout.length <= SMALL else "loop"


def can_compile(name: str, device: torch.device) -> bool:
    """Whether steps can be compiled."""
    return name == "vmap" and device.type == "cuda"


def threads(layout: Layout, most: int) -> int:
    """How many threads share one step: a small model's steps are too short to be shared out."""
    return 1 if layout.length <= SMALL else most


def make(
    name: str,
    model: nn.Module,
    layout: Layout,
    pool: Pool,
    optimizer: Optimizer,
    compiled: bool,
) -> Engine:
    """An engine over one network and one pool of images."""
    if name == "loop":
        return loop.Loop(model, layout, pool, optimizer)
    return vmap.Vmap(model, layout, pool, optimizer, compiled)


def on_all_cores(engine: Engine, device: torch.device, cores: int, trainers: int) -> Engine:
    """The same engine, with a CPU's cores put to use."""
    if not spread.possible(device, cores, trainers):
        return engine
    return spread.Spread(engine, min(cores, trainers))
