"""Every row of the paper trains: a few rounds on tiny images of its data's shape and classes teach it them.

What is asked of a run, an untrained network does not have: its labelled loss falls by a fifth and more,
and where users have no labels, theirs falls as much or their pseudo-labels are far better than guesses.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssfl.paper import rows, sweep
from ssfl.paper.rows import PaperRun, Row
from ssfl.runs import folder as runs

EVERY = [pytest.param(row, id=str(row.number)) for row in (*rows.ROWS, rows.METHODS)]
SHAPES = {"cifar10": (32, 32, 3), "svhn": (32, 32, 3), "stl10": (96, 96, 3), "emnist": (28, 28)}
CLASSES = {"cifar10": 10, "svhn": 10, "stl10": 10, "emnist": 47}
EACH = {"cifar10": 100, "svhn": 60, "stl10": 16, "emnist": 24}
"""Images of a class."""
HOW = {"cifar10": (4, 16, 0.005, 0.6), "svhn": (4, 16, 0.005, 0.6), "stl10": (4, 8, 0.001, 0.8),
       "emnist": (8, 16, 0.01, 0.6)}  # fmt: skip
"""Steps of a round, batch size, learning rate and a threshold that no untrained network reaches."""
LABELLED = ("supervised", "supervised-grouping", "data-sharing", "easgd", "overlap-sgd")
"""The methods whose users know every label."""


def draw_images(path: Path, shape: tuple[int, ...], classes: int, each: int) -> Path:
    """Images whose class shows in bright and dark fields, wide enough to be known when shifted."""
    generator = np.random.default_rng(0)
    half = generator.choice([30.0, 220.0], (classes, 5, 3))
    fields = np.concatenate([half, half[:, :, ::-1]], axis=2)
    down, across = np.arange(shape[0]) * 5 // shape[0], np.arange(shape[1]) * 6 // shape[1]
    labels = np.arange(classes * each) % classes
    clean = fields[:, down][:, :, across][labels]
    if len(shape) == 3:
        clean = np.repeat(clean[..., None], 3, axis=3)
    images = np.clip(clean + generator.normal(0, 15, clean.shape), 0, 255).astype(np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[: 4 * classes], y_test=labels[: 4 * classes])
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small data of each data set's shape and classes."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: draw_images(folder / f"{name}.npz", SHAPES[name], CLASSES[name], EACH[name]) for name in SHAPES
    }


def played(
    run: PaperRun, data: Path, out: Path, changes: tuple[str, ...]
) -> tuple[Path, list[dict[str, Any]]]:
    """The run's folder and its rounds."""
    options = sweep.Options(data=str(data), sets=changes, out=out)
    row = Row(0, "", "", (run,))
    (path,) = sweep.play([row], options, lambda line: None, quiet=True)
    assert sweep.play([row], options, lambda line: None, quiet=True) == [path]  # knows its own run again
    return path, [event for event in runs.read_events(path) if event["event"] == "round"]


def marked(run: PaperRun) -> str:
    """The setting that says how many labels there are."""
    return "user_labels" if run.labels_at == "users" or run.method == "fixmatch" else "server_labels"


def falls(events: list[dict[str, Any]], key: str) -> bool:
    """Whether a loss ends a fifth or more below where it began; a broken run has none."""
    losses = [event[key] for event in events]
    return all(map(math.isfinite, losses)) and bool(sum(losses[-2:]) / 2 < 0.8 * losses[0])


def right(events: list[dict[str, Any]], classes: int) -> bool:
    """Whether users came to be sure, and then were right three times as often as guesses are."""
    kept = [(event["mask_rate"], event["pseudo_accuracy"]) for event in events if event["mask_rate"] > 0]
    sure = sum(rate for rate, _ in kept)
    return bool(sure > 0.01 and sum(rate * accuracy for rate, accuracy in kept) > 3 / classes * sure)


@pytest.mark.slow
@pytest.mark.parametrize("row", EVERY)
def test_every_row_trains(row: Row, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Every method of the row, labels at the server and at the users, among its users with a small network.

    A few take part at once, so that the server's few steps count in the average.
    """
    for run in {(run.method, run.labels_at): run for run in reversed(row.runs)}.values():
        classes, (steps, batch, rate, sure) = CLASSES[run.data], HOW[run.data]
        few, labels, rounds = min(run.participants, max(3, run.groups or 0)), 2 * classes, 6
        if run.labels_at == "users":  # one step: users know their few labels by heart after more of them
            few, labels, rounds, steps, rate, sure = 5, 500, 16, 1, 0.01, 0.95
        changes: tuple[str, ...] = (
            f"federation.rounds={rounds}", f"federation.period={steps}", f"federation.participants={few}",
            f"train.batch_size={batch}", "train.warmup=0", "train.cycles=0.4", f"train.lr={rate}",
            "model.name=small", "run.device=cpu", "run.eval_every=20",
            "run.diversity_every=0",
        )  # fmt: skip
        if run.method not in LABELLED:
            changes += (f"method.threshold={sure}",)
        if run.server_labels:
            changes += (f"split.{marked(run)}={labels}",)
        if run.data == "emnist":
            changes += ("model.norm=group",)
        _, events = played(run, tiny[run.data], tmp_path, changes)
        told = {key: [event[key] for event in events] for key in ("loss", "mask_rate", "pseudo_accuracy")}
        if "server_loss" in events[0]:
            told["server_loss"] = [event["server_loss"] for event in events]
            assert falls(events, "server_loss"), told
        known = run.method in LABELLED or marked(run) == "user_labels"
        assert falls(events, "loss") or (not known and right(events, classes)), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "model"), [("13", "resnet18"), ("45", "vgg11"), ("50", "resnet9"), ("46", "cnn")]
)
def test_the_rows_own_networks_train(number: str, model: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    run = rows.row(number).runs[-1]
    changes = (
        "federation.rounds=2", "federation.period=1", "train.batch_size=4", "federation.participants=2",
        "split.users=10", "federation.groups=2", f"split.{marked(run)}=47", "train.warmup=0", "train.lr=0.02",
        "run.device=cpu", "run.diversity_every=0",
    )  # fmt: skip
    path, events = played(run, tiny[run.data], tmp_path, changes)
    config = runs.read_config(path)
    assert (config.model.name, config.federation.participants) == (model, 2)
    whose = "" if run.labels_at == "users" else "server_"
    assert all(math.isfinite(event[f"{whose}loss"]) for event in events)
    assert events[0][f"{whose}update_norm"] > 1e-3  # the printed schedule is at its floor in the second
