"""The settings of the paper's runs under one of three rules ("fidelities"): those in the paper's text
("paper"), those in the authors' code ("reference"), or our recommendation ("recommended").

Each fidelity is a set of ordinary settings. docs/fidelity.md lists every difference.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ssfl.config.loading import apply, from_dict
from ssfl.config.settings import Config
from ssfl.errors import ConfigError
from ssfl.paper.rows import PaperRun

Sections = dict[str, dict[str, Any]]
FIDELITIES = ("paper", "reference", "recommended")
IMAGES = 65536  # M in the paper: the number of images in an epoch
BATCH = 64  # B in the paper: the batch size
TRIAL = {"images": 1437, "batch": 32, "labels": 50, "users": 100}
"""Values for a quick trial on the bundled digits: the number of training images, the batch size, and the
largest numbers of labels and users."""

# Table A.1. Rows 42-45 (STL-10) and 49-50 (ResNet-9) print no settings of their own: CIFAR-10's.
_CIFAR = {"epochs": 300, "lr": 0.146, "warmup": 5, "cycles": 2.3, "model": "resnet18"}
OPTIMIZER: dict[str, dict[str, Any]] = {
    "cifar10": _CIFAR,
    "svhn": _CIFAR | {"epochs": 40},
    "stl10": _CIFAR | {"model": "vgg11"},
    "emnist": {"epochs": 100, "lr": 0.03, "warmup": 0, "cycles": 7 / 16, "model": "cnn"},
}
FEDMATCH_ROUNDS = 200  # rows 49 and 50: as many rounds as FedMatch had
AUTHORS_CYCLES = 7 / 16 * (2**20 - 5 * 1024) / (200 * 1024 - 5 * 1024)
"""The value of train.cycles that reproduces the learning rates of the authors' code."""


def actual(run: PaperRun, fidelity: str) -> PaperRun:
    """Returns the run that is trained in place of a run of the paper. With the fidelities "paper" and
    "reference", it is the paper's run itself. The fidelity "recommended" (the settings that we recommend)
    replaces FedAvg and grouping by another method, unless the users have the labels."""
    if fidelity == "recommended" and run.method in ("grouping", "crl-gn") and run.labels_at == "server":
        return replace(run, method="anchored", groups=None, published=None, where="")
    return run


def require(fidelity: str) -> None:
    """Raises if `fidelity` is none of "paper", "reference" and "recommended"."""
    if fidelity not in FIDELITIES:
        raise ConfigError(
            f"--fidelity {fidelity}: use one of {', '.join(FIDELITIES)}", key="--fidelity", value=fidelity
        )


