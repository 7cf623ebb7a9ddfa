"""What `paper` and `reference` set, field by field: one run of each data set, and what methods differ in.

The values are those of docs/fidelity.md, written out here once more: a setting that changes in either
fidelity is seen, whatever the library's defaults are.
"""

from typing import Any

import pytest

from ssfl.config.writing import as_dict
from ssfl.paper import rows
from ssfl.paper.fidelity import settings
from ssfl.paper.rows import PaperRun


def values(config: Any) -> dict[str, Any]:
    """Every setting by "section.key"."""
    return {
        f"{section}.{key}": value for section, keys in as_dict(config).items() for key, value in keys.items()
    }


def first(number: int, method: str, labels_at: str = "server") -> PaperRun:
    found = [run for run in rows.row(str(number)).runs if (run.method, run.labels_at) == (method, labels_at)]
    return found[0]


SAME: dict[str, Any] = {
    # what both fidelities have in every one of the three runs
    "split.scheme": "skew", "split.skew": 0.4, "split.labels_at": "server", "split.shared": False,
    "method.name": "grouping", "method.threshold": 0.95, "method.teacher_mode": "train",
    "method.server_weight": None, "train.server_views": "weak", "federation.slow_average": 0.0,
    "federation.combine": "mean", "federation.median_fallback": False, "federation.gate": None,
    "federation.head_start": 0.0,
    "model.norm_statistics": "average", "data.flip": True,
    "federation.period": 16, "federation.epoch_images": 65536, "federation.dropout": 0.0,
    "train.batch_size": 64, "train.momentum": 0.9, "train.weight_decay": 1e-4, "train.clip": 0.0,
    "train.precision": None, "run.seed": 1,
}  # fmt: skip
FIDELITY: dict[str, dict[str, Any]] = {
    "paper": {
        "split.seed": 2019, "method.server_replicas": False, "method.views": "separate",
        "federation.group_sizes": "even", "federation.extra_step": False, "train.nesterov": False,
        "train.momentum_policy": "reset", "train.batches": "continue", "train.floor": 1e-4,
        "train.horizon": 1.0,
    },
    "reference": {
        "split.seed": 2020, "method.server_replicas": True, "method.views": "joint",
        "federation.group_sizes": "filled", "federation.extra_step": True, "train.nesterov": True,
        "train.momentum_policy": "slot", "train.batches": "restart", "train.floor": 1e-5,
        "train.horizon": 1.0,
    },
}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "cifar10": {
        "data.name": "cifar10", "split.users": 10, "split.server_labels": 1000, "model.name": "resnet18",
        "model.norm": "group", "federation.participants": 10, "federation.groups": 2,
        "federation.rounds": 300 * 1024 // 16, "train.warmup": 5 * 1024, "run.diversity_every": 1920,
    },
    "svhn": {
        "data.name": "svhn", "split.users": 10, "split.server_labels": 1000, "model.name": "resnet18",
        "model.norm": "group", "federation.participants": 10, "federation.groups": 2,
        "federation.rounds": 40 * 1024 // 16, "train.warmup": 5 * 1024, "run.diversity_every": 256,
    },
    "emnist": {
        "data.name": "emnist", "split.users": 47, "split.server_labels": 4700, "model.name": "cnn",
        "model.norm": "none", "federation.participants": 47, "federation.groups": 5,
        "federation.rounds": 100 * 1024 // 16, "train.warmup": 0, "run.diversity_every": 640,
    },
}  # fmt: skip
BOTH: dict[tuple[str, str], dict[str, Any]] = {
    # what is the data's and the fidelity's at once
    ("cifar10", "paper"): {"train.lr": 0.146, "train.cycles": 2.3},
    ("svhn", "paper"): {"train.lr": 0.146, "train.cycles": 2.3},
    ("emnist", "paper"): {"train.lr": 0.03, "train.cycles": 0.4375},
    ("cifar10", "reference"): {
        "train.lr": 0.165,
        "train.cycles": 2.286217948717949,
        "train.horizon": 1024 / 300,
    },
    ("svhn", "reference"): {"train.lr": 0.165, "train.cycles": 2.286217948717949},
    ("emnist", "reference"): {"train.lr": 0.03, "train.cycles": 0.4375, "train.floor": 1e-6},
}
ROW = {"cifar10": 19, "svhn": 13, "emnist": 21}


@pytest.mark.parametrize("fidelity", FIDELITY)
@pytest.mark.parametrize("data", DATA)
def test_a_run_of_grouping_field_by_field(data: str, fidelity: str) -> None:
    expected = SAME | FIDELITY[fidelity] | DATA[data] | BOTH[data, fidelity]
    found = values(settings(first(ROW[data], "grouping"), fidelity))
    assert {key: found[key] for key in expected} == pytest.approx(expected)


CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    # row, method (at the users: "@"), what is to be seen in `paper`, what of it is another in `reference`
    (19, "crl-gn",
     {"method.views": "separate", "method.server_replicas": False, "model.norm": "group",
      "model.norm_statistics": "average", "method.server_weight": None, "federation.groups": None},
     {"method.views": "joint"}),
    (43, "crl-bn",
     {"method.views": "joint", "method.teacher_mode": "train", "model.norm": "batch", "model.name": "vgg11",
      "model.norm_statistics": "average", "train.horizon": 1.0, "train.lr": 0.146, "train.warmup": 5120},
     {"model.norm_statistics": "server", "train.horizon": 1024 / 300, "train.lr": 0.165}),
    (42, "self-training",
     {"method.views": "joint", "method.teacher_mode": "train", "model.norm_statistics": "average",
      "method.name": "self-training", "train.lr": 0.146, "train.warmup": 5120, "train.cycles": 2.3,
      "train.horizon": 1.0},
     {"method.views": "separate", "method.teacher_mode": "eval", "model.norm_statistics": "server",
      "train.lr": 0.03, "train.warmup": 0, "train.cycles": 0.4375, "train.horizon": 1024 / 300}),
    (32, "supervised",
     {"method.name": "supervised", "method.server_replicas": False, "model.norm_statistics": "average",
      "split.server_labels": 4700, "split.labels_at": "server"},
     {"model.norm_statistics": "server"}),
    (32, "supervised-grouping",
     {"federation.groups": 2, "method.server_replicas": False, "model.norm_statistics": "average",
      "method.name": "supervised"},
     {"method.server_replicas": True}),
    (22, "supervised",
     {"split.server_labels": 0, "model.norm_statistics": "average",
      "train.momentum_policy": "reset", "federation.period": 32},
     {"train.momentum_policy": "slot"}),
    (23, "data-sharing",
     {"method.name": "data-sharing", "split.shared": True, "split.server_labels": 2500, "model.norm": "batch",
      "model.norm_statistics": "average", "train.momentum_policy": "reset", "train.nesterov": False},
     {"train.momentum_policy": "slot", "train.nesterov": True}),
    (26, "easgd",
     {"method.name": "easgd", "method.elasticity": None, "train.momentum_policy": "user",
      "train.nesterov": False, "train.batches": "continue"},
     {"train.nesterov": True, "train.batches": "restart"}),
    (27, "overlap-sgd",
     {"method.name": "overlap-sgd", "method.elasticity": 0.6, "train.momentum_policy": "user",
      "train.nesterov": False},
     {"train.nesterov": True}),
    (38, "fixmatch",
     {"train.momentum_policy": "slot", "federation.period": 16, "split.user_labels": 4000,
      "split.labels_at": "users", "method.name": "fixmatch", "split.users": 1,
      "method.views": "separate", "federation.rounds": 19_200, "train.nesterov": False},
     {"train.nesterov": True}),
    (41, "crl-gn@",
     {"split.labels_at": "users", "split.user_labels": 4700, "split.server_labels": None, "train.lr": 0.03,
      "method.views": "separate", "train.floor": 1e-4},
     {"train.lr": 0.01, "method.views": "joint", "train.floor": 1e-6}),
    (50, "grouping",
     {"model.name": "resnet9", "model.norm": "group", "federation.period": 100, "federation.rounds": 200,
      "federation.epoch_images": 65536, "train.warmup": 0, "train.lr": 0.146, "train.horizon": 1.0,
      "method.server_replicas": False, "run.diversity_every": 20},
     {"federation.period": 5, "federation.rounds": 600, "federation.epoch_images": 1000, "train.lr": 0.0075,
      "method.server_replicas": True, "run.diversity_every": 60}),
    (50, "grouping@",
     {"split.labels_at": "users", "split.user_labels": 5000, "train.lr": 0.146,
      "method.server_replicas": False, "federation.period": 100},
     {"train.lr": 0.0075, "federation.period": 5}),
    (49, "fedmatch",
     {"model.norm": "none", "model.name": "resnet9", "train.lr": 1e-3, "train.cycles": 0.0,
      "train.momentum": 0.0, "train.nesterov": False, "train.momentum_policy": "reset",
      "train.batches": "continue", "train.floor": 1e-4, "federation.rounds": 200, "federation.period": 100,
      "federation.extra_step": False, "run.diversity_every": 0, "method.threshold": 0.75,
      "split.seed": 2019, "data.flip": True},
     {"split.seed": 2020}),
]  # fmt: skip


@pytest.mark.parametrize(("number", "method", "printed", "coded"), CASES)
def test_where_methods_differ(
    number: int, method: str, printed: dict[str, Any], coded: dict[str, Any]
) -> None:
    assert coded.keys() <= printed.keys()
    run = first(number, method.rstrip("@"), "users" if method.endswith("@") else "server")
    for fidelity, expected in (("paper", printed), ("reference", printed | coded)):
        found = values(settings(run, fidelity))
        assert {key: found[key] for key in expected} == pytest.approx(expected), fidelity


def test_further_seeds_split_anew_in_both() -> None:
    run = first(19, "grouping")
    seeds = [settings(run, fidelity, seed=3) for fidelity in ("paper", "reference")]
    assert [(one.split.seed, one.run.seed) for one in seeds] == [(2021, 3), (2022, 3)]


def test_a_longer_row_has_more_rounds_of_the_same_schedule() -> None:
    longer = rows.row("15").runs[-1]
    assert longer.epochs == 120
    for fidelity in ("paper", "reference"):
        config = settings(longer, fidelity)
        assert (config.federation.rounds, config.train.warmup) == (120 * 64, 5 * 1024)
        assert config.train.horizon == 1
