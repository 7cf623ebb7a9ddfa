"""`ssfl report`: write one HTML file that explains a run or compares several."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.verbs import With


def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; by itself RUN/report.html, of several ./report.html.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every figure there, PNG and SVG.")
    ] = None,
    code: With = None,
) -> None:
    """Write one HTML file that explains a run or compares several.  Example: ssfl report runs/quickstart"""
    from ssfl.core import outside
    from ssfl.report import page

    outside.supply(code or [])
    for path in page.write(run, out, figures):
        print(path)
