"""What came of a contest: a table, a JSON file and a picture."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ssfl.core.statistics import wilson
from ssfl.runs import folder as runs
from ssfl.runs import provenance, text

ROOM = 12.0
"""How many points below the middle method the picture reaches."""


@dataclass(frozen=True)
class Standing:
    """What became of a method."""

    method: str
    options: tuple[str, ...]
    accuracies: list[float]
    """On test images after the last round, a number for each seed that did not break down."""
    diverged: int
    images: int
    """User images in one run: those that the steps of all rounds draw, the same for every method."""
    megabytes: float
    """Sent to and from users in one run."""
    rounds: int
    curve: list[tuple[float, ...]] = field(default_factory=list)
    """(images, megabytes, validation accuracy), the mean over seeds."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Of each run that did not break down: seed, test accuracy, seconds, device, commit."""
    server_images: int = 0
    """Forward and backward passes of the server's images in one run; nothing makes them equal."""
    tries: list[dict[str, Any]] = field(default_factory=list)
    """What was to choose from, and the accuracy on validation images that it had."""
    flag: str = ""
    """What a reader must know about the method."""
    passes: int = 0
    """Forward and backward passes of user images in one run."""
    collapsed: int = 0
    """How many runs ended far below their own best validation accuracy."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config of the first run."""

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.accuracies) if self.accuracies else None

    @property
    def images_tested(self) -> int | None:
        """How many test images every accuracy is of."""
        counts = {run["test_images"] for run in self.runs}
        return counts.pop() if len(counts) == 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """In percent, of the mean accuracy: what that many test images can tell."""
        if self.mean is None or not self.images_tested:
            return None
        low, high = wilson(self.mean / 100 * self.images_tested, self.images_tested)
        return 100 * low, 100 * high

    @property
    def right(self) -> tuple[str, str]:
        """How many test images are right, on average over the seeds, and the interval of their share."""
        if self.mean is None or self.interval is None or self.images_tested is None:
            return "–", "–"
        low, high = self.interval
        return (
            f"{self.mean / 100 * self.images_tested:.4g} of {self.images_tested:,}",
            f"{low:.1f} to {high:.1f}",
        )

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def table(standings: Sequence[Standing]) -> str:
    """Best first, with what it cost."""
    head = ["method", "test accuracy, %", "right", "95 % interval", "first minus this [95 %]", "seeds",
            "collapsed", "rounds", "user images, million", "passes, million", "server images, million",
            "sent, MB", "chosen"]  # fmt: skip
    rows = [head]
    for one in standings:
        mean, deviation = one.mean, one.deviation
        told = "broke down" if mean is None else f"{mean:.2f}"
        told += "" if deviation is None else f" ± {deviation:.2f}"
        told += f" ({one.diverged} broke down)" if one.diverged and mean is not None else ""
        millions = [f"{number / 1e6:.3g}" for number in (one.images, one.passes, one.server_images)]
        seeds, lost = len(one.accuracies) + one.diverged, one.collapsed + one.diverged
        chosen = " ".join(one.options) or "–"
        name = one.method + " *" * bool(one.flag)
        behind = _behind(one, standings[0])
        rows.append([name, told, *one.right, behind, str(seeds), str(lost), str(one.rounds), *millions,
                     f"{one.megabytes:.4g}", chosen])  # fmt: skip
    commits = {str(run["commit"]) for one in standings for run in one.runs}
    note = f"\nruns of {len(commits)} commits: contest.json says which" if len(commits) > 1 else ""
    flagged = [f"\n* {one.method}: {one.flag}" for one in standings if one.flag]
    return text.table(rows) + _images(standings) + note + "".join(flagged)


def _images(standings: Sequence[Standing]) -> str:
    """How many images the figures are of: of few they say little."""
    for run in (run for one in standings for run in one.runs):
        kept = f"; {run['validation_images']:,} training images set aside draw the curves"
        return f"\naccuracy is of {run['test_images']:,} test images{kept}"
    return ""


