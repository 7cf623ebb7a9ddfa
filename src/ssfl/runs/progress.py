"""Seeing a run work: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ssfl.core.events import Event
from ssfl.runs.remaining import Pace
from ssfl.runs.remaining import told as remaining
from ssfl.simulate import privacy

T = TypeVar("T")
LINE_EVERY = 5.0  # seconds between plain lines, evaluations aside


def watched(play: Callable[["Reporter | None"], T], quiet: bool) -> T:
    """What `play` gives, its events shown unless `quiet`."""
    if quiet:
        return play(None)
    with Reporter() as reporter:
        return play(reporter)


def accuracy(event: Event) -> str:
    """What an evaluation found, in words."""
    if "accuracy" in event:
        return f"accuracy {100 * event['accuracy']:.1f} %"
    return f"validation accuracy {100 * event['validation_accuracy']:.1f} %"


class Reporter:
    """Shows events as they come; use as a context."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.shown = time.monotonic()
        self.pace = Pace(0, 1)
        self.told, self.accuracy = "starting", ""
        self.bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[told]}"),
            TextColumn("{task.fields[left]}"), console=self.console,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None, told=self.told, left="")

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        if event["event"] == "privacy":
            self.console.print(privacy.told(event), soft_wrap=True, highlight=False)
            return
        if event["event"] == "forecast":
            for line in event["lines"]:
                self.console.print(line, soft_wrap=True, highlight=False, markup=False)
            return
        self.pace.add(event)
        if event["event"] == "start":
            self.pace = Pace(event["rounds"], event.get("eval_every", 1))
            self.pace.round = event["round"]
            self.bar.start()  # not before: what is loaded has bars of its own
            self.bar.update(self.task, total=self.pace.rounds, completed=event["round"])
        elif event["event"] == "round":
            mask = f"mask rate {event['mask_rate']:.2f}  " if "mask_rate" in event else ""
            alone = "without users  " if event.get("alone") else ""
            self.told = f"{alone}{mask}{event['seconds']:.2f} s/round"
        elif event["event"] == "eval":
            self.accuracy = f"{accuracy(event)}  "
        left = self.pace.left
        words = "" if left is None else f"{remaining(left)} left"
        self.bar.update(self.task, completed=event["round"], told=self.accuracy + self.told, left=words)
        late = event["event"] == "round" and time.monotonic() - self.shown > LINE_EVERY
        if not self.console.is_terminal and (event["event"] == "eval" or late):
            self.shown = time.monotonic()
            told = (self.accuracy if event["event"] == "eval" else "") + self.told
            line = f"round {event['round']}/{self.pace.rounds}  {told}  {words}"
            self.console.print(line, soft_wrap=True, highlight=False)
