"""Measures the free memory of a device, decides how many users fit into it, and raises errors for settings
that need too much."""

import os
import resource
import sys
from pathlib import Path

import torch

from ssfl.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free(device: torch.device) -> int:
    """Returns how many bytes of memory are free on a device: on a GPU, or in main memory within the limit of
    a container."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # not Linux: use the size of the whole memory as an estimate
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container may have a limit; if it has none, memory.max is a word and int() raises
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        # the system frees the memory of cached files when it is needed
        available = min(available, limit - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):
        pass
    return max(available, 0)


def peak(device: torch.device) -> dict[str, int]:
    """Returns the most memory that this process has used at any time so far, in bytes: main memory under
    "cpu" and, if the device is a GPU, its memory under "gpu"."""
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
    """Returns how many bytes of memory it takes to keep vectors (models or momentum) from one round to the
    next, with all their copies. There are `rows` + 1 vectors: one for each user or participant, and one more
    for the server. Raises ConfigError if the device has less free memory.

    Each vector has `length` numbers of type `dtype`. During a round there are two copies of all vectors: the
    old and the new values. On a CPU, writing a checkpoint needs a third copy.

    The other arguments are parts of the error message. `key` and `value` are the setting because of which the
    vectors are kept. `whose` says whose vectors they are, such as "users". `fix` is what to set instead.
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
    """Returns how many of `users` users to train at the same time, if each needs `needed` bytes of memory.
    The users who train together may use 70 % of the memory that is free after subtracting `reserved` bytes.

    If all users fit, the result is `users`. Otherwise the users are divided into about equal parts that fit,
    and the size of a part is returned. The result is at least 1, even if a single user does not fit.
    """
    fit = max(1, int(0.7 * (free(device) - reserved)) // max(needed, 1))
    parts = -(-users // fit)
    return -(-users // parts)


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
