"""Says in sentences whether the best two of several experiments differ clearly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ssfl.core import statistics
from ssfl.report.gather import Run
from ssfl.report.predictions import Seen
from ssfl.report.several import Family, differences
from ssfl.runs import text

_TRAINING = ("federation.rounds", "federation.epochs", "federation.period", "train.batch_size")
"""Settings that determine how long a run trains. Runs that compare methods should not differ in them."""


@dataclass(frozen=True)
class BestTwo:
    """The best two of several experiments. Over their common seeds, `first` has at least the mean accuracy of
    `second`."""

    first: Family
    second: Family

    @property
    def seeds(self) -> list[tuple[int, int]]:
        """The common seeds, each as the seeds of training and of the split."""
        return [seed for seed in self.first.by_seed if seed in self.second.by_seed]

    @property
    def pair(self) -> tuple[Run, Run]:
        """A run of each experiment: those of the first common seed, or the first runs if there is none."""
        if not self.seeds:
            return self.first.counted[0], self.second.counted[0]
        return self.first.by_seed[self.seeds[0]][0], self.second.by_seed[self.seeds[0]][0]

    @property
    def difference(self) -> statistics.SeedMean | None:
        """How many percentage points `first` is better over the common seeds; None if there is none."""
        return statistics.mean_difference(self.first.accuracies, self.second.accuracies)

    @property
    def is_decided(self) -> bool:
        """Whether the 95 % interval of the difference over the seeds is above 0."""
        interval = self.difference and self.difference.interval
        return interval is not None and interval.low > 0


def sentences(families: Sequence[Family], seen: Callable[[Run], Seen | str]) -> list[str]:
    """Returns a list with sentences that say whether the best two experiments differ clearly. Further ones
    name experiments with diverged runs and those that are not compared. The last one warns if the comparison
    of methods is not fair.

    The best two are compared by the differences over their common seeds, as in a contest. If they have fewer
    than two seeds in common, one run of each is compared on the same test images. `seen` returns the
    predictions of a run, or a sentence that says why there are none.
    """
    notes = _notes(families)
    best = best_two(families)
    if best is None:
        return notes
    compared = _over_seeds(best) if len(best.seeds) > 1 else _one_run_each(best, seen)
    return [compared, *notes, *_unequal(*best.pair)]


def best_two(families: Sequence[Family]) -> BestTwo | None:
    """Returns the best two experiments by their mean accuracy over the seeds; those with a diverged run come
    after all others. Returns None if fewer than two can be compared."""
    ranked = sorted(_comparable(families), key=lambda one: (one.diverged > 0, -fmean(one.ends)))
    if len(ranked) < 2:
        return None
    best = BestTwo(ranked[0], ranked[1])
    # the second one may be better over the common seeds
    return BestTwo(best.second, best.first) if best.difference and best.difference.mean < 0 else best


def _comparable(families: Sequence[Family]) -> list[Family]:
    """Returns the experiments with finished runs that are judged on the same images as the first of them."""
    done = [family for family in families if family.by_seed and any(run.finished for run in family.runs)]
    return [family for family in done if _judged_on(family) == _judged_on(done[0])]


def _judged_on(family: Family) -> tuple[str, str]:
    """Returns the images on which an experiment is judged, as their kind (such as "test") and the fingerprint
    of the data. The accuracies of two experiments can be compared if these are equal."""
    run = family.counted[0]
    return run.judged_by, str(run.split.get("fingerprint"))


def _notes(families: Sequence[Family]) -> list[str]:
    """Returns sentences about experiments with diverged runs, and about those that are not compared."""
    alike = _comparable(families)
    sound = any(not family.diverged for family in alike)
    after = " It is ranked after the experiments without a diverged run." if sound else ""
    notes = [
        f"{family.label}: training diverged in {family.diverged} of {len(family.runs)} runs, which its mean "
        f"leaves out.{after}"
        for family in alike
        if family.diverged
    ]
    left_out = [family.label for family in families if family not in alike]
    if left_out and alike:
        notes.append(f"Not compared, because no run is finished on the same images: {', '.join(left_out)}.")
    return notes


def _over_seeds(best: BestTwo) -> str:
    """Returns sentences that compare two experiments with several common seeds: the mean difference of their
    accuracies with its 95 % interval over the seeds (Student's t)."""
    first, second, apart = best.first, best.second, best.difference
    assert apart is not None  # there are common seeds
    means = (
        f"the mean accuracy of {first.label} is {apart.mean:.2f} percentage points higher than that of "
        f"{second.label}"
    )
    verdict = "The best two do not clearly differ"
    if apart.mean < 0.005:  # it would be shown as 0.00
        means = f"the mean accuracies of {first.label} and {second.label} are equal"
    elif best.is_decided:
        verdict = f"{first.label} is better than {second.label}"
    sentence = f"{verdict}: over {len(best.seeds)} common seeds, {means}"
    if apart.interval is None:
        sentence += ". All seeds have the same difference, so there is no interval."
    else:
        between = text.points(*apart.interval)
        sentence += f" (95 % interval of the difference over the seeds: {between} percentage points)."
    if len(first.by_seed) != len(best.seeds) or len(second.by_seed) != len(best.seeds):
        sentence += " Seeds that only one of them has are left out of this difference."
    if len({split for _, split in best.seeds}) == 1:
        sentence += " All these seeds have the same split, so other splits may give another result."
    score = first.counted[0].score
    if score is not None and 0 < score.count < statistics.FEW:
        sentence += f" There are only {score.count:,} {score.images}"
        sentence += "; the interval does not include this uncertainty." if apart.interval else "."
    return sentence


def _one_run_each(best: BestTwo, seen: Callable[[Run], Seen | str]) -> str:
    """Returns sentences that compare one run of each experiment, and say that only one seed is compared. The
    runs are compared on the same test images if both have predictions for them."""
    looks = [(run, look) for run in best.pair if not isinstance(look := seen(run), str) and look.correct]
    note = _few_seeds(best)
    if len(looks) < 2:
        mine, other = best.pair
        scores = [text.percent(run.judged[-1][1]) for run in best.pair]
        return (
            f"The accuracy of {mine.name} is {scores[0]}, and that of {other.name} {scores[1]}. The "
            "difference has no interval, because the report does not have the predictions of both for the "
            f"same test images. {note}"
        )
    (mine, better), (other, worse) = sorted(looks, key=lambda one: -sum(one[1].correct or []))
    compared = statistics.paired(better.correct or [], worse.correct or [])
    low, high = (100 * end for end in compared.interval)
    between = f"95 % interval of the difference: {text.points(low, high)} percentage points"
    numbers = f"{mine.name} has {compared.correct:,} correct, {other.name} {compared.other_correct:,}"
    if low > 0:
        result = f"Of {compared.count:,} test images, {numbers}: these two models clearly differ ({between})."
    elif compared.count < statistics.FEW:
        too_few = f"{compared.count:,} test images are too few to tell the best two apart"
        result = f"{too_few}: {numbers} ({between})."
    else:
        result = (
            f"The best two do not clearly differ: of {compared.count:,} test images, {numbers} ({between})."
        )
    return f"{result} {note}"


def _few_seeds(best: BestTwo) -> str:
    """Returns sentences which say that at most one seed is compared."""
    both = f"{best.first.label} and {best.second.label}"
    if not best.seeds:
        return f"{both} have no seed in common, so this compares one run of each."
    only = "This compares one seed"
    if len(best.first.by_seed) > 1 or len(best.second.by_seed) > 1:
        only = f"{both} have only one seed in common, and this compares only that seed"
    return f"{only} (run.seed = {best.seeds[0][0]}). Another seed may give another result."


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
