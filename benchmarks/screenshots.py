"""Trains four runs on the digits, and takes the screenshots of the report and the board for the
documentation.

  python -m benchmarks.screenshots [--runs FOLDER] [--out FOLDER] [--json FILE]

It needs Chromium, chromedriver and selenium. Runs in the folder that are finished are not repeated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ssfl
from ssfl.report import page
from ssfl.runs.folder import read_events

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

RUNS = {
    "anchored": ["run.diversity_every=5"],
    "fedavg": ["run.diversity_every=5", "method.name=crl-gn", "method.threshold=0.95"],
    "grouping": ["run.diversity_every=5", "method.name=grouping", "method.threshold=0.95"],
    "server-only": ["method.name=server-only"],
}
"""The runs to train, by name: the settings that differ from the quickstart."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.screenshots", description="Takes screenshots."
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/screenshots"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--json", type=Path, default=Path("results/screenshots.json"))
    options = parser.parse_args()
    for name, settings in RUNS.items():
        if not (options.runs / name / "summary.json").is_file():
            ssfl.run(ssfl.load_config("quickstart", settings), options.runs / name)
    with browser() as chrome:
        report(chrome, options.runs, ["fedavg"], (1000, 1180), options.out / "report.png")
        report(chrome, options.runs, list(RUNS), (1110, 1060), options.out / "report-compare.png")
        with board(options.runs) as address:
            run = "document.querySelector('input[aria-label=\"compare {}\"]')"
            shot(chrome, address, 1200, 860, options.out / "board.png", clicked=[
                run.format(name) for name in ("anchored", "fedavg")])  # fmt: skip
    options.json.write_text(json.dumps(record(options.runs), indent=1) + "\n", "utf-8")


def report(chrome: "Chrome", runs: Path, names: list[str], size: tuple[int, int], out: Path) -> None:
    """Writes a report on these runs and takes a screenshot of its top, `size` pixels (width, height)."""
    written = (runs / f"{out.stem}.html").resolve()
    page.write([runs / name for name in names], written)
    shot(chrome, written.as_uri(), *size, out)


def shot(
    chrome: "Chrome", address: str, width: int, height: int, out: Path, clicked: list[str] | None = None
) -> None:
    """Opens a page, clicks on the given elements, waits until the charts are drawn, and saves a screenshot as
    `out`."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chrome.get(address)
    wait = WebDriverWait(chrome, 60)
    for element in clicked or []:
        there = f"return {element} !== null"
        wait.until(partial(_is_true, there))
        chrome.execute_script(f"if (!{element}.checked) {element}.click()")
    wait.until(partial(_is_true, "return document.querySelectorAll('svg.drawing').length > 1"))
    chrome.save_screenshot(str(out))
    print(out)


def _is_true(script: str, chrome: "Chrome") -> bool:
    """Returns whether a script in the page returns true."""
    return bool(chrome.execute_script(script))


@contextmanager
def browser() -> Iterator["Chrome"]:
    """Yields a Chromium browser without a window, and closes it at the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        sys.exit("Chromium or chromedriver is missing: apt-get install chromium chromium-driver")
    settings = webdriver.ChromeOptions()
    settings.binary_location = program
    for argument in ("--headless=new", "--disable-gpu", "--hide-scrollbars"):
        settings.add_argument(argument)
    if os.geteuid() == 0:
        settings.add_argument("--no-sandbox")  # Chromium's sandbox does not work for root
    chrome = webdriver.Chrome(options=settings, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@contextmanager
def board(runs: Path) -> Iterator[str]:
    """Starts `ssfl board` for the runs on a free port and yields its address. Stops it at the end."""
    command = [sys.executable, "-m", "ssfl", "board", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield line[line.index("http://") :].split()[0]
        finally:
            process.terminate()


def record(runs: Path) -> dict[str, Any]:
    """Returns how the runs were made, and their curves, for the JSON file."""
    made: dict[str, Any] = {"command": "python -m benchmarks.screenshots", "runs": {}}
    for name, settings in RUNS.items():
        summary = json.loads((runs / name / "summary.json").read_text("utf-8"))
        events = list(read_events(runs / name))
        curves = {
            key: [[event["round"], event[key]] for event in events if event["event"] == kind and key in event]
            for kind, key in (("eval", "accuracy"), ("round", "mask_rate"), ("round", "pseudo_accuracy"))
        }
        kept = {key: summary.get(key) for key in ("accuracy", "device", "versions", "commit")}
        made["runs"][name] = {"settings": settings, **kept, **curves}
    return made


if __name__ == "__main__":
    main()
