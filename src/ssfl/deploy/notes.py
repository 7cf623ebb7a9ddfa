"""The port's reports of refusals. A few are sent at once; the rest are counted and reported once a minute."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

AT_ONCE = 5
"""How many refusals of one sender are reported at once in a period. For strangers it is one of each kind."""
PERIOD = 60.0
"""Seconds between two summaries."""
SENDERS = 20
"""How many strangers are counted separately in a period. All others are counted together."""
OTHERS = "other addresses"


@dataclass
class Budget:
    """The refusals of one sender in this period."""

    reported: int = 0
    kinds: set[str] = field(default_factory=set)
    counted: int = 0
    last: str = ""


class Notes:
    """Reports refusals within a budget; `flush` must be called regularly."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.tell = tell
        self.began = time.monotonic()
        self.senders: dict[tuple[int | None, str], Budget] = {}

    def add(self, node: int | None, host: str, why: str, lost: bool, broken: bool = False) -> None:
        """Reports or counts a refusal. Without a node, the sender is a stranger.

        `lost` says that the sender's answer can no longer arrive, and `broken` that a broken connection is
        the cause.
        """
        self.flush()
        why = why[:300]
        sender = (node, "") if node is not None else (None, host)
        if sender not in self.senders and node is None and len(self.senders) >= SENDERS:
            sender = None, OTHERS
        budget = self.senders.setdefault(sender, Budget())
        at_once = budget.reported < AT_ONCE and (node is not None or why not in budget.kinds)
        if at_once and sender[1] != OTHERS:
            budget.reported += 1
            budget.kinds.add(why)
            self.tell({"node": node, "from": host, "reason": why, "lost": lost, "broken": broken})
        else:
            budget.counted += 1
            budget.last = why

    def count(self, node: int, host: str, why: str) -> None:
        """Counts a refusal of a site, without a report of its own: only the next summary includes it."""
        self.flush()
        budget = self.senders.setdefault((node, ""), Budget())
        budget.counted += 1
        budget.last = why

    def flush(self, end: bool = False) -> None:
        """Reports the refusals that were only counted, once a period or at the `end`."""
        if not end and time.monotonic() - self.began < PERIOD:
            return
        self.began = time.monotonic()
        senders, self.senders = self.senders, {}
        for (node, host), budget in senders.items():
            if budget.counted:
                why = f"{budget.counted} more refused requests in the last minute. The last was {budget.last}"
                self.tell({"node": node, "from": host, "reason": why, "lost": False})
