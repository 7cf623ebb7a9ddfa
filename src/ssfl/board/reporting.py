"""Writes a report as HTML to the standard output: `python -m ssfl.board.reporting RUN...`. The board runs
this as a separate process."""

import sys
from pathlib import Path

from ssfl.errors import SsflError
from ssfl.report import page


def main() -> None:
    """Writes the report on the run folders in the arguments to the standard output."""
    try:
        sys.stdout.write(page.html(page.contents([Path(word) for word in sys.argv[1:]])))
    except SsflError as error:
        sys.exit(f"no report: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
