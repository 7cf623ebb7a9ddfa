"""How long a run will take yet: the same number for the terminal and for the board."""

import time

from ssfl.config.settings import Config
from ssfl.core.events import Event
from ssfl.runs import comparing


class Clock:
    """Measures the pace of rounds, with everything that comes between them."""

    def __init__(self, config: Config, first: int) -> None:
        self.config, self.first = config, first
        self.began = time.monotonic()
        self.server = 0.0
        self.rounds = config.federation.rounds or 0

    def left(self, event: Event) -> float:
        """Seconds that remain after a round: of the rounds, and of what the run is compared with."""
        played: int = event["round"] - self.first
        self.server += float(event.get("phases", {}).get("server", 0.0))
        pace = (time.monotonic() - self.began) / played
        rounds = self.rounds - self.first - played
        more = comparing.expected(self.config, pace, self.server / played)
        return round(rounds * pace + more, 1)
