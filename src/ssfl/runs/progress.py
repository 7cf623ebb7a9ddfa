"""Seeing a run work: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ssfl.core.events import Event
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
        self.began = self.shown = time.monotonic()
        self.rounds = self.first = 0
        self.told, self.accuracy = "starting", ""
        self.bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[told]}"),
            TextColumn("left"), TimeRemainingColumn(), console=self.console,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None, told=self.told)

    def __enter__(self) -> "Reporter":
        self.bar.start()
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
        if event["event"] == "start":
            self.rounds, self.first = event["rounds"], event["round"]
            self.began = time.monotonic()
            self.bar.update(self.task, total=self.rounds, completed=self.first)
        elif event["event"] == "round":
            mask = f"mask rate {event['mask_rate']:.2f}  " if "mask_rate" in event else ""
            alone = "without users  " if event.get("alone") else ""
            self.told = f"{alone}{mask}{event['seconds']:.2f} s/round"
        elif event["event"] == "eval":
            self.accuracy = f"{accuracy(event)}  "
        self.bar.update(self.task, completed=event["round"], told=self.accuracy + self.told)
        late = event["event"] == "round" and time.monotonic() - self.shown > LINE_EVERY
        if not self.console.is_terminal and (event["event"] == "eval" or late):
            self.shown = time.monotonic()
            # the time before the first round, of loading and compiling, does not come again
            pace = (self.shown - self.began) / max(event["round"] - self.first, 1)
            left = pace * (self.rounds - event["round"])
            told = (self.accuracy if event["event"] == "eval" else "") + self.told
            line = f"round {event['round']}/{self.rounds}  {told}  {left:.0f} s left"
            self.console.print(line, soft_wrap=True, highlight=False)
