"""A run in words and numbers, for the list and beside its curves."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from ssfl.board import folder
from ssfl.board.folder import text
from ssfl.core.statistics import wilson
from ssfl.report.gather import finite

TAIL = 1 << 18
SETTINGS = 300
VERDICT = 2000
"""Letters that a verdict may have."""
SCORES = {
    "accuracy": "accuracy", "correct": "correct", "count": "count", "validation": "validation_accuracy",
    "validation_correct": "validation_correct", "validation_count": "validation_count",
}  # fmt: skip
"""How good a model is, as the page calls it and as evaluations and the summary do."""
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
        **{name: finite(summary.get(key)) for name, key in SCORES.items()},
        "folds": summary.get("judged_by") == "folds",
        "verdict": _verdict(summary),
        "left": None,
        "age": _age(handle),
    }
    if state != "finished":
        told |= _so_far(handle, told["rounds"], state == "running", told["age"] or 0.0)
    return told | _intervals(told)


def _verdict(summary: dict[str, Any]) -> str | None:
    """Whether the unlabelled images helped, in words."""
    judged = summary.get("verdict")
    said = judged.get("text") if isinstance(judged, dict) else None
    return "".join(sign for sign in said[:VERDICT] if sign.isprintable()) if isinstance(said, str) else None


def _intervals(told: dict[str, Any]) -> dict[str, list[float] | None]:
    """The 95 % intervals of the accuracies, where their counts are known."""
    found = {}
    for name, right, count in (
        ("interval", told["correct"], told["count"]),
        ("validation_interval", told["validation_correct"], told["validation_count"]),
    ):
        known = right is not None and count is not None and 0 <= right <= count and 1 <= count <= 10**9
        found[name] = list(wilson(right, int(count))) if known else None
    return found


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


def _so_far(handle: int, rounds: int | None, running: bool, age: float) -> dict[str, Any]:
    """Round, accuracy (on validation images too: test images may come last) and seconds left of an unfinished
    run, from the end of its events. What is left is what the run itself says, as the terminal shows it."""
    found: dict[str, Any] = {"round": 0}
    pace, left = [], None
    for event in _last_events(handle):
        found["round"] = max(found["round"], _whole(event.get("round")) or 0)
        for key, name in SCORES.items():
            if event.get("event") == "eval" and finite(event.get(name)) is not None:
                found[key] = finite(event[name])
        seconds = finite(event.get("seconds"))
        if seconds is not None and event.get("event") == "round":
            pace.append(seconds)
            left = finite(event.get("left"))
    if running and left is not None:
        found["left"] = max(0.0, left - age)
    elif running and rounds and pace:  # of a version that did not say
        recent = sorted(pace[-20:])
        found["left"] = max(0, rounds - found["round"]) * recent[len(recent) // 2]
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
