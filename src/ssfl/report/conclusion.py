"""Says in sentences whether the best two of several experiments differ clearly."""

from collections.abc import Callable, Sequence
from statistics import fmean

from ssfl.core import statistics
from ssfl.report.gather import Run
from ssfl.report.predictions import Seen
from ssfl.report.several import Family, differences, seed_of

_TRAINING = ("federation.rounds", "federation.epochs", "federation.period", "train.batch_size")
"""Settings that determine how long a run trains. Runs that compare methods should not differ in them."""


def sentences(families: Sequence[Family], seen: Callable[[Run], Seen | str]) -> list[str]:
    """Returns a list with sentences that say whether the best two experiments differ clearly. The last one
    warns if the comparison of their methods is not fair.

    Experiments are ranked by their mean accuracy over the seeds. The best two are compared by the differences
    over their common seeds, as in a contest. If they have fewer than two seeds in common, one run of each is
    compared on the same test images.

    Only experiments that have finished runs on the same data are compared. If there are fewer than two, the
    list is empty. `seen` returns the predictions of a run, or a sentence that says why there are none.
    """
    done = [family for family in families if family.by_seed and any(run.finished for run in family.runs)]
    alike = [family for family in done if _judged_on(family) == _judged_on(done[0])]
    if len(alike) < 2:
        return []
    first, second = sorted(alike, key=lambda one: (one.diverged > 0, -fmean(one.ends)))[:2]
    common = [seed for seed in first.by_seed if seed in second.by_seed]
    pair = first.counted[0], second.counted[0]
    if common:
        pair = first.by_seed[common[0]][0], second.by_seed[common[0]][0]
    compared = _over_seeds(first, second) if len(common) > 1 else _on_images(first, second, pair, seen)
    if not compared:
        return []
    notes = [
        f"{family.label}: training diverged in {family.diverged} of {len(family.runs)} runs, so it is ranked "
        "last."
        for family in alike
        if family.diverged
    ]
    left_out = [family.label for family in families if family not in alike]
    if left_out:
        notes.append(f"Not compared, because no run is finished on the same images: {', '.join(left_out)}.")
    return [compared, *notes, *_unequal(*pair)]


def _judged_on(family: Family) -> tuple[str, str]:
    """Returns the images on which an experiment is judged, as their kind (such as "test") and the fingerprint
    of the data. The accuracies of two experiments can be compared if these are equal."""
    run = family.counted[0]
    return run.judged_by, str(run.split.get("fingerprint"))


def _over_seeds(first: Family, second: Family) -> str:
    """Returns sentences that compare two experiments with several common seeds: the mean difference of their
    accuracies with its 95 % interval over the seeds (Student's t)."""
    ours, theirs = (
        {seed: 100 * fmean(run.judged[-1][1] for run in runs) for seed, runs in family.by_seed.items()}
        for family in (first, second)
    )
    apart = statistics.mean_difference(ours, theirs)
    mean, half = apart if apart else (0.0, None)
    half = half or 0.0  # there are at least two common seeds, so it is known
    if mean < 0:  # the first one is better only over seeds that the other does not have
        first, second, mean = second, first, -mean
    count = len(ours.keys() & theirs.keys())
    between = f"{mean - half:+.2f} to {mean + half:+.2f} percentage points".replace("-", "−")
    means = (
        f"the mean accuracy of {first.label} is {mean:.2f} percentage points higher than that of "
        f"{second.label}"
    )
    verdict = "The best two do not clearly differ"
    if mean < 0.005:
        means = f"the mean accuracies of {first.label} and {second.label} are equal"
    elif mean > half:
        verdict = f"{first.label} is better than {second.label}"
    text = (
        f"{verdict}: over {count} common seeds, {means} (95 % interval of the difference over the seeds: "
        f"{between})."
    )
    if len(ours) != count or len(theirs) != count:
        text += " Seeds that only one of them has are left out of this difference."
    score = first.counted[0].score
    if score is not None and 0 < score.count < statistics.FEW:
        text += (
            f" There are only {score.count:,} {score.images}; the interval does not include this uncertainty."
        )
    return text


def _on_images(
    first: Family, second: Family, pair: tuple[Run, Run], seen: Callable[[Run], Seen | str]
) -> str:
    """Returns sentences that compare one run of each experiment on the same test images, and say that only
    one seed is compared. Returns "" if a run has no predictions."""
    looks = [(run, look) for run in pair if not isinstance(look := seen(run), str) and look.correct]
    if len(looks) < 2:
        return ""
    (mine, best), (other, worse) = sorted(looks, key=lambda one: -sum(one[1].correct or []))
    compared = statistics.paired(best.correct or [], worse.correct or [])
    low, high = (100 * end for end in compared.interval)
    between = f"95 % interval of the difference: {low:+.1f} to {high:+.1f} percentage points"
    between = between.replace("-", "−")
    numbers = f"{mine.name} has {compared.correct:,} correct, {other.name} {compared.other_correct:,}"
    if low > 0:
        text = f"Of {compared.count:,} test images, {numbers}: {mine.name} is better ({between})."
    elif compared.count < statistics.FEW:
        too_few = f"{compared.count:,} test images are too few to tell the best two apart"
        text = f"{too_few}: {numbers} ({between})."
    else:
        text = (
            f"The best two do not clearly differ: of {compared.count:,} test images, {numbers} ({between})."
        )
    both = f"{first.label} and {second.label}"
    if seed_of(mine) != seed_of(other):
        return f"{text} {both} have no seed in common, so this compares one run of each."
    only = "This compares one seed"
    if len(first.by_seed) > 1 or len(second.by_seed) > 1:
        only = f"{both} have only one seed in common, and this compares only that seed"
    return f"{text} {only} (run.seed = {mine.config.run.seed}). Another seed may give another result."


def _unequal(one: Run, other: Run) -> list[str]:
    """Returns a list with one sentence that warns if runs of two methods also differ in their split or in the
    length of training, so that they do not compare the methods alone. Otherwise the list is empty."""
    if one.config.method.name == other.config.method.name:
        return []
    unequal = [
        f"{key} ({mine} and {theirs})"
        for key, (mine, theirs) in differences([one, other])
        if key.startswith("split.") or key in _TRAINING
    ]
    if not unequal:
        return []
    return [f"These two runs do not compare the methods alone: they also differ in {', '.join(unequal)}."]
