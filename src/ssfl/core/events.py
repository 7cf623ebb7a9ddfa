"""The type of an event. A run logs its events in `events.jsonl`, one JSON object per line."""

from collections.abc import Iterable
from statistics import mean
from typing import Any

Event = dict[str, Any]
ROUND_FIELDS = (
    "event", "round", "lr", "participants", "returned", "groups", "bytes_up", "bytes_down", "seconds", "left",
    "phases", "memory", "loss", "mask_rate", "pseudo_accuracy", "update_norm", "user_loss", "user_mask_rate",
    "user_update_norm", "images", "steps", "server_loss", "server_update_norm", "server_images",
    "server_models", "refused", "cut", "against", "missing", "asked_again", "wire_up", "wire_down",
)  # fmt: skip
"""The fields of a round's event, including those that only some runs have. A method's own metrics must have
other names."""


def mean_mask_rate(events: Iterable[Event]) -> float | None:
    """Returns the mean of the mask rate over the rounds of a run: the fraction of the users' images that had
    a label or pseudo-label and were trained on. None if no round recorded it, for example because no user
    trained."""
    rounds = (event for event in events if event["event"] == "round")
    rates = [event["mask_rate"] for event in rounds if event.get("mask_rate") is not None]
    return mean(rates) if rates else None
