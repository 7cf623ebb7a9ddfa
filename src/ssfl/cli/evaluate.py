"""`ssfl evaluate`: how good a model is on a folder of labelled images."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssfl.cli.options import Json, RunFolder
from ssfl.cli.verbs import With
from ssfl.runs.text import printable

if TYPE_CHECKING:
    from ssfl.runs.evaluate import Evaluation

SHEET = "mistakes.png"
MOST_BROKEN = 20
MOST_CLASSES = 20
"""With more classes the confusion matrix is left to --json."""


def evaluate(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One sub-folder for each class.")],
    code: With = None,
    sheet: Annotated[
        Path | None, typer.Option(help=f"Where to write the worst mistakes. [default: RUN/{SHEET}]")
    ] = None,
    json_only: Json = False,
) -> None:
    """Judge the model by a folder of labelled images.

    Accuracy with its interval, balanced accuracy, each class, the confusion matrix, calibration, and a
    picture of the worst mistakes.

    Example: ssfl evaluate runs/own more-scans"""
    from ssfl.core import outside
    from ssfl.runs import evaluate as judge
    from ssfl.runs import sheet as sheets

    outside.supply(code or [])
    judged = judge.evaluate(run, folder)
    target = sheet or (run / SHEET if run.is_dir() else Path(SHEET))
    written = sheets.write(judged, target)
    if json_only:
        print(json.dumps(judged.as_dict() | {"sheet": None if written is None else str(written)}))
    else:
        print("\n".join(map(printable, described(judged))))
        print(printable(f"worst mistakes: {written}") if written else "no mistakes")
    for line in judged.broken[:MOST_BROKEN]:
        print(f"ssfl: skipped {printable(line)}", file=sys.stderr)
    if len(judged.broken) > MOST_BROKEN:
        print(f"ssfl: and {len(judged.broken) - MOST_BROKEN} more", file=sys.stderr)


def described(judged: "Evaluation") -> list[str]:
    """What was found, line by line."""
    from ssfl.core import statistics
    from ssfl.runs import text

    few = f"; below {statistics.FEW} images it says little" if judged.count < statistics.FEW else ""
    gap = judged.mean_confidence - judged.accuracy
    way = "about as sure as it is right" if abs(gap) < 0.03 else "too sure" if gap > 0 else "not sure enough"
    matrix, classes = judged.confusion, judged.classes
    rows = [["class", "images", "right", "accuracy", "95 % interval", "most often taken for"]]
    for k, row in enumerate(matrix):
        total = sum(row)
        if not total:
            continue
        most, other = max(((many, j) for j, many in enumerate(row) if j != k), default=(0, k))
        taken = f"{classes[other]} ({most})" if most else "-"
        share = text.percent(row[k] / total)
        rows.append([classes[k], f"{total}", f"{row[k]}", share, text.interval(row[k], total), taken])
    lines = [
        f"accuracy           {text.accuracy(judged.correct, judged.count)}{few}",
        f"balanced accuracy  {text.percent(judged.balanced_accuracy)}",
        f"calibration error  {text.percent(judged.calibration_error)} (mean confidence "
        f"{text.percent(judged.mean_confidence)}: {way})",
        "",
        *text.table(rows).splitlines(),
    ]
    if len(classes) <= MOST_CLASSES:
        head = ["true \\ predicted", *classes]
        cells = [
            [classes[k], *(str(many or "·") for many in row)] for k, row in enumerate(matrix) if sum(row)
        ]
        lines += ["", *text.table([head, *cells]).splitlines()]
    return lines
