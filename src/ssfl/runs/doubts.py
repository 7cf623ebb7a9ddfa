"""Warns about settings that are allowed but probably unintended, and about choices that the user should
know."""

import numpy as np
import torch

from ssfl.config.settings import Config, FederationSettings, SplitSettings, TrainSettings
from ssfl.core.statistics import FEW, wilson
from ssfl.data import split
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Index
from ssfl.errors import warn_user
from ssfl.models import networks
from ssfl.runs.text import loose, untested


def warn(as_written: Config, config: Config, dataset: Dataset, parts: split.Parts, validation: Index) -> None:
    """Gives all warnings about a run before it starts. `as_written` is the config as the user wrote it.
    `config` is the resolved config, in which open settings (such as the network) are filled in."""
    lines = [*_network(as_written, config, dataset), *_labels(config, dataset, parts), *_warmup(config)]
    lines += [*_unread(config), *_newcomers(config)]
    lines += _owners(dataset, parts, validation)
    counts = torch.bincount(dataset.test_labels, minlength=len(dataset.classes)).tolist()
    missing = untested(dataset.classes, counts) if sum(counts) else []  # with folds there are no test images
    lines += _few(config, dataset)
    for line in (*lines, *(f"{line}; add test images" for line in missing)):
        warn_user(line)


def _network(as_written: Config, config: Config, dataset: Dataset) -> list[str]:
    """Returns a warning, in a list, if a smaller network was chosen because there is no GPU; otherwise an
    empty list."""
    chosen, usual = config.model.name, networks.suited(dataset.shape, gpu=True)
    if as_written.model.name is not None or chosen == usual:
        return []
    faster = "; smaller images train faster (--set data.size=32)" if min(dataset.shape[1:]) > 32 else ""
    return [
        f"this run uses no GPU, so the network is {chosen} instead of {usual}; to change it, use "
        f"--set model.name=NAME{faster}"
    ]


def _labels(config: Config, dataset: Dataset, parts: split.Parts) -> list[str]:
    """Returns a warning, in a list, if the server has no labelled images at all, or none of some classes;
    otherwise an empty list."""
    labels_elsewhere = config.split.labels_at != "server" or "labels" in config.method.needs()
    counts = split.class_counts(dataset.labels.numpy(), [parts.server])[0]
    missing = [name for name, count in zip(dataset.classes, counts, strict=True) if not count]
    if not missing or labels_elsewhere:
        return []
    way = "raise split.server_labels"
    if dataset.server is not None:
        way = "add an image of each class to server= of ssfl.Data"
    elif dataset.users is not None:
        way = "give labelled images to the server: name them in server= of ssfl.Data, or give them no owner"
    if not len(parts.server):
        return [f"there are no labelled images, so the model cannot learn; {way}"]
    named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return [
        f"the server has no labelled image of {len(missing)} of {len(counts)} classes ({named}), so the "
        f"model cannot learn them; {way}"
    ]


def _owners(dataset: Dataset, parts: split.Parts, validation: Index) -> list[str]:
    """Returns a list of warnings about the owners of the images. There are none unless the data themselves
    say which images belong to which user. The warnings are about images in unlabelled/ that are in no user's
    sub-folder, a single user, and images that belong to nobody."""
    if dataset.users is None:
        return []
    lines = loose(dataset.loose)
    if len(dataset.users) == 1 and dataset.names:
        lines.append(
            f"there is only one user, {dataset.names[0]}, because unlabelled/ has only one sub-folder; for "
            "more users, make one sub-folder for each"
        )
    unused = len(dataset.labels) - len(np.unique(np.concatenate([parts.server, *parts.users, validation])))
    if unused:
        ways = ["raise split.server_labels"] if dataset.server is None else []
        ways += [] if dataset.names else ["name them in server= or users= of ssfl.Data"]
        lines.append(f"{unused} training images have no owner and are not used: {', or '.join(ways)}")
    return lines


def _warmup(config: Config) -> list[str]:
    """Returns a warning, in a list, if the warm-up of the learning rate is longer than the run; otherwise an
    empty list."""
    steps = (config.federation.rounds or 0) * config.federation.period
    if config.train.warmup <= steps:
        return []
    return [
        f"train.warmup = {config.train.warmup} is longer than the run ({steps} steps): the learning rate "
        "never reaches train.lr; lower train.warmup"
    ]


def _unread(config: Config) -> list[str]:
    """Returns a warning for each setting that the user changed but that has no effect, because it belongs to
    another split scheme, for example."""
    split, federation = config.split, config.federation
    scheme, attacked = split.scheme, federation.attackers > 0
    idle = [
        ("split.skew", split.skew != SplitSettings.skew and scheme != "skew", "split.scheme=skew"),
        (
            "split.alpha",
            split.alpha != SplitSettings.alpha and scheme != "dirichlet",
            "split.scheme=dirichlet",
        ),
        ("split.capped", split.capped and scheme != "dirichlet", "split.scheme=dirichlet"),
        (
            "split.classes_per_user",
            split.classes_per_user != SplitSettings.classes_per_user and scheme != "shards",
            "split.scheme=shards",
        ),
        ("split.mixtures", split.mixtures and scheme != "mixture", "split.scheme=mixture"),
        (
            "train.cycles",
            config.train.cycles != TrainSettings.cycles and config.train.schedule == "annealing",
            "train.schedule=paper",
        ),
        (
            "split.user_labels",
            split.user_labels is not None and split.labels_at == "server",
            "split.labels_at=both",
        ),
        (
            "federation.attack",
            federation.attack != FederationSettings.attack and not attacked,
            "federation.attackers=0.1",
        ),
        (
            "federation.attack_scale",
            federation.attack_scale != FederationSettings.attack_scale and not attacked,
            "federation.attackers=0.1",
        ),
    ]
    return [
        f"{key} has no effect, because it is used only with {needed}"
        for key, changed, needed in idle
        if changed
    ]


def _few(config: Config, dataset: Dataset) -> list[str]:
    """Returns a warning, in a list, if there are so few test images that the accuracy will be uncertain;
    otherwise an empty list."""
    count = len(dataset.test_labels)
    if not 0 < count < FEW or config.run.test == "never":
        return []
    low, high = wilson(0.8 * count, count)
    # with "last", as in a contest, runs are compared on held-out test images
    hint = "; add test images" if config.run.test == "last" else "; --folds 5 tests every labelled image"
    hint = "" if config.run.folds else hint
    if config.run.engine == "sites":  # real sites do not train once more for each fold
        hint = "; `ssfl run FOLDER --folds 5` on the labelled images tests every one of them"
    return [
        f"{count} test images are few: for an accuracy of 80 %, the 95 % interval would be "
        f"{100 * low:.0f} to {100 * high:.0f} %{hint}"
    ]


def _newcomers(config: Config) -> list[str]:
    """Returns a warning, in a list, if users keep models of their own and not all users take part in every
    round; otherwise an empty list. A user whose first round is late would then start from an untrained
    model."""
    users, participants = config.split.users, config.federation.participants or config.split.users
    if config.method.start != "user" or participants >= users:
        return []
    return [
        f"with {config.method.name} every user keeps its own model: a user that takes part for the first "
        "time "
        f"in a late round starts untrained; federation.participants={users} lets all take part in every round"
    ]
