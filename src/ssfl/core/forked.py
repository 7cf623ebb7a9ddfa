"""Calls functions in copies of this process, to use all cores for work that Python would do on one."""

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a run to stop."""
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
            # a signal must not reach the fork before it has its own handlers
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python warns that there are threads
                    process = os.fork()
                if not process:
                    _work(functions[number::count], before)
                running.append(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
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


def _work(functions: Sequence[Callable[[], object]], mask: Iterable[int]) -> None:
    """Calls the functions and ends this process, which is a fork, without the clean-up of its original.
    Ctrl-C and SIGTERM are left to the original, which ends its forks."""
    try:
        gc.disable()  # objects of the original, such as those on a GPU, must not be cleaned up here
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        for function in functions:
            with suppress(Exception):
                function()
    finally:
        os._exit(0)
