"""What many tests need: small real data sets and quick configs."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ssfl.config import Config, load_config
from stage import NAMES, Stage


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
        for process in made.started:
            if process.poll() is None:
                process.terminate()
        for process in made.started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
