"""The time that a run still needs, which the terminal and the board both show."""

import time

from ssfl.config.settings import Config
from ssfl.core.events import Event
from ssfl.runs import baseline


class Clock:
    """Measures the seconds per round, including everything between rounds."""

    def __init__(self, config: Config, first: int) -> None:
        self.config, self.first = config, first
        self.began = time.monotonic()
        self.server = 0.0
        self.rounds = config.federation.rounds or 0

    def left(self, event: Event) -> float:
        """Returns the seconds left after a round, for the rounds and for the models of the comparison."""
        played: int = event["round"] - self.first
        self.server += float(event.get("phases", {}).get("server", 0.0))
        pace = (time.monotonic() - self.began) / played
        rounds = self.rounds - self.first - played
        comparison = baseline.expected(self.config, pace, self.server / played)
        return round(rounds * pace + comparison, 1)
