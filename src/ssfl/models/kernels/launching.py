"""Starts Triton kernels, or only compiles them. Compiling many kernels at once shortens the first round of a
run."""

import importlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from importlib.util import find_spec
from threading import Thread
from typing import Any

from ssfl.core import forked

LONG = 0.1
"""A kernel that takes more seconds was not in Triton's cache, but was compiled."""
PATIENCE = 60.0
"""How many seconds the processes that compile kernels may take."""

MOST = 16
"""The largest number of processes that compile kernels. Each needs some memory."""

_compiling: Context | None = None
"""The context in which kernels are compiled and not run; None if they are run. It holds for all threads of
the process, so only one thread may train at a time."""


_checksum: Thread | None = None
"""The thread that computes the checksum of Triton (see `prepare`), while it is running."""


def prepare() -> None:
    """Starts to compute the checksum of Triton's own files, in a thread. Triton computes it before the first
    kernel, which takes about two seconds, because a compiled kernel is only used again with the same Triton.
    With the thread, images can be loaded in this time."""
    global _checksum
    if _checksum is None and find_spec("triton") is not None:
        _checksum = Thread(target=_compute_checksum, daemon=True)
        _checksum.start()


def _compute_checksum() -> None:
    with suppress(Exception):  # Triton computes it itself if this version has no such function
        module: Any = importlib.import_module("triton.runtime.cache")
        if not hasattr(module, "triton_key"):  # before Triton 3.5
            module = importlib.import_module("triton.compiler.compiler")
        module.triton_key()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a Triton kernel with this grid of programs. Inside `compile_ahead` it is only compiled."""
    if _checksum is not None and _checksum.is_alive():
        _checksum.join()
    if _compiling is None:
        kernel[grid](*arguments, **options)
    else:  # a copy, because gradients are computed in another thread, and a context has one thread at a time
        _compiling.copy().run(kernel.warmup, *arguments, grid=grid, **options)


def compile_ahead(run: Callable[[], None], processes: int) -> None:
    """Compiles the kernels that `run` launches, several at once in processes, and waits for them.

    `run` is called once, but its kernels are not executed. So the tensors that it computes have arbitrary
    values. If this fails, or Triton cannot compile in this way, each kernel is compiled when it is first
    used. An error is not reported here: it will occur again at that time.
    """
    global _compiling
    import triton  # type: ignore[import-not-found, unused-ignore]

    if not hasattr(triton, "AsyncCompileMode"):
        return
    later, context = Later(min(processes, MOST)), copy_context()
    mode = triton.AsyncCompileMode(later, ignore_errors=True)
    with suppress(Exception):
        context.run(mode.__enter__)  # other Triton kernels than ours are compiled as usual
        try:
            _compiling = context
            try:
                run()
            finally:
                _compiling = None
            later.finish()
        finally:
            later.give_up()
            context.run(mode.__exit__, None, None, None)


class Later(Executor):
    """Collects functions that compile kernels, and calls them in `finish`.

    A good part of compiling is Python code, so threads would wait for each other. Instead, forked processes
    compile all kernels and write them to Triton's cache. Then this process calls the functions again, which
    now only read the cache.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
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
                with suppress(OSError):  # no more processes are allowed
                    forked.run([each for each, _ in self.waiting[number + 1 :]], self.processes, PATIENCE)

    def give_up(self) -> None:
        """Ends the calls that have not been made with an error, so that nobody waits for them."""
        for _, future in self.waiting:
            if not future.done():
                future.set_exception(RuntimeError("the kernel was not compiled in advance"))
