"""`ssfl compare`: name the first round, user and quantity in which two runs differ."""

import typer

from ssfl.cli.options import LINE, RunFolder
from ssfl.runs.text import printable


def compare(first: RunFolder, second: RunFolder) -> None:
    """Name the first round, user and quantity in which two runs differ. Exit code 1 if they do.

    Example: ssfl compare runs/a runs/b"""
    from ssfl.runs import compare as comparison

    for line in comparison.settings(first, second):
        print(f"config  {printable(line)}"[:LINE])
    difference = comparison.first_difference(first, second)
    if difference is not None:
        print(f"first difference  {printable(difference)}"[:LINE])
        raise typer.Exit(1)
    print("the same events in every round")
