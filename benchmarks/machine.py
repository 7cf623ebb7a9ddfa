"""How busy a Linux machine is, and the memory of a process with its descendants."""

import os
import threading
import time
from pathlib import Path

PROC = Path("/proc")
IDLE = 0.2
"""The machine counts as idle if fewer cores than this are busy."""


def busy(patience: float = 0.0) -> float | None:
    """Returns how many cores other processes use; waits up to `patience` seconds for an idle machine."""
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
    """Returns the idle seconds of all cores together."""
    return float((PROC / "uptime").read_text("utf-8").split()[1])


class Watch(threading.Thread):
    """Samples the memory (proportional set size) of a process and its descendants. Pages that they share
    count once."""

    def __init__(self, root: int, every: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.root, self.every = root, every
        self.peak: float | None = None
        """MiB."""
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(self.every):
            sizes = [size for size in map(_size, _tree(self.root)) if size is not None]
            if sizes:
                self.peak = max(self.peak or 0.0, sum(sizes) / 1024)

    def stop(self) -> float | None:
        self.done.set()
        self.join()
        return self.peak


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            # "pid (name) state parent ...", and a name may hold anything
            parent = int(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    processes = [root]
    for process in processes:
        processes += children.get(process, [])
    return processes


def _size(process: int) -> int | None:
    """Returns the memory of a process in KiB."""
    try:
        lines = (PROC / str(process) / "smaps_rollup").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)
