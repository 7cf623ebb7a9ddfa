"""What many tests need: small real data sets, quick configs, the command line, a browser."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest

from ssfl.cli import main
from ssfl.config.loading import Config, load_config
from stage import NAMES, Stage
from waiting import command_of, descendants, ended

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no deadline")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Decoded images of the tests are kept apart from the user's."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSFL_CACHE", str(place))
        yield place


@pytest.fixture
def quick() -> Callable[..., Config]:
    """The quickstart, cut to a few short rounds; further overrides as key=value."""

    def make(*overrides: str) -> Config:
        short = ["federation.rounds=4", "federation.period=3", "train.batch_size=16", "run.threads=1",
                 "run.device=cpu"]  # fmt: skip
        return load_config("quickstart", [*short, *overrides])

    return make


@pytest.fixture(scope="session")
def patterns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .npz of 28×28 grey images in four classes (stripes and blobs) that a network soon tells apart."""
    generator = np.random.default_rng(5)

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 4
        grid = np.mgrid[0:28, 0:28]
        shapes = [grid[0] // 4 % 2, grid[1] // 4 % 2, (grid[0] + grid[1]) // 4 % 2, grid.sum(0) < 28]
        clean = np.stack([shapes[label] for label in labels]) * 200.0
        return np.clip(clean + generator.normal(0, 25, clean.shape), 0, 255).astype(np.uint8), labels

    x_train, y_train = images(240)
    x_test, y_test = images(40)
    path = tmp_path_factory.mktemp("data") / "patterns.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


@pytest.fixture
def ssfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Call the command in a scratch folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ssfl", *words])
        try:
            main.main()
            code: int | str | None = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return call


@pytest.fixture(scope="session")
def browser() -> Iterator["Chrome"]:
    """A real headless Chromium that reaches no other machine; its logs tell console errors and requests."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("NO BROWSER, pages are not tested: run `apt-get install chromium chromium-driver`")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox does not work for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    with suppress(OSError):  # the driver may close its last connection without an answer
        started.quit()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG files: labelled/CLASS at the centre, and one folder for each of three sites."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits, root = load_digits(), tmp_path_factory.mktemp("folders")
    for number, (pixels, digit) in enumerate(zip(digits.images[:400], digits.target[:400], strict=True)):
        home = f"labelled/{digit}" if number < 100 else NAMES[number % 3]
        (root / home).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)).save(root / home / f"{number:03d}.png")
    return root


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A keys folder of the three sites."""
    from ssfl.deploy import keys

    folder = tmp_path_factory.mktemp("ring") / "keys"
    keys.init(folder, [])
    for name in NAMES:
        keys.add(folder, name)
    return folder


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    try:
        yield made
    finally:
        below = {pid: command_of(pid) for process in made.started for pid in descendants(process.pid)}
        for process in made.started:
            if process.poll() is None:
                process.terminate()
        for process in made.started:
            try:
                ended(process, quiet=15)
            except AssertionError:
                process.kill()
                process.wait()
        for pid, command in below.items():  # Flower's client apps outlive the node that started them
            if command and command_of(pid) == command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
