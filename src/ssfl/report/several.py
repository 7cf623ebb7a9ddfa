"""Compares several runs. Runs that differ only in their seeds are grouped into one experiment."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ssfl.core.statistics import accuracy_interval
from ssfl.report.gather import Points, Run, Score, settings, thinned
from ssfl.runs import folder
from ssfl.runs.text import interval

_BESIDE = ("split.seed", "data.root", "data.download")
"""Settings that may differ between runs of the same experiment. All settings of the section [run] may differ
too."""
_SEPARATORS = "-_. /="


@dataclass(frozen=True)
class Family:
    """An experiment: one or more runs that differ at most in their seeds, in the section [run] and in where
    the data are stored. All their other settings are the same."""

    label: str
    """What the runs have in common, for sentences: the beginning of their names, or the name of a single
    run."""
    runs: list[Run]

    @property
    def name(self) -> str:
        """The label, with the number of seeds if there are several runs."""
        return f"{self.label}, {self.size}" if len(self.runs) > 1 else self.label

    @property
    def size(self) -> str:
        """The number of runs as text, such as "3 seeds". If some runs have the same seeds, it is "3 runs"."""
        alike = len({seed_of(run) for run in self.runs}) < len(self.runs)
        return f"{len(self.runs)} {'runs' if alike else 'seeds'}"

    @property
    def diverged(self) -> int:
        """How many of the runs diverged. The means leave them out."""
        return sum(folder.broke_down(run.path) is not None for run in self.runs)

    @property
    def by_seed(self) -> dict[tuple[int, int], list[Run]]:
        """The runs of `counted` that have an accuracy, by their seeds (see `seed_of`)."""
        seeds: dict[tuple[int, int], list[Run]] = {}
        for run in self.counted:
            if run.judged:
                seeds.setdefault(seed_of(run), []).append(run)
        return seeds

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
    def accuracies(self) -> dict[tuple[int, int], float]:
        """The last accuracy in percent of each seed; the mean if several runs have this seed."""
        return {seed: 100 * fmean(run.judged[-1][1] for run in runs) for seed, runs in self.by_seed.items()}

    @property
    def correct(self) -> str:
        """How many images the only run classifies correctly, such as "912 of 1,000". It is "–" if there are
        several runs, because a mean count is that of no run, or if the run has no accuracy yet."""
        score = self._only_score
        return "–" if score is None else f"{score.correct:,} of {score.count:,}"

    @property
    def interval(self) -> str:
        """The 95 % interval of the accuracy, such as "89.3 to 92.8 %"; "–" if there is none. With several
        runs, it is Student's t interval of the mean over the seeds. With one run, it is Wilson's interval,
        which reflects only the limited number of images."""
        if self._only_score is not None:
            return interval(self._only_score.correct, self._only_score.count)
        ends = accuracy_interval(list(self.accuracies.values())) if len(self.counted) > 1 else None
        return "–" if ends is None else f"{ends.low:.1f} to {ends.high:.1f} %"

    @property
    def _only_score(self) -> Score | None:
        """The accuracy of the only run with its counts; None if there are several runs or no counts."""
        score = self.counted[0].score
        return score if len(self.counted) == 1 and score is not None and score.count else None

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


def families(runs: Sequence[Run]) -> list[Family]:
    """Returns the runs grouped into experiments, in the order of the runs."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(repr(_experiment(run)), []).append(run)
    named: list[Family] = []
    for members in alike.values():
        label = members[0].name
        if len(members) > 1:
            label = _common([run.name for run in members]) or members[0].config.method.name
        taken = {family.label for family in named}
        named.append(Family(label if label not in taken else f"{label} ({members[0].name})", members))
    return named


def seed_of(run: Run) -> tuple[int, int]:
    """Returns the seeds of a run: that of the training (run.seed) and that of the split (split.seed)."""
    return run.config.run.seed, run.config.split.seed


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


def _common(names: Sequence[str]) -> str:
    """Returns the longest text with which all names begin, such as "anchored-lr0.09" for runs that are called
    anchored-lr0.09-seed1 and anchored-lr0.09-seed2. The word "seed", digits of the seed, and separators at
    its end are left out. It is empty if nothing is left."""
    first, last = min(names), max(names)
    same = [one == other for one, other in zip(first, last, strict=False)]
    text = first[: same.index(False) if False in same else len(same)]
    if any(name[len(text) :][:1].isdigit() for name in names):
        text = text.rstrip("0123456789")  # seeds 10 and 11 begin with the same digit
    return re.sub(r"seeds?$", "", text.rstrip(_SEPARATORS), flags=re.IGNORECASE).rstrip(_SEPARATORS)


def _told(value: Any) -> str:
    """Returns a setting's value as a text of at most 60 characters."""
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _short(value: float) -> float:
    """Returns the value rounded to five significant digits, which keeps the page small."""
    return float(f"{value:.5g}")
