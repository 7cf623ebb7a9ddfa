"""Draws simple figures of runs with matplotlib (the extra `report`), without a whole report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssfl.core.events import Event
from ssfl.errors import SsflError, one_line

STYLES = ["-", "--", "-.", ":"]
"""The line styles, so that lines can also be told apart without colour."""


def pyplot() -> Any:
    """Returns the module matplotlib.pyplot, set up to draw into files without a display. Raises if matplotlib
    is not installed."""
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
    """Draws the test accuracy and the mask rate over the rounds into the file `path`, with one line per run,
    and returns the path. `histories` has the events of each run, by its name in the legend."""
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
