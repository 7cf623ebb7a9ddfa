"""`ssfl check`: test a method, and a network, against the laws that every engine relies on."""

import json
from typing import Annotated

import typer

from ssfl.cli.options import Json
from ssfl.errors import SsflError


def check(
    method: Annotated[str, typer.Argument(help="A method's name, or FILE.py:NAME.")],
    model: Annotated[
        str | None, typer.Option(help="A network of your own: FILE.py:NAME, a function that makes it.")
    ] = None,
    json_only: Json = False,
) -> None:
    """Test a method, and a network, against the laws that every engine relies on.

    Example: ssfl check mine.py:Mine --model mine.py:make"""
    from ssfl.config.loading import check_overrides

    check_overrides([f"method.name={method}"])  # before torch is imported
    from ssfl.runs import laws

    found = laws.check(method, model)
    if json_only:
        print(json.dumps([law._asdict() for law in found]))
    else:
        print("\n".join(f"{'ok  ' if law.holds else 'FAIL'}  {law.name} ({law.told})" for law in found))
    if not all(law.holds for law in found):
        raise typer.Exit(SsflError.exit_code)
