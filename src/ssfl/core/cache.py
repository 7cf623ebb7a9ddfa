"""The cache folder: what takes long to compute, shared by commands and processes, and safe to delete.

It lies in `~/.cache/ssfl`; the environment variable SSFL_CACHE moves it. An entry is a folder named after the
fingerprint of what it was made from. It is written under another name and renamed when it is whole. Beyond
SSFL_CACHE_GB gigabytes (default: 20) the entries that nobody has used for longest are deleted.
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
    """Where the cache lies."""
    moved = os.environ.get(PLACE)
    if moved:
        return Path(moved).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "ssfl"


def obtain(kind: str, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
    """The folder of an entry, and whether `make` had to write it now.

    Of several processes that want the same entry one makes it and the others wait. Raises OSError where the
    cache cannot be written.
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
    """Delete the entries that were not used for longest until the rest is within the limit. A process that
    has mapped the files of an entry keeps them until it ends."""
    found = sorted(entries(), reverse=True)
    total = 0
    for _, size, entry in found:
        total += size
        if total > limit() and entry != keep:
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def limit() -> float:
    """The most bytes that the cache may have."""
    try:
        return 1e9 * float(os.environ.get(LIMIT, GIGABYTES))
    except ValueError:
        return 1e9 * GIGABYTES


def entries() -> list[tuple[float, int, Path]]:
    """When each entry was last used, its bytes and its folder."""
    found = []
    for entry in root().glob("*/*"):
        with suppress(OSError):
            if entry.is_dir() and entry.suffix != PART:
                size = sum(file.stat().st_size for file in entry.iterdir())
                found.append((entry.stat().st_mtime, size, entry))
    return found


def _used(entry: Path) -> bool:
    """Whether an entry is there; if so, it counts as used now."""
    try:
        os.utime(entry)
    except PermissionError:  # somebody else's, to be read
        return entry.is_dir()
    except OSError:
        return False
    return True
