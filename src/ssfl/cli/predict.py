"""`ssfl predict`: predict the class of images, with the model's confidence."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.options import Json, Model
from ssfl.cli.verbs import With
from ssfl.errors import DataError
from ssfl.runs.text import printable


def predict(
    run: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    code: With = None,
    every_class: Annotated[
        bool, typer.Option("--every-class", help="Also show the probability of each class.")
    ] = False,
    json_only: Json = False,
) -> None:
    """Predict the class of images, with the model's confidence.

    Example: ssfl predict runs/quickstart scan.png"""
    from ssfl.core import outside, progress
    from ssfl.runs.predict import predict as predicted

    outside.supply(code or [])
    progress.show(not json_only)
    broken: list[str] = []
    predictions = predicted(run, images, broken, every_class=every_class)
    if json_only:
        print(json.dumps(predictions))
    else:
        for row in predictions:
            each = (f"{printable(name)} {share:.3f}" for name, share in row.get("probabilities", {}).items())
            confidence = f"{row['confidence']:.3f}"
            print(printable(row["file"]), printable(row["class"]), confidence, *each, sep="\t")
    if broken:  # after the predictions for the files that can be read
        rest = f" and {len(broken) - 20} more" if len(broken) > 20 else ""
        raise DataError("; ".join(broken[:20]) + rest)
