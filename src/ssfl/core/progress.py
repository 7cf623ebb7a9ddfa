"""Progress bars for long computations, most of which come before the first round. They are shown by commands,
not when ssfl is used from Python."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

PATIENCE = 1.0
"""A progress bar appears only after this many seconds, because most computations are finished sooner."""
LINE_EVERY = 5.0
"""If the output is not a terminal, progress is printed as a line, at most once in this many seconds."""
_visible = False
_display: Callable[[str], None] | None = None


def show(visible: bool) -> None:
    """Switches the display of progress on or off for this process. It is off by default."""
    global _visible
    _visible = visible


def show_in(display: Callable[[str], None] | None) -> None:
    """Replaces the progress bars of a terminal by texts: `display` is called with each new text. Use this
    while another progress bar is already on the screen. None restores the usual progress bars.

    When a computation ends, `display` is called with an empty text.
    """
    global _display
    _display = display


def say(line: str) -> None:
    """Prints a line to stderr, if progress is switched on in this process."""
    if _visible:
        with suppress(OSError):  # a full disk loses only this line
            print(line, file=sys.stderr)


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar during a `with` block that processes `total` items. Yields a function: call it
    with the number of items finished since its last call."""
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
