"""Makes the paper's tables from finished runs: published accuracy, ours, difference, scale, seeds."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ssfl.paper.fidelity import actual
from ssfl.paper.results import PaperResult, means
from ssfl.paper.rows import NAMES, PaperRun, Row
from ssfl.runs.text import table

HEAD = ("row", "setting", "published", "ours", "difference", "scale", "seeds", "fidelity", "data")


def lines(rows: Sequence[Row], results: Sequence[PaperResult]) -> list[dict[str, Any]]:
    """Returns one line for each run and each way in which it was run (scale, fidelity, data). Runs without
    results have a line too."""
    rows_shown: list[dict[str, Any]] = []
    recommended: set[str] = set()
    seen: set[tuple[str, float | None]] = set()
    for row in rows:
        for run in row.runs:
            if (run.name, run.published) in seen:  # rows share runs
                continue
            seen.add((run.name, run.published))
            ours = actual(run, "recommended")
            if ours.name != run.name and ours.name not in recommended:
                recommended.add(ours.name)
                rows_shown += _ways(row, ours, results)
            rows_shown += _ways(row, run, results) or [_head(row, run) | {"accuracy": None, "seeds": 0}]
    return rows_shown


def _head(row: Row, run: PaperRun) -> dict[str, Any]:
    return {"row": row.number, "setting": setting(run), "run": run.name, "published": run.published}


def _ways(row: Row, run: PaperRun, results: Sequence[PaperResult]) -> list[dict[str, Any]]:
    """Returns a line for each way in which a run was run, with the difference from the published accuracy if
    both are comparable."""
    ways = []
    for way in means(one for one in results if one.name == run.name):
        published = None if way.changes else run.published  # another experiment
        alike = way.accuracy is not None and way.data != "digits"  # a trial on digits is not comparable
        difference = (way.accuracy or 0) - published if alike and published is not None else None
        comparison = {"published": published, "difference": difference, "changes": list(way.changes)}
        ways.append(_head(row, run) | asdict(way) | comparison)
    return ways


def setting(run: PaperRun) -> str:
    """Returns the settings of a run in words."""
    words = [NAMES[run.method], run.data, f"K={run.users}", f"C={run.participants}"]
    words += [f"S={run.groups}"] if run.groups else []
    words += [f"R={run.skew:g}", f"T={run.period}"]
    words += [f"Ns={run.server_labels}"] if run.server_labels else []
    words += [f"E={run.epochs}"] if run.epochs else []
    return ", ".join(words) + (", labels at the users" if run.labels_at == "users" else "")


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the lines as a Markdown table."""
    rows: list[tuple[str, ...]] = [HEAD]
    for line in lines:
        published = "–" if line["published"] is None else f"{line['published']:.2f}"
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
    return table(rows)
