"""Shows the progress of a run: as a live bar on a terminal, as plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ssfl.core import progress, statistics
from ssfl.core.events import Event
from ssfl.runs.text import duration, percent
from ssfl.simulate import privacy

T = TypeVar("T")
LINE_EVERY = 5.0  # seconds between plain lines; evaluations are always shown
WIDE = 135  # columns; narrower terminals show no bar and shorter metrics, so that all fits on one line


def watched(play: Callable[["Reporter | None"], T], quiet: bool) -> T:
    """Calls `play` and returns its result. Unless `quiet`, the argument of `play` is a `Reporter`, which
    shows events on the terminal; otherwise it is None."""
    if quiet:
        return play(None)
    with Reporter() as reporter:
        return play(reporter)


def accuracy(event: Event) -> str:
    """Returns the accuracy in an evaluation event as text, with its count and interval; "" if no images were
    evaluated. Without test images, it is the validation accuracy."""
    for key, name in (("", "accuracy"), ("validation_", "validation accuracy")):
        if f"{key}accuracy" in event:
            correct, count = event[f"{key}correct"], event[f"{key}count"]
            low, high = (100 * end for end in statistics.wilson(correct, count))
            return f"{name} {percent(correct / count)} ({correct:,}/{count:,}, {low:.0f}-{high:.0f} %)"
    return ""


class _Left(ProgressColumn):
    """The column of the progress bar that shows the remaining time. It counts down also while no events
    come."""

    def __init__(self, left: Callable[[], str]) -> None:
        super().__init__()
        self.left = left

    def render(self, task: Task) -> Text:
        return Text(self.left())


class Reporter:
    """Shows the events of a run on the terminal: call it with each event. Use it as a context manager, which
    removes the progress bar at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.shown = time.monotonic()
        self.rounds = 0
        self.metrics, self.accuracy, self.what = "starting", "", ""
        self.whole: float | None = None  # when everything will be done
        self.inner: float | None = None  # when the run inside this one will be done
        self.narrow = self.console.is_terminal and self.console.width < WIDE
        bar = () if self.narrow else (BarColumn(bar_width=None),)
        self.bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), *bar, TextColumn("{task.fields[metrics]}"),
            _Left(self.left), console=self.console, disable=not self.console.is_terminal,
            expand=not self.narrow,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None, metrics=self.metrics)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        progress.show_in(None)
        self.bar.stop()

    def left(self) -> str:
        """Returns the remaining time as text, such as "3 min left"; "" if it is not known yet."""
        known = [end for end in (self.whole, self.inner) if end is not None]
        return f"{duration(max(1, *(round(end - time.monotonic()) for end in known)))} left" if known else ""

    def _count_down(self, left: float | None) -> None:
        """Sets the remaining time to `left` seconds; None means that it is not known. While a run for the
        comparison trains, such as the server-only run, `left` is the remaining time of that run only. The
        main run's remaining time, if known, is then not changed and simply counts down."""
        end = None if left is None else time.monotonic() + left
        if not self.what or self.whole is None:
            self.whole = end
        self.inner = end if self.what else None

    def _prepare(self, text: str) -> None:
        """Shows a line of text in the progress bar about a preparation during the rounds, such as computing
        features; "" shows the metrics again."""
        self.bar.update(self.task, metrics=text or self.metrics)

    def __call__(self, event: Event) -> None:
        if event["event"] == "privacy":
            self.console.print(privacy.describe(event), soft_wrap=True, highlight=False)
            return
        if event["event"] == "forecast":
            for line in event["lines"]:
                self.console.print(line, soft_wrap=True, highlight=False, markup=False)
            return
        if event["event"] == "verdict":  # the command prints it at the end
            return
        if event["event"] == "start":
            self.bar.start()  # not earlier, because loading the data has its own progress bars
            if self.console.is_terminal:
                progress.show_in(self._prepare)
            self.rounds, self.what = event["rounds"], event.get("what", "")
            self.accuracy, self.metrics = "", "starting"
            self.bar.update(self.task, total=self.rounds, completed=event["round"])
        elif event["event"] == "round":
            mask = f"mask rate {event['mask_rate']:.2f}  " if "mask_rate" in event else ""
            alone = "without users  " if event.get("alone") else ""
            each = "" if self.narrow else f"{event['seconds']:.2f} s/round"
            self.metrics = f"{alone}{mask}{each}"
            self._count_down(event.get("left"))
        elif event["event"] == "eval":
            score = accuracy(event)
            self.accuracy = f"{score.partition(' (')[0] if self.narrow else score}  ".lstrip()
        what = f"{self.what}: " if self.what else ""
        metrics = (what + self.accuracy + self.metrics).rstrip()
        self.bar.update(self.task, completed=event["round"], metrics=metrics)
        late = event["event"] == "round" and time.monotonic() - self.shown > LINE_EVERY
        if not self.console.is_terminal and (event["event"] == "eval" or late):
            self.shown = time.monotonic()
            metrics = (self.accuracy if event["event"] == "eval" else "") + self.metrics
            line = f"{what}round {event['round']}/{self.rounds}  {metrics}  {self.left()}"
            self.console.print(line, soft_wrap=True, highlight=False)
