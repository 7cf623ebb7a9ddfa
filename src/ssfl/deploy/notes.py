"""What the port tells the centre about refusals: a few at once, the rest counted and told once a minute."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

AT_ONCE = 5
"""Refusals of one sender that are told at once in a period; a stranger's, one of each kind."""
PERIOD = 60.0
"""Seconds between two summaries."""
SENDERS = 100
"""Strangers that are counted each by itself in a period; all others together."""
OTHERS = "other addresses"


@dataclass
class Budget:
    """What one sender was refused in this period."""

    told: int = 0
    kinds: set[str] = field(default_factory=set)
    counted: int = 0
    last: str = ""


class Notes:
    """Tells refusals within a budget; `flush` is called now and then."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.tell = tell
        self.began = time.monotonic()
        self.senders: dict[tuple[int | None, str], Budget] = {}

    def add(self, node: int | None, host: str, why: str, lost: bool, broken: bool = False) -> None:
        """Somebody was refused something; without a node a stranger. `lost` is whether its answer cannot come
        any more, `broken` whether its connection is to blame."""
        self.flush()
        why = why[:300]
        sender = (node, "") if node is not None else (None, host)
        if sender not in self.senders and node is None and len(self.senders) >= SENDERS:
            sender = None, OTHERS
        budget = self.senders.setdefault(sender, Budget())
        at_once = budget.told < AT_ONCE and (node is not None or why not in budget.kinds)
        if at_once and sender[1] != OTHERS:
            budget.told += 1
            budget.kinds.add(why)
            self.tell({"node": node, "from": host, "reason": why, "lost": lost, "broken": broken})
        else:
            budget.counted += 1
            budget.last = why

    def count(self, node: int, host: str, why: str) -> None:
        """A site was refused something that is told with the next summary alone."""
        self.flush()
        budget = self.senders.setdefault((node, ""), Budget())
        budget.counted += 1
        budget.last = why

    def flush(self, end: bool = False) -> None:
        """Tell what was only counted, once a period."""
        if not end and time.monotonic() - self.began < PERIOD:
            return
        self.began = time.monotonic()
        senders, self.senders = self.senders, {}
        for (node, host), budget in senders.items():
            if budget.counted:
                why = f"{budget.counted} more in the last minute, the last of them {budget.last}"
                self.tell({"node": node, "from": host, "reason": why, "lost": False})
