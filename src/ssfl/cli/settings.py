"""`ssfl settings`: list the settings with their defaults and meanings."""

from typing import Annotated

import typer


def settings(
    word: Annotated[
        str,
        typer.Argument(
            metavar="[WORD]", help="Show only settings with this word, or the settings of this method."
        ),
    ] = "",
) -> None:
    """List the settings with their defaults and meanings.

    Example: ssfl settings threshold"""
    from ssfl.cli import explain
    from ssfl.core import outside

    if outside.is_path(word):
        outside.trust(word)
    print("\n".join(explain.lines(word)))
