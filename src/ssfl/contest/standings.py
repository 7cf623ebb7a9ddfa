"""The results of a contest, as a JSON file and a picture. `texts.py` has the table."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ssfl.core.statistics import SeedMean, accuracy_interval, mean_difference, wilson
from ssfl.runs import folder as runs
from ssfl.runs import provenance, text

GUESSING = 10.0
"""A run stayed near guessing if its best validation accuracy is less than this many percentage points above
that of guessing, which is 100 divided by the number of classes."""
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
    """How many images the users drew for training in one run; an image counts each time it is drawn. With
    `--equal images` it is the same for every method that trains users."""
    megabytes: float
    """Megabytes that users sent and received in one run."""
    rounds: int
    curve: list[tuple[float, ...]] = field(default_factory=list)
    """The learning curve. Each point has three numbers. The first is how many images users have drawn so far.
    The second is how many megabytes users have sent and received so far. The third is the validation
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
    tuned: bool = False
    """Whether the settings were chosen in runs of half the length."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config of the first run that did not diverge, without paths of this machine."""
    seed_curves: list[list[float]] = field(default_factory=list)
    """For each seed that did not diverge, the validation accuracy in percent at each point of `curve`."""
    shared_split: bool = False
    """Whether all seeds have the same users' images, for example because the data name the images of each
    user."""

    @property
    def seeds(self) -> int:
        """How many seeds were run, including those that diverged."""
        return len(self.accuracies) + self.diverged

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
    def interval_kind(self) -> str | None:
        """How `interval` is computed: "student" with several seeds, "wilson" with one. None if there is no
        interval."""
        if self.interval is None:
            return None
        return "student" if self.seeds > 1 else "wilson"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy in percent, within 0 and 100.

        With several seeds, it is Student's t interval of the mean over the seeds. With one seed, it is
        Wilson's interval, which reflects only the limited number of test images. None if the number of seeds
        that did not diverge, or of test images, is too small or unknown. Also None if all seeds have the same
        accuracy, because Student's interval would have no width.
        """
        if self.seeds > 1:
            return accuracy_interval(self.accuracies)
        if self.mean is None or not self.images_tested:
            return None
        low, high = wilson(self.mean / 100 * self.images_tested, self.images_tested)
        return 100 * low, 100 * high

    @property
    def correct(self) -> int | None:
        """How many test images the only run classifies correctly. None with several seeds, because the mean
        count is that of no run."""
        if self.seeds > 1 or self.mean is None or not self.images_tested:
            return None
        return round(self.mean / 100 * self.images_tested)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the test accuracy over the seeds in percentage points. It needs
        at least two seeds that did not diverge; otherwise it is None."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def near_guessing(runs: Sequence[dict[str, Any]], classes: int) -> int:
    """Returns how many of these runs stayed near guessing (see `GUESSING`). Runs of older contests whose best
    validation accuracy is unknown do not count."""
    best = [run["best_validation"] for run in runs if run.get("best_validation") is not None]
    return sum(accuracy < 100 / classes + GUESSING for accuracy in best)


def reference(standings: Sequence[Standing], against: str | None) -> Standing:
    """Returns the results of the method to which the others are compared: `against`, or the first method if
    it is None."""
    return next((one for one in standings if one.method == against), standings[0])


@dataclass(frozen=True)
class Differences:
    """Which methods of a contest differ from one of them, by the 95 % intervals of the differences over the
    common seeds. Methods without a result are in none of the lists."""

    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Methods that these seeds cannot distinguish: the interval contains 0, or there is none because all
    seeds have the same difference."""
    one_seed: list[str] = field(default_factory=list)
    """Methods with only one common seed, so that there is no interval."""
    no_seed: list[str] = field(default_factory=list)
    """Methods without a common seed."""


def differences(standings: Sequence[Standing], compared: Standing) -> Differences:
    """Returns which of the other methods differ from the method `compared`."""
    found = Differences()
    for standing in standings:
        if standing is compared or standing.mean is None:
            continue
        apart = _apart(standing, compared)
        common = {run["seed"] for run in standing.runs} & {run["seed"] for run in compared.runs}
        if apart is None:
            which = found.no_seed
        elif len(common) == 1:
            which = found.one_seed
        elif apart.interval is None or apart.interval.low <= 0 <= apart.interval.high:
            which = found.undecided
        else:
            which = found.worse if apart.mean > 0 else found.better
        which.append(standing.method)
    return found


def behind(standing: Standing, first: Standing) -> str:
    """Returns as text how many percentage points a method is behind `first`, with the 95 % interval over the
    seeds. The interval is left out if there is none (see `gap`). Returns "–" for the method `first` itself,
    or if no seed is common."""
    apart = None if standing is first else _apart(standing, first)
    return "–" if apart is None else text.difference(apart)


