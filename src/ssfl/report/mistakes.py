"""Where a model errs: the confusion matrix, the worst classes, images, and the views it was trained on."""

from ssfl.report.blocks import Block, Cell, bars, half, heading, number, table, text
from ssfl.report.gather import Run
from ssfl.report.pictures import Seen
from ssfl.report.words import count
from ssfl.runs.text import interval, percent

MOST_CLASSES, WORST = 60, 10
Shares = list[list[float | None]]


def confusion(run: Run, seen: Seen | str) -> list[Block]:
    """Which classes are taken for which."""
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
        right = interval(seen.confusion[k][k], totals[k])
        lines.append([classes[k], *map(number, (f"{totals[k]:,}", percent(share), right)), other])
    drawn = f", drawn from {seen.of:,}" if seen.tested < seen.of else ""
    said = f"The model of round {seen.round:,} on {count(seen.tested, 'test image')}{drawn}."
    if seen.right is None:
        said = f"{count(seen.tested, 'labelled image')}, each judged by a model that had not seen it (folds)."
    head: list[Cell] = [
        "class",
        number("images"),
        number("right"),
        number("95 % interval"),
        "most often taken for",
    ]
    made = _matrix(classes, shares, [k for _, k in worst], seen.confusion)
    return [text(said), half(made), half(table(head, lines) | {"title": "The worst classes"})]


def _matrix(classes: list[str], shares: Shares, worst: list[int], counts: list[list[int]]) -> Block:
    """The confusion matrix; of very many classes, that of the worst."""
    rows, columns, values, note = classes, classes, shares, ""
    many: list[list[int]] | None = counts
    if len(classes) > MOST_CLASSES:
        kept = sorted(worst[: MOST_CLASSES // 2])
        rows = [classes[k] for k in kept]
        columns = [*rows, "others"]
        values = []
        for k in kept:
            near = [shares[k][j] or 0.0 for j in kept]
            values.append([*near, max(0.0, 1 - sum(near))])
        note, many = f"The {len(kept)} worst of {len(classes)} classes. ", None
    return {
        "kind": "matrix", "figure": "confusion", "title": "What is taken for what", "rows": rows,
        "columns": columns, "values": [[v if v is None else round(v, 4) for v in row] for row in values],
        "rowLabel": "true", "columnLabel": "predicted", "format": "percent", "most": 1, "counts": many,
        "note": f"{note}Percent of each true class, and how many; a perfect model has 100 in the diagonal.",
    }  # fmt: skip


def images(seen: Seen) -> list[Block]:
    """Test images with what the model says of them."""
    made: list[Block] = []
    for title, items in seen.examples:
        if items:
            figure = f"images-{title.lower().replace(' ', '-')}"
            made += [
                heading(title),
                {"kind": "images", "figure": figure, "title": title, "items": items},
            ]
    return made


def views(run: Run, seen: Seen) -> list[Block]:
    """Weak and strong views of the same images."""
    method, mirrored = run.config.method, " and mirrored" if run.config.data.flip else ""
    told = (
        f"Training images as they are, weakly changed (shifted{mirrored}) and strongly changed (two random "
        "operations and a grey square besides)."
    )
    threshold = getattr(method, "threshold", None)
    if threshold is not None and "strong" in method.uses():
        told += (
            " The model predicts the first weak view; where it is at least "
            f"{threshold:g} sure, that is the pseudo-label that a strong view is trained with."
        )
    items = [{**item, "counts": threshold is not None and item["sure"] >= threshold} for item in seen.views]
    title = "Weak and strong views of the same images"
    return [text(told), {"kind": "views", "figure": "views", "title": title, "items": items}]


def _recorded(run: Run) -> list[Block]:
    """The accuracy by class as the last evaluation told it."""
    each = zip(run.class_accuracy, run.classes, strict=False)
    known = [(value, name) for value, name in each if value is not None]
    items: list[Block] = [{"name": name, "value": value} for value, name in sorted(known)[:WORST]]
    return (
        [bars("worst-classes", f"Accuracy of the {len(items)} worst classes", items, "percent")]
        if items
        else []
    )
