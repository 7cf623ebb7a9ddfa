"""The sections of a report that show a model's mistakes and its training images: the confusion matrix, the
worst classes, example images, and weak and strong views."""

from collections.abc import Sequence

from ssfl.core.words import count
from ssfl.report.blocks import Block, Cell, bars, half, heading, number, table, text
from ssfl.report.gather import Run
from ssfl.report.predictions import Seen
from ssfl.report.words import threshold, threshold_rule
from ssfl.runs.text import interval, percent

MOST_CLASSES, WORST = 60, 10
"""With more than MOST_CLASSES classes, the confusion matrix shows only half that many: the classes with the
lowest accuracy. WORST is how many classes a table lists, also those with the lowest accuracy."""
_BECOMES = "the prediction for a weak view becomes a pseudo-label if its confidence is"
Shares = list[list[float | None]]


def confusion(run: Run, seen: Seen | str) -> list[Block]:
    """Returns the confusion matrix and a table of the classes with the lowest accuracy, as blocks of a
    report. `seen` has the predictions, or is a text that says why there are none. In the second case, the
    accuracies that the run itself recorded for these classes are returned with this text instead."""
    if isinstance(seen, str):
        return [*_recorded(run), text(seen, "note")]
    totals = [sum(row) for row in seen.confusion]
    shares: Shares = [
        [many / total if total else None for many in row]
        for row, total in zip(seen.confusion, totals, strict=True)
    ]
    worst = sorted((share, k) for k, row in enumerate(shares) if (share := row[k]) is not None)
    classes = seen.classes
    lines: list[list[Cell]] = []
    for share, k in worst[:WORST]:
        most, taken = max((many, j) for j, many in enumerate(seen.confusion[k]) if j != k)
        other = f"{classes[taken]} ({percent(most / totals[k])})" if most else "–"
        spread = interval(seen.confusion[k][k], totals[k])
        lines.append([classes[k], *map(number, (f"{totals[k]:,}", percent(share), spread)), other])
    drawn = f", drawn at random from {seen.of:,}" if seen.tested < seen.of else ""
    sentence = (
        f"Predictions of the model of round {seen.round:,} for {count(seen.tested, 'test image')}{drawn}."
    )
    if seen.correct is None:
        sentence = (
            f"{count(seen.tested, 'labelled image')}, each classified by a model that was not trained on it "
            "(cross-validation)."
        )
    head: list[Cell] = [
        "class",
        number("images"),
        number("accuracy"),
        number("95 % interval"),
        "most often confused with",
    ]
    matrix = _matrix(classes, shares, [k for _, k in worst], seen.confusion)
    return [text(sentence), half(matrix), half(table(head, lines) | {"title": "The worst classes"})]


def _matrix(classes: list[str], shares: Shares, worst: list[int], counts: list[list[int]]) -> Block:
    """Returns the chart of the confusion matrix. With more than `MOST_CLASSES` classes, it shows only the
    least accurate ones, half of `MOST_CLASSES`.

    `shares` and `counts` are [true class][predicted class]: fractions of the true class, and numbers of
    images. `worst` lists the classes, the least accurate first.
    """
    rows, columns, values, note = classes, classes, shares, ""
    many: list[list[int]] | None = counts
    if len(classes) > MOST_CLASSES:
        shown = sorted(worst[: MOST_CLASSES // 2])
        rows = [classes[k] for k in shown]
        columns = [*rows, "others"]
        values = []
        for k in shown:
            near = [shares[k][j] or 0.0 for j in shown]
            values.append([*near, max(0.0, 1 - sum(near))])
        note, many = f"The {len(shown)} worst of {len(classes)} classes. ", None
    return {
        "kind": "matrix", "figure": "confusion", "title": "Confusion matrix", "rows": rows,
        "columns": columns, "values": [[v if v is None else round(v, 4) for v in row] for row in values],
        "rowLabel": "true", "columnLabel": "predicted", "format": "percent", "most": 1, "counts": many,
        "note": f"{note}Each row is a true class: the percentage of its images with each prediction, and "
        "their number. A perfect model has 100 % on the diagonal.",
    }  # fmt: skip


def images(seen: Seen) -> list[Block]:
    """Returns the part of a report that shows example test images with their predictions."""
    made: list[Block] = []
    for title, items in seen.examples:
        if items:
            figure = f"images-{title.lower().replace(' ', '-')}"
            made += [
                heading(title),
                {"kind": "images", "figure": figure, "title": title, "items": items},
            ]
    return made


def views(run: Run, seen: Seen, whose: str = "", others: Sequence[tuple[str, Run]] = ()) -> list[Block]:
    """Returns the part of a report that shows training images next to their weak and strong views. In a
    report on several runs, `whose` names the run that made the predictions. `others` has a run of each other
    experiment, with the experiment's name; a sentence says which thresholds they use."""
    mirrored = " and mirrored" if run.config.data.flip else ""
    sentence = (
        f"Training images, their weak views (shifted{mirrored}) and their strong views (in addition, two "
        "random operations and a grey square)."
    )
    if run.config.data.views == "semifl":
        sentence = sentence.replace("random operations and a grey square", "random operations")
    if run.config.data.views == "gentle":
        sentence = (
            f"Training images and gentle views of them (rotated, zoomed and shifted a little{mirrored}, with "
            "other brightness and contrast). Weak and strong views are of the same kind."
        )
    sentence += f" The images and predictions are those of {whose}." if whose else ""
    least, rule = threshold(run), threshold_rule(run)
    if rule:
        now = "" if least is None or f"{least:.3g}" == rule else f" (in the last round: {least:.3g})"
        sentence += (
            f" {'There, the' if whose else 'The'} prediction for the first weak view is the pseudo-label of "
            f"a strong view if its confidence is at least {rule}{now}."
        )
    rules: dict[str, list[str]] = {}
    for name, other in others:
        rules.setdefault(threshold_rule(other), []).append(name)
    for other_rule, names in rules.items():
        if other_rule and other_rule != rule:
            needs = "it must be" if rule else _BECOMES
            sentence += f" With {', '.join(names)}, {needs} at least {other_rule}."
    counts = None if least is None else [item["confidence"] >= least for item in seen.views]
    items = [{**item, "counts": counts and counts[k]} for k, item in enumerate(seen.views)]
    title = "Weak and strong views of the same images"
    return [text(sentence), {"kind": "views", "figure": "views", "title": title, "items": items}]


def _recorded(run: Run) -> list[Block]:
    """Returns a bar chart of the test accuracies of the worst classes, from the last evaluation. It is used
    if the model cannot be loaded."""
    each = zip(run.class_accuracy, run.classes, strict=False)
    known = [(value, name) for value, name in each if value is not None]
    items: list[Block] = [{"name": name, "value": value} for value, name in sorted(known)[:WORST]]
    return (
        [bars("worst-classes", f"Accuracy of the {len(items)} worst classes", items, "percent")]
        if items
        else []
    )
