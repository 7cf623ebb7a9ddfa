"""Writes a report to the standard output, for the board: `python -m ssfl.board.reporting RUN...`."""

import sys
from pathlib import Path

from ssfl.errors import SsflError
from ssfl.report import page


def main() -> None:
    try:
        sys.stdout.write(page.html(page.contents([Path(word) for word in sys.argv[1:]])))
    except SsflError as error:
        sys.exit(f"no report: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
