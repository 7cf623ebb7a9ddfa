"""Measures how the cost of a run grows with the number of users K, for a fixed number of images: seconds
until the first round, and seconds per round.

  python -m benchmarks.users [--images N] [--participants C] [--repeats N] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import report
from ssfl.runs.folder import versions

USERS = (100, 1_000, 10_000, 100_000)
ROUNDS = 8
SETTINGS = [
    f"federation.rounds={ROUNDS}", "federation.period=4", "train.batch_size=16", "train.warmup=0",
    "run.eval_every=1000000", "run.checkpoint_every=1", "run.device=cpu", "method.name=alternate",
]  # fmt: skip
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of the number of users.")
    parser.add_argument("--images", type=int, default=1_000_000, help="8x8 images of all users together")
    parser.add_argument("--participants", type=int, default=100, help="users per round")
    parser.add_argument("--users", type=int, nargs="+", default=USERS, help="the numbers of users to try")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a further setting")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    settings = [*SETTINGS, f"federation.participants={options.participants}", *options.sets]
    tries: dict[int, list[Row]] = {users: [] for users in options.users}
    with tempfile.TemporaryDirectory() as folder:
        data = generate(Path(folder) / "images.npz", options.images)
        for i in range(options.repeats):  # rows take turns, so that a busy minute affects all of them
            for users, rows in tries.items():
                overrides = [f"data.path={data}", f"split.users={users}", *settings]
                rows.append(measure(overrides, Path(folder) / f"{users}-{i}"))
    medians = [
        {"users": users, "images_each": options.images / users}
        | {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for users, rows in tries.items()
    ]
    show(medians)
    if options.json:
        details = report.circumstances("benchmarks.users") | {
            "versions": versions() | {"numpy": np.__version__},
            "images": options.images,
            "repeats": options.repeats,
            "settings": settings,
            "rows": medians,
        }
        report.save(options.json, details)


def show(rows: list[Row]) -> None:
    print("    users  images each  start, s  resume, s  s/round  peak, MiB  split.json, kB  checkpoint, kB")
    for row in rows:
        print(
            f"{row['users']:>9}{row['images_each']:>13.0f}{row['start_seconds']:>10.2f}"
            f"{row['resume_seconds']:>11.2f}{row['round_seconds']:>9.3f}{row['peak_mib']:>11.0f}"
            f"{row['split_bytes'] / 1e3:>16.1f}{row['checkpoint_bytes'] / 1e3:>16.1f}"
        )


def generate(path: Path, count: int) -> Path:
    """Writes a data file (.npz) with `count` training images of 8x8 pixels in ten classes, and returns its
    path. Each class has a pattern, to which noise is added."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 200, (10, 8, 8), dtype=np.uint8)
    y_train, y_test = generator.permutation(np.arange(count) % 10), np.arange(1000) % 10
    x_train, x_test = (
        patterns[y] + generator.integers(0, 56, (len(y), 8, 8), dtype=np.uint8) for y in (y_train, y_test)
    )
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def measure(overrides: list[str], out: Path) -> Row:
    """Measures `ssfl run` and then `ssfl resume` with these settings. Returns seconds, peak memory and file
    sizes."""
    sets = [word for override in overrides for word in ("--set", override)]
    start, peak = begin(["run", *sets, "--out", str(out), "--quiet"], out, 1)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    # the first round warms up and the last one evaluates
    seconds = [e["seconds"] for e in events if e["event"] == "round" and 1 < e["round"] < ROUNDS]
    newest = max((out / "checkpoints").iterdir())
    row = {
        "start_seconds": start,
        "round_seconds": statistics.median(seconds),
        "peak_mib": peak,
        "split_bytes": (out / "split.json").stat().st_size,
        "checkpoint_bytes": newest.stat().st_size,
    }
    # delete what was written after round ROUNDS - 1, as if the run had been killed then
    for lost in (newest, out / "summary.json", out / "model.safetensors"):
        lost.unlink()
    kept = [json.dumps(event) + "\n" for event in events if event["round"] < ROUNDS]
    (out / "events.jsonl").write_text("".join(kept))
    row["resume_seconds"], _ = begin(["resume", str(out), "--quiet"], out, ROUNDS)
    return row


def begin(words: list[str], out: Path, round: int) -> tuple[float, float]:
    """Runs an ssfl command to its end. Returns the seconds from its start until its first round begins, and
    its peak memory in MiB. `round` is the number of that round."""
    events = out / "events.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "ssfl", *words])
    taken, size = None, -1
    while taken is None and process.poll() is None:
        time.sleep(0.005)
        if events.is_file() and events.stat().st_size != size:
            size = events.stat().st_size
            taken = round_seconds(events, round)
    seen = time.perf_counter()
    if process.returncode is None:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if taken is None or process.returncode:
        sys.exit(f"ssfl {' '.join(words)} failed")
    scale = 2**20 if sys.platform == "darwin" else 2**10  # macOS reports bytes, other systems KiB
    return seen - began - taken, usage.ru_maxrss / scale


def round_seconds(events: Path, round: int) -> float | None:
    """Returns how many seconds a round took, from events.jsonl, or None if the round's event is not there
    yet."""
    for line in events.read_text().splitlines(keepends=True):
        if line.endswith("\n") and (event := json.loads(line))["round"] == round:
            return float(event["seconds"])
    return None


if __name__ == "__main__":
    main()
