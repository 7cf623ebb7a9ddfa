"""Draws the paper's figures from finished runs as PNG and SVG files, with the same panels as in the paper.

The symbols are the paper's. R is the skew, T the number of local steps per round, N_s the number of labelled
images at the server. C is the number of participants per round, K the number of users, and E the number of
epochs.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ssfl.core.schedule import learning_rate
from ssfl.errors import ConfigError
from ssfl.paper import rows
from ssfl.paper.drawing import (
    MEASURES,
    TITLES,
    Drawing,
    Line,
    accuracy,
    beside,
    diversity,
    finish,
    legend,
    percents,
    written,
)
from ssfl.paper.fidelity import FIDELITIES, settings
from ssfl.paper.results import PaperResult
from ssfl.paper.rows import NAMES, PaperRun
from ssfl.report.plots import STYLES, pyplot

PARTICIPANTS = (10, 30, 47)
"""The values of C (participants per round) in Figure 6 and Appendix D."""
COUNTS = {4: "four", 5: "five"}


def draw(
    name: str, results: Sequence[PaperResult], out: Path, fidelity: str = "paper", with_changes: bool = False
) -> list[Path]:
    """Draws the figure with this number in the paper, and returns the files. A letter, such as "D", means
    every figure of that appendix. `fidelity` chooses the runs to draw: trained as in the paper's text
    ("paper"), as in its authors' code ("reference"), or as we recommend ("recommended"). `with_changes` also
    draws runs that were changed with `--set`, as additional lines."""
    wanted = [one for one in FIGURES if name.upper() in (one, one.partition(".")[0])]
    if not wanted:
        raise ConfigError(
            f"there is no figure {name!r}: use one of {', '.join(FIGURES)}, lr", key="figure", value=name
        )
    return [path for one in wanted for path in FIGURES[one](Drawing(results, fidelity, with_changes), out)]


def _methods(drawing: Drawing, out: Path) -> list[Path]:
    """Draws Figure 2: bars with the final test accuracy of the five methods, for R = 0 and R = 0.4."""
    wanted = list(dict.fromkeys(NAMES[run.method] for run in drawing.wanted(rows.METHODS.runs)))
    lines = drawing.of(rows.METHODS.runs)
    names = dict(enumerate(wanted)) | {line.place: line.name.replace(", ", "\n") for line in lines}
    size = (1.8 * max(len(names), 5), 4)
    figure, axes = drawing.plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for axis, skew in zip(axes, (0.0, 0.4), strict=True):
        for line in (line for line in lines if line.run.skew == skew):
            height = statistics.mean(percents(line.results))
            axis.bar_label(
                axis.bar(line.place, height, width=0.7, color=f"C{line.place}"), fmt="%.1f", fontsize=8
            )
        axis.set_xticks(list(names), names.values(), rotation=25, ha="right", fontsize=8)
        axis.margins(y=0.08)
        axis.set(title=f"R = {skew:g}", ylabel="test accuracy, %" if skew == 0 else None)
        axis.set_xlim(-0.6, len(names) - 0.4)
    return drawing.save(figure, out, "2", f"Test accuracy of the {COUNTS[len(wanted)]} methods")


def _curves_and_diversity(skew: float, number: str) -> Callable[[Drawing, Path], list[Path]]:
    """Returns a function that draws Figure 3 or 4 (`number`): the test accuracy and the gradient diversity
    over epochs for this skew R. Diversity is drawn in both normalisations."""

    def drawn(drawing: Drawing, out: Path) -> list[Path]:
        figure, axes = drawing.plt.subplots(1, 3, figsize=(12, 4), sharex=True, layout="constrained")
        for line in drawing.of(run for run in rows.METHODS.runs if run.skew == skew):
            drawing.line(axes[0], line.name, line.place, accuracy(line.results))
            for axis, measure in zip(axes[1:], MEASURES, strict=True):
                drawing.line(axis, line.name, line.place, diversity(line.results, measure))
        axes[0].set_ylabel("test accuracy, %")
        for axis, label in zip(axes[1:], MEASURES.values(), strict=True):
            axis.set(ylabel=label, yscale="log")
        finish(figure, axes)
        legend(figure, axes)
        return drawing.save(figure, out, number, f"Convergence and gradient diversity, R = {skew:g}")

    return drawn


def _factors(drawing: Drawing, out: Path) -> list[Path]:
    """Draws Figure 5: the test accuracy against R, T and N_s, in one panel each. Hollow marks show the
    accuracies that the paper prints."""
    figure, axes = drawing.plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    panels: list[tuple[str, tuple[int, ...], Callable[[PaperRun], float]]] = [
        ("non-iidness R", (1, 2, 3), lambda run: run.skew),
        ("communication period T", (4, 5, 6), lambda run: run.period),
        ("labels at the server Ns", (7, 8, 9), lambda run: run.server_labels),
    ]
    drawing.places |= {(data, ()): place for place, data in enumerate(TITLES)}
    lines = {n: drawing.of(rows.row(str(n)).runs, lambda run: run.data) for n in range(1, 10)}
    scales = {one.scale for one in drawing.used}
    hollow = ""
    for axis, (label, numbers, factor) in zip(axes, panels, strict=True):
        for number, place in [(n, place) for n in numbers for place in {line.place: n for line in lines[n]}]:
            first, *others = (line for line in lines[number] if line.place == place)
            one, name = first.results[0], TITLES[first.run.data]
            name += ", on digits" if one.data == "digits" else ""
            name += f", scale {one.scale:g}" if len(scales) > 1 else ""
            points: dict[float, list[float]] = {}
            for line in (first, *others):
                value = factor(line.run)
                if numbers == (7, 8, 9):  # a trial on digits has fewer labels than the paper's run
                    value = line.results[0].setting("split", "server_labels", value)
                points.setdefault(value, []).extend(percents(line.results))
            drawing.line(axis, first.named(name), place, points)
            wanted = drawing.wanted(rows.row(str(number)).runs)
            printed = [(factor(run), run.published) for run in wanted if run.published is not None]
            if printed and one.data != "digits" and not first.changes:
                hollow = " (hollow: published)"
                axis.plot(*zip(*printed, strict=True), "o", color=f"C{place}", fillstyle="none")
        axis.set_xlabel(label)
        if axis.lines:
            _factor_ticks(axis, periods=label.endswith("T"))
            axis.legend(fontsize=8)
        else:
            axis.text(0.5, 0.5, "not run", ha="center", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
    axes[0].set_ylabel("test accuracy, %")
    finish(figure, axes, epochs=False)
    method = NAMES[drawing.wanted(rows.row("1").runs)[0].method]
    return drawing.save(figure, out, "5", f"{method}: accuracy against R, T and Ns{hollow}")


def _factor_ticks(axis: Any, periods: bool) -> None:
    """Sets the ticks of the horizontal axis of a panel. With `periods`, the axis shows periods T, which are
    powers of two. It is then logarithmic, with one tick for each T. An axis of another factor keeps its usual
    ticks, unless it has only one value; only this value then has a tick."""
    values = sorted({float(x) for line in axis.lines for x in line.get_xdata()})
    if periods:
        axis.set_xscale("log", base=2)
    if periods or len(values) == 1:
        axis.set_xticks(values, [f"{value:g}" for value in values])


def _participants(drawing: Drawing, out: Path) -> list[Path]:
    """Draws Figure 6: FedAvg and grouping for three values of C, in the paper on EMNIST. The panels show
    accuracy, gradient diversity, mask rate and the accuracy of pseudo-labels."""
    figure, axes = _by_participants(drawing)
    for line, column in _columns(drawing, axes):
        for axis, measure in zip(column[1:3], MEASURES, strict=True):
            drawing.line(axis, line.name, line.place, diversity(line.results, measure))
        drawing.line(column[3], line.name, line.place, beside(line.results, "mask_rate"))
        drawing.line(column[4], line.name, line.place, beside(line.results, "pseudo_accuracy"))
    for axis, label in zip(axes[1:3, 0], MEASURES.values(), strict=True):
        axis.set(ylabel=label, yscale="log")
    axes[3, 0].set_ylabel("mask rate")
    axes[4, 0].set_ylabel("accuracy of\npseudo-labels")
    finish(figure, axes.flat)
    legend(figure, axes.flat)
    return drawing.save(
        figure, out, "6", f"{_versus(drawing)} on {drawing.data_title} by the number of participants"
    )


def _by_participants(drawing: Drawing) -> tuple[Any, Any]:
    """Returns an empty figure and its panels for Figure 6 and Appendix D: five rows of panels, with the test
    accuracy at the top, and one column for each of three values of C."""
    shape = {"figsize": (11, 12), "sharex": True, "sharey": "row", "layout": "constrained"}
    figure, axes = drawing.plt.subplots(5, 3, **shape)
    axes[0, 0].set_ylabel("test accuracy, %")
    for axis, count in zip(axes[0], PARTICIPANTS, strict=True):
        axis.set_title(f"C = {count}")
    return figure, axes


def _columns(drawing: Drawing, axes: Any, style: str = "") -> Iterator[tuple[Line, Any]]:
    """Draws into the top panels the test accuracy of every run of row 16 of the experiment table (Figure 6)
    that has results. For each such run, it yields the line and the column of panels for the run's C. The
    caller draws the other panels of the column. `style` is the line style; "" means one style per method."""
    for line in drawing.of(rows.row("16").runs):
        column = axes[:, PARTICIPANTS.index(line.run.participants)]
        drawing.line(column[0], line.name, line.place, accuracy(line.results), style)
        yield line, column


def _versus(drawing: Drawing) -> str:
    """Returns the names of the methods that Figure 6 and Appendix D compare, for the title."""
    methods = dict.fromkeys(run.method for run in drawing.wanted(rows.row("16").runs))
    return " and ".join(NAMES[method] for method in methods)


def _lines(
    number: str, wanted: Sequence[PaperRun], title: str, label: Callable[[PaperRun], str]
) -> Callable[[Drawing, Path], list[Path]]:
    """Returns a function that draws Figure B.1 or C.1: the test accuracy over epochs, with one line for each
    of the `wanted` runs. `label` returns a run's name in the legend."""

    def drawn(drawing: Drawing, out: Path) -> list[Path]:
        figure, axis = drawing.plt.subplots(figsize=(6, 4), layout="constrained")
        lines = drawing.of(wanted, by=lambda run: run)
        for line in lines:
            drawing.line(axis, line.named(label(line.run)), line.place, accuracy(line.results))
        axis.set_ylabel("test accuracy, %")
        finish(figure, [axis])
        legend(figure, [axis])
        method = NAMES[drawing.wanted(wanted)[0].method]
        return drawing.save(figure, out, number, f"{title} on {drawing.data_title}, {method}")

    return drawn


