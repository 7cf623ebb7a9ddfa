"""One run folder as facts for a report: whatever a run wrote, and however far it came.

Old folders lack what newer runs record, and a damaged or hostile one may hold anything: every number is
checked to be one, and what is missing is left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ssfl.config.loading import as_dict
from ssfl.config.settings import Config
from ssfl.core import plain_files, statistics
from ssfl.core.events import Event
from ssfl.errors import RunError
from ssfl.runs import folder, roster
from ssfl.runs.text import accuracy, percent

Points = list[tuple[int, float]]
MOST_POINTS = 400
"""A curve keeps so many points at most: more would not show, and the file would grow with every round."""
MEASURE = "gradient_l2_squared"


@dataclass(frozen=True)
class Score:
    """A share of right answers, and of how many."""

    on: str
    """"test", "validation" or "folds"."""
    share: float
    right: int
    count: int
    balanced: float | None = None

    @property
    def told(self) -> str:
        """With its count and interval, in words."""
        return accuracy(self.right, self.count) if self.count else percent(self.share)

    @property
    def images(self) -> str:
        """The images that it is of, in words."""
        return "held-out labelled images" if self.on == "folds" else f"{self.on} images"


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    path: Path
    name: str
    config: Config
    events: list[Event]
    split: dict[str, Any]
    """split.json; empty where it cannot be read."""
    summary: dict[str, Any]
    """summary.json; empty while the run is unfinished."""

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @cached_property
    def rounds(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "round"]

    @cached_property
    def evaluations(self) -> list[Event]:
        found = [event for event in self.events if event["event"] == "eval"]
        return [event for event in found if finite(event.get("accuracy")) is not None]

    @property
    def played(self) -> int:
        """How many rounds the events tell of."""
        return max((event["round"] for event in self.events), default=0)

    @property
    def planned(self) -> int:
        return self.config.federation.rounds or self.played

    @cached_property
    def accuracy(self) -> Points:
        return self.told("accuracy", "eval")

    @cached_property
    def watched(self) -> Points:
        """Accuracy as it was followed: on validation images where the test images come last."""
        return self.validation if self.test_kept else self.accuracy

    @cached_property
    def validation(self) -> Points:
        return self.told("validation_accuracy", "eval")

    @property
    def judged_by(self) -> str:
        """The images by which the run is judged: "test" ones, "validation" where those are never seen, or
        the labelled images in "folds"."""
        if self.summary.get("judged_by") == "folds" or (
            self.config.run.folds and self.split.get("test") == 0
        ):
            return "folds"
        return "validation" if self.config.run.test == "never" else "test"

    @cached_property
    def score(self) -> "Score | None":
        """How good the model is in the end, or so far."""
        kind = self.judged_by
        prefix = "validation_" if kind == "validation" else ""
        told: dict[str, Any] = self.summary
        if finite(told.get(f"{prefix}accuracy")) is None:
            found = [e for e in self.events if finite(e.get(f"{prefix}accuracy")) is not None]
            told = found[-1] if found and kind != "folds" else {}
        share = finite(told.get(f"{prefix}accuracy"))
        if share is None:
            return None
        count = finite(told.get(f"{prefix}count")) or finite(self.split.get(kind)) or 0.0
        right = finite(told.get(f"{prefix}correct"))
        balanced = None if prefix else finite(told.get("balanced_accuracy"))
        return Score(kind, share, round(share * count) if right is None else int(right), int(count), balanced)

    @property
    def verdict(self) -> str | None:
        """Whether the unlabelled images helped, in words."""
        told = inside(self.summary.get("verdict"), "text")
        return told[:2000] if isinstance(told, str) else None

    @property
    def is_uneven(self) -> bool:
        """Whether the classes of the test images differ much in size."""
        return statistics.is_uneven([count or 0 for count in numbers(self.split.get("test_classes"))])

    @property
    def judged(self) -> Points:
        if self.judged_by == "folds":
            return [(self.played, self.score.share)] if self.score else []
        return self.validation if self.judged_by == "validation" else self.accuracy

    @property
    def test_kept(self) -> bool:
        """Whether test images are kept, for the last round or for ever, and validation images followed."""
        return self.config.run.test != "every"

    @cached_property
    def classes(self) -> list[str]:
        found = self.split.get("classes")
        return [str(name) for name in found] if isinstance(found, list) else []

    @cached_property
    def class_accuracy(self) -> list[float | None]:
        """Of each class on the test images, as the last evaluation told it."""
        told = [numbers(event.get("class_accuracy")) for event in self.evaluations]
        return next((values for values in reversed(told) if values), [])

    @cached_property
    def user_classes(self) -> list[list[float | None]]:
        """How many images of each class every listed user holds."""
        listed = self.split.get("user_classes")
        return [numbers(row) for row in listed] if isinstance(listed, list) else []

    @property
    def users(self) -> int:
        return self.config.split.users

    @property
    def streams(self) -> int:
        return self.config.federation.groups or 1

    @property
    def grouped(self) -> bool:
        """Whether users are dealt into groups with models of their own."""
        return self.streams > 1 and self.config.method.start == "group"

    def curve(self, value: Callable[[Event], Any], kind: str) -> Points:
        """A number over the rounds in which it was told."""
        told = [(event["round"], finite(value(event))) for event in self.events if event["event"] == kind]
        return [(at, found) for at, found in told if found is not None]

    def told(self, key: str, kind: str = "round") -> Points:
        """A field of the events of a kind, over the rounds."""
        return self.curve(lambda event: event.get(key), kind)

    def diversity(self, normalisation: str) -> Points:
        """Gradient diversity, "definition" (Definition 1) or "authors" (n·Δ), "..._groups" within groups."""
        return self.curve(lambda event: inside(event.get(MEASURE), normalisation), "diversity")


def read(path: Path, name: str) -> Run:
    """A run folder under a name; one line says what is wrong where there is none."""
    config = folder.read_config(path)
    try:
        events = list(folder.read_events(path))
    except RunError:
        raise RunError(f"{path} is damaged: its events.jsonl cannot be read; start the run anew") from None
    known = [e for e in events if e["event"] in ("round", "eval", "diversity") and 0 <= e["round"] <= 10**9]
    split = _object(path / "split.json")
    config = roster.joined(config, len(split["sites"]) if isinstance(split.get("sites"), list) else 0)
    return Run(path, name, config, known, split, folder.read_summary(path) or {})


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(values: Any) -> list[float | None]:
    """A list of numbers, None where one is not; nothing where it is no list."""
    return [finite(value) for value in values] if isinstance(values, list) else []


def whole(values: Any) -> list[int]:
    """The whole numbers of a list, such as users."""
    return [value for value in values if type(value) is int] if isinstance(values, list) else []


def inside(value: Any, key: str) -> Any:
    """`value[key]` where there is such a thing."""
    return value.get(key) if isinstance(value, dict) else None


def thinned(points: Points) -> Points:
    """At most so many of the points, evenly; the first and the last are among them."""
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(k * last / (MOST_POINTS - 1))] for k in range(MOST_POINTS)]


def settings(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return {f"{section}.{key}": v for section, keys in as_dict(config).items() for key, v in keys.items()}


def _object(path: Path) -> dict[str, Any]:
    try:
        found = plain_files.parse_json(plain_files.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
