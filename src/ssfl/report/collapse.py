"""Finds out whether a run collapsed: its users are confident in wrong pseudo-labels, and the accuracy
falls."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ssfl.report.gather import Points, Run, finite, numbers
from ssfl.runs.text import percent

SURE, WRONG, FELL, ONE_WAY = 0.7, 0.5, 0.1, 2.0
"""Limits in the diagnosis of a collapse. Pseudo-labels are called confident but wrong if the mask rate is at
least SURE and the share of correct pseudo-labels is at most WRONG. At real sites this share is unknown; then
a mask rate of at least (1 + SURE) / 2 is enough. The accuracy is said to have fallen if it is at least FELL
below its best.

Updates are called nearly parallel if n·Δ is at most ONE_WAY. Here Δ is the gradient diversity of n users. For
gradients of equal length, n·Δ is 1 if all are parallel, and n if all are orthogonal.
"""
STAYS = 3
"""The signs of a collapse must last for this many rounds in a row."""


@dataclass(frozen=True)
class Collapse:
    """Says in words whether a run collapsed. `head` is a short sentence, and `text` gives the reasons. `bad`
    says that this diagnosis is a warning."""

    head: str
    text: str
    bad: bool = False
    since: int | None = None
    """The first round with the signs of a collapse. None if the run has not collapsed, or has recovered."""


def judge(run: Run) -> Collapse:
    """Returns whether a run collapsed, and why. The diagnosis uses the run's mask rate, the share of correct
    pseudo-labels, the accuracy and the gradient diversity."""
    masks, pseudo_accuracy = run.series("mask_rate"), dict(run.series("pseudo_accuracy"))
    method = run.config.method
    if not method.trains_users or "labels" in method.needs():
        return Collapse("No pseudo-labels.", "This method makes none, so it cannot collapse onto wrong ones.")
    if len(masks) < STAYS:
        return Collapse("Too early.", "There are too few rounds to tell whether the run is collapsing.")
    if pseudo_accuracy:
        sure = [at for at, mask in masks if mask >= SURE and pseudo_accuracy.get(at, 1.0) <= WRONG]
    else:  # no true labels are known at real sites, so only the accuracy can show a collapse
        sure = [at for at, mask in masks if mask >= (1 + SURE) / 2]
    since = _first_to_stay([at for at, _ in masks], sure)
    last = masks[-max(STAYS, len(masks) // 5) :]
    mask = percent(fmean(value for _, value in last))
    mask_of = f"a pseudo-label to {mask} of their images in the last {len(last)} rounds (mask rate)"
    labels = [pseudo_accuracy[at] for at, _ in last if at in pseudo_accuracy]
    true = f", and {percent(fmean(labels))} of these pseudo-labels are correct" if labels else ""
    best, fall = _fall(run.watched, since)
    streams = _streams(run)
    if since is not None and (fall >= FELL or (pseudo_accuracy and masks[-1][0] in sure)):
        facts = [f"The users give {mask_of}{true.replace(' and', ' but only')}"]
        way = _way(run, since)
        facts += [way] if way else []
        head = "Confident but mostly wrong pseudo-labels"
        if fall >= FELL:
            facts.append(f"the accuracy fell from {percent(best)} by {100 * fall:.1f} percentage points")
            head = "Collapse"
        return Collapse(f"{head} from round {since:,} on.", f"{'; '.join(facts)}.{streams}", True, since)
    if streams:
        return Collapse("The average hides a collapse.", streams.strip(), True)
    now = f"The users give {mask_of}{true}."
    if since is not None and pseudo_accuracy:
        return Collapse(
            f"Recovered: pseudo-labels were mostly wrong for a time from round {since:,} on.", now
        )
    if fmean(value for _, value in last) < 0.02:
        hint = "Try a lower method.threshold or more rounds."
        return Collapse("The users hardly learn.", f"They give {mask_of}. {hint}", True)
    return Collapse("No collapse.", now)


def _first_to_stay(rounds: Sequence[int], marked_rounds: Sequence[int]) -> int | None:
    """Returns the first round from which at least `STAYS` rounds in a row are marked, or None.
    `marked_rounds` are those of the `rounds` that show the signs of a collapse."""
    marked = set(marked_rounds)
    for place, at in enumerate(rounds[: len(rounds) - STAYS + 1]):
        if marked.issuperset(rounds[place : place + STAYS]):
            return at
    return None


def _fall(accuracy: Points, since: int | None) -> tuple[float, float]:
    """Returns the best accuracy up to the round `since`, and how far the last accuracy is below it. Returns
    zeros if `since` is None or there is no accuracy."""
    if since is None or not accuracy:
        return 0.0, 0.0
    best = max((value for at, value in accuracy if at <= since), default=accuracy[0][1])
    return best, best - accuracy[-1][1]


def _way(run: Run, since: int) -> str:
    """Returns a clause that says whether the users' updates are nearly parallel from the round `since` on.
    This is decided by the median of n·Δ within groups, where Δ is the gradient diversity of the n users of a
    group. Returns "" if the diversity was not measured."""
    values = sorted(value for at, value in run.diversity("authors_groups") if at >= since)
    if not values:
        return ""
    middle = values[len(values) // 2]
    moved = "their updates are nearly parallel" if middle <= ONE_WAY else "their updates are not parallel"
    return f"{moved} (n·Δ = {middle:.2f}, where 1 means parallel and n orthogonal)"


def _streams(run: Run) -> str:
    """Returns a sentence if each group's model is far worse than the average of the groups' models, else
    ""."""
    evaluations = [event for event in run.evaluations if numbers(event.get("stream_accuracy"))]
    if not evaluations:
        return ""
    accuracies = [value for value in numbers(evaluations[-1]["stream_accuracy"]) if value is not None]
    mean = finite(evaluations[-1]["accuracy"]) or 0.0
    if not accuracies or mean - max(accuracies) < 0.25:
        return ""
    return (
        f" Each of the {len(accuracies)} group models has an accuracy of at most "
        f"{percent(max(accuracies))}; the average of these models still has an accuracy of {percent(mean)}."
    )
