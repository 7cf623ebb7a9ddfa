"""Reads the events of a run as curves. Each reading continues where the last one ended, and memory is
limited."""

import json
import os
import threading
from collections import OrderedDict
from typing import Any

from ssfl.board import untrusted
from ssfl.report.gather import MEASURE, finite, inside

Points = list[tuple[int, float]]
CURVES = {
    "accuracy": "eval", "validation_accuracy": "eval", "mask_rate": "round", "pseudo_accuracy": "round",
    "loss": "round", "server_loss": "round", "seconds": "round",
}  # fmt: skip
"""The curves, each with the kind of event that it comes from. Gradient diversity comes in addition."""
CHUNK, LONGEST, AT_ONCE = 1 << 20, 1 << 23, 1 << 26
"""The most bytes of a chunk, of a line, and of one reading of a file. The next reading continues from
there."""
KEPT = 800
FOLLOWED = 32


class Curve:
    """The points of a curve. If there are too many, only every second point is kept, then every fourth, and
    so on."""

    def __init__(self) -> None:
        self.points: Points = []
        self.every, self.seen = 1, 0
        self.last: tuple[int, float] | None = None

    def add(self, at: int, value: float) -> None:
        self.last = (at, value)
        if self.seen % self.every == 0:
            self.points.append(self.last)
        self.seen += 1
        if len(self.points) >= KEPT:
            self.points = self.points[::2]
            self.every *= 2

    def shown(self) -> Points:
        """Returns the kept points, and the newest point even if it was not kept."""
        newest = [] if self.last is None or self.points[-1:] == [self.last] else [self.last]
        return self.points + newest


class Follower:
    """Reads the events.jsonl of one run as it grows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.offset, self.rest, self.damaged, self.round = 0, b"", False, 0
        self.curves: dict[str, Curve] = {}

    def look(self, run: int) -> None:
        """Reads new events. If the file was replaced or truncated, it is read from the start."""
        handle = untrusted.open_plain(run, "events.jsonl")
        if handle is None:
            return
        with self.lock, os.fdopen(handle, "rb") as stream:
            status = os.fstat(stream.fileno())
            if (status.st_dev, status.st_ino) != self.file or status.st_size < self.offset:
                self._forget()
                self.file = (status.st_dev, status.st_ino)
            stream.seek(self.offset)
            end = self.offset + AT_ONCE
            while not self.damaged and self.offset < end and (chunk := stream.read(CHUNK)):
                self.offset += len(chunk)
                *lines, self.rest = (self.rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                self.damaged = self.damaged or len(self.rest) > LONGEST

    def _take(self, line: bytes) -> None:
        """Adds one event to the curves. A damaged line ends the reading, as for all readers of events."""
        if self.damaged:
            return
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        at = event.get("round") if isinstance(event, dict) else None
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at <= 10**9:
            self.damaged = True
            return
        assert isinstance(event, dict)
        self.round = max(self.round, at)
        kind = event.get("event")
        for name, told_by in CURVES.items():
            if kind == told_by:
                self._add(name, at, event.get(name))
        if kind == "diversity":
            self._add("diversity", at, inside(event.get(MEASURE), "definition"))

    def _add(self, name: str, at: int, value: Any) -> None:
        number = finite(value)
        if number is not None:
            self.curves.setdefault(name, Curve()).add(at, number)

    def shown(self) -> dict[str, Points]:
        with self.lock:
            return {name: curve.shown() for name, curve in self.curves.items()}


class Followers:
    """The followers of the runs that were shown most recently."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: OrderedDict[str, Follower] = OrderedDict()

    def of(self, name: str) -> Follower:
        with self.lock:
            follower = self.held.pop(name, None) or Follower()
            self.held[name] = follower
            if len(self.held) > FOLLOWED:
                self.held.popitem(last=False)
            return follower
