"""Starts Triton kernels, or only compiles them. Compiling many kernels at once shortens the first round of a
run."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from ssfl.core import forked
from ssfl.core.machine import cores

LONG = 0.1
"""A kernel that takes more seconds was not in Triton's cache, but was compiled."""
PATIENCE = 60.0
"""How many seconds the processes that compile kernels may take."""

_compiling: Context | None = None
"""The context in which kernels are compiled and not run; None if they are run. It holds for all threads of
the process, so only one thread may train at a time."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a Triton kernel with this grid of programs. Inside `compile_ahead` it is only compiled."""
    if _compiling is None:
        kernel[grid](*arguments, **options)
    else:  # a copy, because gradients are computed in another thread, and a context has one thread at a time
        _compiling.copy().run(kernel.warmup, *arguments, grid=grid, **options)


def compile_ahead(run: Callable[[], None]) -> None:
    """Compiles the kernels that `run` launches, several at once, and waits for them.

    `run` is called once, but its kernels are not executed. So the tensors that it computes have arbitrary
    values. If this fails, or Triton cannot compile in this way, each kernel is compiled when it is first
    used. An error is not reported here: it will occur again at that time.
    """
    global _compiling
    import triton  # type: ignore[import-not-found, unused-ignore]

    if not hasattr(triton, "AsyncCompileMode"):
        return
    later = Later()
    with suppress(Exception), triton.AsyncCompileMode(later, ignore_errors=True):
        _compiling = copy_context()
        try:
            run()
        finally:
            _compiling = None
            later.finish()


class Later(Executor):
    """Collects functions that compile kernels, and calls them in `finish`.

    Compiling is mostly Python code, so threads would wait for each other. Instead, forked processes compile
    all kernels and write them to Triton's cache. Then this process calls the functions again, which now only
    read the cache.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], object], Future[Any]]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Returns a future for the result of this call, which is made in `finish`."""
        future: Future[Any] = Future()
        self.waiting.append((partial(function, *arguments, **options), future))
        return future

    def finish(self) -> None:
        """Makes all calls. Starts processes only after one call has shown that the cache is empty."""
        filled = not hasattr(os, "fork")
        for number, (function, future) in enumerate(self.waiting):
            began = time.perf_counter()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            if not filled and time.perf_counter() - began > LONG:
                filled = True
                forked.run([each for each, _ in self.waiting[number + 1 :]], cores(), PATIENCE)
        self.waiting.clear()
