"""Handles Ctrl-C and SIGTERM: the current round is finished and saved first, and the exit code says which
signal it was.

systemd, Slurm, containers and `timeout` send SIGTERM, often to every process of a group at once.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SETTLE = 0.5
"""After a SIGTERM, another SIGTERM is ignored for this many seconds. `timeout` sends one to the process that
it started, and one to the whole process group."""


class Terminated(BaseException):
    """Raised if SIGTERM arrives outside of a round. It is not a KeyboardInterrupt, because typer exits with
    code 130 for that, and SIGTERM needs 143."""


@dataclass
class Stop:
    """Holds the number of the signal that asked this process to stop, or 0 if there was none."""

    by: int = 0

    def is_set(self) -> bool:
        """Returns whether a signal has asked this process to stop."""
        return self.by != 0


def exit_code(by: int) -> int:
    """Returns the exit code of a process that the signal `by` stopped: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (by or signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside this `with` block, SIGTERM raises `Terminated`, so that open files are closed. A second SIGTERM
    ends the process at once."""
    if not _ours(signal.SIGTERM):
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    first = 0.0

    def stop(*_: object) -> None:
        nonlocal first
        if first and time.monotonic() - first < SETTLE:
            return
        if first:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        first = time.monotonic()
        raise Terminated

    stop.of_ssfl = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible(loud: bool, supervised: bool = False) -> Iterator[Stop]:
    """Inside this `with` block, the first Ctrl-C or SIGTERM is only recorded in the yielded `Stop`, so that
    the round can be finished and saved. A second signal ends the process at once.

    With `loud`, the first signal prints a line that says what the first and a second signal do. With
    `supervised`, which is for processes of torchrun, a second SIGTERM is ignored. The reason is that
    torchrun, when it is stopped, sends SIGTERM to processes that may already have received one. It later
    kills processes that take too long.
    """
    noted = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    kinds = [signal.SIGINT, *([signal.SIGTERM] if _ours(signal.SIGTERM) else [])]
    before = {kind: signal.getsignal(kind) for kind in kinds}
    settling = False

    def note(kind: int, *_: object) -> None:
        nonlocal settling
        if settling and kind == signal.SIGTERM:
            return
        if not settling:
            noted.by = kind
            if loud:  # a plain write: whatever the signal interrupted may hold the stream
                os.write(2, b"\nfinishing the round, then saving; a second Ctrl-C or SIGTERM stops at once\n")
            settling = True
            if kind == signal.SIGTERM:
                time.sleep(SETTLE)
        # a second signal ends the process without Python, which may be busy with a long computation
        if signal.SIGTERM in before:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if supervised else signal.SIG_DFL)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        if noted.by != kind:
            signal.raise_signal(kind)

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield noted
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _ours(kind: signal.Signals) -> bool:
    """Returns whether ssfl may handle this signal. It may do so only in the main thread, and only if no other
    code has set a handler for the signal. A program that embeds ssfl keeps its own handlers."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(kind)
    return handler == signal.SIG_DFL or hasattr(handler, "of_ssfl")
