"""How long a run will still take, from its events alone: the terminal and the board show the same time."""

from collections.abc import Iterable
from statistics import median

from ssfl.core.events import Event

RECENT = 20
"""Rounds that say how fast the next ones will be."""


class Pace:
    """The recent rounds and evaluations of a run."""

    def __init__(self, rounds: int, eval_every: int) -> None:
        self.rounds, self.eval_every = rounds, max(1, eval_every)
        self.round = 0
        self._rounds: list[float] = []
        self._evaluations: list[float] = []

    def add(self, event: Event) -> None:
        """Take one event in."""
        seconds = event.get("seconds")
        if not isinstance(seconds, int | float) or event.get("event") not in ("round", "eval"):
            return
        if event["event"] == "eval":
            self._evaluations = [*self._evaluations[1 - RECENT :], float(seconds)]
            return
        phases = event.get("phases")
        saving = phases.get("checkpoint", 0.0) if isinstance(phases, dict) else 0.0
        self._rounds = [*self._rounds[1 - RECENT :], seconds + saving]
        number = event.get("round")
        self.round = max(self.round, number if isinstance(number, int) else 0)

    @property
    def left(self) -> float | None:
        """Seconds until the last round and its evaluation; None before the first round."""
        if not self._rounds:
            return None
        rounds = max(0, self.rounds - self.round)
        evaluations = -(-self.rounds // self.eval_every) - self.round // self.eval_every
        each = median(self._evaluations) if self._evaluations else 0.0
        return rounds * median(self._rounds) + max(0, evaluations) * each


def left(events: Iterable[Event], rounds: int, eval_every: int) -> float | None:
    """Seconds until a run ends, from its events so far."""
    pace = Pace(rounds, eval_every)
    for event in events:
        pace.add(event)
    return pace.left


def told(seconds: float) -> str:
    """A time in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
