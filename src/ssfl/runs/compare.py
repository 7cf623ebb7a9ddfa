"""Compares two runs for `ssfl compare`: which settings differ, and in which round, user and quantity their
results first differ."""

from pathlib import Path
from typing import Any

from ssfl.config.writing import as_dict
from ssfl.runs import folder


def settings(first: Path, second: Path) -> list[str]:
    """Returns one line for each setting in which two runs differ: `section.key: value in the first run |
    value in the second`. `first` and `second` are run folders."""
    a, b = (as_dict(folder.read_config(path)) for path in (first, second))
    return [
        f"{section}.{key}: {a[section].get(key, '-')} | {b[section].get(key, '-')}"
        for section in a
        for key in a[section] | b[section]
        if a[section].get(key, "-") != b[section].get(key, "-")
    ]


def first_difference(first: Path, second: Path) -> str | None:
    """Returns a sentence about the first difference between the events of two runs, or None if they are
    equal. Times, memory and network traffic are ignored. `first` and `second` are run folders."""
    one, two = (list(folder.read_events(path)) for path in (first, second))
    for a, b in zip(one, two, strict=False):
        where = f"round {a['round']}"
        if (a["event"], a["round"]) != (b["event"], b["round"]):
            return (
                f"the first run has the event {a['event']} of round {a['round']} where the second run has "
                f"the event {b['event']} of round {b['round']}"
            )
        for key in [*a, *(key for key in b if key not in a)]:
            if key in folder.WALL_CLOCK or a.get(key) == b.get(key):
                continue
            return f"{where}, {_inside(a, b, key)}"
    if len(one) != len(two):
        which, rest = ("first", one) if len(one) > len(two) else ("second", two)
        event = rest[min(len(one), len(two))]
        return f"only the {which} run has the event {event['event']} of round {event['round']}"
    return None


def _inside(a: dict[str, Any], b: dict[str, Any], key: str) -> str:
    """Returns in words how the events `a` and `b` differ in the field `key`. If the field has one value per
    user, the first user with different values is named."""
    x, y = a.get(key), b.get(key)
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        place = next((i for i, pair in enumerate(zip(x, y, strict=True)) if pair[0] != pair[1]), 0)
        if key.startswith("user_"):
            users = a.get("returned")
            user = users[place] if isinstance(users, list) and place < len(users) else place
            return f"user {user}, {key[5:]}: {x[place]} | {y[place]}"
        return f"{key}[{place}]: {x[place]} | {y[place]}"
    if isinstance(x, dict) and isinstance(y, dict):
        inner = next((k for k in [*x, *y] if x.get(k) != y.get(k) or (k in x) != (k in y)), "")
        return f"{key}.{inner}: {x.get(inner)} | {y.get(inner)}"
    return f"{key}: {x} | {y}"
