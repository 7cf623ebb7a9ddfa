"""Methods: a method is a name for a choice of settings, in any section, that a person's keys override.

Adding one is adding a row. The five of the paper's section 3 are `self-training`, `supervised`,
`crl-bn`, `crl-gn` and `grouping`.
"""

from typing import Any

Settings = dict[str, dict[str, Any]]

_PAPER = {"server": "parallel", "teacher_mode": "train"}
_ONCE = {"objective": "consistency", "labels": "round", "averaging": "fedavg", "server": "alternate"}

METHODS: dict[str, Settings] = {
    # Recommended: `alternate`, in which labels have the last word. Besides, users label once a round, the
    # server also sees strong views of its images, the users' mean moves with momentum, a round that would
    # undo the labels is played without users, the model is a slow average over rounds, and users with few
    # classes take short steps that count more.
    "anchored": {
        "method": {
            **_ONCE,
            "threshold": 0.8,
            "server_views": "suited",
            "server_momentum": 0.5,
            "guard": True,
            "slow": 0.99,
            "pace": "classes",
        },
        "model": {"norm": "group"},
    },
    # Users learn from the received model, their mean replaces it, and the server then trains that
    # mean on its labels: the labelled signal has the last word in every round.
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
    # A rival, Diao, Ding and Tarokh 2022: labels once a round, fix and mix losses, the server last and with
    # momentum. Published with batch normalisation whose statistics are taken over every user's images,
    # which no real federation could do, and 5 local epochs of batches of 10: not here.
    "semifl": {
        "method": {**_ONCE, "fill": True, "mix": 1.0, "server_momentum": 0.5},
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 1.0},
    },
    # A rival, Lee et al. 2024, (FL)²: thresholds by class, flat minima, doubtful users weigh more. Published
    # on SemiFL's rounds, with the same statistics over every user's images: not here. Its server's training
    # before the first round is a tenth of the rounds here, as in the next two.
    "fl2": {
        "method": {
            **_ONCE,
            "thresholds": "free",
            "fill": True,
            "sharpness": 0.1,
            "weighting": "doubt",
            "server_momentum": 0.5,
            "head_start": 0.1,
        },
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 1.0},
    },
    # A rival, Liang et al. 2022: users far from the others weigh less, in three means of halves. Published
    # with a mean teacher and one labelled user that trains first; here users learn by consistency, and the
    # server has the labels.
    "rscfed": {
        "method": {
            "objective": "consistency",
            "averaging": "fedavg",
            "server": "alternate",
            "combine": "distance",
            "head_start": 0.1,
        },
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
    },
    # A rival, Li, Li and Wang 2023: thresholds by how often a class was trained on, weights by how many
    # images, residual connection. Users tell everybody their class counts. Published with rare second
    # classes of unsure images: not here.
    "cbafed": {
        "method": {
            **_ONCE,
            "thresholds": "balanced",
            "threshold": 0.84,
            "fill": True,
            "weighting": "labelled",
            "residual": 5,
            "head_start": 0.1,
        },
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
    },
    # Li et al. 2020: users are held to the model they received.
    "fedprox": {
        "method": {
            "objective": "consistency",
            "averaging": "fedavg",
            "server": "alternate",
            "proximal": 0.01,
        },
        "model": {"norm": "group"},
    },
    # The thresholds of FlexMatch (Zhang et al. 2021) and FreeMatch (Wang et al. 2023), once a round.
    "flexmatch": {"method": {**_ONCE, "thresholds": "flex"}, "model": {"norm": "group"}},
    "freematch": {"method": {**_ONCE, "thresholds": "free"}, "model": {"norm": "group"}},
    # No users at all: what the server can do alone with its labels. The line to beat.
    "server-only": {
        "method": {"objective": "none", "averaging": "fedavg", "server": "parallel"},
        "model": {"norm": "group"},
    },
}

_KNOWN = "users know the labels of their images"
_STATISTICS = "published with BatchNorm statistics over every user's images; goes without"
FLAGS: dict[str, str] = {
    "supervised": _KNOWN,
    "data-sharing": f"{_KNOWN}, and are sent labelled ones",
    "easgd": _KNOWN,
    "overlap-sgd": _KNOWN,
    "fixmatch": "one model sees every image: no federation",
    "fedmatch": "users are shown the weights of others",
    "cbafed": "users tell everybody how many images of each class they label",
    "semifl": _STATISTICS,
    "fl2": _STATISTICS,
}
"""What a method has that a real federation could hardly give it, or was published with."""
