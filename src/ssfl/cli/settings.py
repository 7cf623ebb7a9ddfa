"""`ssfl settings`: list every setting, its default and what it does."""

from typing import Annotated

import typer


def settings(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Only those that speak of it.")] = "",
) -> None:
    """List every setting, its default and what it does.  Example: ssfl settings threshold"""
    from ssfl.cli import explain
    from ssfl.core import outside

    if outside.is_path(word):
        outside.trust(word)
    print("\n".join(explain.lines(word)))
