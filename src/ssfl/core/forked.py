"""Calls functions in copies of this process, to use all cores for work that Python would do on one."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

POLL = 0.02
"""How many seconds pass between two looks at whether the processes have ended."""


def run(functions: Sequence[Callable[[], object]], processes: int, seconds: float) -> None:
    """Calls each function once, in one of several forked processes. Only what they write to files remains:
    results, errors and what they print are lost. Processes that need more than `seconds` seconds are ended.

    A fork has only the calling thread, so the functions must not need other threads of this process, and no
    GPU.
    """
    count = min(processes, len(functions))
    running: list[int] = []
    try:
        for number in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python warns that there are threads
                process = os.fork()
            if not process:
                _work(functions[number::count])
            running.append(process)
        end = time.monotonic() + seconds
        while running and time.monotonic() < end:
            running = [process for process in running if not _has_ended(process)]
            time.sleep(POLL)
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process, 0)


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] == process
    except ChildProcessError:  # somebody else waited for it
        return True


def _work(functions: Sequence[Callable[[], object]]) -> None:
    """Calls the functions and ends this process, which is a fork, without the clean-up of its original."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        for function in functions:
            with suppress(Exception):
                function()
    finally:
        os._exit(0)
