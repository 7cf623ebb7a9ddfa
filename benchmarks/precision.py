"""Compares the accuracy of training in bfloat16 and in float32: the same runs in both, with several seeds.

python -m benchmarks.precision --data FILE.npz [--rounds N] [--seeds N] [--set KEY=VALUE ...] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from ssfl.runs.folder import versions

PRECISIONS = ("bfloat16", "float32")
SETTINGS = ["method.name=alternate", "model.norm=none", "train.momentum_policy=reset"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the accuracy of bfloat16 and float32.")
    parser.add_argument("--data", required=True, help="letters, for the preset emnist")
    parser.add_argument("--rounds", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3, help="the number of runs that share the device")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a further setting")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = [*SETTINGS, f"data.path={options.data}", f"federation.rounds={options.rounds}", *options.sets]
    cases = [(precision, seed) for seed in range(1, options.seeds + 1) for precision in PRECISIONS]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(cases), options.at_once):
            batch = cases[first : first + options.at_once]
            started = [begin(settings, *case, Path(folder)) for case in batch]
            rows += [finish(process, *case) for process, case in zip(started, batch, strict=True)]
    for precision in PRECISIONS:
        accuracies = [100 * row["accuracy"] for row in rows if row["precision"] == precision]
        mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
        print(f"{precision:9} {mean:.2f} ± {deviation:.2f}  {accuracies}")
    if options.json:
        details = {"versions": versions(), "settings": settings, "rows": rows}
        report.save(options.json, report.circumstances("benchmarks.precision") | details)


def begin(settings: list[str], precision: str, seed: int, folder: Path) -> "subprocess.Popen[str]":
    """Starts `ssfl run` with these settings, precision and seed in its own process, and returns the
    process."""
    sets = [*settings, f"train.precision={precision}", f"run.seed={seed}", f"split.seed={2018 + seed}"]
    words = [word for setting in sets for word in ("--set", setting)]
    out = str(folder / f"{precision}-{seed}")
    command = [sys.executable, "-m", "ssfl", "run", "emnist", *words, "--out", out, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]", precision: str, seed: int) -> dict[str, Any]:
    """Waits for a run to end, and returns its result."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"the run with {precision}, seed {seed} failed")
    summary = json.loads(output)
    kept = ("accuracy", "loss", "rounds", "device", "engine", "compile")
    return {"precision": precision, "seed": seed} | {key: summary[key] for key in kept}


if __name__ == "__main__":
    main()
