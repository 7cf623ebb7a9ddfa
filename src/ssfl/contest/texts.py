"""What a contest prints: the table of results with its conclusion, and which settings a method chose."""

from collections.abc import Iterable, Sequence
from typing import Any

from ssfl.contest.standings import GUESSING, Standing, behind, differences, near_guessing, reference
from ssfl.runs import text
from ssfl.runs.text import percent

FEW = 0.01
"""If users have pseudo-labels for a smaller fraction of their images, a contest says little about how a
method uses unlabelled images."""
Try = tuple[float, tuple[str, ...]]
"""A validation accuracy from 0 to 1 (-1 if the run diverged), and the settings that led to it."""


def table(standings: Sequence[Standing], against: str | None = None) -> str:
    """Returns the results as text for the terminal: a table with one line per method, a conclusion, and
    remarks. `against` is the method to which the others are compared; None means the first."""
    compared = reference(standings, against)
    whom = "the first" if against is None else compared.method
    one_seed = all(standing.seeds < 2 for standing in standings)
    counted = ["correct", "95 % interval"] if one_seed else ["95 % interval over seeds"]
    head = ["method", "test accuracy, %", *counted, f"behind {whom} (95 % interval)",
            "seeds", "collapsed", "rounds", "user images, million", "passes, million", "server images, "
            "million",
            "sent, MB", "chosen"]  # fmt: skip
    rows = [head]
    for standing in standings:
        mean, deviation = standing.mean, standing.deviation
        accuracy = "diverged" if mean is None else f"{mean:.2f}"
        accuracy += "" if deviation is None else f" ± {deviation:.2f}"
        accuracy += f" ({standing.diverged} diverged)" if standing.diverged and mean is not None else ""
        millions = [
            f"{number / 1e6:.3g}" for number in (standing.images, standing.passes, standing.server_images)
        ]
        chosen = " ".join(standing.options) or "–"
        rows.append([standing.method + " *" * bool(standing.flag), accuracy,
                     *([_correct(standing)] if one_seed else []), _interval(standing),
                     behind(standing, compared), str(standing.seeds),
                     str(standing.collapsed + standing.diverged), str(standing.rounds),
                     *millions, f"{standing.megabytes:.4g}", chosen])  # fmt: skip
    return "\n".join([text.table(rows), *_remarks(standings, against)])


def _correct(standing: Standing) -> str:
    """Returns how many test images the only run classifies correctly, such as "912 of 1,000"."""
    if standing.correct is None or standing.images_tested is None:
        return "–"
    return f"{standing.correct:,} of {standing.images_tested:,}"


def _interval(standing: Standing) -> str:
    """Returns the 95 % interval of the accuracy, such as "89.3 to 92.8"."""
    return "–" if standing.interval is None else "{:.1f} to {:.1f}".format(*standing.interval)


def _remarks(standings: Sequence[Standing], against: str | None) -> list[str]:
    """Returns the lines below the table. Each has one or more sentences."""
    lines = conclusion(standings, against)
    if any(standing.shared_split for standing in standings) and any(one.seeds > 1 for one in standings):
        lines.append(
            "All seeds have the same users' images, so the ± and the intervals leave out the differences "
            "between splits."
        )
    lines += _images(standings)
    commits = {str(run["commit"]) for standing in standings for run in standing.runs}
    if len(commits) > 1:
        lines.append(
            f"The runs were made with {len(commits)} different commits of ssfl; contest.json lists them."
        )
    for standing in standings:
        lines += diverged(standing.method, standing.diverged, standing.seeds)
        lines += collapsed(standing.method, standing.collapsed, standing.seeds, standing.tuned)
        classes = next((run["classes"] for run in standing.runs if run.get("classes")), None)
        lines += guessed(standing.method, standing.runs, standing.seeds, classes)
        if standing.mask_rate is not None and standing.mask_rate < FEW:
            made = f"pseudo-labels for only {100 * standing.mask_rate:.2g} % of their images"
            lines.append(
                f"{standing.method}: its users made {made if standing.mask_rate else 'no pseudo-labels'}, so "
                "this contest says little about how it uses unlabelled images."
            )
    return lines + [f"* {standing.method}: {standing.flag}." for standing in standings if standing.flag]


