"""Makes the paper's tables from finished runs: the published accuracy, ours, their difference, and the number
of seeds.

Two further columns say how a run was trained. Fidelity says whether settings follow the paper's text, its
authors' code or our recommendation. Scale is the fraction of the training that was run.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ssfl.paper.fidelity import actual
from ssfl.paper.results import PaperResult, means
from ssfl.paper.rows import NAMES, PaperRun, Row
from ssfl.runs.text import table

HEAD = ("row", "setting", "published", "ours", "difference", "scale", "seeds", "fidelity", "data")


def lines(rows: Sequence[Row], results: Sequence[PaperResult]) -> list[dict[str, Any]]:
    """Returns the lines of a table as dicts. A run has one line for each combination of data, changed
    settings, fidelity and scale with which it was trained. The beginning of this file explains fidelity and
    scale. A run without results has one line too. A run that is in several rows is listed once.

    If our recommended method was trained in place of a run, its lines come before those of the run.
    """
    rows_shown: list[dict[str, Any]] = []
    recommended: set[str] = set()
    seen: set[tuple[str, float | None]] = set()
    for row in rows:
        for run in row.runs:
            if (run.name, run.published) in seen:  # some rows share a run
                continue
            seen.add((run.name, run.published))
            ours = actual(run, "recommended")
            if ours.name != run.name and ours.name not in recommended:
                recommended.add(ours.name)
                rows_shown += _ways(row, ours, results)
            rows_shown += _ways(row, run, results) or [_head(row, run) | {"accuracy": None, "seeds": 0}]
    return rows_shown


def _head(row: Row, run: PaperRun) -> dict[str, Any]:
    """Returns the first columns of a line: row number, settings, name of the run and published accuracy."""
    names = {"run": run.name, "paper_data": run.data}
    return {"row": row.number, "setting": setting(run), **names, "published": run.published}


def _ways(row: Row, run: PaperRun, results: Sequence[PaperResult]) -> list[dict[str, Any]]:
    """Returns one line of the table for each combination of data, changed settings, fidelity and scale with
    which a run was trained. In a line, "difference" is our accuracy minus the published one, in percentage
    points. It is None if the paper prints no accuracy, and if our run diverged, has changed settings or was a
    trial on digits."""
    ways = []
    mine = [one for one in results if one.name == run.name]
    for way in means(mine):
        kind = way.fidelity, way.data, way.scale, way.changes
        trained = next(one for one in mine if (one.fidelity, one.data, one.scale, one.changes) == kind)
        published = None if way.changes else run.published  # with changed settings, it is another experiment
        alike = way.accuracy is not None and way.data != "digits"  # a trial on digits is not comparable
        difference = (way.accuracy or 0) - published if alike and published is not None else None
        comparison = {"published": published, "difference": difference, "changes": list(way.changes)}
        ways.append(_head(row, run) | asdict(way) | comparison | {"setting": setting(run, trained)})
    return ways


def setting(run: PaperRun, trained: PaperResult | None = None) -> str:
    """Returns the settings of a run as a short text with the paper's symbols, such as "FedAvg, svhn, K=10,
    C=10". They are those of the paper. With a result (`trained`), they are those with which it was trained,
    which may have other data, or fewer labels and users."""
    data, users, skew, labels = run.data, run.users, run.skew, run.server_labels
    if trained is not None:
        data, users = trained.data, trained.setting("split", "users", users)
        skew, labels = trained.setting("split", "skew", skew), trained.labels(run)
    words = [NAMES[run.method], data, f"K={users}", f"C={run.participants}"]
    words += [f"S={run.groups}"] if run.groups else []
    words += [f"R={skew:g}", f"T={run.period}"]
    words += [f"Ns={labels}"] if labels else []
    words += [f"E={run.epochs}"] if run.epochs else []
    return ", ".join(words) + (", labels at the users" if run.labels_at == "users" else "")


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the lines as the text of a Markdown table."""
    rows: list[tuple[str, ...]] = [HEAD]
    for line in lines:
        published = "–" if line["published"] is None else f"{line['published']:.2f}"
        if line["published"] is not None and line.get("data") == "digits":
            published += f" ({line['paper_data']})"
        if not line["seeds"]:
            rows.append((str(line["row"]), line["setting"], published, "not run", *["–"] * 5))
            continue
        ours = "diverged" if line["accuracy"] is None else f"{line['accuracy']:.2f}"
        if line["deviation"] is not None:
            ours += f" ± {line['deviation']:.2f}"
        if line["accuracy"] is not None and line["diverged"]:
            ours += f" ({line['diverged']} diverged)"
        difference = "–" if line["difference"] is None else f"{round(line['difference'], 2) + 0.0:+.2f}"
        changes = f", with {' '.join(line['changes'])}" if line["changes"] else ""
        rows.append((
            str(line["row"]), line["setting"] + changes, published, ours, difference, f"{line['scale']:g}",
            str(line["seeds"]), line["fidelity"], line["data"],
        ))  # fmt: skip
    return "\n\n".join([table(rows), *_notes(lines)])


def _notes(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Returns sentences to print below a table: which runs made no pseudo-label, so that their accuracy says
    nothing about how the method uses unlabelled images."""
    notes = []
    for line in lines:
        empty = line.get("without_pseudo_labels", 0)
        if empty:
            seeds = f" with {empty} of {line['seeds']} seeds" if line["seeds"] > 1 else ""
            notes.append(
                f"{line['setting']}, scale {line['scale']:g}: no pseudo-label was made{seeds}. The mask rate "
                "was 0 in every round."
            )
    return notes
