"""Waits that last as long as there is progress: a busy machine is slow, and slow is no failure.

The clock of a wait stands still while a process that a test started computes, or would if the machine let it
(Linux counts both), and starts again from zero whenever a watched file grows.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
HARD = 1800.0
"""Seconds after which even a wait with progress is given up."""
BUSY = 0.3
"""The share of a core that processes must want to count as computing; those that only poll want far less."""
LOOK = 1.0
"""Seconds between two looks for progress."""


def wait_until(
    condition: Callable[[], T],
    what: Callable[[], str] | str,
    quiet: float = 60,
    files: Iterable[Path] = (),
    every: float = 0.05,
) -> T:
    """Returns what the condition gives once that is true; fails after `quiet` seconds without progress."""
    watched = list(files)
    began = looked = time.monotonic()
    idle, wanted, sizes = 0.0, _wanted(os.getpid()), _sizes(watched)
    while not (found := condition()):
        now = time.monotonic()
        if now - looked >= LOOK:
            wanted_before, wanted, sizes_before, sizes = wanted, _wanted(os.getpid()), sizes, _sizes(watched)
            more = sum(max(0.0, time - wanted_before.get(task, 0.0)) for task, time in wanted.items())
            if sizes != sizes_before:
                idle = 0.0
            elif more < BUSY * (now - looked):
                idle += now - looked
            looked = now
        if idle > quiet or now - began > HARD:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"no progress for {idle:.0f} s, after {now - began:.0f} s in all: {told}")
        time.sleep(every)
    return found


def ended(process: subprocess.Popen, what: Callable[[], str] | str = "", quiet: float = 60) -> int:
    """Returns the exit code of a process, which may take as long as it works."""
    wait_until(lambda: process.poll() is not None, what or f"{process.args!r} goes on", quiet)
    assert process.returncode is not None
    return int(process.returncode)


def finished(process: subprocess.Popen[str], quiet: float = 60) -> tuple[str, str]:
    """Returns what a process of few words wrote to its pipes, once it ended."""
    ended(process, quiet=quiet)
    out, err = process.communicate()
    return out or "", err or ""


def descendants(parent: int) -> set[int]:
    """The processes below one, its children's children included."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = set[int](), {parent}
    while new:
        new = {child for child, above in parents.items() if above in new} - found
        found |= new
    return found


def command_of(pid: int) -> bytes:
    """How a process was started; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _wanted(parent: int) -> dict[str, float]:
    """Seconds that each thread of the processes below one has run or has waited for a core."""
    return dict(_tasks(descendants(parent)))


def _tasks(processes: Iterable[int]) -> Iterator[tuple[str, float]]:
    for process in processes:
        try:
            files = list(Path(f"/proc/{process}/task").glob("*/schedstat"))
        except OSError:  # it has ended
            continue
        for file in files:
            try:
                ran, waited, _ = map(int, file.read_text().split())
            except OSError:
                continue
            yield str(file), (ran + waited) / 1e9


def _sizes(files: Iterable[Path]) -> list[int]:
    return [file.stat().st_size if file.exists() else -1 for file in files]
