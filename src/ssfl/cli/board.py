"""`ssfl board`: show the runs of a folder live in a browser on this machine."""

from pathlib import Path
from typing import Annotated

import typer


def board(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder with the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free port.")] = 8642,
) -> None:
    """Show the runs of a folder live in a browser on this machine.

    Example: ssfl board runs"""
    from ssfl.board.app import serve

    serve(folder, port)
