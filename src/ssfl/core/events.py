"""What happens in a run is told in events: one JSON object a line in `events.jsonl`."""

from typing import Any

Event = dict[str, Any]
