"""Compares four methods on real handwritten digits, with the same images, split and test set (`make demo`).

python examples/demo.py [--out FOLDER] [--rounds N] [--seeds N] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads sleep

import ssfl
from ssfl.report import plots
from ssfl.runs.display import Reporter
from ssfl.runs.folder import next_free, read_summary

METHODS = {
    "server alone": ["method.name=server-only"],
    "FedAvg": ["method.name=crl-gn", "method.threshold=0.95"],  # the paper's own threshold
    "grouping (paper)": ["method.name=grouping", "method.threshold=0.95"],
    "anchored (recommended)": ["method.name=anchored"],
}
WHY = """\
Once users are confident (mask rate), ten of them outvote the server's few labels. Under FedAvg they agree on
one wrong class. Under grouping each of the two streams does, and only the mean of the streams is useful. With
anchored the server trains last, after the average. This keeps the users' pseudo-labels correct, and only then
do the users improve the model."""


def main() -> None:
    """Trains every method with every seed, prints a table and draws the curves."""
    parser = argparse.ArgumentParser(description="Four methods on real handwritten digits.")
    parser.add_argument("--out", type=Path, help="folder for the runs and the picture")
    parser.add_argument("--rounds", type=int, help="rounds of each run")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, of weights, draws and split")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args()
    folder = given.out or next_free(Path("runs") / "demo")
    print("10 users with unlabelled digits, 50 labelled ones at the server, 360 test images")
    results: dict[str, list[ssfl.Result]] = {}
    for title, settings in METHODS.items():
        results[title] = []
        for seed in range(1, given.seeds + 1):
            overrides = [*settings, f"run.seed={seed}", f"split.seed={2018 + seed}"]
            if given.rounds:
                overrides.append(f"federation.rounds={given.rounds}")
            print(f"\n{title}{f', seed {seed}' if given.seeds > 1 else ''}")
            with Reporter() as report:
                config = ssfl.load_config("quickstart", overrides)
                name = config.method.name if seed == 1 else f"{config.method.name}-{seed}"
                results[title].append(ssfl.run(config, folder / name, report))

    picture = plots.curves(
        {title: runs[0].history for title, runs in results.items()},
        folder / "curves.png",
        "Digits: 10 users, skew 0.4, 5 labels per class at the server",
    )
    print("\n" + table(results) + "\n\n" + WHY)
    print(f"\npicture      {picture}\nrun folders  {folder}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record(results), indent=1) + "\n")


def table(results: dict[str, list[ssfl.Result]]) -> str:
    """Returns a table as text with one line per method: its test accuracy, its mask rate, and the share of
    correct pseudo-labels in the last round."""
    lines = [f"{'method':<26}{'accuracy':>16}{'mask rate':>12}{'pseudo-labels correct':>23}"]
    for title, runs in results.items():
        accuracies = [100 * run.accuracy for run in runs]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if len(runs) > 1 else ""
        last = [[e for e in run.history if e["event"] == "round"][-1] for run in runs]
        masks = [event["mask_rate"] for event in last if "mask_rate" in event]
        right = [event["pseudo_accuracy"] for event in last if event.get("pseudo_accuracy") is not None]
        lines.append(
            f"{title:<26}{f'{statistics.mean(accuracies):.1f}{spread} %':>16}"
            f"{f'{statistics.mean(masks):.2f}' if masks else '-':>12}"
            f"{f'{100 * statistics.mean(right):.0f} %' if right else '-':>23}"
        )
    return "\n".join(lines)


def record(results: dict[str, list[ssfl.Result]]) -> dict[str, Any]:
    """Returns everything that documents the demo, for the JSON file: command, commit, and the summary and
    curves of every run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "processors": os.cpu_count(),
        "runs": [
            {
                "title": title,
                "seed": seed,
                "summary": read_summary(run.path),
                "accuracy": [[e["round"], e["accuracy"]] for e in run.history if e["event"] == "eval"],
                "stream_accuracy": [
                    [e["round"], *e["stream_accuracy"]] for e in run.history if "stream_accuracy" in e
                ],
                **{
                    key: [[e["round"], e[key]] for e in run.history if key in e]
                    for key in ("mask_rate", "pseudo_accuracy")
                },
            }
            for title, runs in results.items()
            for seed, run in enumerate(runs, 1)
        ],
    }


if __name__ == "__main__":
    main()
