"""Chooses and makes an engine. All engines compute the same and differ only in speed."""

import warnings

import torch
from torch import nn

from ssfl.core import compile_cache
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
"""Bytes. On a CPU, a user's step that touches at most this many is called short. Then overheads that all
users of a joint step share (function calls, random draws, views) cost more than the arithmetic, so users are
trained together. Measured in results/engines-cpu.json."""
MOST = 16_383
"""The largest number of users that the GPU kernels can train at once."""
LONG = 2000
"""A number of steps. A run with at least this many takes longer than compiling a step, so that compiling
pays."""


def choose(device: torch.device, needed: int) -> str:
    """Returns the name of the default engine. `needed` is how many bytes the engine "vmap", which trains
    users together, needs for each further user."""
    return "vmap" if device.type != "cpu" or needed <= CACHED else "loop"


def can_compile(name: str, device: torch.device) -> bool:
    """Returns whether the engine with this name can compile its steps on this device."""
    return name == "vmap" and device.type == "cuda"


def threads(needed: int, most: int) -> int:
    """Returns how many threads, up to `most`, share one step that needs this many bytes. A short step is not
    worth sharing."""
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
    """Returns the engine with this name, for one network and one pool of images."""
    if pool.images.is_cuda:  # its kernels are compiled too, by Triton
        compile_cache.use()
    if name == "loop":
        return loop.Loop(model, layout, pool, optimizer, method)
    return vmap.Vmap(model, layout, pool, optimizer, method, compiled)


def on_all_cores(engine: Engine, device: torch.device, cores: int, trainers: int) -> Engine:
    """Returns an engine that divides the users among several processes if that is faster on a CPU; otherwise
    the same engine."""
    if not spread.possible(device, cores, trainers):
        return engine
    try:
        return spread.Spread(engine, min(cores, trainers))
    except (OSError, ImportError, RuntimeError) as error:  # no room for a process, or none allowed
        warnings.warn(
            f"training uses one process instead of {min(cores, trainers)}, which is slower: others cannot be "
            f"started ({error}). Set run.threads=1 to skip the attempt.",
            SsflWarning,
            stacklevel=2,
        )
        return engine
