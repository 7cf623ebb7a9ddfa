"""How much memory a device has left, and what would not fit into it."""

import os
import resource
import sys
from pathlib import Path

import torch

from ssfl.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free(device: torch.device) -> int:
    """Bytes that could still be taken on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        left = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # not Linux: all there is, the best that can be known
        left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container may have less than its machine; without a limit memory.max is a word
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        left = min(left, limit - used + int(stat["inactive_file"]))  # cached files make room
    except (OSError, ValueError, KeyError):
        pass
    return max(left, 0)


def peak(device: torch.device) -> dict[str, int]:
    """The most bytes that this process has held so far, by kind of device."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"cpu": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.max_memory_allocated(device)
    return found


def check_kept(
    setting: str, whose: str, rows: int, length: int, dtype: torch.dtype, device: torch.device, instead: str
) -> int:
    """The bytes that a setting keeps between rounds, a row each, which is refused where it would not fit.

    A round holds the matrix before it and after it; on a CPU, a checkpoint holds it and its bytes twice.
    """
    needed = (3 if device.type == "cpu" else 2) * (rows + 1) * length * dtype.itemsize
    left = free(device)
    if needed > left:
        raise ConfigError(
            f"{setting} keeps a row for each of {rows} {whose}, which needs "
            f"{_told(needed)} of memory where {device} has {_told(left)} free: set it to {instead}"
        )
    return needed


def share(users: int, needed: int, device: torch.device, kept: int = 0) -> int:
    """How many users to train together when each needs so many bytes: all, or even parts that fit.

    `kept` bytes will be held besides.
    """
    fit = max(1, int(0.7 * (free(device) - kept)) // max(needed, 1))
    parts = -(-users // fit)
    return -(-users // parts)


def _told(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
