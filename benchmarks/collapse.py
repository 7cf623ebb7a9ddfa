"""Draws the picture of a collapse for the documentation, beside a run that does not collapse, from the
results of the demo.

  python -m benchmarks.collapse [--results FOLDER] [--out FOLDER]
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.plots import BLUE, GREY, ORANGE, STYLE, read, save

SEED = 1
PANELS = {
    "FedAvg": "FedAvg collapses",
    "anchored (recommended)": "anchored: the server trains last",
}
"""For each run to draw, by its name in results/demo.json: the title of its panel."""
CURVES = {
    "accuracy": ("test accuracy", BLUE, "o-"),
    "mask_rate": ("mask rate", ORANGE, "--"),
    "pseudo_accuracy": ("correct pseudo-labels", GREY, ":"),
}
"""The metrics to draw: the name, colour and line style of each."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collapse", description="Draws a collapse.")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder with demo.json")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    print(save(collapse(read(options.results / "demo.json")), options.out / "collapse.svg"))


def collapse(demo: dict[str, Any]) -> Figure:
    """Returns the figure with one panel for each of the two methods. `demo` is the content of
    results/demo.json."""
    runs = {run["title"]: run for run in demo["runs"] if run["seed"] == SEED}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (title, heading) in zip(panels, PANELS.items(), strict=True):
            draw(axes, runs[title])
            axes.set_title(heading)
        panels[0].set_ylabel("%")
        panels[0].legend(loc="center right", frameon=False)
    return figure


def draw(axes: Axes, run: dict[str, Any]) -> None:
    """Draws the accuracy, the mask rate and the share of correct pseudo-labels of a run into a panel, in
    percent."""
    for key, (name, colour, line) in CURVES.items():
        points = [(round_, 100 * value) for round_, value in run[key] if value is not None]
        axes.plot(*zip(*points, strict=True), line, color=colour, label=name, markersize=5)
    axes.set(xlabel="round", xlim=(0, 51), ylim=(-3, 105))
    axes.grid(True)
    axes.tick_params(length=0)


if __name__ == "__main__":
    main()
