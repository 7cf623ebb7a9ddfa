"""The cache folder: results that take long to compute, shared by commands and processes, and safe to delete.

It is `~/.cache/ssfl`; the environment variable SSFL_CACHE changes that. An entry is a folder named after the
fingerprint of what it was made from. It is written under another name and renamed when it is complete. If the
cache exceeds SSFL_CACHE_GB gigabytes (default: 20), the entries that were not used for longest are deleted.
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
    """Returns the cache folder."""
    folder = os.environ.get(PLACE)
    if folder:
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "ssfl"


def obtain(kind: str, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
    """Returns the folder of a cache entry, and whether the entry was made now.

    The entry is the folder `kind`/`key` in the cache. If it does not exist, `make` gets an empty folder and
    writes the files into it. If several processes want the same entry, one makes it and the others wait.
    Raises OSError if the cache cannot be written.
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
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
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
    """Deletes the entries that were not used for longest until the cache is within its limit. The entry
    `keep` is never deleted.

    An entry that another process has mapped into memory stays usable for that process until it ends.
    """
    total = 0
    for _, size, entry in sorted(entries(), reverse=True):
        total += size
        if total > limit() and entry != keep:
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def limit() -> float:
    """Returns how many bytes the cache may hold at most."""
    try:
        return 1e9 * float(os.environ.get(LIMIT, GIGABYTES))
    except ValueError:
        return 1e9 * GIGABYTES


def entries() -> list[tuple[float, int, Path]]:
    """Returns for each entry the time of its last use (seconds since 1970), its size in bytes and its
    folder."""
    listed = []
    for entry in root().glob("*/*"):
        with suppress(OSError):
            if entry.is_dir() and entry.suffix != PART:
                size = sum(file.lstat().st_size for file in entry.rglob("*"))
                listed.append((entry.stat().st_mtime, size, entry))
    return listed


def _used(entry: Path) -> bool:
    """Returns whether an entry exists; if it does, also records that it was used now."""
    try:
        os.utime(entry)
    except PermissionError:  # another user's entry, which may still be read
        return entry.is_dir()
    except OSError:
        return False
    return True