def conclusion(standings: Sequence[Standing], against: str | None = None) -> list[str]:
    """Returns sentences that say which methods differ from the method `against` (None: the first), by the
    95 % intervals of the differences over the seeds. The list is empty if no method has a result that can be
    compared."""
    compared = reference(standings, against)
    found = differences(standings, compared)
    if compared.mean is None:
        return []
    name = compared.method
    whom = f"{name} (the first)" if compared is standings[0] else name
    seeds = max(standing.seeds for standing in standings)
    if seeds == 1:
        none = f"With one seed, no method can be distinguished from {whom}"
        return [f"{none}: an interval needs at least two seeds."] if found.one_seed else []
    lines = []
    if found.worse or found.better:
        parts = [f"better than {_listed(found.worse)}"] if found.worse else []
        parts += [f"worse than {_listed(found.better)}"] if found.better else []
        if len(found.worse) == len(standings) - 1 > 1:
            parts = ["better than all others"]
        lines.append(f"With these {seeds} seeds, {name} is {' and '.join(parts)}.")
    if found.undecided:
        lines.append(
            f"With these {seeds} seeds, {_listed(found.undecided)} cannot be distinguished from {whom}."
        )
    if found.one_seed:
        lines.append(
            f"{_listed(found.one_seed)} {_have(found.one_seed)} only one seed in common with {whom}, and one "
            "seed gives no interval."
        )
    if found.no_seed:
        lines.append(
            f"{_listed(found.no_seed)} {_have(found.no_seed)} no seed in common with {whom}, so there is no "
            "comparison."
        )
    return lines


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _images(standings: Sequence[Standing]) -> list[str]:
    """Returns, in a list, a line that says how many test and validation images were used. The list is empty
    if no run has finished."""
    for run in (run for one in standings for run in one.runs):
        return [
            f"The accuracy is on {run['test_images']:,} test images; the curves use "
            f"{run['validation_images']:,} validation images."
        ]
    return []


def diverged(method: str, count: int, seeds: int) -> list[str]:
    """Returns, in a list, a line that says why a method of which `count` of `seeds` runs diverged comes last.
    The list is empty if none diverged."""
    if not count:
        return []
    if count == seeds:
        return [f"{method}: every run diverged, so it has no accuracy and comes last."]
    rest = "the run that did not diverge" if seeds - count == 1 else f"the {seeds - count} other runs"
    return [
        f"{method}: {count} of {seeds} runs diverged. Its mean is only over {rest}, so methods without "
        "diverged runs come before it, whatever its mean is."
    ]


def collapsed(method: str, count: int, seeds: int, tuned: bool) -> list[str]:
    """Returns, in a list, a line that says how many runs of a method collapsed. If its settings were `tuned`
    in shorter runs, the line says that these may not have shown it. The list is empty if none collapsed."""
    if not count:
        return []
    ended = "it ended far below its" if count == 1 else "they ended far below their"
    line = f"{method}: {count} of {seeds} runs collapsed: {ended} best validation accuracy."
    hint = " Its settings were chosen in runs of half the length, and a collapse may come later than that."
    return [line + hint * tuned]


def guessed(method: str, runs: Sequence[dict[str, Any]], seeds: int, classes: int | None) -> list[str]:
    """Returns, in a list, a line that says how many runs of a method stayed near guessing. The list is empty
    if none did, or if the number of `classes` is unknown."""
    count = near_guessing(runs, classes) if classes else 0
    if not count or not classes:
        return []
    return [
        f"{method}: {count} of {seeds} runs stayed near guessing. Their best validation accuracy is below "
        f"{100 / classes + GUESSING:.3g} %; guessing has {100 / classes:.3g} %."
    ]


def choice(method: str, tries: Sequence[Try], images: int, default: str = "") -> str:
    """Returns a line that says which settings a method chose on `images` validation images, and how clear the
    choice was. `default` is a setting of `tries` that is the method's default; "" if none is."""
    best, taken = max(tries, key=lambda one: one[0])

    def name(options: tuple[str, ...]) -> str:
        return options[0].partition("=")[2] if len(taken) == 1 else " ".join(options)

    chosen = " ".join(taken) + (", its default" if default in taken else "")
    others = [(score, options) for score, options in tries if options != taken]
    if best < 0:
        return f"{method}: training diverged with every value that was tried; it uses {chosen}"
    scores = ", ".join(
        f"{name(options)}: {'diverged' if score < 0 else percent(score)}" for score, options in others
    )
    remarks = [
        f"{method}: chose {chosen} (validation accuracy {percent(best)} on {images:,} images; {scores})"
    ]
    for place, option in enumerate(taken):
        end = end_of_range([options[place] for _, options in tries], option)
        remarks += [f"{name((option,))} is the {end} value that was tried"] if end else []
    near = [name(options) for score, options in others if round((best - score) * images) <= 1]
    if near:
        remarks.append(f"{_listed(near)} {'is' if len(near) == 1 else 'are'} at most one image behind")
    return "; ".join(remarks)


def end_of_range(options: Iterable[str], taken: str) -> str:
    """Returns "smallest" or "largest" if the setting `taken` is at that end of the values that were tried.
    Returns "" if it is between others, if there are fewer than three values, or if they are not numbers."""
    try:
        values = {float(option.partition("=")[2]) for option in options}
        value = float(taken.partition("=")[2])
    except ValueError:
        return ""
    if len(values) < 3 or min(values) < value < max(values):
        return ""
    return "smallest" if value == min(values) else "largest"


def _listed(names: Sequence[str]) -> str:
    """Returns names as text, such as "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
