"""`ssfl report`: write one HTML file about a run, or about several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.verbs import With


def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file to write. Default: RUN/report.html, or ./report.html for several runs."
        ),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every figure to DIR, as PNG and SVG.")
    ] = None,
    code: With = None,
) -> None:
    """Write an HTML report about one run, or a comparison of several runs.

    Example: ssfl report runs/quickstart"""
    from ssfl.core import outside
    from ssfl.report import page

    outside.supply(code or [])
    for path in page.write(run, out, figures):
        print(path)
