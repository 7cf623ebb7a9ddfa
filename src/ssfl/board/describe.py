"""A run in words and numbers, for the list and beside its curves."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from ssfl.board import folder
from ssfl.board.folder import text
from ssfl.report.gather import finite

TAIL = 1 << 18
SETTINGS = 300
LARGEST = {
    "config.toml": folder.SMALL, "summary.json": folder.SMALL, "split.json": 1 << 26, "events.jsonl": 1 << 28,
    "model.safetensors": 1 << 32,
}  # fmt: skip
"""What a report reads, and how large it may be."""


def run(handle: int, name: str) -> dict[str, Any]:
    """What the list shows of a run."""
    config, summary = folder.read_config(handle), folder.read_json(handle, "summary.json")
    state, error = folder.state(handle)
    data = config.get("data", {})
    told: dict[str, Any] = {
        "name": name,
        "state": state,
        "error": error,
        "method": text(config.get("method", {}).get("name", "")),
        "data": text(data.get("name") or Path(str(data.get("path", ""))[:4096]).stem),
        "rounds": _whole(config.get("federation", {}).get("rounds")),
        "round": _whole(summary.get("rounds")),
        "accuracy": finite(summary.get("accuracy")),
        "validation": finite(summary.get("validation_accuracy")),
        "left": None,
        "age": _age(handle),
    }
    return told if state == "finished" else told | _so_far(handle, state == "running")


class Finished:
    """What was said of finished runs, which need not be read again as long as their files are the same."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def run(self, handle: int, name: str) -> dict[str, Any]:
        """As `run`, quickly where it is known."""
        stamp = tuple(_changed(handle, file) for file in ("config.toml", "summary.json"))
        known, told = self._held.get(name, ((), {}))
        if known == stamp:
            return told | {"age": _age(handle)}
        told = run(handle, name)
        if told["state"] == "finished" and len(self._held) < folder.RUNS:
            self._held[name] = (stamp, told)
        return told


def _changed(handle: int, file: str) -> int:
    """When a file was last changed, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(file, dir_fd=handle, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0


def _so_far(handle: int, running: bool) -> dict[str, Any]:
    """Round, accuracy (on validation images too: test images may come last) and seconds left of an unfinished
    run, from the end of its events."""
    found: dict[str, Any] = {"round": 0}
    left = None
    for event in _last_events(handle):
        found["round"] = max(found["round"], _whole(event.get("round")) or 0)
        for key, name in (("accuracy", "accuracy"), ("validation", "validation_accuracy")):
            if event.get("event") == "eval" and finite(event.get(name)) is not None:
                found[key] = finite(event[name])
        if event.get("event") == "round":
            left = finite(event.get("left"))  # what the terminal shows
    if running and left is not None:
        found["left"] = max(0.0, left)
    return found


def _last_events(handle: int) -> list[dict[str, Any]]:
    file = folder.open_plain(handle, "events.jsonl")
    if file is None:
        return []
    with os.fdopen(file, "rb") as stream:
        start = max(0, os.fstat(stream.fileno()).st_size - TAIL)
        stream.seek(start)
        lines = stream.read(TAIL).split(b"\n")
    found = []
    for line in lines[1 if start else 0 : -1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def settings(handle: int) -> dict[str, str]:
    """The settings of a run by their dotted names."""
    found = {
        text(f"{section}.{key}"): text(value)
        for section, keys in folder.read_config(handle).items()
        for key, value in keys.items()
    }
    return dict(list(found.items())[:SETTINGS])


def strange(handle: int) -> str | None:
    """A file of a run that no run would write, a report of which is not tried."""
    for file, most in (*LARGEST.items(), ("checkpoints", None)):
        try:
            status = os.stat(file, dir_fd=handle, follow_symlinks=False)
        except FileNotFoundError:
            continue
        wanted = stat.S_ISDIR if most is None else stat.S_ISREG
        if not wanted(status.st_mode) or (most is not None and status.st_size > most):
            return file
    return None


def _age(handle: int) -> float | None:
    """Seconds since the run last wrote an event."""
    changed = _changed(handle, "events.jsonl")
    return max(0.0, time.time() - changed / 1e9) if changed else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None
