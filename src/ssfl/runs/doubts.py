"""What can be done and is hardly meant, and what a person would want to know was chosen: a line for each."""

import warnings

import numpy as np
import torch

from ssfl.config.settings import Config, FederationSettings, SplitSettings
from ssfl.core.statistics import FEW, wilson
from ssfl.data import split
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Index
from ssfl.errors import SsflWarning
from ssfl.models import networks
from ssfl.runs.text import loose, untested


def warn(given: Config, config: Config, dataset: Dataset, parts: split.Parts, held: Index) -> None:
    """Tell them as warnings; `given` is the config before what it left open was chosen, `held` the validation
    images."""
    found = [*_network(given, config, dataset), *_labels(config, dataset, parts), *_warmup(config)]
    found += [*_unread(config), *_newcomers(config)]
    found += _owners(dataset, parts, held)
    counts = torch.bincount(dataset.test_labels, minlength=len(dataset.classes)).tolist()
    missing = untested(dataset.classes, counts) if sum(counts) else []  # with folds there may be none at all
    found += _few(config, dataset)
    for line in (*found, *(f"{line}; add some" for line in missing)):
        warnings.warn(line, SsflWarning, stacklevel=3)


def _network(given: Config, config: Config, dataset: Dataset) -> list[str]:
    chosen, usual = config.model.name, networks.suited(dataset.shape, gpu=True)
    if given.model.name is not None or chosen == usual:
        return []
    faster = "; --set data.size=32 trains faster" if min(dataset.shape[1:]) > 32 else ""
    return [
        f"no GPU, so the network is {chosen}, which a CPU can train, and not {usual}: "
        f"--set model.name=NAME chooses another{faster}"
    ]


def _labels(config: Config, dataset: Dataset, parts: split.Parts) -> list[str]:
    told = config.split.labels_at != "server" or "labels" in config.method.needs()
    counts = split.class_counts(dataset.labels.numpy(), [parts.server])[0]
    missing = [name for name, count in zip(dataset.classes, counts, strict=True) if not count]
    if not missing or told:  # otherwise users know no label
        return []
    if not len(parts.server):
        return ["nobody has a label: the model can learn nothing; raise split.server_labels"]
    named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return [
        f"the server has no label of {len(missing)} of {len(counts)} classes ({named}): nobody can learn "
        "them; raise split.server_labels"
    ]


def _owners(dataset: Dataset, parts: split.Parts, held: Index) -> list[str]:
    """What a person may not know of owners that the data name."""
    if dataset.users is None:
        return []
    found = loose(dataset.loose)
    if len(dataset.users) == 1 and dataset.names:
        found.append(f"there is one user, {dataset.names[0]}: every sub-folder of unlabelled/ is a user")
    unused = len(dataset.labels) - len(np.unique(np.concatenate([parts.server, *parts.users, held])))
    if unused:
        found.append(f"{unused} training images belong to nobody and are not used")
    return found


def _warmup(config: Config) -> list[str]:
    steps = (config.federation.rounds or 0) * config.federation.period
    if config.train.warmup <= steps:
        return []
    return [
        f"train.warmup = {config.train.warmup} is longer than the run ({steps} steps): the learning rate "
        "never gets to train.lr"
    ]


def _unread(config: Config) -> list[str]:
    """Settings that somebody gave and nothing reads."""
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
    return [f"{key} does nothing here: it needs {more}" for key, given, more in idle if given]


def _few(config: Config, dataset: Dataset) -> list[str]:
    """A warning where so few images test the model that its accuracy says little."""
    count = len(dataset.test_labels)
    if not 0 < count < FEW or config.run.test == "never":
        return []
    low, high = wilson(0.8 * count, count)
    divided = config.run.folds or config.run.engine == "sites"
    more = "" if divided else "; --folds 5 tests every labelled image"
    return [
        f"{count} test images are few: an accuracy of 80 % would only mean {100 * low:.0f} to "
        f"{100 * high:.0f} %{more}"
    ]


def _newcomers(config: Config) -> list[str]:
    """Users with models of their own that are not there from the start."""
    users, participants = config.split.users, config.federation.participants or config.split.users
    if config.method.start != "user" or participants >= users:
        return []
    return [
        f"with {config.method.name} users keep models of their own: one that is drawn for the first time "
        f"in a late round begins untrained; federation.participants={users} has all of them from the start"
    ]