def gap(standing: Standing, first: Standing) -> list[float | None] | None:
    """Returns how many percentage points the method `first` is better than this one, as [mean, low, high].
    Low and high are the ends of the 95 % interval. They are None for a single seed, and if all seeds have the
    same difference. Returns None for the method `first` itself, or if no seed is common to both methods."""
    apart = None if standing is first else _apart(standing, first)
    return None if apart is None else [apart.mean, *(apart.interval or (None, None))]


def _apart(standing: Standing, first: Standing) -> SeedMean | None:
    """Returns how many percentage points the method `first` is better than this one. Differences are taken
    seed by seed, since both methods have the same split for the same seed. None if no seed is common."""
    theirs, best = ({run["seed"]: 100 * run["accuracy"] for run in each.runs} for each in (standing, first))
    return mean_difference(best, theirs)


def write(
    standings: Sequence[Standing], out: Path, origin: dict[str, Any], against: str | None = None
) -> Path:
    """Writes contest.json with all results, and returns its path. `origin` says how they were made, such as
    the command. `against` is the method to which the others are compared; None means the first."""
    compared = reference(standings, against)
    entries = [
        {
            "method": one.method, "mean": one.mean, "interval": one.interval,
            "interval_kind": one.interval_kind, "deviation": one.deviation, "accuracies": one.accuracies,
            "diverged": one.diverged, "options": one.options, "rounds": one.rounds, "images": one.images,
            "server_images": one.server_images, "megabytes": one.megabytes, "runs": one.runs,
            "tries": one.tries, "validation_curve": one.curve, "seed_validation_curves": one.seed_curves,
            "shared_split": one.shared_split, "flag": one.flag or None, "passes": one.passes,
            "collapsed": one.collapsed, "config": one.config,
            "first_minus_this": gap(one, standings[0]), "against_minus_this": gap(one, compared),
        }
        for one in standings
    ]  # fmt: skip
    file = out / "contest.json"
    known = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "versions": runs.versions(),
        "against": compared.method,
    }
    runs.write_atomic(file, (json.dumps(origin | known | {"standings": entries}, indent=1) + "\n").encode())
    return file


def draw(standings: Sequence[Standing], out: Path) -> list[Path]:
    """Draws two plots of the validation accuracy, with one curve per method. One is against the number of
    images that users drew for training, the other against the megabytes that users sent and received. With
    several seeds, a curve is their mean, and thin lines show the seeds. Returns the paths of the PNG and SVG
    files."""
    from ssfl.report import plots

    plt = plots.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for number, standing in enumerate(standings):
        style = {"linestyle": plots.STYLES[number % len(plots.STYLES)], "marker": "osD^vP*X"[number % 8]}
        for axis, cost, unit in zip(axes, (0, 1), (1e6, 1.0), strict=True):
            _draw_curve(axis, standing, cost, unit, style)
    ends = [standing.curve[-1][2] for standing in standings if standing.curve]
    tops = [accuracies[-1] for standing in standings for accuracies in standing.seed_curves]
    if ends:  # a collapsed method would leave no room for the others
        lowest = max(0.0, statistics.median(ends) - ROOM)
        axes[0].set_ylim(bottom=lowest, top=min(100.0, max([*ends, *tops]) + ROOM / 5))
    judged = [f" on {run['validation_images']:,} images" for standing in standings for run in standing.runs]
    axes[0].set(xlabel="user images, million", ylabel=f"validation accuracy{''.join(judged[:1])}, %")
    axes[1].set(xlabel="megabytes sent and received")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=6)  # more would overlap if the numbers are long
    if ends:
        several = max(standing.seeds for standing in standings) > 1
        title = "last validation accuracy, %" + "\n(mean; thin lines: seeds)" * several
        axes[0].legend(fontsize=8, title=title, title_fontsize=8)
    files = [out / "contest.png", out / "contest.svg"]
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files


def _draw_curve(axis: Any, standing: Standing, cost: int, unit: float, style: dict[str, Any]) -> None:
    """Draws the learning curve of a method, with a thin line for each seed. `cost` is the place of the cost
    in a point of the curve, and `unit` its unit. If no user takes part, the last accuracy is drawn as a
    horizontal line."""
    if not standing.curve:
        return
    costs = [point[cost] / unit for point in standing.curve]
    accuracies = [point[2] for point in standing.curve]
    label, thin = f"{standing.method}: {accuracies[-1]:.1f}", {"linewidth": 0.8, "alpha": 0.5}
    if costs[-1]:
        every = 0.2 if len(costs) > 8 else 1
        (line,) = axis.plot(costs, accuracies, label=label, markevery=every, markersize=4, **style)
        for each in standing.seed_curves:
            axis.plot(costs, each, color=line.get_color(), linestyle=line.get_linestyle(), **thin)
    else:
        axis.axhline(accuracies[-1], label=label, color="0.4", linestyle=":")
        for each in standing.seed_curves:
            axis.axhline(each[-1], color="0.4", linestyle=":", **thin)
