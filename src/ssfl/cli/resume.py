"""`ssfl resume`: continue a run that was stopped."""

import sys

from ssfl.cli.options import Json, Quiet, RunFolder
from ssfl.cli.training import carry_out
from ssfl.cli.verbs import With
from ssfl.runs.text import printable


def resume(run: RunFolder, code: With = None, quiet: Quiet = False, json_only: Json = False) -> None:
    """Continue a run that was stopped.

    Example: ssfl resume runs/quickstart"""
    from ssfl.core import outside, progress
    from ssfl.runs import train

    outside.supply(code or [])
    progress.show(not (quiet or json_only))

    def warn(message: str) -> None:
        print(f"ssfl: warning: {printable(str(message))}", file=sys.stderr)

    if not json_only and not quiet and train.finished(run):
        print(f"{run} is already finished: there is nothing to continue")
    carry_out(lambda report: train.resume(run, report, warn), quiet or json_only, json_only)
