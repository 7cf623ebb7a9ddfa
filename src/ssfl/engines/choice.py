"""Engines differ in speed alone: one contract, `train(rows, momentum, work)`, and a choice by name."""

import warnings

import torch
from torch import nn

from ssfl.core.rows import Layout
from ssfl.engines import dist, loop, spread, vmap
from ssfl.engines.contract import Engine
from ssfl.engines.work import Optimizer, Pool
from ssfl.errors import SsflWarning
from ssfl.federation import Method

__all__ = [
    "CACHED",
    "LONG",
    "MOST",
    "Engine",
    "can_compile",
    "choose",
    "dist",
    "make",
    "on_all_cores",
    "spread",
    "threads",
]

CACHED = 20 * 2**20
"""A user's step is short when it touches no more bytes than this: then, on a CPU, what users have in common
(calls, draws, views) counts more than the arithmetic. Measured: results/engines-cpu.json."""
MOST = 16_383
"""Users that a GPU's kernels take at once."""
LONG = 2000
"""So many steps take longer than compiling them."""


def choose(device: torch.device, needed: int) -> str:
    """The engine when nobody chose one; `needed` is what "vmap" needs for one more user, in bytes."""
    return "vmap" if device.type != "cpu" or needed <= CACHED else "loop"


def can_compile(name: str, device: torch.device) -> bool:
    """Whether steps can be compiled."""
    return name == "vmap" and device.type == "cuda"


def threads(needed: int, most: int) -> int:
    """How many threads share one step: short ones are not worth sharing."""
    return 1 if needed <= CACHED else most


def make(
    name: str,
    model: nn.Module,
    layout: Layout,
    pool: Pool,
    optimizer: Optimizer,
    method: Method,
    compiled: bool,
) -> Engine:
    """An engine over one network and one pool of images."""
    if name == "loop":
        return loop.Loop(model, layout, pool, optimizer, method)
    return vmap.Vmap(model, layout, pool, optimizer, method, compiled)


def on_all_cores(engine: Engine, device: torch.device, cores: int, trainers: int) -> Engine:
    """The same engine, with a CPU's cores put to use."""
    if not spread.possible(device, cores, trainers):
        return engine
    try:
        return spread.Spread(engine, min(cores, trainers))
    except (OSError, ImportError, RuntimeError) as error:  # no room for a process, or none allowed
        warnings.warn(f"users are not spread over processes: {error}", SsflWarning, stacklevel=2)
        return engine
