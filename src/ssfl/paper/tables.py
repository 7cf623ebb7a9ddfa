"""The paper's tables from finished runs: published, ours, difference, scale, seeds."""

from collections.abc import Sequence
from typing import Any

from ssfl.paper.results import Result, means
from ssfl.paper.rows import NAMES, Row, Run

HEAD = ("setting", "published", "ours", "difference", "scale", "seeds", "fidelity", "data")


def lines(rows: Sequence[Row], found: Sequence[Result]) -> list[dict[str, Any]]:
    """A line for each run and each way in which it was run, or one that says that it was not."""
    told: list[dict[str, Any]] = []
    for row in rows:
        for run in row.runs:
            head: dict[str, Any] = {
                "row": row.number,
                "setting": setting(run),
                "run": run.name,
                "published": run.published,
            }
            ways = means(one for one in found if one.name == run.name)
            for way in ways:
                alike = run.published is not None and way.data != "digits"  # a trial is not compared
                difference = way.accuracy - (run.published or 0) if alike else None
                told.append(
                    head
                    | {
                        "accuracy": way.accuracy, "deviation": way.deviation, "seeds": way.seeds,
                        "scale": way.scale, "fidelity": way.fidelity, "data": way.data,
                        "changes": list(way.changes), "difference": difference,
                    }
                )  # fmt: skip
            if not ways:
                told.append(head | {"accuracy": None})
    return told


def setting(run: Run) -> str:
    """A run in words."""
    words = [NAMES[run.method], run.data, f"K={run.users}", f"C={run.participants}"]
    words += [f"S={run.groups}"] if run.groups else []
    words += [f"R={run.skew:g}", f"T={run.period}"]
    words += [f"Ns={run.server_labels}"] if run.server_labels else []
    words += [f"E={run.epochs}"] if run.epochs else []
    return ", ".join(words) + (", labels at the users" if run.labels_at == "users" else "")


def markdown(told: Sequence[dict[str, Any]]) -> str:
    """The lines as a Markdown table."""
    rows: list[tuple[str, ...]] = [HEAD]
    for line in told:
        published = "–" if line["published"] is None else f"{line['published']:.2f}"
        if line["accuracy"] is None:
            rows.append((line["setting"], published, "not run", *["–"] * 5))
            continue
        spread = "" if line["deviation"] is None else f" ± {line['deviation']:.2f}"
        difference = "–" if line["difference"] is None else f"{line['difference']:+.2f}"
        changes = f" {' '.join(line['changes'])}" if line["changes"] else ""
        rows.append((
            line["setting"], published, f"{line['accuracy']:.2f}{spread}", difference, f"{line['scale']:g}",
            str(line["seeds"]), line["fidelity"] + changes, line["data"],
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    drawn = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    drawn.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(drawn)
