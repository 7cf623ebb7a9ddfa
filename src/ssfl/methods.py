"""Methods: a method is a name for a choice of settings, in any section, that a person's keys override.

Adding one is adding a row. The five of the paper's section 3 are `self-training`, `supervised`,
`crl-bn`, `crl-gn` and `grouping`.
"""

from typing import Any

Settings = dict[str, dict[str, Any]]

_PAPER = {"server": "parallel", "teacher_mode": "train"}

METHODS: dict[str, Settings] = {
    # Users learn from the received model, their mean replaces it, and the server then trains that
    # mean on its labels: the labelled signal has the last word in every round. Recommended.
    "alternate": {
        "method": {"objective": "consistency", "averaging": "fedavg", "server": "alternate"},
        "model": {"norm": "group"},
    },
    # The paper's own: CRL, GroupNorm, grouping-based averaging, equation (7).
    "grouping": {
        "method": {"objective": "consistency", "averaging": "grouping", **_PAPER},
        "model": {"norm": "group"},
    },
    # CRL with GroupNorm and FedAvg, equation (8).
    "crl-gn": {
        "method": {"objective": "consistency", "averaging": "fedavg", **_PAPER},
        "model": {"norm": "group"},
    },
    # CRL with BatchNorm and FedAvg; both views pass through the network together.
    "crl-bn": {
        "method": {"objective": "consistency", "averaging": "fedavg", "views": "joint", **_PAPER},
        "model": {"norm": "batch"},
    },
    # Pseudo-labels of the weak view train the weak view, equation (5); BatchNorm and FedAvg.
    "self-training": {
        "method": {"objective": "self-training", "averaging": "fedavg", "views": "joint", **_PAPER},
        "model": {"norm": "batch"},
    },
    # Users know their labels, equation (6): an oracle, what labels everywhere would give.
    "supervised": {
        "method": {"objective": "supervised", "averaging": "fedavg", "server": "parallel"},
        "model": {"norm": "batch"},
    },
    # One model that sees everything, L_s + L_k in every step: what gathering the images would give.
    "fixmatch": {
        "method": {"objective": "consistency", "averaging": "fedavg", **_PAPER, "server": "none"},
        "model": {"norm": "group"},
        "split": {"users": 1, "labels_at": "users"},
        "train": {"momentum_policy": "slot"},
    },
    # Users know their labels and hold a common, class-balanced set (the server's) besides.
    "data-sharing": {
        "method": {"objective": "supervised", "averaging": "fedavg", "server": "none"},
        "model": {"norm": "batch"},
        "split": {"shared": True},
    },
    # Users know their labels and keep models of their own, drawn to a common one.
    "easgd": {
        "method": {"objective": "supervised", "averaging": "elastic", "server": "none"},
        "model": {"norm": "batch"},
        "train": {"momentum_policy": "user"},
    },
    "overlap-sgd": {
        "method": {"objective": "supervised", "averaging": "overlap", "server": "none"},
        "model": {"norm": "batch"},
        "train": {"momentum_policy": "user"},
    },
    # A rival, Jeong et al. 2021: weights are sums, labels move one part and unlabelled images the other.
    "fedmatch": {
        "method": {
            "objective": "fedmatch",
            "averaging": "fedavg",
            "server": "alternate",
            "threshold": 0.75,
        },
        "model": {"norm": "none"},
        "train": {"lr": 0.001, "momentum": 0.0, "nesterov": False},
    },
    # No users at all: what the server can do alone with its labels. The line to beat.
    "server-only": {
        "method": {"objective": "none", "averaging": "fedavg", "server": "parallel"},
        "model": {"norm": "group"},
    },
}
