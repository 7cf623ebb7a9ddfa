"""The paper's figures from finished runs, in its arrangement: PNG and SVG."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ssfl.errors import ConfigError
from ssfl.paper import rows
from ssfl.paper.drawing import MEASURES, Drawing, accuracy, beside, diversity, finish, percents, written
from ssfl.paper.fidelity import FIDELITIES, settings
from ssfl.paper.results import Result
from ssfl.paper.rows import NAMES, Run
from ssfl.report.plots import STYLES, pyplot
from ssfl.schedule import learning_rate


def draw(name: str, results: Sequence[Result], out: Path, fidelity: str = "paper") -> list[Path]:
    """A figure by its number in the paper; a letter alone is every figure of that appendix."""
    wanted = [one for one in FIGURES if name.upper() in (one, one.partition(".")[0])]
    if not wanted:
        raise ConfigError(f"there is no figure {name!r} to draw: choose from {', '.join(FIGURES)}, lr")
    return [path for one in wanted for path in FIGURES[one](Drawing(results, fidelity), out)]


def _methods(drawing: Drawing, out: Path) -> list[Path]:
    """Figure 2: the final accuracy of the five methods."""
    figure, axes = drawing.plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    found = drawing.of(rows.METHODS.runs)
    for axis, skew in zip(axes, (0.0, 0.4), strict=True):
        for place, run in enumerate(run for run in rows.METHODS.runs if run.skew == skew):
            if run in found:
                bar = axis.bar(place, statistics.mean(percents(found[run])), width=0.7, color=f"C{place}")
                axis.bar_label(bar, fmt="%.1f", fontsize=8)
        names = [NAMES[run.method] for run in rows.METHODS.runs if run.skew == skew]
        axis.set_xticks(range(len(names)), names, rotation=25, fontsize=8)
        axis.set(title=f"R = {skew:g}", ylabel="test accuracy, %" if skew == 0 else None)
        axis.set_xlim(-0.6, len(names) - 0.4)
    return drawing.save(figure, out, "2", "Test accuracy of the five methods")


def _curves_and_diversity(skew: float, number: str) -> Callable[[Drawing, Path], list[Path]]:
    """Figures 3 and 4: convergence, and gradient diversity in both measures."""

    def drawn(drawing: Drawing, out: Path) -> list[Path]:
        figure, axes = drawing.plt.subplots(1, 3, figsize=(12, 4), sharex=True, layout="constrained")
        wanted = [run for run in rows.METHODS.runs if run.skew == skew]
        for run, found in drawing.of(wanted).items():
            name, place = NAMES[run.method], wanted.index(run)
            drawing.line(axes[0], name, place, accuracy(found))
            for axis, measure in zip(axes[1:], MEASURES, strict=True):
                drawing.line(axis, name, place, diversity(found, measure))
        axes[0].set_ylabel("test accuracy, %")
        for axis, label in zip(axes[1:], MEASURES.values(), strict=True):
            axis.set(ylabel=label, yscale="log")
        finish(figure, axes, each=())
        told = axes[0].get_legend_handles_labels()
        figure.legend(*told, loc="outside lower center", ncols=len(wanted), fontsize=8)
        return drawing.save(figure, out, number, f"Convergence and gradient diversity, R = {skew:g}")

    return drawn


def _factors(drawing: Drawing, out: Path) -> list[Path]:
    """Figure 5: accuracy against R, T and N_s; hollow marks are the paper's own figures."""
    figure, axes = drawing.plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    panels: list[tuple[str, tuple[int, ...], Callable[[Run], float]]] = [
        ("non-iidness R", (1, 2, 3), lambda run: run.skew),
        ("communication period T", (4, 5, 6), lambda run: run.period),
        ("labels at the server Ns", (7, 8, 9), lambda run: run.server_labels),
    ]
    for axis, (label, numbers, factor) in zip(axes, panels, strict=True):
        for place, number in enumerate(numbers):
            row = rows.row(str(number))
            points = {factor(run): percents(found) for run, found in drawing.of(row.runs).items()}
            drawing.line(axis, row.runs[0].data, place, points)
            printed = [(factor(run), run.published) for run in row.runs if run.published is not None]
            if printed and points and drawing.used[-1].data != "digits":
                axis.plot(*zip(*printed, strict=True), "o", color=f"C{place}", fillstyle="none")
        axis.set_xlabel(label)
        if not axis.lines:
            axis.text(0.5, 0.5, "not run", ha="center", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
    if axes[1].lines:
        axes[1].set_xscale("log", base=2)
    axes[0].set_ylabel("test accuracy, %")
    finish(figure, axes, epochs=False)
    return drawing.save(figure, out, "5", "Accuracy against R, T and Ns (hollow: published)")


def _participants(drawing: Drawing, out: Path) -> list[Path]:
    """Figure 6: FedAvg and grouping on EMNIST by C; mask rate and pseudo-labels beside the diversity."""
    figure, axes = drawing.plt.subplots(
        5, 3, figsize=(11, 12), sharex=True, sharey="row", layout="constrained"
    )
    everything = drawing.of(rows.row("16").runs)
    for column, count in enumerate((10, 30, 47)):
        for place, run in enumerate(run for run in rows.row("16").runs if run.participants == count):
            found, name = everything.get(run, []), NAMES[run.method]
            drawing.line(axes[0, column], name, place, accuracy(found))
            for axis, measure in zip(axes[1:3, column], MEASURES, strict=True):
                drawing.line(axis, name, place, diversity(found, measure))
            drawing.line(axes[3, column], name, place, beside(found, "mask_rate"))
            drawing.line(axes[4, column], name, place, beside(found, "pseudo_accuracy"))
        axes[0, column].set_title(f"C = {count}")
    axes[0, 0].set_ylabel("test accuracy, %")
    for axis, label in zip(axes[1:3, 0], MEASURES.values(), strict=True):
        axis.set(ylabel=label, yscale="log")
    axes[3, 0].set_ylabel("images with a\npseudo-label")
    axes[4, 0].set_ylabel("of these, right")
    finish(figure, axes.flat, each=(axes[0, 2],))
    return drawing.save(figure, out, "6", "FedAvg and grouping on EMNIST by the number of participants")


def _lines(
    number: str, row: str, title: str, label: Callable[[Run], str]
) -> Callable[[Drawing, Path], list[Path]]:
    """Figures B.1 and C.1: convergence of the runs of a row."""

    def drawn(drawing: Drawing, out: Path) -> list[Path]:
        figure, axis = drawing.plt.subplots(figsize=(6, 4), layout="constrained")
        wanted = rows.row(row).runs
        for run, found in drawing.of(wanted).items():
            drawing.line(axis, label(run), wanted.index(run), accuracy(found))
        axis.set_ylabel("test accuracy, %")
        finish(figure, [axis])
        return drawing.save(figure, out, number, title)

    return drawn


def _sixteen(drawing: Drawing, out: Path) -> list[Path]:
    """Appendix D: all sixteen measures, as Definition 1 normalises them, for FedAvg and grouping."""
    figure, axes = drawing.plt.subplots(4, 4, figsize=(13, 11), sharex=True, layout="constrained")
    found = drawing.of(rows.row("21").runs)
    for line, kind in enumerate(("gradient", "update")):
        for half, server in enumerate(("", "_server")):
            for column, norm in enumerate(("l2_squared", "l2", "l1_squared", "l1")):
                axis, variant = axes[2 * line + half, column], f"{kind}_{norm}{server}"
                for place, (run, seeds) in enumerate(found.items()):
                    drawing.line(axis, NAMES[run.method], place, diversity(seeds, "definition", variant))
                axis.set_title(
                    f"{kind}, {norm.replace('_', ' ')}{', with server' if server else ''}", fontsize=8
                )
                axis.set_yscale("log")
    finish(figure, axes.flat, each=(axes[0, 0],))
    return drawing.save(figure, out, "D", "Sixteen measures of gradient diversity, EMNIST, K = C = 47")


def schedules(out: Path) -> list[Path]:
    """The learning rate over training, literally by the formula, in each fidelity: it rises again."""
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
    "B.1": _lines("B.1", "4", "Convergence by T", lambda run: f"T = {run.period}"),
    "C.1": _lines(
        "C.1", "15", "Convergence by C and E on SVHN, K = 30",
        lambda run: f"C = {run.participants}, E = {run.epochs or 40}",
    ),
    "D": _sixteen,
}  # fmt: skip
