"""Makes the JSON file and the table of the simulator benchmark from the contestants' measurements."""

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.child import home
from benchmarks.machine import IDLE
from ssfl.runs import provenance, text


def summary(spec: jobs.Spec, warmup: int, runs_of: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the content of the JSON file: the job's settings and the results of each contestant. `runs_of`
    has all runs of each contestant, including failed ones."""
    config = jobs.config(spec)
    users, steps, batch = jobs.participants(config), config.federation.period, config.train.batch_size
    settings = {
        "users": config.split.users, "users_per_round": users, "local_steps": steps, "batch_size": batch,
        "lr": config.train.lr, "momentum": config.train.momentum, "nesterov": config.train.nesterov,
        "weight_decay": config.train.weight_decay, "method": config.method.name,
        "model": config.model.name, "norm": config.model.norm,
        "timed_rounds": spec.rounds - warmup, "warmup_rounds": warmup,
    }  # fmt: skip
    expected = {"steps": spec.rounds * users * steps, "images": spec.rounds * users * steps * batch}
    contestants = {name: _contestant(runs, warmup, expected) for name, runs in runs_of.items()}
    best = min(
        (
            each["median_s"]
            for name, each in contestants.items()
            if home(name) == "ours" and "median_s" in each
        ),
        default=None,
    )
    for contestant in contestants.values():
        if "median_s" in contestant:
            contestant["images_per_s"] = users * steps * batch / contestant["median_s"]
            contestant["times_our_best"] = contestant["median_s"] / best if best else None
    return {
        "job": spec.job,
        "title": jobs.JOBS[spec.job].title,
        "note": jobs.JOBS[spec.job].note,
        "settings": settings,
        "expected": expected,
        "contestants": contestants,
    }


def _contestant(runs: list[dict[str, Any]], warmup: int, expected: dict[str, int]) -> dict[str, Any]:
    """Returns the results of one contestant over its repeated runs: times, memory and losses. If one run
    failed or did not do the expected number of steps and images, returns why instead."""
    for run in runs:
        if "not_run" in run or "failed" in run:
            return run
        if any(run[what] != count for what, count in expected.items()):
            return {"failed": f"did {run['steps']} steps on {run['images']} images", "runs": runs}
    rounds = [[b - a for a, b in zip([r["ready"], *r["ends"]], r["ends"], strict=False)] for r in runs]
    timed = [seconds for each in rounds for seconds in each[warmup:]]
    last = runs[-1]
    return {
        "median_s": statistics.median(timed),
        "min_s": min(timed),
        "max_s": max(timed),
        "memory_mib": max(run["memory"] for run in runs),
        "gpu_memory_mib": last["gpu_memory"],
        "prepare_s": [run["ready"] - run["started"] for run in runs],
        "warmup_s": [sum(each[:warmup]) for each in rounds],
        "all_rounds_s": [sum(each) for each in rounds],
        "round_s": [each[warmup:] for each in rounds],
        "losses": [run["losses"] for run in runs],
        "others_busy_cores": [run["others"] for run in runs],
        **{key: last[key] for key in ("steps", "images", "processes", "threads", "versions")},
    }


def table(summary: dict[str, Any]) -> str:
    """Returns a Markdown table with one line per contestant, followed by notes."""
    head = (
        "runtime", "s / round", "min–max", "images / s", "× our best", "memory, MiB", "GPU, MiB",
        "start, s", "first round, s", "all rounds, s", "processes × threads", "last loss",
    )  # fmt: skip
    rows: list[Sequence[str]] = [head]
    notes = [summary["note"]] if summary["note"] else []
    for name, contestant in summary["contestants"].items():
        if "median_s" not in contestant:
            notes.append(
                f"{name} not run: {contestant['not_run']}"
                if "not_run" in contestant
                else f"{name} failed: {contestant['failed']}"
            )
            continue
        others = max(
            (cores or 0.0 for both in contestant["others_busy_cores"] for cores in both), default=0.0
        )
        if others >= IDLE:
            notes.append(f"{name}: others kept {others:.1f} cores busy just before or after it")
        ratio, gpu = contestant["times_our_best"], contestant["gpu_memory_mib"]
        rows.append((
            name, f"{contestant['median_s']:.3f}", f"{contestant['min_s']:.3f}–{contestant['max_s']:.3f}",
            f"{contestant['images_per_s']:,.0f}", "–" if ratio is None else f"{ratio:.2f}",
            f"{contestant['memory_mib']:,.0f}", "–" if gpu is None else f"{gpu:,.0f}",
            f"{statistics.median(contestant['prepare_s']):.1f}",
            f"{statistics.median(contestant['warmup_s']):.2f}",
            f"{statistics.median(contestant['all_rounds_s']):.1f}",
            f"{contestant['processes']} × {contestant['threads']}", f"{contestant['losses'][-1][-1]:.4f}",
        ))  # fmt: skip
    return "\n".join([text.table(rows), "", *notes]).rstrip()


def circumstances(module: str) -> dict[str, Any]:
    """Returns how a measurement was made, for its JSON file: command, date, commit and machine. `module` is
    the name of the benchmark's module."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system(), "gpus": gpus()},
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as an indented JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _cpu() -> str:
    """Returns the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def gpus() -> list[str]:
    """Returns the names of this machine's GPUs."""
    return _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()


def _output(command: list[str]) -> str:
    """Returns the output of a command, or "" if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
