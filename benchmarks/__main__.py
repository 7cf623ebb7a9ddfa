"""Runs the same federated job with ssfl and with other simulators, and reports the times as a table and a
JSON file.

Each simulator ("contestant") runs alone, in its own process. With --repeats, the order is reversed each time,
so that none always runs first.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import contest, jobs, report

WARMUP = 1
"""The number of rounds at the start that are not timed."""


def main() -> int:
    """Runs the benchmark command. Returns the exit code: 1 if a contestant failed, otherwise 0."""
    options = _options()
    job = jobs.JOBS[options.job]
    if options.data and not job.images:
        raise SystemExit(f"{options.job} brings its own images: leave out --data")
    names = options.on.split(",")
    pythons = _pythons(options.python)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = str(Path(options.data).absolute()) if options.data else None
        if data is None and job.images:
            data = str(jobs.draw_images(job, folder))
        rounds = WARMUP + (options.rounds or job.rounds)
        spec = jobs.Spec(options.job, "", rounds, data, options.device, str(folder / "told.json"))
        for turn in range(options.repeats):
            for name in names if turn % 2 == 0 else reversed(names):
                python = pythons.get(contest.peer(name) or "", sys.executable)
                reason = contest.missing(name, python)
                if reason is not None:
                    runs[name].append({"not_run": reason})
                    continue
                print(f"{name} ...", file=sys.stderr, flush=True)
                runs[name].append(contest.run(replace(spec, contestant=name), python, folder, options.wait))
                print("\n".join(runs[name][-1].get("log", [])), file=sys.stderr, end="")
        drawn = "drawn at random in this shape: speed does not depend on it" if job.images else "bundled"
        summary = {
            **report.summary(spec, WARMUP, runs),
            "data": Path(options.data).name if options.data else drawn,
            "device": options.device,
            **report.circumstances("benchmarks"),
        }
    path = Path(options.json or f"results/benchmark-{options.job}-{options.device}.json")
    report.save(path, summary)
    print(f"{options.job}: {summary['title']}; images {summary['data']}; device {summary['device']}\n")
    print(report.table(summary))
    print(f"\n{path}")
    return int(any("failed" in one for one in summary["contestants"].values()))


def _options() -> argparse.Namespace:
    """Returns the options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("job", choices=list(jobs.JOBS))
    parser.add_argument(
        "--on", default="loop,vmap,pfl,pfl-2,flower", help="the contestants (pfl-N: N processes)"
    )
    parser.add_argument("--rounds", type=int, help="the number of timed rounds, after a warm-up")
    parser.add_argument("--repeats", type=int, default=1, help="the number of runs of each contestant")
    parser.add_argument(
        "--wait", type=float, default=0, help="seconds to wait for an idle machine, each time"
    )
    parser.add_argument("--data", metavar="FILE.npz", help="images for emnist or cifar10; else random ones")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", metavar="FILE", help="default: results/benchmark-JOB-DEVICE.json")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH",
        help="a peer's interpreter; default: .venv-PEER/bin/python where there is one, else this one",
    )  # fmt: skip
    return parser.parse_args()


def _pythons(overrides: list[str]) -> dict[str, str]:
    """Returns the path of the Python interpreter for each other simulator, from options such as
    "flower=PATH"."""
    beside = {peer: contest.ROOT / f".venv-{peer}" / "bin" / "python" for peer in contest.PACKAGES}
    there = {peer: str(path) for peer, path in beside.items() if path.exists()}
    return there | dict(one.split("=", 1) for one in overrides)


if __name__ == "__main__":
    sys.exit(main())
