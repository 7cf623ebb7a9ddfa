"""Writes the results of finished runs into one JSON file: summary, curves, times and resolved config.

  python -m benchmarks.record runs/a --what TEXT --command "ssfl run ..." --device TEXT --out results/a.json

Curves of the pseudo-labels are means over the rounds between two evaluations. The config names data files
without their folders.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from ssfl.config import writing
from ssfl.runs import folder

KEPT_OUT = ("event", "round", "memory", "seconds")
"""Fields of the last evaluation that the file leaves out: they are elsewhere in it or do not concern the
result."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record", description="Writes the results of runs into one JSON file."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a finished run")
    parser.add_argument("--what", required=True, help="one sentence: what was run")
    parser.add_argument(
        "--command", required=True, action="append", help="the command of each run, in the order of the runs"
    )
    parser.add_argument("--device", required=True, help="the device, and what else ran on it")
    parser.add_argument("--images", action="append", default=[], metavar="FILE=FINGERPRINT")
    parser.add_argument(
        "--note", action="append", default=[], help="a sentence that readers need. Repeatable"
    )
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    if len(options.command) != len(options.runs):
        parser.error(f"--command was given {len(options.command)} times for {len(options.runs)} runs")
    for each in options.images:
        if "=" not in each:
            parser.error(f"--images {each}: write FILE=FINGERPRINT")
    runs = [
        {"command": command, **result(run)}
        for command, run in zip(options.command, options.runs, strict=True)
    ]
    told = {
        "what": options.what,
        "device": options.device,
        "images": dict(each.split("=", 1) for each in options.images),
        "notes": options.note,
        "runs": runs,
    }
    folder.write_atomic(options.out, (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())
    for run in runs:
        accuracies = (run["summary"].get(name) for name in ("accuracy", "validation_accuracy"))
        accuracy = next((value for value in accuracies if value is not None), None)
        print(f"{'unknown' if accuracy is None else f'{accuracy:.4f}'}  {run['command']}")


def result(run: Path) -> dict[str, Any]:
    """Returns what is kept of the run in the folder `run`. Raises SystemExit if it is not finished."""
    summary = folder.read_summary(run)
    if summary is None:
        raise SystemExit(f"{run} has no summary: the run is not finished")
    events = list(folder.read_events(run))
    rounds = [event for event in events if event["event"] == "round"]
    evaluations = [event for event in events if event["event"] == "eval"]
    ends = [event["round"] for event in evaluations]
    told: dict[str, Any] = {
        "summary": summary,
        "last_evaluation": {key: value for key, value in evaluations[-1].items() if key not in KEPT_OUT},
    }
    for name in ("validation_accuracy", "accuracy"):
        if curve := [[event["round"], event[name]] for event in evaluations if name in event]:
            told[f"{name}_curve"] = curve
    for name in ("mask_rate", "pseudo_accuracy"):
        told[f"{name}_curve"] = [
            [end, _mean(event.get(name) for event in rounds if start < event["round"] <= end)]
            for start, end in zip([0, *ends], ends, strict=False)
        ]
    return {
        **told,
        "images_of_users": sum(event.get("images", 0) for event in rounds),
        "images_of_server": sum(event.get("server_images", 0) for event in rounds),
        "rounds_without_users": [event["round"] for event in rounds if event.get("alone")],
        "seconds": _seconds(rounds),
        "config": writing.to_toml(writing.portable(folder.read_config(run))),
    }


def _seconds(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the time of the first round, and the medians of all rounds and of their parts."""
    parts = {name for event in rounds for name in event.get("phases", {})}
    return {
        "first_round": round(rounds[0]["seconds"], 4),
        "median_round": round(statistics.median(event["seconds"] for event in rounds), 4),
        **{
            f"median_{name}": round(statistics.median(event["phases"].get(name, 0.0) for event in rounds), 4)
            for name in sorted(parts)
        },
    }


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


if __name__ == "__main__":
    main()
