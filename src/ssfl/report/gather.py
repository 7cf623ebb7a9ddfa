"""Reads the data of one run folder, finished or not, for a report.

Old folders lack some fields, and a damaged or malicious folder may contain anything. So every number is
checked, and values that are missing or wrong are left out.
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

Points = list[tuple[int, float]]
MOST_POINTS = 400
"""The most points of a curve. More would not be visible, and the page would grow with every round."""
MEASURE = "gradient_l2_squared"


@dataclass(frozen=True)
class Score:
    """An accuracy, with the number of correct images and of all images."""

    on: str
    """"test", "validation" or "folds"."""
    share: float
    correct: int
    count: int
    balanced: float | None = None

    @property
    def images(self) -> str:
        """The images on which it was measured, in words."""
        return "held-out labelled images" if self.on == "folds" else f"{self.on} images"


@dataclass(frozen=True)
class Run:
    """What a report needs to know about a run folder."""

    path: Path
    name: str
    config: Config
    events: list[Event]
    split: dict[str, Any]
    """split.json; empty if it cannot be read."""
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
        events = [event for event in self.events if event["event"] == "eval"]
        return [event for event in events if finite(event.get("accuracy")) is not None]

    @property
    def played(self) -> int:
        """The number of the last round in the events."""
        return max((event["round"] for event in self.events), default=0)

    @property
    def planned(self) -> int:
        return self.config.federation.rounds or self.played

    @cached_property
    def accuracy(self) -> Points:
        return self.series("accuracy", "eval")

    @cached_property
    def watched(self) -> Points:
        """The accuracy over the rounds. It is that on validation images if test images are used only at the
        end."""
        return self.validation if self.test_kept else self.accuracy

    @cached_property
    def validation(self) -> Points:
        return self.series("validation_accuracy", "eval")

    @property
    def judged_by(self) -> str:
        """The images that decide how good the run is: "test", "validation" if test images are never used, or
        "folds" for cross-validation on the labelled images."""
        if self.summary.get("judged_by") == "folds" or (
            self.config.run.folds and self.split.get("test") == 0
        ):
            return "folds"
        return "validation" if self.config.run.test == "never" else "test"

    @cached_property
    def score(self) -> "Score | None":
        """The accuracy of the final model, or of the latest one while the run is unfinished."""
        kind = self.judged_by
        prefix = "validation_" if kind == "validation" else ""
        scores: dict[str, Any] = self.summary
        if finite(scores.get(f"{prefix}accuracy")) is None:
            evaluations = [e for e in self.events if finite(e.get(f"{prefix}accuracy")) is not None]
            scores = evaluations[-1] if evaluations and kind != "folds" else {}
        share = finite(scores.get(f"{prefix}accuracy"))
        if share is None:
            return None
        count = finite(scores.get(f"{prefix}count")) or finite(self.split.get(kind)) or 0.0
        correct = finite(scores.get(f"{prefix}correct"))
        balanced = None if prefix else finite(scores.get("balanced_accuracy"))
        return Score(
            kind, share, round(share * count) if correct is None else int(correct), int(count), balanced
        )

    @property
    def verdict(self) -> str | None:
        """Whether the unlabelled images helped, in words."""
        text = inside(self.summary.get("verdict"), "text")
        return text[:2000] if isinstance(text, str) else None

    @property
    def is_uneven(self) -> bool:
        """Whether the numbers of test images per class differ much."""
        return statistics.is_uneven([count or 0 for count in numbers(self.split.get("test_classes"))])

    @property
    def judged(self) -> Points:
        if self.judged_by == "folds":
            return [(self.played, self.score.share)] if self.score else []
        return self.validation if self.judged_by == "validation" else self.accuracy

    @property
    def test_kept(self) -> bool:
        """Whether test images are used only in the last round or never. Curves then show the accuracy on
        validation images."""
        return self.config.run.test != "every"

    @cached_property
    def classes(self) -> list[str]:
        names = self.split.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @cached_property
    def class_accuracy(self) -> list[float | None]:
        """The accuracy of each class on the test images, from the last evaluation that recorded it."""
        values_by_evaluation = [numbers(event.get("class_accuracy")) for event in self.evaluations]
        return next((values for values in reversed(values_by_evaluation) if values), [])

    @cached_property
    def user_classes(self) -> list[list[float | None]]:
        """The number of images of each class, for every user that split.json lists."""
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
        """Whether users are divided into groups with their own models."""
        return self.streams > 1 and self.config.method.start == "group"

    def curve(self, value: Callable[[Event], Any], kind: str) -> Points:
        """Returns points of round and number, where `value` computes the number from each event of this
        kind."""
        points = [(event["round"], finite(value(event))) for event in self.events if event["event"] == kind]
        return [(at, number) for at, number in points if number is not None]

    def series(self, key: str, kind: str = "round") -> Points:
        """Returns points of round and number, for a field of the events of this kind."""
        return self.curve(lambda event: event.get(key), kind)

    def diversity(self, normalisation: str) -> Points:
        """Returns the gradient diversity over the rounds. The normalisation is "definition" (Definition 1) or
        "authors" (n·Δ); with "..._groups" it is measured within groups."""
        return self.curve(lambda event: inside(event.get(MEASURE), normalisation), "diversity")


def read(path: Path, name: str) -> Run:
    """Returns the data of a run folder, with a name for the report; raises if it is not a run folder."""
    config = folder.read_config(path)
    try:
        events = list(folder.read_events(path))
    except RunError as error:
        raise RunError(f"{error}: restore that file, or make it readable", value=error.value) from None
    known = [e for e in events if e["event"] in ("round", "eval", "diversity") and 0 <= e["round"] <= 10**9]
    split = _object(path / "split.json")
    config = roster.joined(config, len(split["sites"]) if isinstance(split.get("sites"), list) else 0)
    return Run(path, name, config, known, split, folder.read_summary(path) or {})


def finite(value: Any) -> float | None:
    """Returns the value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(values: Any) -> list[float | None]:
    """Returns a list of numbers, with None for values that are not numbers; an empty list if the argument is
    no list."""
    return [finite(value) for value in values] if isinstance(values, list) else []


def whole(values: Any) -> list[int]:
    """Returns the whole numbers in a list, such as the numbers of users; other items are left out."""
    return [value for value in values if type(value) is int] if isinstance(values, list) else []


def inside(value: Any, key: str) -> Any:
    """Returns `value[key]` if `value` is a dict, else None."""
    return value.get(key) if isinstance(value, dict) else None


def thinned(points: Points) -> Points:
    """Returns at most MOST_POINTS of the points, evenly spaced, always with the first and the last."""
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(k * last / (MOST_POINTS - 1))] for k in range(MOST_POINTS)]


def settings(config: Config) -> dict[str, Any]:
    """Returns every setting by its dotted name."""
    return {f"{section}.{key}": v for section, keys in as_dict(config).items() for key, v in keys.items()}


def _object(path: Path) -> dict[str, Any]:
    try:
        content = plain_files.parse_json(plain_files.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
