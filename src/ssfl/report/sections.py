"""Makes the sections of a report on one run or on several runs. An experiment (`Family`) is a group of runs
that differ only in their seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ssfl.config.writing import to_toml
from ssfl.report import collapse, conclusion, costs, mistakes, owners, several, words
from ssfl.report.blocks import Block, Cell, bars, half, heading, named, number, say, table, text
from ssfl.report.gather import Points, Run, finite, numbers, thinned
from ssfl.report.predictions import Loader, Seen, look
from ssfl.report.several import Family
from ssfl.runs.text import duration, interval, percent

MOST_DETAILED = 4
"""In a report on several runs, at most this many experiments are shown with their owners, confusion matrix
and example images."""
_READ = """Low diversity means that the updates of the users are nearly parallel. This can be agreement or a
collapse. It is a collapse if nearly all images have a pseudo-label (mask rate near 1) while the pseudo-labels
are mostly wrong or the accuracy falls."""
_MEANS = """Accuracy on the test images after the last round: mean and standard deviation over runs that
differ only in their seeds. With several seeds, the interval is that of the mean over the seeds (Student's t).
With one seed, it is Wilson's interval, which reflects only the number of test images. Mask rate: the share of
the users' images with a pseudo-label in the last fifth of the rounds. Correct pseudo-labels: the share of
these that are correct."""


def make(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns all sections of the report, as {id, title, blocks}. First come the verdict, the accuracy and,
    for several runs, how they differ. The other sections are about gradient diversity and pseudo-labels,
    owners, mistakes, images, views, costs and settings. Sections without content are left out."""
    families = several.families(runs)
    loader = Loader()
    looks: dict[Path, Seen | str] = {}

    def seen_by(run: Run) -> Seen | str:
        if run.path not in looks:
            looks[run.path] = look(run, loader)
        return looks[run.path]

    seen = [seen_by(family.runs[0]) for family in families[:MOST_DETAILED]]
    if len(runs) == 1:
        run = runs[0]
        first = [("verdict", "Verdict", _verdict(run)), ("accuracy", "Accuracy", _accuracy(run))]
        curves = _diversity(run)
    else:
        first = [
            ("verdict", "Verdict", _standings(runs, families, seen_by)),
            ("accuracy", "Accuracy", _accuracies(families)),
            ("differences", "How the runs differ", _differences(runs)),
        ]
        curves = _diversities(families)
    measured = any(block.get("figure") == "diversity" for block in curves)
    whole = [
        *first,
        ("diversity", f"{'Gradient diversity and pseudo' if measured else 'Pseudo'}-labels", curves),
        ("owners", "Owners of the images", _owners(families)),
        *_detailed(families, seen, len(runs) == 1),
        ("costs", "Time, bytes, memory", costs.blocks(runs)),
        ("settings", "Settings and versions", _settings(runs)),
    ]
    return [{"id": name, "title": title, "blocks": blocks} for name, title, blocks in whole if blocks]


def _verdict(run: Run) -> list[Block]:
    """Returns the first section of a report on one run: whether the unlabelled images helped, a warning if
    the run collapsed, and the accuracy."""
    diagnosis = collapse.judge(run)
    blocks = [say("", run.verdict, False)] if run.verdict else []
    blocks += [say(diagnosis.head, diagnosis.text, True)] if diagnosis.bad else []
    return [
        *blocks,
        {"kind": "tiles", "items": _tiles(run)},
        text(words.answer(run), "lead"),
        text(words.question(run)),
    ]


def _tiles(run: Run) -> list[tuple[str, ...]]:
    """Returns the numbers at the top of the report as tuples of name, value and sometimes further lines:
    accuracy, rounds, users, server labels, skew."""
    score, skew = run.score, finite(run.split.get("measured_skew"))
    tiles: list[tuple[str, ...]] = [("accuracy", "–")]
    if score is not None:
        name = f"accuracy on {score.images}"
        of = (
            (f"{score.correct:,} of {score.count:,}", interval(score.correct, score.count))
            if score.count
            else ()
        )
        tiles = [(name, percent(score.share), *of)]
        if score.balanced is not None and (run.is_uneven or score.on == "folds"):
            tiles.append(("balanced accuracy", percent(score.balanced), "mean over the classes"))
    tiles += [
        ("rounds", f"{run.played:,}" if run.finished else f"{run.played:,} of {run.planned:,}"),
        ("users", f"{run.users:,}"),
        ("server labels", f"{run.config.split.server_labels or 0:,}"),
    ]
    return [*tiles, ("measured R", f"{skew:.3f}")] if skew is not None else tiles


def _standings(
    runs: Sequence[Run], families: Sequence[Family], seen: Callable[[Run], Seen | str]
) -> list[Block]:
    """Returns the first section of a report on several runs. It says whether the best two experiments differ
    clearly, warns about runs that collapsed, and has a table of the experiments. `seen` returns the
    predictions of a run, or a sentence that says why there are none."""
    heads = ["seeds", "accuracy", "correct", "95 % interval", "mask rate", "correct pseudo-labels", "time",
             "bytes"]  # fmt: skip
    cells = [_standing(family) for family in families]
    if all(family.correct == "–" for family in families):  # with several seeds each
        for line in (heads, *cells):
            del line[2]
    rows: list[list[Cell]] = [
        [family.name, *map(number, line)] for family, line in zip(families, cells, strict=True)
    ]
    ends = {family.name: family.ends for family in families if family.ends}
    items: list[Block] = [
        {"name": name, "value": fmean(values), "text": several.spread(values)}
        for name, values in ends.items()
    ]
    blocks = [say("", line, False) for line in conclusion.sentences(families, seen)]
    for run in runs:
        diagnosis = collapse.judge(run)
        blocks += [say(f"{run.name}: {diagnosis.head}", diagnosis.text, True)] if diagnosis.bad else []
        blocks += [text(f"{run.name}: {run.verdict}")] if run.verdict else []
    blocks += [table(["run", *map(number, heads)], rows), text(_MEANS, "note")]
    unseen = [run.name for run in runs if run.judged_by == "validation"]
    if unseen:
        which = "all runs" if len(unseen) == len(runs) else ", ".join(unseen)
        blocks.append(
            text(
                f"For {which}, the accuracy is on validation images: test images are never used there.",
                "note",
            )
        )
    blocks += [bars("final", "Accuracy after the last round", items, "percent")] if items else []
    blocks += [text(f"{run.name}: {words.answer(run)}") for run in runs if not run.finished]
    questions = list(dict.fromkeys(words.question(run) for run in runs))
    return [*blocks, *(text(one) for one in questions[:3])]


def _standing(family: Family) -> list[str]:
    """Returns one experiment's cells in the table of experiments, without its name: from the number of seeds
    to the bytes sent."""
    counted = family.counted
    masks, correct = (
        [late for run in counted if (late := _late(run.series(key))) is not None]
        for key in ("mask_rate", "pseudo_accuracy")
    )
    spent = [costs.totals(run) for run in counted]
    seeds = f"{len({several.seed_of(run) for run in counted})}"
    seeds += "" if all(run.finished for run in counted) else ", not finished"
    return [
        seeds,
        several.spread(family.ends),
        family.correct,
        family.interval,
        *map(several.spread, (masks, correct)),
        duration(fmean(cost["seconds"] for cost in spent)),
        costs.size(fmean(cost["bytes_up"] + cost["bytes_down"] for cost in spent)),
    ]


def _differences(runs: Sequence[Run]) -> list[Block]:
    """Returns the report's table of the settings that differ between the runs."""
    rows = [[key, *values] for key, values in several.differences(runs)]
    if not rows:
        return [text("The settings of the runs are all the same.")]
    intro = text("Every setting that differs between the runs.")
    return [intro, table(["setting", *(run.name for run in runs)], rows)]


def _line(
    figure: str, title: str, label: str, series: list[Block], runs: Sequence[Run], **options: Any
) -> Block:
    """Returns a line chart over the rounds. The horizontal axis is the same in all charts: it ends at the
    last round of the longest run."""
    whole = [0, max(max(run.planned, run.played) for run in runs)]
    common = {"kind": "line", "xLabel": "round", "format": "percent", "range": [0, 1], "xRange": whole}
    return {**common, "figure": figure, "title": title, "yLabel": label, "series": series, **options}


def _accuracy(run: Run) -> list[Block]:
    """Returns the charts of accuracy and loss over the rounds, for a report on one run."""
    kinds = ("test", run.accuracy), ("validation", run.validation)
    series = [_series(f"{name} images", of) for name, of in kinds if of]
    if not series:
        if run.judged_by == "folds":
            return []
        return [text("There is no evaluation yet.")]
    groups = {event["round"]: numbers(event.get("stream_accuracy")) for event in run.evaluations}
    for k in range(max(map(len, groups.values()), default=0) if run.streams <= 4 else 0):
        points = [
            (at, value) for at, each in groups.items() if k < len(each) and (value := each[k]) is not None
        ]
        series.append(_series(f"group {k + 1} alone", points))
    losses = [
        ("users", run.series("loss")),
        ("server", run.series("server_loss")),
        ("test", run.series("loss", "eval")),
    ]
    loss_series = [_series(name, points) for name, points in losses if points]
    return [
        half(_line("accuracy", _title([run]), "accuracy", series, [run], height=320, marks=_marks(run))),
        half(_line("loss", "Loss", "mean loss", loss_series, [run], format="number", range=None, height=320)),
    ]


def _accuracies(families: Sequence[Family]) -> list[Block]:
    """Returns the chart of accuracy over the rounds, for a report on several runs."""
    runs = _members(families)
    late = any(run.test_kept for run in runs)  # if so, the curves show validation images
    series = _curves(families, lambda run: (run.validation if late else []) or run.accuracy)
    if not series:
        folded = all(run.judged_by == "folds" for run in runs)
        return [] if folded else [text("There is no evaluation yet.")]
    note = "The band is one standard deviation over the seeds." if any("band" in s for s in series) else ""
    return [_line("accuracy", _title(runs), "accuracy", series, runs, height=320, note=note)]


def _title(runs: Sequence[Run]) -> str:
    """Returns the title of an accuracy chart, which says whether it shows test or validation images."""
    late = any(run.test_kept for run in runs)
    ways = {"validation" if late and (run.validation or run.test_kept) else "test" for run in runs}
    return f"Accuracy on the {' or '.join(sorted(ways))} images"


def _diversity(run: Run) -> list[Block]:
    """Returns the charts of gradient diversity and pseudo-labels, for a report on one run."""
    if not run.config.method.trains_users:
        return []
    diagnosis = collapse.judge(run)
    spread = [_series("over all participants", run.diversity("definition"))]
    if run.grouped:
        spread.append(_series("within groups", run.diversity("definition_groups")))
    shares = [("with a pseudo-label (mask rate)", "mask_rate"), ("correct, of these", "pseudo_accuracy")]
    labels = [_series(name, points) for name, key in shares if (points := run.series(key))]
    title = "Pseudo-labels: mask rate, and share of correct ones"
    charts = _spread(spread, [run], _marks(run))
    if labels:
        charts.append(_line("pseudo-labels", title, "share", labels, [run], height=260, marks=_marks(run)))
    note = [text(_READ, "note")] if len(charts) == 2 else []
    return [say(diagnosis.head, diagnosis.text, diagnosis.bad), *map(half, charts), *note] if charts else []


def _diversities(families: Sequence[Family]) -> list[Block]:
    """Returns the charts of gradient diversity and pseudo-labels, for a report on several runs."""
    runs = _members(families)
    charts = _spread(_curves(families, lambda run: run.diversity("definition")), runs, [])
    measured = bool(charts)
    for figure, title, key in (
        ("mask-rate", "Mask rate: the share of images with a pseudo-label", "mask_rate"),
        ("pseudo-accuracy", "The share of pseudo-labels that are correct", "pseudo_accuracy"),
    ):
        series = _curves(families, lambda run, key=key: run.series(key))  # type: ignore[misc]
        charts += [_line(figure, title, "share", series, runs, height=260)] if series else []
    return [*map(half, charts), *([text(_READ, "note")] if measured else [])]


def _spread(series: list[Block], runs: Sequence[Run], marks: list[Block]) -> list[Block]:
    """Returns a list with the chart of gradient diversity; it is empty if diversity was not measured
    (run.diversity_every).

    A horizontal line shows the value for parallel updates, if all runs have equally many participants. A
    report on one run with groups has a second line, for updates that are parallel within groups. `marks` are
    vertical marks.
    """
    if not any(one["points"] for one in series):
        return []
    many = {run.config.federation.participants or run.users for run in runs}
    most = max(many)
    levels = [{"y": 1 / most, "text": f"1/{most}: all updates parallel"}] if len(many) == 1 else []
    if len(runs) == 1 and runs[0].grouped:
        share = runs[0].streams / most
        levels.append({"y": share, "text": f"{share:.3g}: all updates parallel within groups"})
    return [_line(
        "diversity", "Gradient diversity Δ (Definition 1 of the paper)", "Δ, logarithmic", series, runs,
        height=260, format="number", log=True, range=None, marks=marks, levels=levels,
    )]  # fmt: skip


def _owners(families: Sequence[Family]) -> list[Block]:
    """Returns the report's section about the owners of the images, for the first `MOST_DETAILED` experiments.
    If two experiments have the same split, the charts of who has which images are shown only for the
    first."""
    if len(families) == 1:
        run = families[0].runs[0]
        seeds = _of_first(families[0])
        return [*seeds, *owners.holdings(run), *owners.expected(run), *owners.groups(run)]
    made: list[Block] = []
    shown: dict[str, str] = {}
    for place, family in enumerate(families[:MOST_DETAILED], 1):
        run = family.runs[0]
        same = shown.setdefault(repr(run.split), run.name)
        held = (
            owners.holdings(run)
            if same == run.name
            else [text(f"The owners have the same images as in {same}.")]
        )
        made += [
            heading(family.name),
            *_of_first(family),
            *named([*held, *owners.expected(run), *owners.groups(run)], f"{place}-"),
        ]
    return made


def _of_first(family: Family) -> list[Block]:
    """Returns a list with a text that names the run whose owners are shown, and gives the ranges over the
    seeds. The list is empty if the experiment has only one run."""
    if len(family.runs) == 1:
        return []
    shown = f"Numbers and charts below are only of {_run_of(family)}."
    return [text(" ".join([shown, *owners.ranges(family.runs)]))]


def _run_of(family: Family) -> str:
    """Returns the name of the run that represents an experiment in details. If there are several runs, it
    says so, as in "alone-seed1 (run.seed = 1), the first of 3 seeds"."""
    run = family.runs[0]
    if len(family.runs) == 1:
        return run.name
    return f"{run.name} (run.seed = {run.config.run.seed}), the first of {family.size}"


def _detailed(
    families: Sequence[Family], seen_of_families: Sequence[Seen | str], alone: bool
) -> list[tuple[str, str, list[Block]]]:
    """Returns three sections (id, title, blocks): mistakes, test images and training views. Each experiment
    is represented by its first run. Training views are shown for one experiment only.

    `seen_of_families` has the predictions for each experiment, or a sentence that says why there are none.
    `alone` says that the report is on a single run.
    """
    wrong: list[Block] = []
    images: list[Block] = []
    views: list[Block] = []
    for place, (family, seen) in enumerate(zip(families, seen_of_families, strict=False), 1):
        run = family.runs[0]
        head, prefix = ([], "") if alone else ([heading(_run_of(family))], f"{place}-")
        wrong += [*head, *named(mistakes.confusion(run, seen), prefix)]
        if not isinstance(seen, str):
            others = [(other.label, other.runs[0]) for other in families if other is not family]
            shown = mistakes.images(seen)
            images += [*head, *named(shown, prefix)] if shown else []
            views = views or mistakes.views(run, seen, "" if alone else _run_of(family), others)
    if len(families) > MOST_DETAILED:
        wrong.append(text(f"Shown for the first {MOST_DETAILED} of {len(families)} experiments."))
    return [
        ("mistakes", "Mistakes", wrong),
        ("images", "Test images", images),
        ("views", "Training views", views),
    ]


def _settings(runs: Sequence[Run]) -> list[Block]:
    """Returns the report's section with the settings of the first run in words and, for each run, its
    versions, device and whole config."""
    whose = "" if len(runs) == 1 else f"{runs[0].name}: "
    made: list[Block] = [text(whose + " ".join(words.setting(runs[0])))]
    for run in runs:
        versions = run.summary.get("versions")
        facts = [f"{key} {value}" for key, value in versions.items()] if isinstance(versions, dict) else []
        for key in ("commit", "device", "engine", "threads", "precision", "users_at_once"):
            if run.summary.get(key) is not None:
                facts.append(f"{key.replace('_', ' ')} {run.summary[key]}")
        made += [heading(run.name)] if len(runs) > 1 else []
        made.append(text(f"{', '.join(facts)}." if facts else "Versions are recorded when the run ends."))
        file = {"summary": "config.toml, every setting", "text": to_toml(run.config), "open": False}
        made.append({"kind": "pre", **file})
    return made


def _curves(families: Sequence[Family], points_of: Callable[[Run], Points]) -> list[Block]:
    """Returns one line of a chart per experiment, for those that have any points. `points_of` returns a run's
    points."""
    curves = (family.curve(place, points_of) for place, family in enumerate(families))
    return [series for series in curves if series]


def _members(families: Sequence[Family]) -> list[Run]:
    """Returns the runs of all experiments in one list."""
    return [run for family in families for run in family.runs]


def _series(name: str, points: Points) -> Block:
    """Returns a line of a chart, with at most `MOST_POINTS` points."""
    return {"name": name, "points": [[at, float(f"{value:.5g}")] for at, value in thinned(points)]}


def _late(points: Points) -> float | None:
    """Returns the mean over the last fifth of the points, or None if there are no points."""
    last = [value for _, value in points[-max(1, len(points) // 5) :]]
    return fmean(last) if last else None


def _marks(run: Run) -> list[Block]:
    """Returns a list with a vertical mark at the round in which a collapse began; empty if there was none."""
    since = collapse.judge(run).since
    return [] if since is None else [{"x": since, "text": f"from round {since:,}: confident and wrong"}]
