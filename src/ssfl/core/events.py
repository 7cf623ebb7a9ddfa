"""The events of a run: one JSON object per line of `events.jsonl`."""

from typing import Any

Event = dict[str, Any]
