"""Measures how many sites one centre can serve. The sites are light: they have no images and no torch, but
real TLS and keys.

  python -m benchmarks.federation_load --sites 10 30 100 --rounds 20 --json results/federation-load-cpu.json

For each number of sites it reports:
- the seconds until all sites are connected
- the seconds of a round with `--cohort` sites
- the CPU seconds of the SuperLink's process per idle site and minute
- the memory of that process at the start and at the end
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from ssfl.deploy import keys, silenced

NUMBERS = 10_026
"""The number of weights in the model that is sent, the same as in the quickstart's network."""
PER_PROCESS = 50


def attend(address: str, files: list[Path]) -> None:
    """Runs light sites in threads of this process, one for each site file, until the run is over."""
    import httpx
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

    from ssfl.deploy.connection import connected
    from ssfl.deploy.internals import CannotCarry

    draws = np.random.default_rng()

    def answer(message: Message) -> Message:
        content = RecordDict({"metrics": MetricRecord({"images": 1, "loss": float(draws.random())})})
        content["config"] = ConfigRecord({"name": "light"})
        if "model" in message.content:
            row = message.content.array_records["model"]["row"].numpy()
            content["model"] = ArrayRecord({"row": Array(row + np.float32(draws.random()))})
        return Message(content, reply_to=message)

    def site(file: Path) -> None:
        key, over = keys.read_site(file), False
        while not over:
            try:
                with connected(address, key, 600) as connection:
                    while not over:
                        message = connection.receive()
                        if message is None:
                            time.sleep(0.5)
                            continue
                        over = message.content.config_records["config"].get("ask") == "end"
                        connection.send(answer(message), 0.0)
            except (httpx.HTTPError, CannotCarry) as error:
                print(f"{key.name}: {error!r}", flush=True)

    threads = [threading.Thread(target=site, args=(file,), daemon=True) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def usage(pid: int) -> tuple[float, float]:
    """Returns the CPU seconds that a process has used, and its memory in MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    status = Path(f"/proc/{pid}/status").read_text()
    return seconds, int(status.partition("VmRSS:")[2].split()[0]) / 1024


def child_of(pid: int) -> int:
    """Returns the process number of the SuperLink, the child process of `pid`."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"ssfl.deploy.port" in (file.parent / "cmdline").read_bytes():
                return int(file.parent.name)
        except OSError:
            continue
    raise SystemExit("the SuperLink's process is not there")


def measured(count: int, cohort: int, rounds: int, idle: float, folder: Path) -> dict[str, Any]:
    """Runs one federation of `count` light sites and returns its measurements. Each round asks `cohort` of
    them; `idle` is how many seconds they are measured without work."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from ssfl.deploy import link
    from ssfl.deploy.fleet import Fleet

    ring, lines, notes = folder / "keys", list[str](), Queue[dict[str, Any]]()
    keys.init(ring, [])
    files = [keys.add(ring, f"site-{number:03d}") for number in range(count)]
    with link.listening("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    known = keys.sites(ring)
    draws, results, load_before = np.random.default_rng(1), [], os.getloadavg()
    with (
        silenced(),
        link.running(folder / "link", ring, "127.0.0.1", port, known, 120.0, 4 * NUMBERS, notes.put) as grid,
    ):
        pid = child_of(os.getpid())
        fleet = Fleet(
            grid=grid, names=list(known), needed=count, deadline=120.0, patience=600.0,
            tell=lines.append, notes=notes,
        )  # fmt: skip
        began, (cpu, _) = time.monotonic(), usage(pid)
        crowd = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.federation_load", "--join", f"127.0.0.1:{port}",
                 *map(str, files[start : start + PER_PROCESS])], stdout=subprocess.DEVNULL,
            )
            for start in range(0, count, PER_PROCESS)
        ]  # fmt: skip
        try:
            first = None
            while len(fleet.connected()) < count:
                if first is None and fleet.images:
                    first = time.monotonic()
                time.sleep(0.5)
            admitted = time.monotonic() - began
            admitting = usage(pid)[0] - cpu
            cpu, memory = usage(pid)
            time.sleep(idle)
            resting = usage(pid)[0] - cpu
            cpu = usage(pid)[0]
            for _ in range(rounds):
                nodes = list(fleet.connected().values())
                drawn = draws.choice(len(nodes), min(cohort, len(nodes)), replace=False)
                content = RecordDict({"config": ConfigRecord({"ask": "train"})})
                content["model"] = ArrayRecord({"row": Array(draws.random(NUMBERS, np.float32))})
                start = time.monotonic()
                answers = fleet.exchange({nodes[place]: content for place in drawn}, "train", 120.0)
                results.append((time.monotonic() - start, len(answers)))
            training, (_, later) = usage(pid)[0] - cpu, usage(pid)
            database = sum(file.stat().st_size for file in (folder / "link").glob("link.db*"))
            fleet.dismiss("over")
        finally:
            for process in crowd:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
    seconds = [each for each, _ in results]
    return {
        "sites": count, "cohort": cohort, "rounds": rounds,
        "admitted_seconds": round(admitted, 1),
        "admitting_cpu_per_site": round(admitting / count, 3),
        "idle_cpu_per_site_and_minute": round(resting / count / idle * 60, 3),
        "round_seconds": {name: round(float(np.quantile(seconds, part)), 2)
                          for name, part in (("median", 0.5), ("p90", 0.9), ("largest", 1.0))},
        "round_cpu_per_answer": round(training / max(1, sum(answers for _, answers in results)), 3),
        "answers_missing": sum(min(cohort, count) - answers for _, answers in results),
        "memory_mib": {"admitted": round(memory), "after": round(later)},
        "database_mib": round(database / 2**20, 1),
        "lines": len(lines),
        "load_average": os.getloadavg()[1],
        "load_before": [round(load, 2) for load in load_before],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds in which the sites have no work")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.join:
        attend(asked.join[0], list(map(Path, asked.join[1:])))
        return
    import flwr

    rows = []
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    for count in asked.sites:
        with tempfile.TemporaryDirectory() as folder:
            one = measured(count, asked.cohort, asked.rounds, asked.idle, Path(folder))
        print(json.dumps(one), flush=True)
        rows.append(one)
        if asked.json:
            about = {
                "command": "python -m benchmarks.federation_load " + " ".join(sys.argv[1:]),
                "commit": commit, "flower": flwr.__version__, "python": platform.python_version(),
                "machine": platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"),
                "weights": NUMBERS,
            }  # fmt: skip
            asked.json.write_text(json.dumps(about | {"found": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
