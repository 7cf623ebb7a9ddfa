"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli import verbs

ConfigName = Annotated[
    str | None,
    typer.Argument(
        help="A preset's name, a TOML file, a folder that `ssfl new` made, or a folder of images. Default: "
        "quickstart, or own where --set names other data.",
        autocompletion=verbs.complete_config,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
LINE = 4000
"""Letters that a line of an error may have: a crafted file may put anything into one."""
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder.", autocompletion=verbs.complete_run)
]
