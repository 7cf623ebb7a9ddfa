"""Measures how busy a Linux machine is, and how much memory a process and its descendants use."""

import os
import threading
import time
from pathlib import Path

PROC = Path("/proc")
IDLE = 0.2
"""The machine is treated as idle if fewer than this many cores are busy."""


def busy(patience: float = 0.0) -> float | None:
    """Returns how many cores are busy on this machine, measured over one second, or None if it cannot be
    measured. If the machine is not idle, it waits and measures again for up to `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            before = _idle()
            start = time.monotonic()
            time.sleep(1)
            cores = (os.cpu_count() or 1) - (_idle() - before) / (time.monotonic() - start)
        except OSError:
            return None
        if cores < IDLE or time.monotonic() > until:
            return max(0.0, cores)


def _idle() -> float:
    """Returns the seconds that all cores together have been idle since the machine started."""
    return float((PROC / "uptime").read_text("utf-8").split()[1])


class Watch(threading.Thread):
    """A thread that samples the memory of a process and its descendants, and keeps the largest value. Memory
    that they share is counted once (proportional set size)."""

    def __init__(self, root: int, every: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.root, self.every = root, every
        self.peak: float | None = None
        """The largest memory so far in MiB; None if it could not be read."""
        self.done = threading.Event()

    def run(self) -> None:
        """Samples the memory every `every` seconds until `stop` is called."""
        while not self.done.wait(self.every):
            sizes = [size for size in map(_size, _tree(self.root)) if size is not None]
            if sizes:
                self.peak = max(self.peak or 0.0, sum(sizes) / 1024)

    def stop(self) -> float | None:
        """Ends the thread, and returns the largest memory in MiB."""
        self.done.set()
        self.join()
        return self.peak


def _tree(root: int) -> list[int]:
    """Returns the process numbers of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            # the line is "pid (name) state parent ...", and the name may contain any character
            parent = int(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    processes = [root]
    for process in processes:
        processes += children.get(process, [])
    return processes


def _size(process: int) -> int | None:
    """Returns the memory of a process in KiB, or None if it has ended."""
    try:
        lines = (PROC / str(process) / "smaps_rollup").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)
