"""Draws the figures of a report as PNG and SVG files, with the same data as on its page. It needs matplotlib
(the extra `report`)."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssfl.report.plots import STYLES, pyplot
from ssfl.report.predictions import unpacked

Block = dict[str, Any]
COLOURS = ["#0072b2", "#c2510a", "#008562", "#b0568a", "#9a6b00", "#2b87c0", "#1b1f24", "#6a6f77"]
"""The colours of report.css, after Okabe and Ito: people with colour blindness can tell them apart."""
MARKERS = "os^DxvP*"


def draw(sections: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws every figure of the sections into `folder` and returns the written files. The file names are the
    figure names on the page."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    figures = [block for section in sections for block in section["blocks"] if "figure" in block]
    quiet = {"text.parse_math": False, "svg.hashsalt": "ssfl"}  # a $ in a name is not a formula
    with plt.rc_context(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the font lacks some letters of names
        for block in figures:
            figure = _KINDS[block["kind"]](plt, block)
            figure.suptitle(block["title"], fontsize=11)
            for kind in ("png", "svg"):
                path = folder / f"{block['figure']}.{kind}"
                figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
            plt.close(figure)
    return written


def _line(plt: Any, block: Block) -> Any:
    """Returns a matplotlib figure of a line chart."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    scale = 100 if block["format"] == "percent" else 1
    for place, series in enumerate(block["series"]):
        number = series.get("look", place) % len(COLOURS)
        points = [(x, scale * y) for x, y in series["points"] if y is not None]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        axis.plot(
            x, y, STYLES[number % len(STYLES)], color=COLOURS[number], marker=MARKERS[number], markersize=4.5,
            markevery=max(1, len(x) // 9), fillstyle="none", label=series["name"].lstrip("_") or "run",
        )  # fmt: skip
        if series.get("band"):
            at, low, high = zip(*series["band"], strict=True)
            axis.fill_between(at, [scale * v for v in low], [scale * v for v in high], color=COLOURS[number],
                              alpha=0.18, linewidth=0)  # fmt: skip
    for level in block.get("levels") or []:
        axis.axhline(scale * level["y"], color="0.5", linestyle=":", linewidth=1)
        where = (0.99, scale * level["y"])
        axis.annotate(
            level["text"], where, xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
    for mark in block.get("marks") or []:
        axis.axvline(mark["x"], color="0.5", linestyle=":", linewidth=1)
        axis.annotate(mark["text"], (mark["x"], 1.0), xycoords=("data", "axes fraction"), xytext=(3, 2),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    if block.get("log"):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the default one writes 10^-1
        axis.minorticks_off()
    if block.get("range"):
        axis.set_ylim(*(scale * end for end in block["range"]))
    if block.get("xRange"):
        axis.set_xlim(*block["xRange"])
    axis.set(xlabel=block["xLabel"], ylabel=block["yLabel"] + (", %" if scale == 100 else ""))
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _matrix(plt: Any, block: Block) -> Any:
    """Returns a matplotlib figure of a matrix, such as a confusion matrix, with coloured cells."""
    values = np.array([[np.nan if v is None else v for v in row] for row in block["values"]], dtype=float)
    values = values.reshape(len(block["rows"]), len(block["columns"]))
    rows, columns = values.shape
    cell = min(0.36, 11 / max(columns, 1))
    figure, axis = plt.subplots(
        figsize=(2.4 + cell * columns, 1.6 + min(0.36, 11 / max(rows, 1)) * rows), layout="constrained"
    )
    kinds = bool(block.get("kinds"))
    most = block.get("most") or (np.nanmax(values) if np.isfinite(values).any() else 1)
    if kinds:  # group 1 has the first colour, as on the page
        shades = plt.matplotlib.colors.ListedColormap(COLOURS)
        axis.imshow((values - 1) % len(COLOURS), cmap=shades, vmin=-0.5, vmax=7.5, alpha=0.4, aspect="auto")
    else:
        axis.imshow(values, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    if columns <= 40 and rows <= 60:
        scale = 100 if block["format"] == "percent" else 1
        for (i, j), value in np.ndenumerate(values):
            if value and np.isfinite(value) and cell > 0.25:
                dark = not kinds and value > 0.55 * most
                axis.text(j, i, f"{scale * value:.0f}", ha="center", va="center", fontsize=6.5,
                          color="white" if dark else "black")  # fmt: skip
    across, down = -(-columns // 40), -(-rows // 45)
    upright = 90 if max(map(len, block["columns"]), default=0) > 2 else 0
    names = [_cut(name) for name in block["columns"][::across]]
    axis.set_xticks(range(0, columns, across), names, fontsize=7, rotation=upright)
    axis.set_yticks(range(0, rows, down), [_cut(name) for name in block["rows"][::down]], fontsize=7)
    axis.set(xlabel=block["columnLabel"], ylabel=block["rowLabel"])
    return figure


def _bars(plt: Any, block: Block) -> Any:
    """Returns a matplotlib figure of a chart with horizontal bars."""
    names = [_cut(item["name"], 40) for item in block["items"]]
    scale, unit = {"percent": (100, "%"), "seconds": (1, "seconds")}.get(block["format"], (1, ""))
    figure, axis = plt.subplots(figsize=(7, 1 + 0.36 * len(names)), layout="constrained")
    bars = axis.barh(range(len(names)), [scale * item["value"] for item in block["items"]], color=COLOURS[0])
    axis.bar_label(bars, fmt=lambda value: f"{value:,.4g}", padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel(unit)
    return figure


def _images(plt: Any, block: Block) -> Any:
    """Returns a matplotlib figure of example images with their predictions as captions."""
    captions = [
        f"{'correct' if item['correct'] else 'wrong'}: {_cut(item['predicted'])}\n"
        f"true {_cut(item['true'])}, {item['confidence']:.0%}"
        for item in block["items"]
    ]
    return _pictures(plt, [[item["image"] for item in block["items"]]], [captions])


def _views(plt: Any, block: Block) -> Any:
    """Returns a matplotlib figure in which each row is a training image with its weak and strong views."""
    rows = [[item["image"], *item["weak"], *item["strong"]] for item in block["items"]]
    head = [
        "image",
        *["weak"] * len(block["items"][0]["weak"]),
        *["strong"] * len(block["items"][0]["strong"]),
    ]
    return _pictures(plt, rows, [head] + [[""] * len(head)] * (len(rows) - 1))


def _pictures(plt: Any, rows: list[list[str]], captions: list[list[str]]) -> Any:
    """Returns a matplotlib figure with rows of images. Each image is a data: URL, and has a caption."""
    wide = len(rows[0])
    figure, axes = plt.subplots(
        len(rows), wide, figsize=(1.15 * wide, 1.35 * len(rows) + 0.4), squeeze=False, layout="constrained"
    )
    for line, addresses, captions_of_row in zip(axes, rows, captions, strict=True):
        for axis, address, caption in zip(line, addresses, captions_of_row, strict=True):
            image = np.asarray(unpacked(address))
            axis.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_title(caption, fontsize=7)
            axis.set_axis_off()
    return figure


def _cut(name: str, most: int = 18) -> str:
    """Returns the name, shortened to at most `most` characters."""
    return name if len(name) <= most else name[: most - 1] + "…"


_KINDS: dict[str, Callable[[Any, Block], Any]] = {
    "line": _line, "matrix": _matrix, "bars": _bars, "images": _images, "views": _views,
}  # fmt: skip
