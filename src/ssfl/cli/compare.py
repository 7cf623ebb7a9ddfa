"""`ssfl compare`: check whether two runs gave the same results, and show the first difference."""

import typer

from ssfl.cli.options import LINE, RunFolder
from ssfl.runs.text import printable


def compare(first: RunFolder, second: RunFolder) -> None:
    """Check whether two runs gave the same results, and show the first difference. The exit code is 1 if they
    differ.

    Example: ssfl compare runs/a runs/b
    """
    from ssfl.runs import compare as comparison

    settings = comparison.settings(first, second)
    if settings:
        print(f"runs    {printable(f'{first} | {second}')}"[:LINE])
    for line in settings:
        print(f"config  {printable(line)}"[:LINE])
    difference = comparison.first_difference(first, second)
    if difference is not None:
        print(f"first difference  {printable(difference)}"[:LINE])
        raise typer.Exit(1)
    print("no difference: both runs have the same events in every round")
