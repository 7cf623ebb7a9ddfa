"""The results of a contest, as a table, a JSON file and a picture."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ssfl.core.statistics import mean_difference, wilson
from ssfl.runs import folder as runs
from ssfl.runs import provenance, text

FEW = 0.01
"""If users have pseudo-labels for a smaller fraction of their images, a contest says little about how a
method uses unlabelled images."""
ROOM = 12.0
"""How far, in percentage points, the picture extends below the accuracy of the median method."""


@dataclass(frozen=True)
class Standing:
    """The results of one method in a contest, over all its seeds. `options` are its chosen settings."""

    method: str
    options: tuple[str, ...]
    accuracies: list[float]
    """The test accuracy after the last round in percent, one for each seed that did not diverge."""
    diverged: int
    """How many seeds diverged."""
    images: int
    """How many images the users trained on in one run; an image counts in every step that uses it. With
    `--equal images` it is the same for every method that trains users."""
    megabytes: float
    """Megabytes that users sent and received in one run."""
    rounds: int
    curve: list[tuple[float, ...]] = field(default_factory=list)
    """The learning curve. Each point has three numbers. The first is how many images users have trained on so
    far. The second is how many megabytes users have sent and received so far. The third is the validation
    accuracy in percent. All three are means over the seeds that did not diverge."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """For each run that did not diverge: its seed, test accuracy (from 0 to 1), seconds, device, commit and
    more."""
    server_images: int = 0
    """How many images the server trained on in one run; an image counts in every step that uses it. It may
    differ between methods."""
    tries: list[dict[str, Any]] = field(default_factory=list)
    """The settings that were tried on validation images before the contest, with the validation accuracy of
    each."""
    flag: str = ""
    """A remark for readers of the table, such as that the method uses the users' labels; "" if there is
    none."""
    passes: int = 0
    """How many forward and backward passes the users made in one run. A pass is one image that goes forward
    and backward through the network once."""
    collapsed: int = 0
    """How many runs collapsed: they ended far below their own best validation accuracy."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config of the first run that did not diverge, without paths of this machine."""

    @property
    def mean(self) -> float | None:
        """The mean test accuracy in percent, or None if every seed diverged."""
        return statistics.mean(self.accuracies) if self.accuracies else None

    @property
    def mask_rate(self) -> float | None:
        """The fraction of the users' images with a label or pseudo-label, as a mean over rounds and runs.
        None if no user trained."""
        rates = [run["mask_rate"] for run in self.runs if run.get("mask_rate") is not None]
        return statistics.mean(rates) if rates else None

    @property
    def images_tested(self) -> int | None:
        """The number of test images. None if it differs between the runs, or if every seed diverged."""
        counts = {run["test_images"] for run in self.runs}
        return counts.pop() if len(counts) == 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean accuracy in percent. It reflects only the limited number of test
        images, not the differences between seeds. None if the mean or the number of test images is None."""
        if self.mean is None or not self.images_tested:
            return None
        low, high = wilson(self.mean / 100 * self.images_tested, self.images_tested)
        return 100 * low, 100 * high

    @property
    def correct(self) -> tuple[str, str]:
        """Two texts for a table. The first is the mean number of correctly classified test images, such as
        "912.3 of 1,000". The second is `interval`, such as "89.3 to 92.8". Both are "–" if unknown."""
        if self.mean is None or self.interval is None or self.images_tested is None:
            return "–", "–"
        low, high = self.interval
        return (
            f"{self.mean / 100 * self.images_tested:.4g} of {self.images_tested:,}",
            f"{low:.1f} to {high:.1f}",
        )

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the test accuracy over the seeds in percentage points. It needs
        at least two seeds that did not diverge; otherwise it is None."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def table(standings: Sequence[Standing]) -> str:
    """Returns the results as a table for the terminal, one line per method, with accuracies and costs."""
    head = ["method", "test accuracy, %", "correct", "95 % interval", "behind the first [95 % interval]",
            "seeds", "collapsed", "rounds", "user images, million", "passes, million", "server images, "
            "million",
            "sent, MB", "chosen"]  # fmt: skip
    rows = [head]
    for standing in standings:
        mean, deviation = standing.mean, standing.deviation
        accuracy = "diverged" if mean is None else f"{mean:.2f}"
        accuracy += "" if deviation is None else f" ± {deviation:.2f}"
        accuracy += f" ({standing.diverged} diverged)" if standing.diverged and mean is not None else ""
        millions = [
            f"{number / 1e6:.3g}" for number in (standing.images, standing.passes, standing.server_images)
        ]
        seeds, lost = len(standing.accuracies) + standing.diverged, standing.collapsed + standing.diverged
        chosen = " ".join(standing.options) or "–"
        name = standing.method + " *" * bool(standing.flag)
        behind = _behind(standing, standings[0])
        rows.append([name, accuracy, *standing.correct, behind, str(seeds), str(lost), str(standing.rounds),
                     *millions, f"{standing.megabytes:.4g}", chosen])  # fmt: skip
    commits = {str(run["commit"]) for standing in standings for run in standing.runs}
    note = (
        f"\nthe runs were made with {len(commits)} different commits of ssfl; contest.json lists them"
        if len(commits) > 1
        else ""
    )
    flagged = [f"\n* {standing.method}: {standing.flag}" for standing in standings if standing.flag]
    hardly_used = [
        f"\n{standing.method}: its users made pseudo-labels for only {100 * standing.mask_rate:.2g} % of "
        "their images, so this contest says little about how it uses unlabelled images"
        for standing in standings
        if standing.mask_rate is not None and standing.mask_rate < FEW
    ]
    return text.table(rows) + _images(standings) + note + "".join([*hardly_used, *flagged])


def _images(standings: Sequence[Standing]) -> str:
    """Returns a line that says how many test and validation images were used; "" if no run has finished."""
    for run in (run for one in standings for run in one.runs):
        return (
            f"\naccuracy on {run['test_images']:,} test images; the curves use "
            f"{run['validation_images']:,} validation images"
        )
    return ""


def _behind(standing: Standing, first: Standing) -> str:
    """Returns as text how many percentage points a method is behind the first (best) method, with the 95 %
    interval over the seeds. The interval is left out if only one seed is common to both methods. Returns "–"
    for the first method itself, or if no seed is common."""
    interval = _interval(standing, first)
    if interval is None:
        return "–"
    mean, low, high = interval
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _interval(standing: Standing, first: Standing) -> list[float | None] | None:
    """Returns how many percentage points the first (best) method is better than this one, as [mean, low,
    high]. Low and high are the ends of the 95 % interval, or None for a single seed. Returns None for the
    first method itself, or if no seed is common to both methods.

    Differences are taken seed by seed, since both methods have the same split for the same seed.
    """
    theirs, best = ({run["seed"]: 100 * run["accuracy"] for run in each.runs} for each in (standing, first))
    apart = mean_difference(best, theirs)
    if apart is None or standing is first:
        return None
    mean, half = apart
    return [mean, None, None] if half is None else [mean, mean - half, mean + half]


def write(standings: Sequence[Standing], out: Path, origin: dict[str, Any]) -> Path:
    """Writes contest.json with all results, and returns its path. `origin` says how they were made, such as
    the command."""
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
    runs.write_atomic(file, (json.dumps(origin | known | {"standings": entries}, indent=1) + "\n").encode())
    return file


def draw(standings: Sequence[Standing], out: Path) -> list[Path]:
    """Draws two plots of the validation accuracy, with one curve per method. One is against the number of
    images that users trained on, the other against the megabytes that users sent and received. Returns the
    paths of the PNG and SVG files."""
    from ssfl.report import plots

    plt = plots.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for number, standing in enumerate(standings):
        style = {"linestyle": plots.STYLES[number % len(plots.STYLES)], "marker": "osD^vP*X"[number % 8]}
        for axis, cost, unit in zip(axes, (0, 1), (1e6, 1.0), strict=True):
            points = [(point[cost] / unit, point[2]) for point in standing.curve]
            if points and points[-1][0]:
                every = 0.2 if len(points) > 8 else 1
                label = f"{standing.method}: {points[-1][1]:.1f}"
                axis.plot(*zip(*points, strict=True), label=label, markevery=every, markersize=4, **style)
            elif points:  # no user takes part: its final accuracy is a horizontal line
                label = f"{standing.method}: {points[-1][1]:.1f} (final)"
                axis.axhline(points[-1][1], label=label, color="0.4", linestyle=":")
    ends = [standing.curve[-1][2] for standing in standings if standing.curve]
    if ends:  # a collapsed method would leave no room for the others
        lowest = max(0.0, statistics.median(ends) - ROOM)
        axes[0].set_ylim(bottom=lowest, top=min(100.0, max(ends) + ROOM / 5))
    judged = [f" of {run['validation_images']:,} images" for standing in standings for run in standing.runs]
    axes[0].set(xlabel="user images, million", ylabel=f"validation accuracy{''.join(judged[:1])}, %")
    axes[1].set(xlabel="megabytes sent and received")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=6)  # more would overlap if the numbers are long
    if ends:
        axes[0].legend(fontsize=8)
    files = [out / "contest.png", out / "contest.svg"]
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files
