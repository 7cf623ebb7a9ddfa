"""Measures `ssfl run FOLDER` on large images: seconds until the first round and until the verdict, memory,
and the accuracy of the time forecast. Each folder is run twice: with an empty cache, and with the cache of
the first run.

  python -m benchmarks.pictures [--folder FOLDER] [--wait 600] [--json FILE]

Without a folder, it draws 1,000 images of mixed sizes, grey and colour: 60 labelled images of four classes,
and 940 unlabelled ones in three sub-folders.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks import machine, report
from ssfl.runs.folder import versions

CLASSES = ("disc", "square", "stripes", "cross")
LABELLED = 15
"""The number of labelled images of each class."""
SITES = {"site-a": 400, "site-b": 320, "site-c": 220}
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
EXPECTED = re.compile(r"about ([\d.]+) (ms|s|min|h) \(.* per round\)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure `ssfl run FOLDER` on large pictures.")
    parser.add_argument("--folder", type=Path, help="pictures of your own. Default: 1,000 drawn ones")
    parser.add_argument("--wait", type=float, default=0.0, help="wait up to this long for an idle machine")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a setting for ssfl run")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or draw(Path(scratch) / "drawn")
        for name in ("empty cache", "cached"):
            busy = machine.busy(options.wait)
            rows[name] = {"busy_cores_before": busy} | measure(folder, Path(scratch), name, options.sets)
            show(name, rows[name])
    if options.json:
        details = report.circumstances("benchmarks.pictures") | {
            "versions": versions(),
            "pictures": "drawn" if options.folder is None else options.folder.name,
            "runs": rows,
        }
        report.save(options.json, details)


def draw(folder: Path) -> Path:
    """Writes JPEG images with sides of 160 to 640 pixels into `folder`, and returns it. Each class has a
    shape, drawn on noise; two thirds of the images are grey."""
    generator = np.random.default_rng(0)
    places = [folder / name for name in CLASSES for _ in range(LABELLED)]
    for site, count in SITES.items():
        places += [folder / "unlabelled" / site] * count
    for number, place in enumerate(places):
        kind = CLASSES.index(place.name) if place.name in CLASSES else int(generator.integers(4))
        width, height = (int(side) for side in generator.integers(160, 640, 2))
        noise = generator.integers(40, 140, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)
        shape(ImageDraw.Draw(picture), kind, width, height, int(generator.integers(150, 255)))
        place.mkdir(parents=True, exist_ok=True)
        picture.convert("L" if number % 3 else "RGB").save(place / f"{number:04}.jpg", quality=90)
    return folder


def shape(canvas: ImageDraw.ImageDraw, kind: int, width: int, height: int, level: int) -> None:
    """Draws the shape of class `kind` in the middle of an image, in the grey `level`."""
    left, top, right, bottom = width // 4, height // 4, 3 * width // 4, 3 * height // 4
    colour, line = (level, level, level), max(4, width // 20)
    if kind == 0:
        canvas.ellipse((left, top, right, bottom), fill=colour)
    elif kind == 1:
        canvas.rectangle((left, top, right, bottom), fill=colour)
    elif kind == 2:
        for at in range(left, right, 3 * line):
            canvas.rectangle((at, top, at + line, bottom), fill=colour)
    else:
        canvas.line((left, top, right, bottom), fill=colour, width=line)
        canvas.line((left, bottom, right, top), fill=colour, width=line)


def measure(folder: Path, scratch: Path, name: str, sets: list[str]) -> dict[str, Any]:
    """Runs `ssfl run FOLDER` as a user would, and returns its times in seconds, its memory and its
    forecast."""
    out, cache = scratch / f"run, {name}", scratch / "cache"
    words = ["run", str(folder), "--out", str(out), *(word for one in sets for word in ("--set", one))]
    environment = os.environ | {"SSFL_CACHE": str(cache)}
    began, loads = time.perf_counter(), [os.getloadavg()[0]]
    process = subprocess.Popen(
        [sys.executable, "-m", "ssfl", *words], stderr=subprocess.PIPE, env=environment, text=True
    )
    watch = machine.Watch(process.pid)
    watch.start()
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=lambda: _read(process, lines), daemon=True)
    reader.start()
    decoded = first = None
    while process.poll() is None:
        time.sleep(0.02)
        now = time.perf_counter()
        if decoded is None and any(cache.glob("images/*/index.json")):
            decoded = now
        if first is None and (out / "events.jsonl").is_file() and (out / "events.jsonl").stat().st_size:
            first = now
    ended = time.perf_counter()
    reader.join()
    peak, shown = watch.stop(), [line for _, line in lines]
    if process.returncode or decoded is None or first is None:
        sys.exit("\n".join(shown) + f"\nssfl {' '.join(words)} failed")
    forecast = next(((at, match) for at, line in lines if (match := EXPECTED.search(line))), None)
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    return {
        "load": [*loads, os.getloadavg()[0]],
        "decoded_s": decoded - began,
        "first_round_after_decoding_s": first - decoded,
        "total_s": ended - began,
        "forecast_s": None if forecast is None else float(forecast[1][1]) * UNITS[forecast[1][2]],
        "forecast_was_s": None if forecast is None else ended - forecast[0],
        "peak_mib": peak,
        "settings": {key: summary.get(key) for key in ("rounds", "engine", "threads", "parameters")},
        "verdict": (summary.get("verdict") or {}).get("text"),
        "printed": [line for line in shown if not re.search(r"\d left$", line)],
    }


def _read(process: "subprocess.Popen[str]", lines: list[tuple[float, str]]) -> None:
    """Appends each line that a process prints to `lines`, with the time at which it came."""
    assert process.stderr is not None
    for line in process.stderr:
        lines.append((time.perf_counter(), line.rstrip()))


def show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name}: decoded after {row['decoded_s']:.1f} s, "
        f"round 1 {row['first_round_after_decoding_s']:.1f} s later, "
        f"verdict after {row['total_s']:.1f} s; forecast {row['forecast_s']} s, it was "
        f"{row['forecast_was_s']:.1f} s; {row['peak_mib']:.0f} MiB; load {row['load']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
