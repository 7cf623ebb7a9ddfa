"""Compares the speed of two versions of ssfl: it runs `benchmarks.steps` of this checkout and of another one
in turns.

    git worktree add ../before COMMIT
    python -m benchmarks.turns ../before --only cnn-47 resnet18-10 --json results/turns.json

Each measurement has its own process, so each version compiles its own code. If the machine becomes slower or
faster meanwhile, it affects both versions. The other checkout uses its own benchmarks/steps.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from ssfl.runs import text

HERE = Path(__file__).resolve().parents[1]


def measured(checkout: Path, words: list[str]) -> dict[str, Any]:
    """Runs `benchmarks.steps` in a checkout with these options, and returns the JSON that it writes: rows and
    commit."""
    path = os.pathsep.join([str(checkout / "src"), str(checkout), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        command = [sys.executable, "-m", "benchmarks.steps", *words, "--json", str(file)]
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | {"PYTHONPATH": path}, stdout=sys.stderr, text=True
        )
        if done.returncode:
            sys.exit(f"benchmarks.steps failed in {checkout} (exit code {done.returncode}): see above")
        written: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return written


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each case the median times of both versions over all turns, and the ratio of the new time
    to the old time."""
    cases = []
    for name in dict.fromkeys(row["name"] for row in rows):
        entry: dict[str, Any] = {"name": name}
        for key in ("step_ms", "server_step_ms", "round_ms"):
            middle = {
                version: statistics.median(
                    row[key] for row in rows if row["name"] == name and row["version"] == version
                )
                for version in ("before", "now")
            }
            entry[key] = middle | {"ratio": middle["now"] / middle["before"]}
        cases.append(entry)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.turns", description="Compare the speed of two versions in turns."
    )
    parser.add_argument("before", type=Path, help="a checkout of the other version")
    parser.add_argument("--only", nargs="+", default=["cnn-47", "cnn-10", "resnet18-10"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="the number of timed rounds in a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.before / "benchmarks" / "steps.py").is_file():
        sys.exit(f"{options.before} has no benchmarks/steps.py: name a checkout of ssfl")
    versions = {"before": options.before.resolve(), "now": HERE}
    words = ["--only", *options.only, "--rounds", str(options.rounds)]
    rows, commits = [], {}
    for turn in range(options.turns):
        for version, checkout in versions.items():
            written = measured(checkout, words)
            commits[version] = written["commit"]
            rows += [{"version": version, "turn": turn} | row for row in written["rows"]]
    cases = compared(rows)
    table = [["case", "", "before, ms", "now, ms", "now / before"]]
    for case in cases:
        for key in ("step_ms", "server_step_ms", "round_ms"):
            numbers = [f"{case[key][what]:.3f}" for what in ("before", "now", "ratio")]
            table.append([case["name"], key.removesuffix("_ms"), *numbers])
    print(text.table(table))
    if options.json:
        around = report.circumstances("benchmarks.turns")
        around["command"] = around["command"].replace(str(options.before), "CHECKOUT")
        report.save(options.json, around | {"commits": commits, "cases": cases, "rows": rows})


if __name__ == "__main__":
    main()
