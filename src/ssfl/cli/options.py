"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli import verbs

ConfigName = Annotated[
    str | None,
    typer.Argument(
        help="The name of a preset, a TOML file, a folder made by `ssfl new`, or a folder of images. "
        "Default: the preset quickstart, or the preset own if --set names other data.",
        autocompletion=verbs.complete_config,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Jobs = Annotated[
    int, typer.Option(min=1, help="The number of runs at the same time. They share the cores or the GPU.")
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
LINE = 4000
"""The largest number of characters in an error message. A text from a malicious file may be very long."""
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder.", autocompletion=verbs.complete_run)
]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or a .safetensors file that `ssfl export` wrote.",
        autocompletion=verbs.complete_run,
    ),
]
