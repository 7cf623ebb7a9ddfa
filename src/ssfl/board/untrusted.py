"""Reads run folders that may be damaged or malicious. No symbolic link is followed, only regular files are
opened, and their size is limited.

A run is "finished" if summary.json contains its final accuracy. Otherwise it is "running" while a process
holds the folder's lock, "failed" if training ended with an error (failed.json), and "stopped" in all other
cases. In the functions below, an argument `folder` is an open file descriptor of a run folder.
"""

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssfl.report.gather import finite
from ssfl.runs import folder as runs

DEPTH, FOLDERS, RUNS = 4, 20_000, 1_000
"""Limits of the search for runs: how deep folders may be nested, how many folders are searched, and how many
runs are listed (the newest)."""
SMALL = 1 << 20
"""The size limit of small files, such as config.toml, in bytes."""
LETTERS = 200
"""How many characters of a text from a run folder, such as the value of a setting, are shown at most."""


class NotThere(Exception):
    """Raised if the folder that the board shows has no run of the requested name."""


def names(root: Path) -> list[str]:
    """Returns the paths of the runs under the folder `root`, relative to `root`, newest first. At most `RUNS`
    are returned."""
    runs_found: list[tuple[float, str]] = []
    queue = [("", 0)]
    for visited, (place, depth) in enumerate(queue):
        if visited >= FOLDERS:
            break
        try:
            with os.scandir(root / place) as entries:
                inside = [entry for entry in entries if _printable(entry.name)]
            if place and any(e.name == "config.toml" and e.is_file(follow_symlinks=False) for e in inside):
                times = [e.stat(follow_symlinks=False).st_mtime for e in inside if e.name == "events.jsonl"]
                runs_found.append((max(times, default=0.0), place))
            elif depth < DEPTH:
                below = [e.name for e in inside if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
                queue += [(f"{place}/{name}" if place else name, depth + 1) for name in sorted(below)]
        except OSError:  # removed in the meantime, or not readable
            continue
    return [name for _, name in sorted(runs_found, key=lambda run: (-run[0], run[1]))[:RUNS]]


@contextmanager
def opened(root: Path, name: str) -> Iterator[int]:
    """Yields a file descriptor of a run's folder. Raises `NotThere` if there is no such run. The path is
    opened one folder at a time, so that no symbolic link can lead out of `root`."""
    parts = name.split("/")
    if len(parts) > DEPTH or not all(_printable(part) and part not in ("", ".", "..") for part in parts):
        raise NotThere(name)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            try:
                inner = os.open(part, flags, dir_fd=folder)
            except (OSError, ValueError):
                raise NotThere(name) from None
            os.close(folder)
            folder = inner
        if not is_plain(folder, "config.toml"):
            raise NotThere(name)
        yield folder
    finally:
        os.close(folder)


def open_plain(folder: int, file: str) -> int | None:
    """Returns a file descriptor of a regular file, open for reading, or None if there is no such file.
    `folder` is the file descriptor of the folder that contains the file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def is_plain(folder: int, file: str) -> bool:
    """Returns whether the folder has a regular file of this name."""
    handle = open_plain(folder, file)
    if handle is not None:
        os.close(handle)
    return handle is not None


def read(folder: int, file: str, most: int = SMALL) -> bytes:
    """Returns the content of a regular file, or b"" if it does not exist or is larger than `most` bytes."""
    handle = open_plain(folder, file)
    if handle is None:
        return b""
    with os.fdopen(handle, "rb") as stream:
        content = stream.read(most + 1)
    return content if len(content) <= most else b""


def read_json(folder: int, file: str) -> dict[str, Any]:
    """Returns the object in a JSON file, or {} if the file cannot be read or does not contain a JSON
    object."""
    try:
        content = json.loads(read(folder, file))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(folder: int) -> dict[str, dict[str, Any]]:
    """Returns the sections of a run's config.toml, or {} if it cannot be read. The settings are not checked,
    because the board also shows runs of other versions of ssfl."""
    try:
        sections = tomllib.loads(read(folder, "config.toml").decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return {section: keys for section, keys in sections.items() if isinstance(keys, dict)}


def state(folder: int) -> tuple[str, str]:
    """Returns the state of a run ("finished", "running", "failed" or "stopped"), and the error text if it
    failed, else ""."""
    if finite(runs.end_of(read_json(folder, "summary.json"))) is not None:
        return "finished", ""
    if runs.is_locked(folder):
        return "running", ""
    failure = read_json(folder, runs.FAILURE)
    return ("failed", text(failure.get("error", ""))) if failure else ("stopped", "")


def text(value: Any) -> str:
    """Returns a value from a run folder as one line of at most `LETTERS` characters, in valid Unicode."""
    line = " ".join(str(value)[: 2 * LETTERS].split())[:LETTERS]
    return line.encode("utf-8", "replace").decode()


def _printable(name: str) -> bool:
    """Returns whether the name of a folder can be shown and requested: it has no invisible characters and no
    slash."""
    return name.isprintable() and "/" not in name
