"""Reads one run folder, finished or not, for a report.

Folders of older versions lack some fields, and a damaged or malicious folder may contain anything. So every
number is checked, and values that are missing or wrong are left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ssfl.config.settings import Config
from ssfl.config.writing import as_dict
from ssfl.core import plain_files, statistics
from ssfl.core.events import Event
from ssfl.errors import RunError
from ssfl.runs import folder, roster

Points = list[tuple[int, float]]
"""The points of a curve: (round, value)."""
MOST_POINTS = 400
"""The largest number of points in a curve on the page. More would not be visible and would make the page
larger."""
MEASURE = "gradient_l2_squared"
"""The name of the field with the gradient diversity, in events that record it."""


@dataclass(frozen=True)
class Score:
    """A model's accuracy (`share`, from 0 to 1), with the number of correct images and of all images.
    `balanced` is the mean of the accuracies of the classes."""

    on: str
    """The images on which the accuracy was measured: "test", "validation" or "folds" (labelled images in
    cross-validation)."""
    share: float
    correct: int
    count: int
    balanced: float | None = None

    @property
    def images(self) -> str:
        """Returns a phrase for the images on which the accuracy was measured, such as "test images"."""
        return "held-out labelled images" if self.on == "folds" else f"{self.on} images"


@dataclass(frozen=True)
class Run:
    """The content of a run folder, as a report needs it: config, events, split and summary."""

    path: Path
    name: str
    config: Config
    events: list[Event]
    split: dict[str, Any]
    """The content of split.json; empty if the file cannot be read."""
    summary: dict[str, Any]
    """The content of summary.json; empty while the run is unfinished."""

    @property
    def finished(self) -> bool:
        """Whether the run has ended and written its summary."""
        return bool(self.summary)

    @cached_property
    def rounds(self) -> list[Event]:
        """The events of rounds."""
        return [event for event in self.events if event["event"] == "round"]

    @cached_property
    def evaluations(self) -> list[Event]:
        """The events of evaluations that have a valid test accuracy."""
        events = [event for event in self.events if event["event"] == "eval"]
        return [event for event in events if finite(event.get("accuracy")) is not None]

    @property
    def played(self) -> int:
        """The number of rounds done so far: the largest round number in the events."""
        return max((event["round"] for event in self.events), default=0)

    @property
    def planned(self) -> int:
        """The number of rounds that the config asks for."""
        return self.config.federation.rounds or self.played

    @cached_property
    def accuracy(self) -> Points:
        """The test accuracy over the rounds."""
        return self.series("accuracy", "eval")

    @cached_property
    def watched(self) -> Points:
        """The accuracy over the rounds: on validation images if the test images are kept for the end,
        otherwise on test images."""
        return self.validation if self.test_kept else self.accuracy

    @cached_property
    def validation(self) -> Points:
        """The accuracy on the validation images over the rounds."""
        return self.series("validation_accuracy", "eval")

    @property
    def judged_by(self) -> str:
        """The images that decide how good the run is. It is "folds" if there are no test images and the
        labelled images are used in a cross-validation. Otherwise it is "validation" if test images are never
        used, and "test" if they are."""
        if self.summary.get("judged_by") == "folds" or (
            self.config.run.folds and self.split.get("test") == 0
        ):
            return "folds"
        return "validation" if self.config.run.test == "never" else "test"

    @cached_property
    def score(self) -> "Score | None":
        """The accuracy of the final model on the kind of images that `judged_by` names, such as "test". For
        an unfinished run it is that of the latest evaluation. None: the run has no evaluation yet."""
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
        """The sentence from summary.json that says whether the unlabelled images helped; None if there is
        none."""
        text = inside(self.summary.get("verdict"), "text")
        return text[:2000] if isinstance(text, str) else None

    @property
    def is_uneven(self) -> bool:
        """Whether some classes have many more test images than others. The balanced accuracy is shown in this
        case."""
        return statistics.is_uneven([count or 0 for count in numbers(self.split.get("test_classes"))])

    @property
    def judged(self) -> Points:
        """The accuracy over the rounds on the images that decide how good the run is (see `judged_by`). For a
        cross-validation, it is a single point at the last round."""
        if self.judged_by == "folds":
            return [(self.played, self.score.share)] if self.score else []
        return self.validation if self.judged_by == "validation" else self.accuracy

    @property
    def test_kept(self) -> bool:
        """Whether the test images are kept for the last round or never used. Curves then show the accuracy on
        validation images."""
        return self.config.run.test != "every"

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes; empty if split.json does not list them."""
        names = self.split.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @cached_property
    def class_accuracy(self) -> list[float | None]:
        """The test accuracy of each class, from the last evaluation that recorded it; empty if none did."""
        values_by_evaluation = [numbers(event.get("class_accuracy")) for event in self.evaluations]
        return next((values for values in reversed(values_by_evaluation) if values), [])

    @cached_property
    def user_classes(self) -> list[list[float | None]]:
        """For every user that split.json lists: its number of images of each class."""
        listed = self.split.get("user_classes")
        return [numbers(row) for row in listed] if isinstance(listed, list) else []

    @property
    def users(self) -> int:
        """The number of users."""
        return self.config.split.users

    @property
    def streams(self) -> int:
        """The number of groups, each with its own model; 1 without grouping."""
        return self.config.federation.groups or 1

    @property
    def grouped(self) -> bool:
        """Whether users are divided into groups, each with its own model."""
        return self.streams > 1 and self.config.method.start == "group"

    def curve(self, value: Callable[[Event], Any], kind: str) -> Points:
        """Returns the curve of `value` over the rounds, as (round, number). `value` computes the number from
        an event; only events of this `kind` are used, such as "round" or "eval". Invalid numbers are left
        out."""
        points = [(event["round"], finite(value(event))) for event in self.events if event["event"] == kind]
        return [(at, number) for at, number in points if number is not None]

    def series(self, key: str, kind: str = "round") -> Points:
        """Returns the curve of one field of the events over the rounds, as (round, number). `kind` is the
        kind of event, such as "round" or "eval"."""
        return self.curve(lambda event: event.get(key), kind)

    def diversity(self, normalisation: str) -> Points:
        """Returns the curve of the gradient diversity over the rounds, as (round, number).

        `normalisation` is "definition" (Δ, Definition 1 of the paper) or "authors" (n·Δ for n users, as in
        the authors' code). "definition_groups" and "authors_groups" are the means over groups, each computed
        from the users of one group.
        """
        return self.curve(lambda event: inside(event.get(MEASURE), normalisation), "diversity")


