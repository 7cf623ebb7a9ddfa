"""`ssfl evaluate`: the accuracy of a model on a folder of labelled images."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssfl.cli.options import Json, Model
from ssfl.cli.verbs import With
from ssfl.runs.text import printable

if TYPE_CHECKING:
    from ssfl.runs.evaluate import Evaluation

SHEET = "mistakes.png"
"""The default name of the picture with the worst mistakes."""
MOST_BROKEN = 20
"""The largest number of unreadable files that are listed by name."""
MOST_CLASSES = 20
"""With more classes than this, only --json shows the confusion matrix."""


def evaluate(
    run: Model,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Labelled images: one sub-folder for each class.")
    ],
    code: With = None,
    sheet: Annotated[
        Path | None, typer.Option(help=f"The PNG file for the worst mistakes. Default: RUN/{SHEET}.")
    ] = None,
    json_only: Json = False,
) -> None:
    """Evaluate the model on a folder of labelled images.

    Prints the accuracy with its interval, the balanced accuracy, the accuracy of each class, the confusion
    matrix and the calibration. Also writes a picture of the worst mistakes.

    Example: ssfl evaluate runs/own more-scans
    """
    from ssfl.core import outside, progress
    from ssfl.runs import evaluate as judge
    from ssfl.runs import sheet as sheets

    outside.supply(code or [])
    progress.show(not json_only)
    judged = judge.evaluate(run, folder)
    target = sheet or (run / SHEET if run.is_dir() else Path(SHEET))
    written = sheets.write(judged, target)
    if json_only:
        print(json.dumps(judged.as_dict() | {"sheet": None if written is None else str(written)}))
    else:
        print("\n".join(map(printable, described(judged))))
        print(printable(f"picture of the worst mistakes: {written}") if written else "no mistakes")
    for line in judged.broken[:MOST_BROKEN]:
        print(f"ssfl: skipped {printable(line)}", file=sys.stderr)
    if len(judged.broken) > MOST_BROKEN:
        print(f"ssfl: skipped {len(judged.broken) - MOST_BROKEN} more files", file=sys.stderr)


def described(judged: "Evaluation") -> list[str]:
    """Returns the results of an evaluation as lines of text for the terminal."""
    from ssfl.core import statistics
    from ssfl.runs import text

    caveat = (
        f"; only {judged.count} images, so this is a rough estimate" if judged.count < statistics.FEW else ""
    )
    gap = judged.mean_confidence - judged.accuracy
    calibration = "neither over- nor underconfident on average"
    if abs(gap) >= 0.03:
        calibration = "overconfident" if gap > 0 else "underconfident"
    matrix, classes = judged.confusion, judged.classes
    rows = [["class", "images", "correct", "accuracy", "95 % interval", "most often confused with"]]
    for k, row in enumerate(matrix):
        total = sum(row)
        if not total:
            continue
        most, other = max(((many, j) for j, many in enumerate(row) if j != k), default=(0, k))
        confused = f"{classes[other]} ({most})" if most else "-"
        share = text.percent(row[k] / total)
        rows.append([classes[k], f"{total}", f"{row[k]}", share, text.interval(row[k], total), confused])
    lines = [
        f"accuracy           {text.accuracy(judged.correct, judged.count)}{caveat}",
        f"balanced accuracy  {text.percent(judged.balanced_accuracy)}",
        f"calibration error  {text.percent(judged.calibration_error)} (mean confidence "
        f"{text.percent(judged.mean_confidence)}: {calibration})",
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
