"""Compiles functions with torch.compile, so that their results have the same bits in every run and later runs
can use the compiled code again."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from ssfl.core import compile_cache
from ssfl.errors import one_line, warn_user

FIXED = {"deterministic": True, "dynamic_scale_rblock": False, "coordinate_descent_tuning": False}
"""Settings of Inductor (torch's compiler) that keep it from choosing an order of summation by timing. If it
chose by timing, results could differ in the last bits from run to run. Older versions of torch do not know
the first setting."""


def prepare() -> None:
    """Sets the options of torch's compiler. It must be called before the first function is compiled."""
    dynamo = importlib.import_module("torch._dynamo").config
    # one process may run many experiments, and each new shape is compiled separately
    dynamo.recompile_limit = max(dynamo.recompile_limit, 256)
    inductor: Any = importlib.import_module("torch._inductor.config")
    fixed = FIXED if hasattr(inductor, "deterministic") else FIXED | {"shape_padding": False}
    for name, value in fixed.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)
    compiler: Any = importlib.import_module("torch.compiler.config")
    # ssfl's own cache folder has this checksum in its name, but a folder that the user chose has not
    if not getattr(compiler, "cache_key_tag", "unknown to this torch"):
        compiler.cache_key_tag = compile_cache.kernels()
    autograd: Any = importlib.import_module("torch._functorch.config")
    if "TORCHINDUCTOR_FX_GRAPH_CACHE" not in os.environ:
        inductor.fx_graph_cache = True
    if "TORCHINDUCTOR_AUTOGRAD_CACHE" not in os.environ:
        autograd.enable_autograd_cache = True


class Compiled:
    """A function that torch compiles when it is first called. Before that, the compiler is not even imported,
    which takes seconds. If compiling fails, it warns and from then on runs the function uncompiled, so that
    training can go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.worked, self.failed = function, False, False
        self.fast: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.failed:
            return self.function(*arguments)
        try:
            if self.fast is None:
                prepare()
                self.fast = torch.compile(self.function, dynamic=False, fullgraph=True)
            result = self.fast(*arguments)
        except Exception as error:
            if self.worked or isinstance(error, torch.OutOfMemoryError):
                raise
            self.failed = True
            reason = one_line(error, 500)
            warn_user(
                f"a part of the training ({self.function.__name__}) runs uncompiled, which is slower: its "
                f"compiled form failed ({reason}). Set run.compile=false to skip the attempt."
            )
            return self.function(*arguments)
        self.worked = True
        return result
