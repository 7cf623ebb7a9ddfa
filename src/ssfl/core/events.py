"""The type of an event. A run logs its events in `events.jsonl`, one JSON object per line."""

from collections.abc import Iterable
from statistics import mean
from typing import Any

Event = dict[str, Any]


def mean_mask_rate(events: Iterable[Event]) -> float | None:
    """Returns the mean of the mask rate over the rounds of a run: the fraction of the users' images that had
    a label or pseudo-label and were trained on. None if no round recorded it, for example because no user
    trained."""
    rounds = (event for event in events if event["event"] == "round")
    rates = [event["mask_rate"] for event in rounds if event.get("mask_rate") is not None]
    return mean(rates) if rates else None
