"""From a row's run to settings, in three ways: as printed, as the authors' code does it, as we recommend.

Each way is a set of ordinary settings; docs/fidelity.md lists every difference.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ssfl.config.loading import apply, from_dict
from ssfl.config.settings import Config
from ssfl.errors import ConfigError
from ssfl.paper.rows import Run

Given = dict[str, dict[str, Any]]
FIDELITIES = ("paper", "reference", "recommended")
IMAGES = 65536  # M, images of an epoch
BATCH = 64  # B
TRIAL = {"images": 1437, "batch": 32, "labels": 50, "users": 100}
"""The bundled digits: training images, B, labels and users that they can bear."""

# Table A.1. Rows 42-45 (STL-10) and 49-50 (ResNet-9) print no settings of their own: CIFAR-10's.
_CIFAR = {"epochs": 300, "lr": 0.146, "warmup": 5, "cycles": 2.3, "model": "resnet18"}
OPTIMIZER: dict[str, dict[str, Any]] = {
    "cifar10": _CIFAR,
    "svhn": _CIFAR | {"epochs": 40},
    "stl10": _CIFAR | {"model": "vgg11"},
    "emnist": {"epochs": 100, "lr": 0.03, "warmup": 0, "cycles": 7 / 16, "model": "cnn"},
}
FEDMATCH_ROUNDS = 200  # rows 49 and 50: the rounds of the method they compare with
AUTHORS_CYCLES = 7 / 16 * (2**20 - 5 * 1024) / (200 * 1024 - 5 * 1024)


def actual(run: Run, fidelity: str) -> Run:
    """What is trained for a run: we recommend one method where the paper compares FedAvg and grouping."""
    if fidelity == "recommended" and run.method in ("grouping", "crl-gn") and run.labels_at == "server":
        return replace(run, method="anchored", groups=None, published=None, where="")
    return run


def require(fidelity: str) -> None:
    """Say which there are where one is asked for that there is not."""
    if fidelity not in FIDELITIES:
        raise ConfigError(f"fidelity {fidelity!r} is not one of {', '.join(FIDELITIES)}")


def settings(
    run: Run,
    fidelity: str = "paper",
    scale: float = 1.0,
    seed: int = 1,
    data: str | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """The config of a run; `data` is a file to use instead of the row's data set, or "digits"."""
    require(fidelity)
    if not 0 < scale <= 1:
        raise ConfigError(f"scale = {scale:g} must be above 0 and at most 1: the part of the training to run")
    run = actual(run, fidelity)
    given = _environment(run, seed)
    _optimizer(given, run, scale, fidelity, trial=data == "digits")
    {"paper": _as_printed, "reference": _as_coded, "recommended": _recommended}[fidelity](given, run)
    if data == "digits":
        _on_digits(given)
    elif data is not None:
        given["data"].pop("name")
        given["data"]["path"] = data
    apply(given, overrides)
    rounds = given["federation"].get("rounds", 0)
    if rounds >= 100 and run.method != "fedmatch":  # ten points, as in the authors' figures
        given["run"].setdefault("diversity_every", rounds // 10)
    return from_dict(given)


def _environment(run: Run, seed: int) -> Given:
    """What the row itself says."""
    supervised = run.method == "supervised-grouping"
    given: Given = {
        "data": {"name": run.data},
        "split": {"users": run.users, "skew": run.skew, "seed": 2018 + seed},
        "model": {"name": OPTIMIZER[run.data]["model"]},
        "method": {"name": "supervised" if supervised else run.method},
        "federation": {"participants": run.participants, "period": run.period},
        "train": {"batch_size": BATCH},
        "run": {"seed": seed},
    }
    if run.method == "fixmatch":
        given["federation"]["period"] = 16
        given["split"]["user_labels"] = run.server_labels
    elif run.labels_at == "users":
        given["split"] |= {"labels_at": "users", "user_labels": run.server_labels}
    else:
        given["split"]["server_labels"] = run.server_labels
    if run.groups:
        given["federation"]["groups"] = run.groups
    if run.data == "emnist":  # the network of Reddi et al., which has no normalisation
        given["model"]["norm"] = "none"
    if run.users == 100:  # rows 49 and 50
        given["model"]["name"] = "resnet9"
        if run.method == "fedmatch":
            given["model"]["norm"] = "none"
    return given


def _optimizer(given: Given, run: Run, scale: float, fidelity: str, trial: bool) -> None:
    """Table A.1, shortened to a part of the training: schedule, warm-up and rounds together."""
    known = OPTIMIZER[run.data]
    images, batch = (TRIAL["images"], TRIAL["batch"]) if trial else (IMAGES, BATCH)
    period = given["federation"]["period"]
    rounds = (run.epochs or known["epochs"]) * images / batch / period
    warmup = known["warmup"] * images / batch
    if run.users == 100:
        rounds, warmup = FEDMATCH_ROUNDS, 0
        if fidelity == "reference" and run.method != "fedmatch":  # a round every five steps
            rounds, images, given["federation"]["period"] = 600, 1000, 5
    if scale * rounds < 0.5:
        raise ConfigError(
            f"scale = {scale:g} leaves no round of {run.name}: {1 / rounds:.2g} is one, so raise it"
        )
    given["federation"] |= {"rounds": round(scale * rounds) or 1, "epoch_images": images}
    given["train"] |= {"lr": known["lr"], "warmup": round(scale * warmup), "cycles": known["cycles"]}
    if run.method == "fedmatch":
        given["train"] |= {"lr": 1e-3, "cycles": 0.0}


def _as_printed(given: Given, run: Run) -> None:
    """ "SGD with momentum", "flip-and-shift" views, models alone are exchanged."""
    given["data"]["flip"] = True
    given["train"]["floor"] = 1e-4
    if run.method != "fedmatch":
        given["train"]["nesterov"] = False
        if given["method"]["name"] not in ("fixmatch", "easgd", "overlap-sgd"):  # one owner each
            given["train"]["momentum_policy"] = "reset"


def _as_coded(given: Given, run: Run) -> None:
    """What the authors' public code does."""
    method, train = given["method"], given["train"]
    given["data"]["flip"] = True
    given["split"]["seed"] += 1  # 2020
    if run.method == "fedmatch":
        return
    given["federation"] |= {"group_sizes": "filled", "extra_step": True}
    train |= {"nesterov": True, "momentum_policy": "slot", "batches": "restart", "floor": 1e-5}
    if run.data == "emnist":
        train["floor"] = 1e-6
    else:
        train |= {"lr": 0.165, "cycles": AUTHORS_CYCLES}
        if run.data != "svhn" and run.users != 100:
            train["horizon"] = 1024 / 300
    if run.users == 100:
        train["lr"] = 0.0075
    elif run.labels_at == "users":
        train["lr"] = 0.01
    if run.method == "self-training":
        train |= {"lr": 0.03, "warmup": 0, "cycles": 7 / 16}
        method |= {"views": "separate", "teacher_mode": "eval"}
    trains = run.labels_at == "server" and run.server_labels > 0 and method["name"] not in (
        "fixmatch", "data-sharing", "easgd", "overlap-sgd",
    )  # fmt: skip
    if run.method in ("grouping", "crl-gn"):
        method["views"] = "joint"
    if "grouping" in run.method and trains:
        method["server_replicas"] = True
    if run.method in ("crl-bn", "self-training", "supervised") and trains:
        given["model"]["norm_statistics"] = "server"
    if method["name"] in ("easgd", "overlap-sgd"):
        train["momentum_policy"] = "user"


def _recommended(given: Given, run: Run) -> None:
    """The library's own defaults, and the server after the users in place of beside them."""
    if run.method != "fedmatch":
        given["train"] |= {"cycles": 0.5, "floor": 0.0}


def _on_digits(given: Given) -> None:
    """A trial on small data: what the row asks for, as far as 1,437 images of ten digits can bear it."""
    given["data"] = {"name": "digits", "flip": False}
    given["model"]["name"] = "small"
    given["train"]["batch_size"] = TRIAL["batch"]
    for key in ("server_labels", "user_labels"):
        if key in given["split"]:
            given["split"][key] = min(given["split"][key], TRIAL["labels"])
    given["split"]["users"] = min(given["split"]["users"], TRIAL["users"])
