"""Measures what a real site costs the centre: CPU seconds while the site waits and in a round, bytes, and
memory.

  python -m benchmarks.sites [--sites N ...] [--model NAME] [--json FILE]

It starts a real `ssfl serve` in its own process, with TLS and a key for each site. The sites are threads of
this process. They speak the protocol but do not train: they return almost the same model. So only the
communication is measured. `ssfl join` prints how long a site's own training takes. It needs Flower.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from PIL import Image

from benchmarks import report
from ssfl.deploy import connection, keys, silenced, wire
from ssfl.deploy.site import POLL
from ssfl.federation import METRICS
from ssfl.runs.folder import versions

ROUNDS = 5
WATCHED = 20.0
"""For how many seconds the cost of waiting sites is measured."""
TICK = os.sysconf("SC_CLK_TCK")
Row = dict[str, float]


@dataclass
class Crowd:
    """The shared state of all sites in this process: how many requests for work they have made, and whether
    they should stop."""

    asked: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


def stand_in(address: str, own: int, key: keys.SiteKey, crowd: Crowd) -> None:
    """Runs a site that does not train: it sends back almost the same model. `own` is the site's number. It
    connects again if the connection is lost."""
    while not crowd.done.is_set():
        with connection.connected(address, key, 120) as line, suppress(httpx.HTTPError):  # connect again
            _attend(line, own, key.name, crowd)


def _attend(line: connection.Connection, own: int, name: str, crowd: Crowd) -> None:
    """Answers the centre's messages over this connection until the run is over."""
    while not crowd.done.is_set():
        message = line.receive()
        with crowd.lock:
            crowd.asked += 1
        if message is None:
            time.sleep(POLL)
            continue
        metrics: dict[str, Any] = {"images": 1.0}
        content = RecordDict()
        if message.metadata.message_type.startswith("train"):
            sent: Any = message.content["model"]
            (row,) = sent.to_numpy_ndarrays()
            # all models must differ, because Flower sends equal models only once
            content = wire.pack(torch.from_numpy(row + np.float32(1e-6 * own)))
            metrics |= dict.fromkeys(METRICS, 0.0)
            metrics["round"] = message.content.config_records["config"]["round"]
        else:
            content["config"] = ConfigRecord({"name": name})
        content["metrics"] = MetricRecord(metrics)
        line.send(Message(content, reply_to=message), 0.0)


@dataclass
class Relay:
    """Passes all connections on to the centre and counts their bytes, still encrypted: `up` to the centre,
    `down` to the sites."""

    port: int
    to: int
    up: int = 0
    down: int = 0

    def start(self) -> None:
        listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            near, _ = listening.accept()
            far = socket.create_connection(("127.0.0.1", self.to))
            for source, target, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(source, target, way), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):  # one side has closed the connection
            while chunk := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(chunk))
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a real site costs the centre.")
    parser.add_argument(
        "--sites", type=int, nargs="+", default=[4, 16, 64], help="the numbers of sites to try"
    )
    parser.add_argument("--model", default="small", help="the network, on 28x28 images")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        images(root / "labelled")
        for count in options.sites:
            rows.append({"sites": count, **measure(root, count, options.model)})
            show(rows[-1])
    if options.json:
        details = report.circumstances("benchmarks.sites") | {"versions": versions(), "model": options.model}
        report.save(options.json, details | {"rounds": ROUNDS, "poll_seconds": POLL, "rows": rows})


def show(row: Row) -> None:
    print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)


def images(folder: Path) -> None:
    """Writes 20 labelled images of two classes into `folder`, for the centre."""
    generator = np.random.default_rng(0)
    for number in range(20):
        home = folder / str(number % 2)
        home.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (28, 28), dtype=np.uint8)
        Image.fromarray(pixels).save(home / f"{number}.png")


def measure(root: Path, count: int, model: str) -> Row:
    """Runs a federation of `count` sites and returns its costs. First all sites but one wait for the last
    one; then all take part in the rounds."""
    port, relayed = free_port(), free_port()
    folder, out = root / f"keys-{count}", root / f"run-{count}"
    keys.init(folder, ["127.0.0.1"])
    own = [keys.read_site(keys.add(folder, f"site{number:05d}")) for number in range(count)]
    sets = [f"federation.rounds={ROUNDS}", "federation.period=1", "train.batch_size=4", "train.warmup=0",
            f"model.name={model}", "run.threads=1"]  # fmt: skip
    words = ["serve", "--data", str(root / "labelled"), "--keys", str(folder), "--port", str(port),
             "--host", "127.0.0.1", "--out", str(out), *(w for s in sets for w in ("--set", s))]  # fmt: skip
    relay, crowd = Relay(relayed, port), Crowd()
    relay.start()
    with (root / "log").open("wb") as log:
        centre = subprocess.Popen([sys.executable, "-m", "ssfl", *words], stdout=log, stderr=log)
    try:
        with silenced():
            address = f"127.0.0.1:{relayed}"
            until(lambda: "listening" in (root / "log").read_text(), centre)
            arguments = [(address, number, key, crowd) for number, key in enumerate(own, 1)]
            start = [threading.Thread(target=stand_in, args=one, daemon=True) for one in arguments]
            for thread in start[:-1]:
                thread.start()
            until(lambda: (root / "log").read_text().count("has connected") >= count - 1, centre)
            link = child(centre.pid)
            asked, used, began = crowd.asked, seconds(link), time.monotonic()
            time.sleep(WATCHED)
            waiting = (seconds(link) - used) / (time.monotonic() - began)
            asked = crowd.asked - asked
            before, up, down = seconds(link) + seconds(centre.pid), relay.up, relay.down
            start[-1].start()
            until(lambda: (out / "summary.json").is_file(), centre)
            used = seconds(link) + seconds(centre.pid) - before
            memory = {name: peak(pid) for name, pid in (("centre_mib", centre.pid), ("link_mib", link))}
            up, down = relay.up - up, relay.down - down
            crowd.done.set()
            centre.wait(60)
    finally:
        crowd.done.set()
        if centre.poll() is None:
            centre.terminate()
            centre.wait()
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    rounds = sorted(event["seconds"] for event in events if event["event"] == "round")
    row = json.loads((out / "summary.json").read_text())["parameters"] * 4
    return {
        "model_bytes": row,
        "waiting_cpu": waiting,
        "cpu_per_question": waiting * WATCHED / max(asked, 1),
        "round_seconds": rounds[len(rounds) // 2],
        "cpu_per_answer": used / (ROUNDS * count),
        "bytes_up": up / (ROUNDS * count),
        "bytes_down": down / (ROUNDS * count),
        **memory,
    }


def until(true: Callable[[], bool], centre: subprocess.Popen[bytes]) -> None:
    """Waits until the function `true` returns True. Ends this program if the centre stops or if the wait
    takes too long."""
    end = time.monotonic() + 500
    while not true():
        if centre.poll() is not None and not true():
            sys.exit("the centre has stopped")
        if time.monotonic() > end:
            sys.exit("this takes too long")
        time.sleep(0.1)


def child(parent: int) -> int:
    """Returns the process number of the SuperLink that the centre has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended in the meantime
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                return int(stat.parent.name)
    sys.exit("the centre has no SuperLink")


def seconds(pid: int) -> float:
    """Returns the CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def peak(pid: int) -> float:
    """Returns the peak memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def free_port() -> int:
    """Returns the number of a free port on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
