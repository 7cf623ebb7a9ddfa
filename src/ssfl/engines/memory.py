"""The free memory of a device, and errors for settings that need more than that."""

import os
import resource
import sys
from pathlib import Path

import torch

from ssfl.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free(device: torch.device) -> int:
    """Returns how many bytes are free on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # not Linux: all of its memory is the best estimate
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container may have less than its machine; without a limit memory.max is a word
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(stat["inactive_file"]))  # cached files make room
    except (OSError, ValueError, KeyError):
        pass
    return max(available, 0)


def peak(device: torch.device) -> dict[str, int]:
    """Returns the largest number of bytes that this process has held so far, in main memory and, if it is
    used, on the GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    most = {"cpu": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if device.type == "cuda":
        most["gpu"] = torch.cuda.max_memory_allocated(device)
    return most


def check_kept(
    key: str,
    value: str,
    whose: str,
    rows: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    fix: str,
) -> int:
    """Returns how many bytes it takes to keep one model for each user or group between rounds, as the setting
    `key` asks for. Raises ConfigError if they are not free on the device.

    There are `rows` models of `length` numbers. A round holds them twice, before and after it. On a CPU,
    writing a checkpoint needs them once more. `whose` and `fix` are parts of the message.
    """
    needed = (3 if device.type == "cpu" else 2) * (rows + 1) * length * dtype.itemsize
    available = free(device)
    if needed > available:
        raise ConfigError(
            f"{key} = {value!r} keeps a copy of the model's size for each of {rows} {whose}. That needs "
            f"{_size(needed)} of memory, and {device} has {_size(available)} free. Set {fix}.",
            key=key,
            value=value,
            fix=fix,
        )
    return needed


def share(users: int, needed: int, device: torch.device, reserved: int = 0) -> int:
    """Returns how many users to train at once if each needs `needed` bytes. It is all of them if they fit
    into the free memory; otherwise they are divided into parts of equal size that fit.

    `reserved` bytes are kept free for other things.
    """
    fit = max(1, int(0.7 * (free(device) - reserved)) // max(needed, 1))
    parts = -(-users // fit)
    return -(-users // parts)


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
