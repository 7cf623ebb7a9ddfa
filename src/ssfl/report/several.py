"""Several runs together: which differ only in the seed, their means, and how settings differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ssfl.core import statistics
from ssfl.report.gather import Points, Run, settings, thinned
from ssfl.report.pictures import Seen
from ssfl.runs.text import interval

_BESIDE = ("split.seed", "data.root", "data.download")
"""With [run], what may differ between runs of the same experiment."""


@dataclass(frozen=True)
class Family:
    """Runs that differ only in their seeds; often one alone."""

    name: str
    runs: list[Run]

    @property
    def counted(self) -> list[Run]:
        """Those that means are over: the finished ones, or all while none is."""
        return [run for run in self.runs if run.finished] or self.runs

    @property
    def ends(self) -> list[float]:
        """The accuracy after the last round of each."""
        return [run.judged[-1][1] for run in self.counted if run.judged]

    @property
    def counts(self) -> tuple[str, str]:
        """How many of how many images are right, on average, and the interval of that share."""
        scores = [run.score for run in self.counted if run.score is not None and run.score.count]
        if not scores or len({score.count for score in scores}) > 1:
            return "–", "–"
        right, count = fmean(score.right for score in scores), scores[0].count
        shown = f"{right:,.0f}" if len(scores) == 1 else f"{right:,.1f}"
        return f"{shown} of {count:,}", interval(right, count)

    def curve(self, look: int, told: Callable[[Run], Points]) -> dict[str, Any] | None:
        """A chart's series: the mean over the seeds, with a band of one deviation to both sides."""
        curves = [dict(points) for points in map(told, self.counted) if points]
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
    """Whether the best two of several experiments can be told apart by their test images."""
    known = [
        (sum(look.right), family, look)
        for family, look in zip(families, seen, strict=False)
        if not isinstance(look, str) and look.right and family.runs[0].finished
    ]
    known = [one for one in known if one[2].source == known[0][2].source]
    if len(known) < 2:
        return []
    (_, first, best), (_, second, other) = sorted(known, key=lambda one: -one[0])[:2]
    pair = statistics.paired(best.right or [], other.right or [])
    low, high = (100 * end for end in pair.interval)
    between = f"95 % interval of the difference: {low:+.1f} to {high:+.1f} points".replace("-", "−")
    numbers = f"{first.runs[0].name} {pair.right:,} right, {second.runs[0].name} {pair.other_right:,}"
    if low > 0:
        return [f"Of {pair.count:,} test images, {numbers}: {first.runs[0].name} is better ({between})."]
    few = f"{pair.count:,} test images are too few to tell the best two apart"
    said = few if pair.count < statistics.FEW else "The best two do not clearly differ"
    of = "" if pair.count < statistics.FEW else f"of {pair.count:,} test images, "
    return [f"{said}: {of}{numbers} ({between})."]


def families(found: Sequence[Run]) -> list[Family]:
    """The runs by experiment, in the order in which they were given."""
    alike: dict[str, list[Run]] = {}
    for run in found:
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
    return {k: v for k, v in settings(run.config).items() if not k.startswith("run.") and k not in _BESIDE}


def differences(found: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs are not all alike, with the value of each."""
    each = [settings(run.config) for run in found]
    keys = dict.fromkeys(key for one in each for key in one)  # methods have settings of their own
    return [
        (key, [_told(one[key]) if key in one else "–" for one in each])
        for key in keys
        if any(key not in one or one[key] != each[0].get(key) for one in each)
    ]


def spread(values: Sequence[float]) -> str:
    """Mean and deviation of shares, in percent."""
    if not values:
        return "–"
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{deviation} %"


def distinct(paths: Sequence[Path]) -> dict[Path, str]:
    """A short name for each folder: as much of the end of its path as tells it from the others."""
    whole = {path: path.resolve().parts for path in paths}
    once = {parts: path for path, parts in reversed(whole.items())}  # a folder given twice counts once
    kept = {path: parts for path, parts in whole.items() if once[parts] == path}
    for depth in range(1, max(map(len, kept.values())) + 1):
        names = {path: "/".join(parts[-depth:]) for path, parts in kept.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: str(path) for path in kept}


def _beginning(names: Sequence[str]) -> str:
    """The letters that all begin with."""
    first, last = min(names), max(names)
    same = [one == other for one, other in zip(first, last, strict=False)]
    return first[: same.index(False) if False in same else len(same)]


def _told(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _short(value: float) -> float:
    return float(f"{value:.5g}")
