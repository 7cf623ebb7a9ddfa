"""`ssfl doctor`: show what this machine can do and what to run first."""

import json
from pathlib import Path

import typer

from ssfl.cli.options import Json
from ssfl.errors import SsflError


def doctor(json_only: Json = False) -> None:
    """Show what this machine can do and what to run first.

    Example: ssfl doctor"""
    from ssfl.cli import examine as examination

    report = examination.examine(Path())
    print(json.dumps(report) if json_only else "\n".join(examination.lines(report)))
    if report["broken"]:
        raise typer.Exit(SsflError.exit_code)
