"""What the paper's figures are made of: the results they take, lines, titles, files.

Gradient diversity is drawn twice: Definition 1, and what the authors' scripts print (n·Δ within each group,
which larger groups make larger).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssfl.errors import RunError
from ssfl.paper.fidelity import actual
from ssfl.paper.results import Result
from ssfl.paper.rows import NAMES, Run
from ssfl.report.plots import STYLES, pyplot

Points = dict[float, list[float]]
MEASURES = {
    "definition": "gradient diversity Δ\n(Definition 1)",
    "authors_groups": "n·Δ within groups\n(authors' scripts)",
}
GIVEN_L2 = "gradient_l2_squared"


@dataclass(frozen=True)
class Line:
    """The seeds of a run, which are drawn as one."""

    run: Run
    """What was trained: with `recommended` not the row's own run."""
    found: list[Result]
    place: int
    """Its colour and style, the same in every panel."""

    changes: tuple[str, ...] = ()
    """The `--set`s that made it another experiment."""

    @property
    def name(self) -> str:
        """The method, as the paper calls it, and what was changed."""
        return self.named(NAMES[self.run.method])

    def named(self, name: str) -> str:
        """A name of another kind, and what was changed."""
        return ", ".join([name, *(change.partition(".")[2] for change in self.changes)])


class Drawing:
    """Chooses the results of one fidelity, data and scale, and notes which runs are missing."""

    def __init__(self, results: Sequence[Result], fidelity: str, with_changes: bool = False) -> None:
        self.plt = pyplot()
        kept = (one for one in results if one.fidelity == fidelity and (with_changes or not one.changes))
        self.results = [one for one in kept if one.accuracy is not None]
        self.fidelity = fidelity
        self.missing: list[str] = []
        self.used: list[Result] = []
        self.places: dict[Hashable, int] = {}

    def wanted(self, runs: Iterable[Run]) -> list[Run]:
        """What is trained for some runs in this fidelity, each once."""
        return list({one.name: one for one in (actual(run, self.fidelity) for run in runs)}.values())

    def of(self, runs: Iterable[Run], by: Callable[[Run], Hashable] = lambda run: run.method) -> list[Line]:
        """The seeds of runs that are compared, all of one scale and data: that of most of them, then the
        largest scale. Runs without any are left out; what differs in `by` has a place of its own, and so
        have changed runs, which come last."""
        wanted = self.wanted(runs)
        names = {run.name for run in wanted}
        mine = [one for one in self.results if one.name in names]
        plain = [one for one in mine if not one.changes] or mine
        kinds = Counter(
            (scale, data) for _, scale, data in {(one.name, one.scale, one.data) for one in plain}
        )
        kind = max(kinds, key=lambda kind: (kinds[kind], kind[0], kind[1] != "digits"), default=None)
        mine = [one for one in mine if (one.scale, one.data) == kind]
        lines = []
        for changes in sorted({(), *(one.changes for one in mine)}):
            for run in wanted:
                seeds = {one.seed: one for one in mine if (one.name, one.changes) == (run.name, changes)}
                found = list(seeds.values())  # one that lies in two places is one
                if found or not changes:
                    place = self.places.setdefault((by(run), changes), len(self.places))
                if found:
                    lines.append(Line(run, found, place, changes))
                elif not changes:
                    self.missing.append(run.name)
        self.used += mine
        return lines

    def line(self, axis: Any, label: str, number: int, points: Points, style: str = "") -> None:
        """A line through the seeds' means, a band from the least to the most."""
        if not points:
            return
        x = sorted(points)
        mean = [sum(points[at]) / len(points[at]) for at in x]
        few = {"marker": "o", "markersize": 4} if len(x) < 12 else {}
        colour, style = f"C{number % 10}", style or STYLES[number % len(STYLES)]  # the same in every panel
        axis.plot(x, mean, style, color=colour, label=label, linewidth=1.8, **few)
        if max(map(len, points.values())) > 1:
            low, high = ([pick(points[at]) for at in x] for pick in (min, max))
            axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)

    def save(self, figure: Any, out: Path, name: str, title: str) -> list[Path]:
        """Write both files; how the runs were made stands under the title."""
        if not self.used:
            raise RunError(
                f"no finished run for figure {name} with fidelity {self.fidelity}: it needs "
                f"{', '.join(self.missing[:3])}{' ...' if len(self.missing) > 3 else ''}; see `ssfl paper ls`"
            )
        data = ", ".join(sorted({one.data for one in self.used}))
        names = {one.name for one in self.used}
        scales = ", ".join(f"{scale:g}" for scale in sorted({one.scale for one in self.used}))
        each = {(one.name, one.changes, one.seed) for one in self.used}
        seeds = sorted(set(Counter(one[:2] for one in each).values()))
        many = " or ".join(map(str, seeds)) + (" seeds" if seeds[-1] > 1 else " seed")
        made = f"{data}; fidelity {self.fidelity}; scale {scales}; {many}"
        if self.missing:
            made += f"; not run: {len(set(self.missing))} of {len({*self.missing, *names})} runs"
        figure.suptitle(f"{title}\n{made}", fontsize=10)
        return written(self.plt, figure, out, name)


def accuracy(found: Sequence[Result]) -> Points:
    """Test accuracy over epochs, percent."""
    return _over(found, "curve", lambda point: 100 * point["accuracy"])


def percents(found: Sequence[Result]) -> list[float]:
    """The seeds' final accuracies."""
    return [100 * (one.accuracy or 0) for one in found]


def beside(found: Sequence[Result], key: str) -> Points:
    """What the rounds' events told at the evaluations, such as the mask rate."""
    return _over(found, "curve", lambda point: point.get(f"round_{key}"))


def diversity(found: Sequence[Result], measure: str, variant: str = GIVEN_L2) -> Points:
    """A measure of gradient diversity over epochs."""
    return _over(found, "diversity", lambda point: point.get(variant, {}).get(measure))


def _over(found: Sequence[Result], kind: str, value: Callable[[dict[str, Any]], float | None]) -> Points:
    points: Points = {}
    for one in found:
        federation, train = one.whole["config"]["federation"], one.whole["config"]["train"]
        images = federation["period"] * train["batch_size"] / federation["epoch_images"]
        for point in one.whole[kind]:
            told = value(point)
            if told is not None:
                points.setdefault(round(point["round"] * images, 6), []).append(told)
    return points


def written(plt: Any, figure: Any, out: Path, name: str) -> list[Path]:
    """The figure as PNG and SVG."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"figure-{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def finish(figure: Any, axes: Any, epochs: bool = True) -> None:
    """Grids, the epochs below, and a word where nothing was drawn."""
    for axis in axes:
        axis.grid(alpha=0.3)
        if epochs and axis.get_subplotspec().is_last_row():
            axis.set_xlabel("epoch")
        if epochs and not axis.lines:
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)


def legend(figure: Any, axes: Any) -> None:
    """One legend below all panels, each name once."""
    told: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            told.setdefault(label, handle)
    if told:
        figure.legend(told.values(), told, loc="outside lower center", ncols=min(len(told), 5), fontsize=8)