def _behind(one: Standing, first: Standing) -> str:
    """How many points, and the interval over seeds."""
    found = _interval(one, first)
    if found is None:
        return "–"
    mean, low, high = found
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def difference(ours: dict[int, float], theirs: dict[int, float]) -> tuple[float, float | None] | None:
    """The mean of the differences by seed, and half the width of its 95 % interval by Student's t; None where
    no seed is common to both, or for one seed alone."""
    from scipy.stats import t

    apart = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not apart:
        return None
    count = len(apart)
    half = t.ppf(0.975, count - 1) * statistics.stdev(apart) / count**0.5 if count > 1 else None
    return statistics.mean(apart), None if half is None else float(half)


def paired(ours: dict[int, float], theirs: dict[int, float], sign: str = "") -> str:
    """How far numbers by seed are apart where both have the seed, and the standard error; `sign` as in a
    format."""
    apart = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not apart:
        return "–"
    error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.2f}" if len(apart) > 1 else ""
    return f"{statistics.mean(apart):{sign}.2f}{error}"


def _interval(one: Standing, first: Standing) -> list[float | None] | None:
    """The mean difference to the first and the ends of its 95 % interval: a seed's split is the same for
    both."""
    theirs, best = ({run["seed"]: 100 * run["accuracy"] for run in each.runs} for each in (one, first))
    found = difference(best, theirs)
    if found is None or one is first:
        return None
    mean, half = found
    return [mean, None, None] if half is None else [mean, mean - half, mean + half]


def write(standings: Sequence[Standing], out: Path, told: dict[str, Any]) -> Path:
    """contest.json: the standings and how they came about."""
    entries = [
        {
            "method": one.method, "mean": one.mean, "interval": one.interval, "deviation": one.deviation,
            "accuracies": one.accuracies,
            "diverged": one.diverged, "options": one.options, "rounds": one.rounds, "images": one.images,
            "server_images": one.server_images, "megabytes": one.megabytes, "runs": one.runs,
            "tries": one.tries, "validation_curve": one.curve, "flag": one.flag or None,
            "passes": one.passes, "collapsed": one.collapsed, "config": one.config,
            "first_minus_this": _interval(one, standings[0]),
        }
        for one in standings
    ]  # fmt: skip
    file = out / "contest.json"
    known = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "versions": runs.versions(),
    }
    runs.write_atomic(file, (json.dumps(told | known | {"standings": entries}, indent=1) + "\n").encode())
    return file


def draw(standings: Sequence[Standing], out: Path) -> list[Path]:
    """Validation accuracy against user images and against megabytes, PNG and SVG."""
    from ssfl.report import plots

    plt = plots.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for number, one in enumerate(standings):
        style = {"linestyle": plots.STYLES[number % len(plots.STYLES)], "marker": "osD^vP*X"[number % 8]}
        for axis, cost, unit in zip(axes, (0, 1), (1e6, 1.0), strict=True):
            points = [(point[cost] / unit, point[2]) for point in one.curve]
            if points and points[-1][0]:
                every = 0.2 if len(points) > 8 else 1
                label = f"{one.method}: {points[-1][1]:.1f}"
                axis.plot(*zip(*points, strict=True), label=label, markevery=every, markersize=4, **style)
            elif points:  # no user takes part: where it ends is a line to beat
                label = f"{one.method}: {points[-1][1]:.1f} (its end)"
                axis.axhline(points[-1][1], label=label, color="0.4", linestyle=":")
    ends = [one.curve[-1][2] for one in standings if one.curve]
    if ends:  # who collapsed would leave no room for the others
        lowest = max(0.0, statistics.median(ends) - ROOM)
        axes[0].set_ylim(bottom=lowest, top=min(100.0, max(ends) + ROOM / 5))
    judged = [f" of {run['validation_images']:,} images" for one in standings for run in one.runs]
    axes[0].set(xlabel="user images, million", ylabel=f"validation accuracy{''.join(judged[:1])}, %")
    axes[1].set(xlabel="megabytes sent")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=6)  # in a trial numbers are long, and more would overlap
    if ends:
        axes[0].legend(fontsize=8)
    files = [out / "contest.png", out / "contest.svg"]
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files
