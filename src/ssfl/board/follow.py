"""Reads the events of a growing run as curves for the board. Each reading continues where the last one ended,
and the memory is limited."""

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
"""The curves, and the kind of event that each comes from. The curve of gradient diversity is added
separately."""
CHUNK, LONGEST, AT_ONCE = 1 << 20, 1 << 23, 1 << 26
"""Limits in bytes: of one read, of one line of events.jsonl, and of all reads for one request. If the last
limit is reached, the next request reads on."""
KEPT = 800
"""When a curve has this many points, every second one is dropped."""
FOLLOWED = 32
"""How many runs keep their curves in memory: those that were opened most recently."""


class Curve:
    """The points of one curve, in limited memory. When there are too many points, every second one is
    dropped."""

    def __init__(self) -> None:
        self.points: Points = []
        self.every, self.seen = 1, 0
        self.last: tuple[int, float] | None = None

    def add(self, at: int, value: float) -> None:
        """Adds a point: the value in round `at`."""
        self.last = (at, value)
        if self.seen % self.every == 0:
            self.points.append(self.last)
        self.seen += 1
        if len(self.points) >= KEPT:
            self.points = self.points[::2]
            self.every *= 2

    def shown(self) -> Points:
        """Returns the points to draw. The newest point is always included."""
        newest = [] if self.last is None or self.points[-1:] == [self.last] else [self.last]
        return self.points + newest


class Follower:
    """Reads the events.jsonl of one run into curves, while the file grows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        """Deletes all curves, so that the next call of `look` reads the file from the beginning."""
        self.offset, self.rest, self.damaged, self.round = 0, b"", False, 0
        self.curves: dict[str, Curve] = {}

    def look(self, run: int) -> None:
        """Reads the events that are new since the last call. If the file was replaced or truncated, it is
        read from the start. `run` is the file descriptor of the run folder."""
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
        """Adds the values of one event (a line of events.jsonl) to the curves. A damaged line ends the
        reading: `damaged` becomes true and further lines are ignored."""
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
        """Adds a point to the curve `name`, if the value is a finite number."""
        number = finite(value)
        if number is not None:
            self.curves.setdefault(name, Curve()).add(at, number)

    def shown(self) -> dict[str, Points]:
        """Returns the points of each curve, by name."""
        with self.lock:
            return {name: curve.shown() for name, curve in self.curves.items()}


class Followers:
    """Keeps a `Follower` for each of the runs that were opened most recently. So the board does not read all
    events again when it updates the page of such a run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: OrderedDict[str, Follower] = OrderedDict()

    def of(self, name: str) -> Follower:
        """Returns the follower of a run, a new one if the run was not opened recently."""
        with self.lock:
            follower = self.held.pop(name, None) or Follower()
            self.held[name] = follower
            if len(self.held) > FOLLOWED:
                self.held.popitem(last=False)
            return follower
