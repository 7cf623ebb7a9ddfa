"""The training jobs that all simulators run. Each job is described once, by an ssfl config that every
contestant reads.

In each round, C users train T steps from the same model, and the mean of their models is the next model.
There is no server training and no evaluation. The learning rate is constant, and momentum starts at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ssfl.config.loading import Config, load_config

ROUND = ("split.server_labels=0", "train.cycles=0", "train.momentum_policy=reset")
# Threshold 0: every pseudo-label is used, so all simulators do the same work. Without labels the loss falls
# to zero. With a small learning rate it falls slowly, so that the losses of simulators can be compared.
CONSISTENCY = (
    "method.name=crl-gn",
    "method.teacher_mode=eval",
    "method.threshold=0",
    *ROUND,
    "train.lr=0.0001",
)


@dataclass(frozen=True)
class Job:
    """A training job: a preset, the settings that differ from it, and the images that it needs."""

    title: str
    preset: str
    settings: tuple[str, ...]
    rounds: int
    """The default number of timed rounds."""
    images: int = 0
    """How many random training images are made if there is no data file. 0: the preset has its own images."""
    shape: tuple[int, ...] = ()
    classes: int = 0
    note: str = ""
    """A note that is printed below the table."""


JOBS = {
    "digits": Job(
        "8×8 digits, small CNN with GroupNorm, consistency loss",
        "quickstart",
        (*CONSISTENCY, "model.name=small"),
        rounds=20,
    ),
    "emnist": Job(
        "EMNIST shape, the paper's CNN, consistency loss",
        "emnist",
        (*CONSISTENCY, "model.norm=none"),
        rounds=3,
        images=112_800,
        shape=(28, 28),
        classes=47,
    ),
    # The speed protocol of pfl-research (arXiv:2404.06430): 50 of 1000 users, one epoch of 50 images.
    "cifar10": Job(
        "CIFAR-10 shape, two-layer CNN, supervised loss, five small steps",
        "own",
        (
            "method.name=supervised", *ROUND, "model.name=cnn", "model.norm=none",
            "split.scheme=iid", "split.users=1000", "federation.participants=50",
            "federation.period=5", "train.batch_size=10", "train.lr=0.1", "train.momentum=0",
            "train.nesterov=false", "train.weight_decay=0", "train.warmup=0",
        ),
        rounds=10,
        images=50_000,
        shape=(32, 32, 3),
        classes=10,
        note="ssfl makes a weak view of every image here, as it always does; the peers make none",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """What one contestant has to run: the job, the device and the number of rounds. It is sent to its process
    as JSON."""

    job: str
    contestant: str
    rounds: int
    """The number of rounds, including the warm-up rounds."""
    data: str | None
    device: str
    out: str


@dataclass
class Measured:
    """The measurements of a contestant, which its process sends back as JSON. Times are in seconds of the
    system's monotonic clock."""

    ready: float = 0.0
    """The time at which data and model were ready."""
    ends: list[float] = field(default_factory=list)
    """The time at which each round ended."""
    losses: list[float] = field(default_factory=list)
    """The mean loss of the users' steps in each round."""
    steps: int = 0
    """The number of training steps, over all users and rounds."""
    images: int = 0
    """The number of images in these steps. It shows whether the contestant did the whole job."""
    processes: int = 1
    threads: int = 0
    """The number of CPU threads that torch uses in each process."""
    memory: float | None = None
    """The peak memory of the process in MiB."""
    gpu_memory: float | None = None
    """The peak GPU memory that torch used in this process, in MiB."""
    versions: dict[str, str] = field(default_factory=dict)


def config(spec: Spec, overrides: Sequence[str] = ()) -> Config:
    """Returns the job as an ssfl config, with these further settings."""
    job = JOBS[spec.job]
    data = [f"data.path={spec.data}"] if spec.data else []
    run = [f"federation.rounds={spec.rounds}", f"run.device={spec.device}"]
    return load_config(job.preset, [*job.settings, *data, *run, *overrides])


def participants(config: Config) -> int:
    """Returns C, the number of users per round."""
    return config.federation.participants or config.split.users


def draw_images(job: Job, folder: Path) -> Path:
    """Writes a data file with random images in the job's shape into `folder`, and returns its path. Random
    images suffice, because the speed does not depend on their content."""
    random = np.random.default_rng(1)
    path = folder / "random.npz"
    arrays = {}
    for part, count in (("train", job.images), ("test", 10 * job.classes)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, *job.shape), np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % job.classes
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path
