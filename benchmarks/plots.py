"""Draws how the cost of a round depends on the numbers of participants and users, from the files in results/.

python -m benchmarks.plots [--results FOLDER] [--out FOLDER]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.steps import BATCH

TERAFLOPS, TERABYTES = 790, 4.8
"""The assumed speed of an H200 GPU: 10^12 bfloat16 operations per second in its tensor cores, and 10^12 bytes
per second from its memory."""
BLUE, ORANGE, GREY = "#1f5fa8", "#c4570a", "#6b6b6b"
STYLE: Any = {
    "svg.fonttype": "none",  # letters stay letters: a smaller file
    "svg.hashsalt": "ssfl",  # names in the file are the same each time
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 2,
    "lines.markersize": 6,
}
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description="Draw the cost of participants and users."
    )
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="the folder with the JSON files"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    results = [read(options.results / f"{name}.json") for name in ("participants-h200", "users-cpu")]
    fixed, each = straight(results[0]["rows"])
    print(f"a step of C users: {fixed:.3f} ms + {each:.4f} ms for each; equal at C = {fixed / each:.1f}")
    print(save(cost(*results), options.out / "cost.svg"))


def read(path: Path) -> Result:
    """Returns the content of a JSON file."""
    result: Result = json.loads(path.read_text("utf-8"))
    return result


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure as an SVG file and returns its path. The file has the same bytes each time, because
    it contains no date, version or path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type")) if path.suffix == ".svg" else None
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=150, metadata=nothing)
    return path


def straight(rows: list[Result]) -> tuple[float, float]:
    """Fits a straight line to the milliseconds of a step of C users. Returns the part that does not depend on
    C, and the milliseconds per user. The fit minimises squared relative errors."""
    users, spent = columns(rows, "users", "step_ms")
    each, fixed = np.polyfit(users, spent, 1, w=1 / spent)
    return float(fixed), float(each)


def floor(row: Result) -> float:
    """Returns a lower bound for a step's milliseconds: the time that its arithmetic or its memory traffic
    alone would take, whichever is longer."""
    return max(float(row["gigaflop"]) / TERAFLOPS, float(row["gigabyte"]) / TERABYTES)


def columns(rows: list[Result], *names: str) -> list[np.ndarray]:
    """Returns the values of these fields in all rows, one array per field."""
    return [np.array([row[name] for row in rows], float) for name in names]


def cost(participants: Result, users: Result) -> Figure:
    """Returns the figure with two panels: time against participants, and time against users."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        left, right = figure.subplots(1, 2)
        draw_participants(left, participants)
        draw_users(right, users)
        for axes in (left, right):
            axes.minorticks_off()
            axes.grid(True)
            axes.tick_params(length=0)
    return figure


def draw_participants(axes: Axes, result: Result) -> None:
    """Draws the measured time of a step of all users against the number of participants C. It adds two fitted
    lines (the fixed part and the part proportional to C) and the lower bound from memory traffic."""
    users, spent = columns(result["rows"], "users", "step_ms")
    fixed, each = straight(result["rows"])
    ends = np.array([0.8, 620.0])
    thin: dict[str, Any] = {"color": BLUE, "linewidth": 1, "linestyle": (0, (1, 2))}
    axes.plot(ends, [fixed, fixed], **thin)
    axes.plot(ends, each * ends, **thin)
    axes.plot(users, [floor(row) for row in result["rows"]], color=GREY, linestyle=(0, (5, 2)), linewidth=1.5)
    axes.plot(users, spent, "o-", color=BLUE)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(0.01, 60))
    axes.set_xticks(users, [f"{count:.0f}" for count in users])
    axes.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axes.set(xlabel="participants of a round, C", ylabel="milliseconds")
    axes.set_title("A step: a fixed part, then in proportion to C")
    low = floor(result["rows"][0]) / users[0]
    axes.text(4, 0.95, "measured", color=BLUE, ha="right", va="center", fontweight="bold")
    axes.text(540, 0.9 * fixed, f"{fixed:.2f} ms for any C", color=BLUE, ha="right", va="top", fontsize=9)
    for x, rate, name, colour in (
        (1.1, each, f"{1000 * each:.0f} µs for each", BLUE),
        (47, low, "memory traffic alone", GREY),
    ):
        rate *= 0.85  # a little below the line, and along it
        angle = np.degrees(np.arctan(rate))
        axes.text(
            x, x * rate, name, color=colour, fontsize=9, va="top",
            rotation=angle, rotation_mode="anchor", transform_rotates_text=True,
        )  # fmt: skip
    axes.text(0.02, 0.97, f"EMNIST CNN, {BATCH} images a user,\n{result['device']}", **corner(axes))


def draw_users(axes: Axes, result: Result) -> None:
    """Draws the seconds until the first round, and the seconds per round, against the number of users K."""
    users, start, spent = columns(result["rows"], "users", "start_seconds", "round_seconds")
    participants = next(s.partition("=")[2] for s in result["settings"] if "participants" in s)
    for seconds, colour, marker, name, digits in (
        (start, ORANGE, "s", "until the first round begins", 1),
        (spent, BLUE, "o", "a round", 2),
    ):
        axes.plot(users, seconds, marker=marker, color=colour)
        for x, y in zip(users, seconds, strict=True):
            place: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{y:.{digits}f}", (x, y), color=colour, fontsize=9, **place)
        axes.text(3200, seconds.mean() + 0.7, name, color=colour, ha="center", va="center", fontweight="bold")
    axes.set(xscale="log", xlim=(60, 200_000), ylim=(0, 5.8))
    axes.set_xticks(users, [f"{count:,.0f}" for count in users])
    axes.set(xlabel="users of the federation, K", ylabel="seconds")
    axes.set_title("More users cost nothing")
    what = f"{result['images']:,} images of 8×8, {participants} participants"
    machine = f"{what},\n{result['machine']['cores']} CPU cores"
    axes.text(0.02, 0.97, machine, **corner(axes))


def corner(axes: Axes) -> dict[str, Any]:
    return {"transform": axes.transAxes, "ha": "left", "va": "top", "fontsize": 9, "color": "#444444"}


if __name__ == "__main__":
    main()