def read(path: Path, name: str) -> Run:
    """Returns the content of the run folder at `path`; `name` is the run's name in the report. Raises if
    `path` is not a run folder."""
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
    """Returns the value as a float if it is a finite number, else None. Run folders may contain anything, so
    every number is read through this function."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(values: Any) -> list[float | None]:
    """Returns the values as a list of floats, with None for each one that is not a finite number. Returns []
    if `values` is not a list."""
    return [finite(value) for value in values] if isinstance(values, list) else []


def whole(values: Any) -> list[int]:
    """Returns only the integers in a list, such as user numbers; other items are left out. Returns [] if
    `values` is not a list."""
    return [value for value in values if type(value) is int] if isinstance(values, list) else []


def inside(value: Any, key: str) -> Any:
    """Returns `value[key]` if `value` is a dict that has this key, else None."""
    return value.get(key) if isinstance(value, dict) else None


def thinned(points: Points) -> Points:
    """Returns at most MOST_POINTS of the points, evenly spaced. The first and the last point are always
    included."""
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(k * last / (MOST_POINTS - 1))] for k in range(MOST_POINTS)]


def settings(config: Config) -> dict[str, Any]:
    """Returns the value of every setting by its dotted name, such as "train.batch_size"."""
    return {f"{section}.{key}": v for section, keys in as_dict(config).items() for key, v in keys.items()}


def _object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if the file cannot be read or contains no object."""
    try:
        content = plain_files.parse_json(plain_files.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
