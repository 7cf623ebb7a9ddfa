"""Figures from run folders, with matplotlib (the extra `report`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssfl.core.events import Event
from ssfl.errors import SsflError, one_line

STYLES = ["-", "--", "-.", ":"]


def pyplot() -> Any:
    """Returns matplotlib's pyplot, without a display; raises if matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as functions
    except ImportError as error:
        raise SsflError(
            f"figures need matplotlib, which cannot be imported ({one_line(error, 160)}): run `pip install "
            "'ssfl[report]'`",
            fix="pip install 'ssfl[report]'",
        ) from error
    return functions


def curves(histories: Mapping[str, list[Event]], path: Path, title: str) -> Path:
    """Draws the test accuracy and the mask rate over the rounds, with a line for each run, and returns the
    file. Lines differ in colour and in style."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 6.4), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    for number, (name, events) in enumerate(histories.items()):
        style = {"linestyle": STYLES[number % len(STYLES)], "linewidth": 2}
        evals = [(e["round"], 100 * e["accuracy"]) for e in events if "accuracy" in e]
        masks = [(e["round"], e["mask_rate"]) for e in events if "mask_rate" in e]
        (line,) = top.plot(*zip(*evals, strict=True), label=f"{name}: {evals[-1][1]:.1f} %", **style)
        if masks:
            bottom.plot(*zip(*masks, strict=True), color=line.get_color(), **style)
    top.set(ylabel="test accuracy, %", ylim=(0, 100), title=title)
    bottom.set(xlabel="round", ylabel="mask rate", ylim=(0, 1.02))
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
