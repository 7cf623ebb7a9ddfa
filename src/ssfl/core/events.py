"""The type of an event. A run logs its events in `events.jsonl`, one JSON object per line."""

from typing import Any

Event = dict[str, Any]
