"""Where a model errs: the confusion matrix, the worst classes, images, and the views it was trained on."""

from ssfl.report.blocks import Block, Cell, bars, heading, number, table, text
from ssfl.report.gather import Run
from ssfl.report.pictures import Seen
from ssfl.report.words import count
from ssfl.runs.text import percent

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
        lines.append([classes[k], number(f"{totals[k]:,}"), number(percent(share)), other])
    drawn = f", drawn from {seen.of:,}" if seen.tested < seen.of else ""
    return [
        text(f"The model of round {seen.round:,} on {count(seen.tested, 'test image')}{drawn}."),
        _matrix(classes, shares, [k for _, k in worst]),
        heading("The worst classes"),
        table(["class", number("images"), number("right"), "most often taken for"], lines),
    ]


def _matrix(classes: list[str], shares: Shares, worst: list[int]) -> Block:
    """The confusion matrix; of very many classes, that of the worst."""
    rows, columns, values, note = classes, classes, shares, ""
    if len(classes) > MOST_CLASSES:
        kept = sorted(worst[: MOST_CLASSES // 2])
        rows = [classes[k] for k in kept]
        columns = [*rows, "others"]
        values = []
        for k in kept:
            near = [shares[k][j] or 0.0 for j in kept]
            values.append([*near, max(0.0, 1 - sum(near))])
        note = f"The {len(kept)} worst of {len(classes)} classes. "
    return {
        "kind": "matrix", "figure": "confusion", "title": "What is taken for what", "rows": rows,
        "columns": columns, "values": [[v if v is None else round(v, 4) for v in row] for row in values],
        "rowLabel": "true", "columnLabel": "predicted", "format": "percent", "most": 1,
        "note": f"{note}Percent of the images of each true class; a perfect model has 100 in the diagonal.",
    }  # fmt: skip


def images(seen: Seen) -> list[Block]:
    """Test images with what the model says of them."""
    made: list[Block] = []
    for title, items in seen.examples:
        figure = f"images-{title.lower().replace(' ', '-')}"
        made.append(heading(title))
        made.append(
            {"kind": "images", "figure": figure, "title": title, "items": items} if items else text("None.")
        )
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
