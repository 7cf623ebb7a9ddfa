"""`ssfl check`: test whether a method, and a network, follow the rules that all training engines rely on."""

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ssfl.cli import verbs
from ssfl.cli.options import Json
from ssfl.errors import ConfigError, SsflError


def check(
    method: Annotated[str, typer.Argument(help="The name of a method, or FILE.py:NAME for your own.")],
    model: Annotated[
        str | None,
        typer.Option(help="Your own network: FILE.py:NAME, where NAME is a function that builds it."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, such as method.tau=0.5. Repeatable. The images have 1x8x8 pixels and 10 "
            "classes: data.size=32 resizes them, and data.path=FILE.npz or data.name=FILE.py:NAME takes "
            "others.",
            autocompletion=verbs.complete_setting,
        ),
    ] = None,
    json_only: Json = False,
) -> None:
    """Test whether your method, and your network, will train correctly with every engine.

    It tests the rules that all engines rely on, and names the likely cause if a rule is broken.

    Example: ssfl check mine.py:Mine --model mine.py:make
    """
    from ssfl.config.loading import check_overrides

    if Path(method).is_dir():
        raise ConfigError(
            f"{method} is a folder, but this command tests methods: `ssfl split {quote(method)}` shows what "
            f"a folder of images holds, and `ssfl report {quote(method)}` shows a run",
            key="method.name",
            value=method,
        )
    check_overrides([*(sets or []), f"method.name={method}"])  # before torch is imported
    from ssfl.runs import laws

    outcomes = laws.check(method, model, sets or [])
    if json_only:
        print(json.dumps([law._asdict() for law in outcomes]))
    else:
        print("\n".join(f"{'ok  ' if law.holds else 'FAIL'}  {law.name} ({law.detail})" for law in outcomes))
    if not all(law.holds for law in outcomes):
        raise typer.Exit(SsflError.exit_code)
