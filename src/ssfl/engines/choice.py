"""Chooses the engine for a run and makes it. All engines compute the same results and differ only in
speed."""

import torch
from torch import nn

from ssfl.core import compile_cache
from ssfl.core.rows import Layout
from ssfl.engines import dist, loop, spread, vmap
from ssfl.engines.contract import Engine
from ssfl.engines.work import Optimizer, Pool
from ssfl.errors import warn_user
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
"""A limit in bytes. On a CPU, a user's training step that touches at most this much memory is called short.
Short steps are faster if users are trained together, because they then share overheads such as function calls
and random draws. Measured in results/engines-cpu.json."""
MOST = 16_383
"""The largest number of users that the GPU kernels can train together."""
LONG = 2000
"""A number of steps. If a run has at least this many, compiling a step takes less time than it saves."""


def choose(device: torch.device, needed: int) -> str:
    """Returns the name of the default engine, "vmap" (users together) or "loop" (one user after another).
    `needed` is how many bytes of memory "vmap" needs for each further user. On a CPU, "vmap" is chosen only
    if `needed` is at most `CACHED`. On any other device, "vmap" is always chosen."""
    return "vmap" if device.type != "cpu" or needed <= CACHED else "loop"


def can_compile(name: str, device: torch.device) -> bool:
    """Returns whether the engine with this name can compile its training steps on this device. Only "vmap" on
    a GPU can."""
    return name == "vmap" and device.type == "cuda"


def threads(needed: int, most: int) -> int:
    """Returns how many CPU threads should share one training step that touches `needed` bytes of memory.

    A short step (see `CACHED`) gets one thread, because sharing it would cost more time than it saves. Any
    other step gets `most` threads.
    """
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
    """Returns the engine with this name. It trains the network `model` on images of `pool` (all images of the
    run), with the losses of this method. `compiled` says whether steps are compiled."""
    if pool.images.is_cuda:  # Triton compiles the GPU kernels, also without torch.compile
        compile_cache.use()
    if name == "loop":
        return loop.Loop(model, layout, pool, optimizer, method)
    return vmap.Vmap(model, layout, pool, optimizer, method, compiled)


def on_all_cores(engine: Engine, device: torch.device, cores: int, trainers: int) -> Engine:
    """Returns an engine that divides the trainers (users, or the server) among several processes, if this is
    possible. Otherwise returns the same engine.

    `trainers` is how many trainers are trained together. Several processes are possible only on a CPU, if
    `trainers` and `cores` are both above 1. The system must also let this process start others.
    """
    if not spread.possible(device, cores, trainers):
        return engine
    try:
        return spread.Spread(engine, min(cores, trainers))
    except (OSError, ImportError, RuntimeError) as error:  # too little memory, or no right to fork
        warn_user(
            f"training uses one process instead of {min(cores, trainers)}, which is slower: others cannot be "
            f"started ({error}). Set run.threads=1 to skip the attempt."
        )
        return engine
