"""Whether a run collapsed: users sure of wrong labels, all moving one way, while accuracy falls."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ssfl.report.gather import Points, Run, finite, numbers
from ssfl.runs.text import percent

SURE, WRONG, FELL, ONE_WAY = 0.7, 0.5, 0.1, 2.0
"""Of a collapse: the least mask rate, the most pseudo-labels right, the least fall of accuracy from its best,
and the most n·Δ (1: all move one way; n: at right angles; the quickstart has more than 6)."""
STAYS = 3
"""Rounds that it must last."""


@dataclass(frozen=True)
class Collapse:
    """What the curves say together."""

    head: str
    text: str
    bad: bool = False
    since: int | None = None
    """The round in which a collapse began."""


def judge(run: Run) -> Collapse:
    """What a reader of the curves should know."""
    masks, right = run.told("mask_rate"), dict(run.told("pseudo_accuracy"))
    method = run.config.method
    if not method.trains_users or "labels" in method.needs():
        return Collapse("No pseudo-labels.", "This method cannot collapse onto wrong ones.")
    if len(masks) < STAYS:
        return Collapse("Too early.", "There are too few rounds to tell whether the run is collapsing.")
    if right:
        sure = [at for at, mask in masks if mask >= SURE and right.get(at, 1.0) <= WRONG]
    else:  # real sites know no labels: only the fall of accuracy can tell
        sure = [at for at, mask in masks if mask >= (1 + SURE) / 2]
    since = _first_to_stay([at for at, _ in masks], sure)
    last = masks[-max(STAYS, len(masks) // 5) :]
    mask = percent(fmean(value for _, value in last))
    mask_of = f"{mask} of their images in the last {len(last)} rounds"
    labels = [right[at] for at, _ in last if at in right]
    true = f", and {percent(fmean(labels))} of these pseudo-labels are right" if labels else ""
    best, fall = _fall(run.watched, since)
    streams = _streams(run)
    if since is not None and (fall >= FELL or (right and masks[-1][0] in sure)):
        facts = [f"The users are sure of {mask_of}{true.replace(' and', ' but only')}"]
        way = _way(run, since)
        facts += [way] if way else []
        head = "Sure and mostly wrong"
        if fall >= FELL:
            facts.append(f"accuracy fell from {percent(best)} by {100 * fall:.1f} points")
            head = "Collapse"
        return Collapse(f"{head} from round {since:,} on.", f"{'; '.join(facts)}.{streams}", True, since)
    if streams:
        return Collapse("The average hides a collapse.", streams.strip(), True)
    now = f"The users are sure of {mask_of}{true}."
    if since is not None and right:
        return Collapse(f"Recovered: wrong labels from round {since:,} on, for a while.", now)
    if fmean(value for _, value in last) < 0.02:
        hint = "A lower method.threshold or more rounds may change that."
        return Collapse("The users hardly learn.", f"They are sure of only {mask_of}. {hint}", True)
    return Collapse("No collapse.", now)


def _first_to_stay(rounds: Sequence[int], found: Sequence[int]) -> int | None:
    """The first of the rounds from which several in a row were found."""
    marked = set(found)
    for place, at in enumerate(rounds[: len(rounds) - STAYS + 1]):
        if marked.issuperset(rounds[place : place + STAYS]):
            return at
    return None


def _fall(accuracy: Points, since: int | None) -> tuple[float, float]:
    """The best accuracy up to a round, and how far the last one lies below it."""
    if since is None or not accuracy:
        return 0.0, 0.0
    best = max((value for at, value in accuracy if at <= since), default=accuracy[0][1])
    return best, best - accuracy[-1][1]


def _way(run: Run, since: int) -> str:
    """Whether the users move one way from a round on, by the middle of n·Δ within groups."""
    found = sorted(value for at, value in run.diversity("authors_groups") if at >= since)
    if not found:
        return ""
    middle = found[len(found) // 2]
    moved = "they nearly all move one way" if middle <= ONE_WAY else "they do not all move one way, though"
    return f"{moved} (n·Δ = {middle:.2f}, where 1 is one way and n at right angles)"


def _streams(run: Run) -> str:
    """In words, where the groups' own models are far worse than their mean."""
    told = [event for event in run.evaluations if numbers(event.get("stream_accuracy"))]
    if not told:
        return ""
    found = [value for value in numbers(told[-1]["stream_accuracy"]) if value is not None]
    mean = finite(told[-1]["accuracy"]) or 0.0
    if not found or mean - max(found) < 0.25:
        return ""
    return (
        f" Each of the {len(found)} group models alone gets at most {percent(max(found))} right; only their "
        f"mean ({percent(mean)}) still tells classes apart."
    )
