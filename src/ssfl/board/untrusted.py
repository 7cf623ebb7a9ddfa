"""Reads run folders safely without trusting them: no link is followed, only regular files are opened, and no
more is read than a real run would write.

A run is "finished" if its summary exists. Otherwise it is "running" while a process holds the folder's lock,
"failed" if training ended with an error (failed.json), and "stopped" in all other cases.
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
"""Limits: how many folders deep runs may be, how many folders are searched, and how many runs are listed (the
newest)."""
SMALL = 1 << 20
LETTERS = 200


class NotThere(Exception):
    """There is no such run in the folder."""


def names(root: Path) -> list[str]:
    """Returns the paths of the runs in a folder, newest first."""
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
    """Yields the open folder of a run. Its path is opened one folder at a time, from the root, without
    following a link."""
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
    """Returns a file descriptor of a regular file in a folder, open for reading; None if there is no such
    file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def is_plain(folder: int, file: str) -> bool:
    handle = open_plain(folder, file)
    if handle is not None:
        os.close(handle)
    return handle is not None


def read(folder: int, file: str, most: int = SMALL) -> bytes:
    """Returns the content of a regular file; empty if it does not exist or is larger than `most` bytes."""
    handle = open_plain(folder, file)
    if handle is None:
        return b""
    with os.fdopen(handle, "rb") as stream:
        content = stream.read(most + 1)
    return content if len(content) <= most else b""


def read_json(folder: int, file: str) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        content = json.loads(read(folder, file))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(folder: int) -> dict[str, dict[str, Any]]:
    """Returns the sections of a run's config without checking them, because the board also shows runs of
    other versions."""
    try:
        sections = tomllib.loads(read(folder, "config.toml").decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return {section: keys for section, keys in sections.items() if isinstance(keys, dict)}


def state(folder: int) -> tuple[str, str]:
    """Returns the state of a run, and its error if it failed."""
    if finite(runs.end_of(read_json(folder, "summary.json"))) is not None:
        return "finished", ""
    if runs.is_locked(folder):
        return "running", ""
    failure = read_json(folder, runs.FAILURE)
    return ("failed", text(failure.get("error", ""))) if failure else ("stopped", "")


def text(value: Any) -> str:
    """Returns a value as one short line of valid text."""
    line = " ".join(str(value)[: 2 * LETTERS].split())[:LETTERS]
    return line.encode("utf-8", "replace").decode()


def _printable(name: str) -> bool:
    """Returns whether a name can be shown and requested: it must be valid Unicode without invisible
    characters."""
    return name.isprintable() and "/" not in name