def _variants(number: str, kind: str, norm: str) -> Callable[[Drawing, Path], list[Path]]:
    """Returns a function that draws one figure of Appendix D, which shows four of the sixteen variants of
    gradient diversity. A figure is about gradients or updates (`kind`), and uses the norm "l1" or "l2"
    (`norm`). Its four variants use squared norms or not, and include the server or not.

    Methods differ in colour, and the two normalisations (see `MEASURES`) in line style.
    """

    def drawn(drawing: Drawing, out: Path) -> list[Path]:
        figure, axes = _by_participants(drawing)
        shown = [(power, server) for server in ("", "_server") for power in ("_squared", "")]
        for line, column in _columns(drawing, axes, STYLES[0]):
            for axis, (power, server) in zip(column[1:], shown, strict=True):
                for measure, style in zip(MEASURES, STYLES, strict=False):
                    points = diversity(line.results, measure, f"{kind}_{norm}{power}{server}")
                    drawing.line(axis, line.name, line.place, points, style)
        for axis, (power, server) in zip(axes[1:, 0], shown, strict=True):
            label = f"{norm}{' squared' if power else ''}\nusers{' and server' if server else ''}"
            axis.set(ylabel=label.replace("l", "ℓ", 1), yscale="log" if power else "linear")
        finish(figure, axes.flat)
        ways = ("as in Definition 1", "as in the authors' scripts, within groups")
        for label, style in zip(ways, STYLES, strict=False):
            axes[1, 0].plot([], [], style, color="black", label=label)
        legend(figure, axes.flat)
        title = f"Diversity of {kind}s by the {norm.replace('l', 'ℓ')} norm: {_versus(drawing)}"
        title += f" on {drawing.data_title}"
        return drawing.save(figure, out, number, title)

    return drawn


