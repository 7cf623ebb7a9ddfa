"""Describes a run for the board: for its list of runs, and for the page of one run."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from ssfl.board import untrusted
from ssfl.board.untrusted import text
from ssfl.core.statistics import wilson
from ssfl.report.gather import finite

TAIL = 1 << 18
"""How many bytes at the end of events.jsonl are read for the list of runs."""
SETTINGS = 300
"""How many settings the page of a run shows at most."""
VERDICT = 2000
"""How many characters of a verdict are shown at most. The verdict is the sentence in summary.json that says
whether the unlabelled images helped."""
SCORES = {
    "accuracy": "accuracy", "correct": "correct", "count": "count", "validation": "validation_accuracy",
    "validation_correct": "validation_correct", "validation_count": "validation_count",
}  # fmt: skip
"""The results that the board shows for a model. Each key is the name of a result in the board's JSON. Its
value is the name of the same result in events and in summary.json."""
LARGEST = {
    "config.toml": untrusted.SMALL, "summary.json": untrusted.SMALL, "split.json": 1 << 26,
    "events.jsonl": 1 << 28,
    "model.safetensors": 1 << 32,
}  # fmt: skip
"""The files that a report reads, and their largest allowed sizes in bytes."""


def run(handle: int, name: str) -> dict[str, Any]:
    """Returns what the board's list shows about one run: state, method, data, rounds, accuracies with
    intervals, time left. `handle` is the file descriptor of the run folder."""
    config, summary = untrusted.read_config(handle), untrusted.read_json(handle, "summary.json")
    state, error = untrusted.state(handle)
    data = config.get("data", {})
    description: dict[str, Any] = {
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
        description |= _so_far(handle, description["rounds"], state == "running", description["age"] or 0.0)
    return description | _intervals(description)


def _verdict(summary: dict[str, Any]) -> str | None:
    """Returns the sentence from summary.json that says whether the unlabelled images helped, without control
    characters; None if there is none."""
    judged = summary.get("verdict")
    text = judged.get("text") if isinstance(judged, dict) else None
    return "".join(sign for sign in text[:VERDICT] if sign.isprintable()) if isinstance(text, str) else None


def _intervals(description: dict[str, Any]) -> dict[str, list[float] | None]:
    """Returns the 95 % intervals of the test accuracy and of the validation accuracy. An interval is [low,
    high], with numbers from 0 to 1. It is None if the run has not recorded how many images it evaluated and
    how many were correct."""
    intervals = {}
    for name, correct, count in (
        ("interval", description["correct"], description["count"]),
        ("validation_interval", description["validation_correct"], description["validation_count"]),
    ):
        known = correct is not None and count is not None and 0 <= correct <= count and 1 <= count <= 10**9
        intervals[name] = list(wilson(correct, int(count))) if known else None
    return intervals


class Finished:
    """Caches the descriptions of finished runs until their files change, so that the list of runs loads
    quickly."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def run(self, handle: int, name: str) -> dict[str, Any]:
        """Returns the same as the function `run`, from the cache if possible."""
        stamp = tuple(_changed(handle, file) for file in ("config.toml", "summary.json"))
        known, description = self._held.get(name, ((), {}))
        if known == stamp:
            return description | {"age": _age(handle)}
        description = run(handle, name)
        if description["state"] == "finished" and len(self._held) < untrusted.RUNS:
            self._held[name] = (stamp, description)
        return description


def _changed(handle: int, file: str) -> int:
    """Returns the time of a file's last change in nanoseconds, or 0 if the file does not exist. `handle` is
    the file descriptor of its folder."""
    try:
        return os.stat(file, dir_fd=handle, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0


def _so_far(handle: int, rounds: int | None, running: bool, age: float) -> dict[str, Any]:
    """Returns the progress of an unfinished run from its last events: round, accuracies and, if the run is
    `running`, the seconds left.

    The seconds left are the run's own estimate minus `age`, the seconds since its last event. Runs of older
    versions of ssfl record no estimate. For these, the seconds left are computed from the total number of
    `rounds` and the seconds of recent rounds.
    """
    progress: dict[str, Any] = {"round": 0}
    pace, left = [], None
    for event in _last_events(handle):
        progress["round"] = max(progress["round"], _whole(event.get("round")) or 0)
        for key, name in SCORES.items():
            if event.get("event") == "eval" and finite(event.get(name)) is not None:
                progress[key] = finite(event[name])
        seconds = finite(event.get("seconds"))
        if seconds is not None and event.get("event") == "round":
            pace.append(seconds)
            left = finite(event.get("left"))
    if running and left is not None:
        progress["left"] = max(0.0, left - age)
    elif running and rounds and pace:  # older versions do not record the time left
        recent = sorted(pace[-20:])
        progress["left"] = max(0, rounds - progress["round"]) * recent[len(recent) // 2]
    return progress


def _last_events(handle: int) -> list[dict[str, Any]]:
    """Returns the events in the last `TAIL` bytes of events.jsonl. Damaged lines are skipped."""
    file = untrusted.open_plain(handle, "events.jsonl")
    if file is None:
        return []
    with os.fdopen(file, "rb") as stream:
        start = max(0, os.fstat(stream.fileno()).st_size - TAIL)
        stream.seek(start)
        lines = stream.read(TAIL).split(b"\n")
    events = []
    for line in lines[1 if start else 0 : -1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def settings(handle: int) -> dict[str, str]:
    """Returns the values of a run's settings as text, by their dotted names, such as "train.batch_size"."""
    values = {
        text(f"{section}.{key}"): text(value)
        for section, keys in untrusted.read_config(handle).items()
        for key, value in keys.items()
    }
    return dict(list(values.items())[:SETTINGS])


def strange(handle: int) -> str | None:
    """Returns the name of a suspicious file in the run folder, or None if there is none. If a file named in
    `LARGEST` exists, it must be a regular file and not larger than its limit. If `checkpoints` exists, it
    must be a folder. A file that breaks these rules, such as a link, is suspicious. The board then makes no
    report on the run."""
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
    """Returns how many seconds ago the run wrote its last event, or None if it has written none."""
    changed = _changed(handle, "events.jsonl")
    return max(0.0, time.time() - changed / 1e9) if changed else None


def _whole(value: Any) -> int | None:
    """Returns the value if it is a plausible count (an integer from 0 to 10^9), else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None
