"""Starts Triton kernels, or only compiles them. Compiling many kernels at once shortens the first round of a
run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

from ssfl.core.machine import cores

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
    """Compiles the kernels that `run` launches, several at once in threads, and waits for them.

    `run` is called once, but its kernels are not executed. So the tensors that it computes have arbitrary
    values. If this fails, or Triton cannot compile in threads, each kernel is compiled when it is first used.
    An error is not reported here: it will occur again at that time.
    """
    global _compiling
    import triton  # type: ignore[import-not-found, unused-ignore]

    if not hasattr(triton, "AsyncCompileMode"):
        return
    with (
        suppress(Exception),
        ThreadPoolExecutor(min(cores(), 16)) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        _compiling = copy_context()
        try:
            run()
        finally:
            _compiling = None
