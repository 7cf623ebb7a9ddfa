"""`ssfl export`: export the model as safetensors, a JSON card and a torch.export program."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.options import Model
from ssfl.cli.verbs import With
from ssfl.runs.text import printable


def export(
    run: Model,
    file: Annotated[Path, typer.Argument(help="The name of the files to write, without an ending.")],
    code: With = None,
) -> None:
    """Export the model as safetensors, a JSON card and a torch.export program.

    Example: ssfl export runs/quickstart digits"""
    from ssfl.core import outside
    from ssfl.runs.predict import export as exported

    outside.supply(code or [])
    for path in exported(run, file):
        print(printable(str(path)))
