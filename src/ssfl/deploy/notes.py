"""Limits how many reports of refused requests the port sends to the centre, so that a flood of bad requests
does not flood the centre. The first few refusals of each sender are reported immediately. The rest are
counted and reported once a minute."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

AT_ONCE = 5
"""How many refusals of one sender are reported immediately in each period (`PERIOD`). The others are only
counted, for the next summary. A stranger is a sender without a known key. A stranger's refusal is reported
immediately only if its reason is new in this period."""
PERIOD = 60.0
"""Seconds between two summaries of refused requests."""
SENDERS = 20
"""How many senders are counted separately in a period. Strangers (senders without a known key) beyond this
number are counted together, as `OTHERS`. Sites are always counted separately."""
OTHERS = "other addresses"


@dataclass
class Budget:
    """The refusals of one sender in this period. `reported` is how many were reported immediately, and
    `kinds` are their reasons. `counted` is how many were only counted, for the summary, and `last` is the
    reason of the last of these."""

    reported: int = 0
    kinds: set[str] = field(default_factory=set)
    counted: int = 0
    last: str = ""


class Notes:
    """Reports refused requests with `tell`: at most `AT_ONCE` per sender and period immediately, and the rest
    in one summary per sender and period.

    Call `flush` regularly: it sends the summaries.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.tell = tell
        self.began = time.monotonic()
        self.senders: dict[tuple[int | None, str, bool], Budget] = {}
        """The refusals by sender: its node, or its address if it is a stranger. Those of a site that cost an
        answer are counted apart (True), so that others cannot hide them."""

    def add(self, node: int | None, host: str, why: str, lost: bool, broken: bool = False) -> None:
        """Reports a refusal immediately, or counts it for the next summary. If `node` is None, the sender is
        a stranger (without a known key) at the address `host`.

        `lost` says whether the answer that the centre waits for can no longer arrive. `broken` says whether
        the cause is a broken connection.
        """
        self.flush()
        why = why[:300]
        sender = (node, "", lost) if node is not None else (None, host, True)
        if sender not in self.senders and node is None and len(self.senders) >= SENDERS:
            sender = None, OTHERS, True
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
        """Counts a refused request of a site without reporting it immediately. It is reported only in the
        next summary."""
        self.flush()
        budget = self.senders.setdefault((node, "", False), Budget())
        budget.counted += 1
        budget.last = why

    def flush(self) -> None:
        """Sends one summary for each sender that has refusals that were counted but not reported immediately.
        Does nothing if the period is not over yet."""
        if time.monotonic() - self.began < PERIOD:
            return
        self.began = time.monotonic()
        senders, self.senders = self.senders, {}
        for (node, host, _), budget in senders.items():
            if budget.counted:
                why = f"{budget.counted} more refused requests in the last minute. The last was {budget.last}"
                self.tell({"node": node, "from": host, "reason": why, "lost": False})