def settings(
    run: PaperRun,
    fidelity: str = "paper",
    scale: float = 1.0,
    seed: int = 1,
    data: str | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """Returns the config that trains a run of the paper with this seed. `fidelity` says which settings to
    use: those of the paper's text ("paper"), of its authors' code ("reference"), or those that we recommend
    ("recommended").

    `scale` is the fraction of the training to run. `data` replaces the paper's data set by an .npz file, a
    folder, or "digits". `overrides` are changed settings, each as `section.key=value`.
    """
    require(fidelity)
    if not 0 < scale <= 1:
        raise ConfigError(
            f"--scale {scale:g}: the fraction of the training to run must be above 0 and at most 1",
            key="--scale",
            value=scale,
        )
    run = actual(run, fidelity)
    values = _environment(run, seed)
    _optimizer(values, run, scale, fidelity, trial=data == "digits")
    {"paper": _as_printed, "reference": _as_coded, "recommended": _recommended}[fidelity](values, run)
    if data == "digits":
        _on_digits(values)
    elif data is not None:
        values["data"].pop("name")
        values["data"]["path"] = data
    apply(values, overrides)
    rounds = values["federation"].get("rounds", 0)
    if rounds >= 100 and run.method != "fedmatch":  # ten points, as in the authors' figures
        values["run"].setdefault("diversity_every", rounds // 10)
    return from_dict(values)


def _environment(run: PaperRun, seed: int) -> Sections:
    """Returns the settings from which every fidelity starts: data, users, labels, method, groups and network.
    Most of them are in the paper's experiment table."""
    supervised = run.method == "supervised-grouping"
    values: Sections = {
        "data": {"name": run.data},
        "split": {"users": run.users, "skew": run.skew, "seed": 2018 + seed},
        "model": {"name": OPTIMIZER[run.data]["model"]},
        "method": {"name": "supervised" if supervised else run.method},
        "federation": {"participants": run.participants, "period": run.period},
        "train": {"batch_size": BATCH},
        "run": {"seed": seed},
    }
    if run.method == "fixmatch":
        values["federation"]["period"] = 16
        values["split"]["user_labels"] = run.server_labels
    elif run.labels_at == "users":
        values["split"] |= {"labels_at": "users", "user_labels": run.server_labels}
    else:
        values["split"]["server_labels"] = run.server_labels
    if run.groups:
        values["federation"]["groups"] = run.groups
    if run.data == "emnist":  # the network of Reddi et al., which has no normalisation
        values["model"]["norm"] = "none"
    if run.users == 100:  # rows 49 and 50
        values["model"]["name"] = "resnet9"
        if run.method == "fedmatch":
            values["model"]["norm"] = "none"
    return values


def _optimizer(values: Sections, run: PaperRun, scale: float, fidelity: str, trial: bool) -> None:
    """Adds the optimizer settings of the paper's Table A.1 to `values`. The schedule, the warm-up and the
    number of rounds are multiplied by `scale`. `trial` means a quick trial on the bundled digits, which has
    smaller epochs (see `TRIAL`)."""
    known = OPTIMIZER[run.data]
    images, batch = (TRIAL["images"], TRIAL["batch"]) if trial else (IMAGES, BATCH)
    period = values["federation"]["period"]
    rounds = (run.epochs or known["epochs"]) * images / batch / period
    warmup = known["warmup"] * images / batch
    if run.users == 100:
        rounds, warmup = FEDMATCH_ROUNDS, 0
        if fidelity == "reference" and run.method != "fedmatch":  # a round every five steps
            rounds, images, values["federation"]["period"] = 600, 1000, 5
    if scale * rounds < 0.5:
        raise ConfigError(
            f"--scale {scale:g} leaves no round of {run.name}: use at least {1 / rounds:.2g}",
            key="--scale",
            value=scale,
            fix=f"--scale {1 / rounds:.2g}",
        )
    values["federation"] |= {"rounds": round(scale * rounds) or 1, "epoch_images": images}
    values["train"] |= {"lr": known["lr"], "warmup": round(scale * warmup), "cycles": known["cycles"]}
    if run.method == "fedmatch":
        values["train"] |= {"lr": 1e-3, "cycles": 0.0}


def _as_printed(values: Sections, run: PaperRun) -> None:
    """Changes `values` to what the paper's text says: SGD with momentum that is not Nesterov's, and views
    that are flipped and shifted. Only models are sent, so momentum begins at zero in every round, except in
    methods that keep it."""
    values["data"]["flip"] = True
    values["train"]["floor"] = 1e-4
    if run.method != "fedmatch":
        values["train"]["nesterov"] = False
        if values["method"]["name"] not in ("fixmatch", "easgd", "overlap-sgd"):  # they keep momentum
            values["train"]["momentum_policy"] = "reset"


def _as_coded(values: Sections, run: PaperRun) -> None:
    """Changes the settings in `values` to those of the authors' public code."""
    method, train = values["method"], values["train"]
    values["data"]["flip"] = True
    values["split"]["seed"] += 1  # 2020
    if run.method == "fedmatch":
        return
    values["federation"] |= {"group_sizes": "filled", "extra_step": True}
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
        values["model"]["norm_statistics"] = "server"
    if method["name"] in ("easgd", "overlap-sgd"):
        train["momentum_policy"] = "user"


def _recommended(values: Sections, run: PaperRun) -> None:
    """Changes the learning rate schedule in `values` to the one that the library recommends, a cosine that
    falls to zero. The other optimizer settings stay those of the paper's Table A.1. Settings that the paper's
    table does not give keep the library's defaults."""
    if run.method != "fedmatch":
        values["train"] |= {"cycles": 0.5, "floor": 0.0}


def _on_digits(values: Sections) -> None:
    """Changes `values` for a quick trial on small data: 1,437 images of ten digits."""
    values["data"] = {"name": "digits", "flip": False}
    values["model"]["name"] = "small"
    values["train"]["batch_size"] = TRIAL["batch"]
    for key in ("server_labels", "user_labels"):
        if key in values["split"]:
            values["split"][key] = min(values["split"][key], TRIAL["labels"])
    values["split"]["users"] = min(values["split"]["users"], TRIAL["users"])
