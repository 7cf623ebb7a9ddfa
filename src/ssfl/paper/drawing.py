"""Functions that the paper's figures share: they choose results, draw lines and legends, and write files.

Gradient diversity is drawn in two normalisations. One is Δ of Definition 1 in the paper. The other is n·Δ, as
the authors' scripts print it, where n is the number of users in a group. This n·Δ is computed within each
group, and is larger for larger groups.

Every figure shows runs of one fidelity: trained as in the paper's text ("paper"), as in its authors' code
("reference"), or as we recommend ("recommended").
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssfl.errors import RunError
from ssfl.paper.fidelity import actual
from ssfl.paper.results import PaperResult
from ssfl.paper.rows import NAMES, PaperRun
from ssfl.report.plots import STYLES, pyplot

Points = dict[float, list[float]]
"""The points of a line: for each x, such as an epoch, the values of all seeds."""
TITLES = {"cifar10": "CIFAR-10", "svhn": "SVHN", "emnist": "EMNIST"}
"""The names of the paper's data sets in titles and legends."""
MEASURES = {
    "definition": "gradient diversity Δ\n(Definition 1)",
    "authors_groups": "n·Δ within groups\n(authors' scripts)",
}
"""The two ways to normalise gradient diversity, with the labels of their axes."""
GIVEN_L2 = "gradient_l2_squared"
"""The variant of gradient diversity that is drawn by default. It uses the squared ℓ2 norms of the users'
gradients."""


@dataclass(frozen=True)
class Line:
    """The results of one run with several seeds, which are drawn as one line."""

    run: PaperRun
    """The run that was trained. Its method may differ from the paper's if it was trained with the settings
    that we recommend (the fidelity "recommended")."""
    results: list[PaperResult]
    place: int
    """The number of the line's colour and style. It is the same in every panel of the figure."""

    changes: tuple[str, ...] = ()
    """The settings that were changed with `--set`. A changed run is another experiment than the paper's, so
    it gets its own line."""

    @property
    def name(self) -> str:
        """The method's name in the paper, followed by the changed settings, for the legend."""
        return self.named(NAMES[self.run.method])

    def named(self, name: str) -> str:
        """Returns the given name, followed by the changed settings, for the legend."""
        return ", ".join([name, *(change.partition(".")[2] for change in self.changes)])


class Drawing:
    """Collects the results for one figure, and records which runs have no result yet. All results are of one
    fidelity: trained as in the paper's text ("paper"), as in its authors' code ("reference"), or as we
    recommend ("recommended")."""

    def __init__(self, results: Sequence[PaperResult], fidelity: str, with_changes: bool = False) -> None:
        self.plt = pyplot()
        chosen = (one for one in results if one.fidelity == fidelity and (with_changes or not one.changes))
        self.results = [one for one in chosen if one.accuracy is not None]
        self.fidelity = fidelity
        self.missing: list[str] = []
        self.used: list[PaperResult] = []
        self.labels: set[int] = set()
        """The numbers of labelled images with which the drawn runs were trained."""
        self.places: dict[Hashable, int] = {}

    def wanted(self, runs: Iterable[PaperRun]) -> list[PaperRun]:
        """Returns the runs that are trained in place of the given runs of the paper, each once. With the
        fidelity "recommended", another method replaces some methods of the paper (see `actual`). With the
        other fidelities, these are the given runs themselves."""
        return list({one.name: one for one in (actual(run, self.fidelity) for run in runs)}.values())

    def of(
        self, runs: Iterable[PaperRun], by: Callable[[PaperRun], Hashable] = lambda run: run.method
    ) -> list[Line]:
        """Returns one line for each of the runs that has results. Runs without results are recorded as
        missing. A run that was trained also with changed settings (`--set`) has a further line for each set
        of changes.

        All these lines have the same data set and the same scale, which is the fraction of the training that
        was run. So the lines can be compared. Of all pairs of scale and data set, the one is used for which
        the most runs have results. If several pairs have equally many, it is the one with the largest scale.

        `by` returns a value for each run. Runs with different values get different colours and styles. So do
        runs with changed settings, whose lines come last.
        """
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
                results = list(seeds.values())  # a result that is in two folders is used once
                if results or not changes:
                    place = self.places.setdefault((by(run), changes), len(self.places))
                if results:
                    lines.append(Line(run, results, place, changes))
                    self.labels |= {one.labels(run) for one in results}
                elif not changes:
                    self.missing.append(run.name)
        self.used += mine
        return lines

    def line(self, axis: Any, label: str, number: int, points: Points, style: str = "") -> None:
        """Draws one line on an axis: the mean over the seeds, with a band from the smallest to the largest
        value. `number` chooses the colour and, unless `style` is given, the line style."""
        if not points:
            return
        x = sorted(points)
        mean = [sum(points[at]) / len(points[at]) for at in x]
        markers = {"marker": "o", "markersize": 4} if len(x) < 12 else {}
        colour, style = f"C{number % 10}", style or STYLES[number % len(STYLES)]  # equal in all panels
        axis.plot(x, mean, style, color=colour, label=label, linewidth=1.8, **markers)
        if max(map(len, points.values())) > 1:
            low, high = ([pick(points[at]) for at in x] for pick in (min, max))
            axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)

    @property
    def data(self) -> list[str]:
        """The names of the data sets with which the drawn runs were trained."""
        return sorted({one.data for one in self.used})

    @property
    def data_title(self) -> str:
        """The data sets of the drawn runs for a title, such as "EMNIST" or "digits"."""
        return " and ".join(TITLES.get(name, name) for name in self.data)

    def save(self, figure: Any, out: Path, name: str, title: str) -> list[Path]:
        """Writes the figure as PNG and SVG and returns the two files. Below the title is a line with the
        data, the numbers of labels, the fidelity, the scale, the number of seeds, and how many runs are
        missing. The scale is the fraction of the training that was run. Raises if no run of the figure has
        results."""
        if not self.used:
            raise RunError(
                f"there is no finished run for figure {name} with fidelity {self.fidelity}: it needs "
                f"{', '.join(self.missing[:3])}{' ...' if len(self.missing) > 3 else ''}; see `ssfl paper "
                "ls`",
                key="figure",
                value=name,
            )
        data = ", ".join(self.data)
        names = {one.name for one in self.used}
        scales = ", ".join(f"{scale:g}" for scale in sorted({one.scale for one in self.used}))
        each = {(one.name, one.changes, one.seed) for one in self.used}
        seeds = sorted(set(Counter(one[:2] for one in each).values()))
        many = " or ".join(map(str, seeds)) + (" seeds" if seeds[-1] > 1 else " seed")
        labels = ", ".join(f"{labels:,}" for labels in sorted(self.labels - {0}))
        data += f"; {labels} labels" if labels else ""
        caption = f"{data}; fidelity {self.fidelity}; scale {scales}; {many}"
        if self.missing:
            caption += f"; not run: {len(set(self.missing))} of {len({*self.missing, *names})} runs"
        empty = {(one.name, one.changes, one.seed) for one in self.used if one.without_pseudo_labels}
        if empty:
            which = "any run" if len(empty) == len(each) else f"{len(empty)} of {len(each)} runs"
            caption += f"; no pseudo-label was made in {which}"
        figure.suptitle(f"{title}\n{caption}", fontsize=10)
        return written(self.plt, figure, out, name)


