"""`ssfl board`: show the runs under a folder in a browser on this machine, live."""

from pathlib import Path
from typing import Annotated

import typer


def board(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is any free one.")] = 8642,
) -> None:
    """Show the runs under a folder in a browser on this machine, live.

    Example: ssfl board runs"""
    from ssfl.board.app import serve

    serve(folder, port)
