"""Progress bars for long preparations, most of them before the first round. Only the command line shows
them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

PATIENCE = 1.0
"""Seconds after which a bar appears; most preparations are quicker."""
LINE_EVERY = 5.0
"""Seconds between plain lines if there is no terminal."""
_visible = False
_display: Callable[[str], None] | None = None


def show(visible: bool) -> None:
    """Sets whether progress is shown in this process."""
    global _visible
    _visible = visible


def show_in(display: Callable[[str], None] | None) -> None:
    """Sets a function that shows progress as a text, for use while another progress bar is on the screen.
    None removes it.

    When the work ends, the function gets an empty text.
    """
    global _display
    _display = display


def say(line: str) -> None:
    """Prints a line to stderr if this process shows progress."""
    if _visible:
        with suppress(OSError):  # a full disk loses only this line
            print(line, file=sys.stderr)


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar during the `with` block. Yields a function; call it with the number of items that
    were finished since its last call."""
    began = shown = time.monotonic()
    done, line = 0, None

    def advance(count: int = 1) -> None:
        nonlocal done, shown, line
        done += count
        now = time.monotonic()
        if not _visible or now - began < PATIENCE:
            return
        if sys.stderr.isatty():
            if _display is not None:
                _display(f"{label}: {done:,} of {total:,}")
                return
            line = line or _rich(label, total)
            line.update(0, completed=done)
        elif now - shown >= LINE_EVERY and done < total:
            shown = now
            remaining = (now - began) / done * (total - done)
            say(f"{label} {done:,} of {total:,}  {remaining:.0f} s left")

    try:
        yield advance
    finally:
        if line is not None:
            line.stop()
        elif _display is not None:
            _display("")


def _rich(label: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn(label), MofNCompleteColumn(), BarColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    progress.add_task("", total=total)
    progress.start()
    return progress