def accuracy(results: Sequence[PaperResult]) -> Points:
    """Returns the test accuracy in percent over epochs."""
    return _over(results, "curve", lambda point: 100 * point["accuracy"])


def percents(results: Sequence[PaperResult]) -> list[float]:
    """Returns the final test accuracy of each seed in percent."""
    return [100 * (one.accuracy or 0) for one in results]


def beside(results: Sequence[PaperResult], key: str) -> Points:
    """Returns a metric of the rounds, such as "mask_rate", over epochs. Only rounds with an evaluation have a
    point."""
    return _over(results, "curve", lambda point: point.get(f"round_{key}"))


def diversity(results: Sequence[PaperResult], measure: str, variant: str = GIVEN_L2) -> Points:
    """Returns the gradient diversity over epochs. `measure` is its normalisation, a key of `MEASURES`.
    `variant` is one of the names in `core.diversity.variants`, such as "update_l1": the ℓ1 norm of the users'
    updates."""
    return _over(results, "diversity", lambda point: point.get(variant, {}).get(measure))


def _over(
    results: Sequence[PaperResult], kind: str, value: Callable[[dict[str, Any]], float | None]
) -> Points:
    """Returns, for each epoch, one value per seed. `value` computes it from a recorded point of this `kind`,
    which is "curve" or "diversity"."""
    points: Points = {}
    for one in results:
        federation, train = one.whole["config"]["federation"], one.whole["config"]["train"]
        images = federation["period"] * train["batch_size"] / federation["epoch_images"]
        for point in one.whole[kind]:
            number = value(point)
            if number is not None:
                points.setdefault(round(point["round"] * images, 6), []).append(number)
    return points


def written(plt: Any, figure: Any, out: Path, name: str) -> list[Path]:
    """Writes the figure as PNG and SVG to the folder `out`, closes it, and returns the two files."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"figure-{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def finish(figure: Any, axes: Any, epochs: bool = True) -> None:
    """Adds a grid to each panel and the label "epoch" to the bottom ones, and writes "not measured" into
    panels without lines. With `epochs=False`, only the grids are added."""
    for axis in axes:
        axis.grid(alpha=0.3)
        if epochs and axis.get_subplotspec().is_last_row():
            axis.set_xlabel("epoch")
        if epochs and not axis.lines:
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)


def legend(figure: Any, axes: Any) -> None:
    """Adds one legend below all panels of the figure. A name that occurs in several panels is listed once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 5), fontsize=8
        )
