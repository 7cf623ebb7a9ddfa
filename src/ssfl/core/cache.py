"""The cache folder of ssfl: it keeps results that take long to compute, so that later commands can use them.
It is safe to delete.

The environment variable SSFL_CACHE names the folder. If it is not set, the folder is `ssfl` in
XDG_CACHE_HOME, or `~/.cache/ssfl` if that variable is not set either. Each entry is a subfolder, named after
a checksum of the data that it was computed from. An entry is written under a temporary name and renamed when
it is complete. If the cache exceeds SSFL_CACHE_GB gigabytes (default: 20), the least recently used entries
are deleted.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PLACE, LIMIT = "SSFL_CACHE", "SSFL_CACHE_GB"
GIGABYTES = 20.0
PART = ".part"


def root() -> Path:
    """Returns the path of the cache folder: the environment variable SSFL_CACHE if it is set, otherwise
    `ssfl` in the user's cache folder (XDG_CACHE_HOME, or `~/.cache`)."""
    folder = os.environ.get(PLACE)
    if folder:
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "ssfl"


def obtain(kind: str, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
    """Returns the folder of a cache entry and whether it was made just now. A missing entry is made by
    calling `make`.

    The entry is the folder `kind`/`key` in the cache. `make` gets an empty folder and writes the entry's
    files into it. If several processes want the same entry, one of them makes it and the others wait. Raises
    OSError if the cache cannot be written.
    """
    place = root() / kind
    entry, part = place / key, place / f"{key}{PART}"
    if _used(entry):
        return entry, False
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _used(entry):
            return entry, False
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        part.mkdir(mode=0o700)
        try:
            make(part)
            os.replace(part, entry)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    trim(keep=entry)
    return entry, True


def trim(keep: Path | None = None) -> None:
    """Deletes the least recently used cache entries until the cache is smaller than its limit (see `limit`).
    The entry `keep` is never deleted.

    A process that has mapped a deleted entry into memory can still use it until the process ends.
    """
    total = 0
    for _, size, entry in sorted(entries(), reverse=True):
        total += size
        if total > limit() and entry != keep:
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def limit() -> float:
    """Returns the largest size that the cache may have, in bytes. The environment variable SSFL_CACHE_GB sets
    it in gigabytes; the default is 20."""
    try:
        return 1e9 * float(os.environ.get(LIMIT, GIGABYTES))
    except ValueError:
        return 1e9 * GIGABYTES


def entries() -> list[tuple[float, int, Path]]:
    """Returns all cache entries, so that `trim` can delete old ones. For each entry: the time of its last use
    (seconds since 1970), its size in bytes, and its folder."""
    listed = []
    for entry in root().glob("*/*"):
        with suppress(OSError):
            if entry.is_dir() and entry.suffix != PART:
                size = sum(file.lstat().st_size for file in entry.rglob("*"))
                listed.append((entry.stat().st_mtime, size, entry))
    return listed


def _used(entry: Path) -> bool:
    """Returns whether a cache entry exists. If it does, also sets the time of its last use to now, so that
    `trim` does not delete it soon."""
    try:
        os.utime(entry)
    except PermissionError:  # another user's entry, which may still be read
        return entry.is_dir()
    except OSError:
        return False
    return True
