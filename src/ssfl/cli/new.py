"""`ssfl new`: write a config file, with comments, for a folder of images."""

from pathlib import Path
from typing import Annotated

import typer


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write ssfl.toml into.")],
    images: Annotated[
        Path | None,
        typer.Option(help="The folder with the images, with a sub-folder for each class. Default: DIR."),
    ] = None,
) -> None:
    """Write a config file, with comments, for a folder of images.

    Example: ssfl new mine --images scans"""
    from ssfl.cli import project as writing

    print("\n".join(writing.project(folder, images)))