def schedules(out: Path) -> list[Path]:
    """Draws the learning rate over the epochs for three data sets, and returns the files. There is one line
    for each fidelity: the paper's text, its authors' code, and our recommendation. With the formula in the
    paper's text, the learning rate rises again at the end."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, number in zip(axes, ("10", "13", "16"), strict=True):
        run = rows.row(number).runs[-1]
        for place, fidelity in enumerate(FIDELITIES):
            config = settings(run, fidelity)
            train, steps = config.train, (config.federation.rounds or 1) * config.federation.period
            epochs = steps * train.batch_size / config.federation.epoch_images
            points = [epochs * i / 1000 for i in range(1001)]
            rate = partial(
                learning_rate, base=train.lr, steps=steps * train.horizon, warmup=train.warmup,
                cycles=train.cycles, floor=train.floor,
            )  # fmt: skip
            axis.plot(points, [rate(steps * i / 1000) for i in range(1001)], STYLES[place], label=fidelity)
        axis.set(title=run.data, xlabel="epoch")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("learning rate")
    axes[0].legend(fontsize=8)
    return written(plt, figure, out, "lr")


FIGURES: dict[str, Callable[[Drawing, Path], list[Path]]] = {
    "2": _methods,
    "3": _curves_and_diversity(0.0, "3"),
    "4": _curves_and_diversity(0.4, "4"),
    "5": _factors,
    "6": _participants,
    "B.1": _lines("B.1", rows.row("4").runs, "Convergence by T", lambda run: f"T = {run.period}"),
    "C.1": _lines(
        "C.1", [run for row in ("13", "15") for run in rows.row(row).runs if run.users == run.participants],
        "Convergence by K = C and E", lambda run: f"K = C = {run.users}, E = {run.epochs or 40}",
    ),
    "D.1": _variants("D.1", "gradient", "l2"),
    "D.2": _variants("D.2", "gradient", "l1"),
    "D.3": _variants("D.3", "update", "l2"),
    "D.4": _variants("D.4", "update", "l1"),
}  # fmt: skip
"""The functions that draw the paper's figures, by figure number."""
