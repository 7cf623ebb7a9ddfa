"""Estimates how much time a run still needs, for the terminal and the board."""

import time

from ssfl.config.settings import Config
from ssfl.core.events import Event
from ssfl.engines.features import Features
from ssfl.runs import baseline


class Clock:
    """Estimates the remaining time of a run from the seconds per round so far, including everything between
    rounds. The time for computing features (the output of the network's frozen part) is counted separately,
    because it is spent only in the first rounds."""

    def __init__(self, config: Config, first: int, features: Features | None = None) -> None:
        self.config, self.first, self.features = config, first, features
        self.began = time.monotonic()
        self.server = self.views = 0.0
        self.rounds = config.federation.rounds or 0
        train, participants = config.train, config.federation.participants or 1
        self.share = train.batch_of("server") / (participants * train.batch_size)
        """The server's images as a share of the users'. If the server trains at the same time as the users,
        its own time is not known, and is estimated by this share."""

    def left(self, event: Event) -> float:
        """Returns how many seconds the run still needs after the round of this event. They include the
        remaining rounds, the server-only model and the cross-validation. Call it once after every round."""
        played: int = event["round"] - self.first
        phases = event.get("phases", {})
        self.server += max(float(phases.get("server", 0.0)), self.share * float(phases.get("users", 0.0)))
        self.views += float(phases.get("features", 0.0))
        pace = (time.monotonic() - self.began - self.views) / played
        rounds = self.rounds - self.first - played
        comparison = baseline.expected(self.config, pace, self.server / played)
        views = 0.0 if self.features is None or not rounds else self.features.left()
        return round(rounds * pace + comparison + views, 1)
