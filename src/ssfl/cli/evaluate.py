"""`ssfl evaluate`: the accuracy of a model on a folder of labelled images."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.options import Json, Model
from ssfl.cli.verbs import With
from ssfl.runs.text import printable

SHEET = "mistakes.png"
"""The default name of the picture with the worst mistakes."""
MOST_BROKEN = 20
"""The largest number of unreadable files that are listed by name."""


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
        print("\n".join(map(printable, str(judged).splitlines())))
        print(printable(f"picture of the worst mistakes: {written}") if written else "no mistakes")
    for line in judged.broken[:MOST_BROKEN]:
        print(f"ssfl: skipped {printable(line)}", file=sys.stderr)
    if len(judged.broken) > MOST_BROKEN:
        print(f"ssfl: skipped {len(judged.broken) - MOST_BROKEN} more files", file=sys.stderr)
