"""Compares several runs. Runs that differ only in their seeds are grouped into one experiment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ssfl.core import statistics
from ssfl.report.gather import Points, Run, settings, thinned
from ssfl.report.predictions import Seen
from ssfl.runs.text import interval

_BESIDE = ("split.seed", "data.root", "data.download")
"""Settings that may differ between runs of the same experiment. All settings of the section [run] may differ
too."""
_TRAINING = ("federation.rounds", "federation.epochs", "federation.period", "train.batch_size")
"""Settings that determine how long a run trains. Runs that compare methods should not differ in them."""


@dataclass(frozen=True)
class Family:
    """An experiment: one or more runs that differ at most in their seeds, in the section [run] and in where
    the data are stored. All their other settings are the same."""

    name: str
    runs: list[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs over which means are taken: the finished runs, or all runs if none is finished."""
        return [run for run in self.runs if run.finished] or self.runs

    @property
    def ends(self) -> list[float]:
        """The last accuracy, from 0 to 1, of each run over which means are taken (`counted`). Runs that have
        no accuracy yet are left out."""
        return [run.judged[-1][1] for run in self.counted if run.judged]

    @property
    def counts(self) -> tuple[str, str]:
        """Two texts for a table: the mean number of correct images, such as "912.3 of 1,000", and the 95 %
        interval of the accuracy. Both are "–" if the runs have different numbers of images, or no accuracy
        yet."""
        scores = [run.score for run in self.counted if run.score is not None and run.score.count]
        if not scores or len({score.count for score in scores}) > 1:
            return "–", "–"
        correct, count = fmean(score.correct for score in scores), scores[0].count
        text = f"{correct:,.0f}" if len(scores) == 1 else f"{correct:,.1f}"
        return f"{text} of {count:,}", interval(correct, count)

    def curve(self, look: int, points_of: Callable[[Run], Points]) -> dict[str, Any] | None:
        """Returns the experiment's line in a chart: the mean over the runs in `counted`, with a band of one
        standard deviation. `points_of` returns the points of a run. `look` is the number of the line's colour
        and line style. Returns None if there are no points."""
        curves = [dict(points) for points in map(points_of, self.counted) if points]
        if not curves:
            return None
        shared = sorted(set.intersection(*(set(points) for points in curves)))
        at = [x for x, _ in thinned([(x, 0.0) for x in shared])]
        series: dict[str, Any] = {"name": self.name, "look": look}
        series["points"] = [[x, _short(fmean(points[x] for points in curves))] for x in at]
        if len(curves) > 1:
            spread = [(x, [points[x] for points in curves]) for x in at]
            series["band"] = [
                [x, _short(fmean(values) - stdev(values)), _short(fmean(values) + stdev(values))]
                for x, values in spread
            ]
        return series


def conclusion(families: Sequence[Family], seen: Sequence[Seen | str]) -> list[str]:
    """Returns a list with a sentence that says whether the best two experiments differ clearly. A second
    sentence warns if the comparison of their methods is not fair. Each experiment is represented by its first
    run, and the two runs are compared on the same test images.

    Only finished runs on the same data are compared. If fewer than two experiments have such a run, the list
    is empty. `seen` has the predictions for each experiment, or a sentence that says why there are none.
    """
    known = [
        (sum(look.correct), family, look)
        for family, look in zip(families, seen, strict=False)
        if not isinstance(look, str) and look.correct and family.runs[0].finished
    ]
    known = [one for one in known if one[2].source == known[0][2].source]
    if len(known) < 2:
        return []
    (_, first, best), (_, second, other) = sorted(known, key=lambda one: -one[0])[:2]
    pair = statistics.paired(best.correct or [], other.correct or [])
    low, high = (100 * end for end in pair.interval)
    between = f"95 % interval of the difference: {low:+.1f} to {high:+.1f} percentage points".replace(
        "-", "−"
    )
    numbers = (
        f"{first.runs[0].name} has {pair.correct:,} correct, {second.runs[0].name} {pair.other_correct:,}"
    )
    unequal = _unequal(first.runs[0], second.runs[0])
    if low > 0:
        better = f"Of {pair.count:,} test images, {numbers}: {first.runs[0].name} is better ({between})."
        return [better, *unequal]
    too_few = f"{pair.count:,} test images are too few to tell the best two apart"
    verdict = too_few if pair.count < statistics.FEW else "The best two do not clearly differ"
    of = "" if pair.count < statistics.FEW else f"of {pair.count:,} test images, "
    return [f"{verdict}: {of}{numbers} ({between}).", *unequal]


def _unequal(one: Run, other: Run) -> list[str]:
    """Returns a list with one sentence that warns if runs of two methods also differ in their split or in the
    length of training, so that they do not compare the methods alone. Otherwise the list is empty."""
    if one.config.method.name == other.config.method.name:
        return []
    unequal = [
        f"{key} ({mine} and {theirs})"
        for key, (mine, theirs) in differences([one, other])
        if key.startswith("split.") or key in _TRAINING
    ]
    if not unequal:
        return []
    return [f"These two runs do not compare the methods alone: they also differ in {', '.join(unequal)}."]


def families(runs: Sequence[Run]) -> list[Family]:
    """Returns the runs grouped into experiments, in the order of the runs."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(repr(_experiment(run)), []).append(run)
    named: list[Family] = []
    for members in alike.values():
        name = members[0].name
        if len(members) > 1:
            shared = _beginning([run.name for run in members]).rstrip("-_. /0123456789")
            name = f"{shared or members[0].config.method.name}, {len(members)} seeds"
        taken = {family.name for family in named}
        named.append(Family(name if name not in taken else f"{name} ({members[0].name})", members))
    return named


def _experiment(run: Run) -> dict[str, Any]:
    """Returns the settings that define the experiment of a run. Runs with equal settings here belong to the
    same experiment."""
    return {k: v for k, v in settings(run.config).items() if not k.startswith("run.") and k not in _BESIDE}


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns the settings that differ between the runs: the name of each setting, and its value in each run
    as text."""
    each = [settings(run.config) for run in runs]
    keys = dict.fromkeys(key for one in each for key in one)  # each method has other settings
    return [
        (key, [_told(one[key]) if key in one else "–" for one in each])
        for key in keys
        if any(key not in one or one[key] != each[0].get(key) for one in each)
    ]


def spread(values: Sequence[float]) -> str:
    """Returns the mean and the standard deviation of fractions as a text in percent, such as "91.2 ± 0.4 %".
    A single value has no deviation. Without values, the text is a dash."""
    if not values:
        return "–"
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{deviation} %"


def distinct(paths: Sequence[Path]) -> dict[Path, str]:
    """Returns a short name for each run folder: the end of its path, as long as needed to tell the folders
    apart. A folder that is listed twice appears once."""
    whole = {path: path.resolve().parts for path in paths}
    once = {
        parts: path for path, parts in reversed(whole.items())
    }  # a folder that is named twice counts once
    unique = {path: parts for path, parts in whole.items() if once[parts] == path}
    for depth in range(1, max(map(len, unique.values())) + 1):
        names = {path: "/".join(parts[-depth:]) for path, parts in unique.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: str(path) for path in unique}


def _beginning(names: Sequence[str]) -> str:
    """Returns the longest text with which all names begin."""
    first, last = min(names), max(names)
    same = [one == other for one, other in zip(first, last, strict=False)]
    return first[: same.index(False) if False in same else len(same)]


def _told(value: Any) -> str:
    """Returns a setting's value as a text of at most 60 characters."""
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _short(value: float) -> float:
    """Returns the value rounded to five significant digits, which keeps the page small."""
    return float(f"{value:.5g}")
