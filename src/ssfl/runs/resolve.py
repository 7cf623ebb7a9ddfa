"""Loads the images that a config names, and divides them among the server and the users. Also resolves the
config: every setting that was left open gets a value.

Mistakes in a config that only the data can show are found here, before anything is written.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ssfl import methods
from ssfl.config.checks import check
from ssfl.config.settings import Config, ModelSettings, PrivacySettings, SplitSettings
from ssfl.core import outside
from ssfl.data import augment, folds, sources, split
from ssfl.data.arrays import Data
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Hands, Index
from ssfl.data.views import KINDS
from ssfl.errors import ConfigError
from ssfl.models import backbones, networks
from ssfl.simulate.privacy import library

VIEWS = 4
"""The default of model.cached_views: for how many weak and how many strong views of each image the output of
a network's frozen part is stored."""


def load_data(config: Config, data_object: Data | None = None) -> Dataset:
    """Returns the data set: the images of `data_object`, or those that the section [data] names. Its
    augmentation is that of data.views, unless the data define their own."""
    dataset = _loaded(config, data_object)
    weak, strong = KINDS[config.data.views]
    return replace(
        dataset,
        weak=weak if dataset.weak == augment.WEAK else dataset.weak,
        strong=strong if dataset.strong == augment.STRONG else dataset.strong,
    )


def _loaded(config: Config, data_object: Data | None) -> Dataset:
    """Returns the data set from one of three sources: `data_object`, a function from outside the package, or
    the files that [data] names. The function is called if data.name is its import path."""
    data = config.data
    if data_object is None and outside.is_path(data.name):
        data_object = _from_outside(data.name or "")
    if data_object is not None:
        return data_object.resized(data.size)
    if data.name == outside.IN_MEMORY:
        raise ConfigError(
            "data.name = 'in memory': these images were passed from Python; pass them again, as data=...",
            key="data.name",
            value=data.name,
        )
    return sources.load(
        data.name, data.path, root=Path(data.root), download=data.download, size=data.size,
        test_fraction=0.0 if config.run.folds else data.test_fraction, broken=data.broken,
    )  # fmt: skip


def _from_outside(name: str) -> Data:
    """Calls a function from outside the package, whose import path is `name`, and returns its result. Raises
    if the result is not an `ssfl.Data`."""
    data = outside.called(name, "data.name")
    if not isinstance(data, Data):
        raise ConfigError(
            f"data.name = {name!r} returned a value of type {type(data).__name__}: return an ssfl.Data",
            key="data.name",
            value=name,
        )
    return data


def with_data(config: Config, data: Data | str | None) -> Config:
    """Returns the config in which data.name says that the data come from Python: "in memory" for an object,
    or the import path. If `data` is None, the config is unchanged."""
    if data is None:
        return config
    if not isinstance(data, Data | str):
        raise ConfigError(
            f"data is of type {type(data).__name__}: pass ssfl.Data(images, labels, test_images, "
            "test_labels), or ssfl.Data.of(train, test) for data sets of torch or Hugging Face",
            key="data",
        )
    if isinstance(data, str):
        outside.trust(data)
    name = data if isinstance(data, str) else outside.IN_MEMORY
    return replace(config, data=replace(config.data, name=name, path=None))


def planned_rounds(config: Config) -> float:
    """Returns the number of rounds of a run: federation.rounds, or computed from federation.epochs. In the
    latter case it may be a fraction."""
    federation = config.federation
    if federation.rounds is not None:
        return federation.rounds
    steps = (federation.epochs or 0) * federation.epoch_images / config.train.batch_size
    return steps / federation.period


def resolve(config: Config, dataset: Dataset) -> Config:
    """Returns the resolved config: all settings that were left open and depend on the data have values.
    Raises if settings do not fit the data."""
    config = _with_owners(config, dataset)
    if config.run.test != "every" and not config.data.validation and dataset.validation is None:
        raise ConfigError(
            f"run.test = {config.run.test!r} needs validation images: set data.validation=0.1",
            key="run.test",
            value=config.run.test,
            fix="data.validation=0.1",
        )
    federation = config.federation
    participants = federation.participants or config.split.users
    groups, count = _groups(config, participants), _rounds(config)
    server_labels, user_labels = _label_counts(config, dataset)
    _require_labels(config, dataset, server_labels)
    flip = dataset.flip if config.data.flip is None else config.data.flip
    path = None if config.data.path is None else _absolute(config.data.path)
    gpu = torch.cuda.is_available() if config.run.device == "auto" else config.run.device != "cpu"
    views = config.train.server_views
    if views == "suited":
        views = "both" if min(dataset.shape[1:]) >= 16 else "weak"
    return replace(
        config,
        data=replace(config.data, flip=flip, root=_absolute(config.data.root), path=path),
        split=replace(config.split, server_labels=server_labels, user_labels=user_labels),
        train=replace(config.train, server_views=views),
        privacy=_privacy(config),
        model=_chosen_model(config, dataset, gpu),
        federation=replace(
            federation,
            participants=participants,
            groups=groups,
            rounds=count,
            epochs=None,
            gate=bool(federation.gate),
        ),
        run=replace(
            config.run,
            eval_every=config.run.eval_every or max(5, count // 100),
            checkpoint_every=config.run.checkpoint_every or max(10, count // 100),
            baseline=_compared(config, server_labels),
        ),
    )


def _groups(config: Config, participants: int) -> int:
    """Returns the number of groups (federation.groups). By default, a method that uses groups has one for
    every ten participants, and at least two. Raises if a group would be empty."""
    federation, groups = config.federation, config.federation.groups
    if groups is None:
        groups = min(participants, max(2, -(-participants // 10))) if config.method.grouped else 1
    full = -(-participants // groups)
    if federation.group_sizes == "filled" and (groups - 1) * full >= participants:
        raise ConfigError(
            f"federation.group_sizes = 'filled' leaves one of {groups} groups without users: set "
            f"federation.groups={-(-participants // full)}",
            key="federation.groups",
            value=groups,
            fix=f"federation.groups={-(-participants // full)}",
        )
    return groups


def _rounds(config: Config) -> int:
    """Returns the number of rounds as a whole number. Raises if it is too large."""
    count = max(1, round(planned_rounds(config)))
    if count > 10**9:
        raise ConfigError(
            f"federation.epochs = {config.federation.epochs} would take {count:.0e} rounds, and at most "
            "1e+09 are possible: lower federation.epochs",
            key="federation.epochs",
            value=config.federation.epochs,
        )
    return count


def _label_counts(config: Config, dataset: Dataset) -> tuple[int, int | None]:
    """Returns the numbers of labelled images of the server (split.server_labels) and of all users
    (split.user_labels, which is None if users need no labels).

    The server gets all labelled images that the data give it. If neither the data nor the config say how
    many, it gets all labelled images if others have no label. Otherwise it gets at most half of each class,
    and at most 100 images of it.
    """
    settings = config.split
    labels, user_labels = settings.server_labels, settings.user_labels
    owners_named = dataset.server is not None or (dataset.users is not None and labels is None)
    if owners_named and settings.labels_at != "users":
        labels = len(_server_images(config, dataset))
    elif labels is None:
        counts = torch.bincount(dataset.labels[dataset.labels >= 0], minlength=len(dataset.classes))
        smallest = int(counts.min() * (1 - config.data.validation))
        if dataset.groups is not None:  # whole groups were set aside, maybe more than data.validation
            smallest = min(smallest, int(_labels_left(config, dataset, len(counts)).min()))
        labels = len(counts) * min(100, max(smallest // 2, 1))
        if bool((dataset.labels < 0).any()):  # the unlabelled images are for the users
            everything = int(_labels_left(config, dataset, len(counts)).sum())
            labels = everything if settings.labels_at == "server" else len(counts) * smallest
    if settings.labels_at != "server" and user_labels is None:
        user_labels = labels
    return 0 if settings.labels_at == "users" else labels, user_labels


def _require_labels(config: Config, dataset: Dataset, server_labels: int) -> None:
    """Raises if labels are missing that the network's normalisation or the method need."""
    if config.model.norm_statistics in ("server", "recompute") and server_labels == 0:
        raise ConfigError(
            f"model.norm_statistics = {config.model.norm_statistics!r} needs labelled images at the server, "
            "and the server has none: set model.norm_statistics=average",
            key="model.norm_statistics",
            value=config.model.norm_statistics,
            fix="model.norm_statistics=average",
        )
    if "labels" in config.method.needs() and bool((dataset.labels < 0).any()):
        raise ConfigError(
            f"method.name = {config.method.name!r} needs a label on every image, and some of {dataset.name} "
            f"have none: choose another method, such as method.name={methods.DEFAULT}",
            key="method.name",
            value=config.method.name,
            fix=f"method.name={methods.DEFAULT}",
        )


def _privacy(config: Config) -> PrivacySettings:
    """Returns the section [privacy] in which delta is filled in. Raises if differential privacy is used and
    its library is not installed."""
    privacy = config.privacy
    if privacy.clip is None:
        return privacy
    library()
    delta = min(1e-5, 0.1 / config.split.users) if privacy.delta is None else privacy.delta
    return replace(privacy, delta=delta)


def _compared(config: Config, server_labels: int) -> bool:
    """Returns whether the run also trains a server-only model to compare with (run.baseline). This is
    possible only if users train and the server has labels. By default it is done only for your own images."""
    is_own_data = config.data.path is not None or outside.is_outside(config.data.name)
    wanted = (
        is_own_data and config.run.engine != "dist" if config.run.baseline is None else config.run.baseline
    )
    return wanted and config.method.trains_users and server_labels > 0


def _chosen_model(config: Config, dataset: Dataset, gpu: bool) -> ModelSettings:
    """Returns the section [model] in which network, number of cached views and path of the weights are filled
    in."""
    model = config.model
    name, views = model.name or networks.suited(dataset.shape, gpu), model.cached_views
    if views is None:
        views = VIEWS if name in backbones.NAMES and model.train != "all" else 0
    weights = None if model.weights is None else _absolute(model.weights)
    return replace(model, name=name, cached_views=views, weights=weights)


def _with_owners(config: Config, dataset: Dataset) -> Config:
    """Returns the config with split.scheme = "given" if the data say who owns which image, since the other
    schemes then have no effect. Otherwise the config is unchanged."""
    if dataset.users is None:
        return config
    owners, users = len(dataset.users), config.split.users
    if config.split.scheme == "given" or (config.data.path is not None and users != SplitSettings.users):
        # the number comes from a resumed run, or somebody set it
        require_users(users, owners, config.data.path is not None)
    unchanged = {
        key: getattr(config.split, key) for key in ("server_labels", "labels_at", "user_labels", "shared")
    }
    config = replace(config, split=SplitSettings("given", owners, seed=config.split.seed, **unchanged))
    check(config)
    return config


def require_users(users: int, owners: int, folder: bool) -> None:
    """Raises if split.users (`users`) is not the number of users that the data name (`owners`). `folder` says
    whether the data are a folder of images, for the message."""
    if users != owners:
        where = "unlabelled/ has a sub-folder for each of" if folder else "the data name"
        raise ConfigError(
            f"split.users = {users}, but {where} {owners} users: set split.users={owners}, or leave it out",
            key="split.users",
            value=users,
            fix=f"split.users={owners}",
        )


def _labels_left(config: Config, dataset: Dataset, classes: int) -> torch.Tensor:
    """Returns the number of labelled images of each class [classes], without the validation images."""
    left = dataset.labels[set_aside(config, dataset)[1]]
    return torch.bincount(left[left >= 0], minlength=classes)


def set_aside(config: Config, dataset: Dataset) -> tuple[Index, Index]:
    """Returns the image numbers of the validation images, and those of all other training images. The
    validation images are those that the data name, or a random part (data.validation) that keeps images of
    one patient, and identical files, together."""
    if dataset.validation is None:
        labels, settings = dataset.labels.numpy(), config.split
        return split.hold_out(labels, config.data.validation, settings.seed, dataset.groups)
    return dataset.validation, np.setdiff1d(np.arange(len(dataset.labels)), dataset.validation)


def _server_images(config: Config, dataset: Dataset) -> Index:
    """Returns the image numbers of the server's labelled images: those that the data name, or all labelled
    images that no user owns."""
    _, available = set_aside(config, dataset)
    if config.split.labels_at == "users":
        return available[:0]
    if dataset.server is not None:
        return np.intersect1d(available, dataset.server)
    free = available if dataset.users is None else np.setdiff1d(available, dataset.users.flat)
    return free[dataset.labels.numpy()[free] >= 0]


def _absolute(path: str) -> str:
    """Returns the absolute path, so that a run can be resumed from another working directory."""
    return str(Path(path).absolute())


def make_parts(config: Config, dataset: Dataset) -> tuple[split.Parts, Index]:
    """Divides the training images. Returns which images the server and each user own, and the image numbers
    of the validation images. Raises if a user would have no image."""
    settings = config.split
    labels = dataset.labels.numpy()
    if settings.users > len(labels):
        raise ConfigError(
            f"split.users = {settings.users} is more than the {len(labels)} training images, but every user "
            "needs at least one image: lower split.users",
            key="split.users",
            value=settings.users,
        )
    validation, available = set_aside(config, dataset)
    if dataset.users is not None:
        parts = _given_parts(config, dataset, available)
    else:
        parts = _dealt_parts(config, dataset, available)
    if dataset.server is not None and len(dataset.server) and not len(parts.server):
        grouped = "" if dataset.groups is None else f", because {folds.GROUPS} are not divided"
        raise ConfigError(
            f"data.validation = {config.data.validation} sets aside all {len(dataset.server)} labelled "
            f"images of the server{grouped}: lower data.validation, or name the validation images in your "
            "data",
            key="data.validation",
            value=config.data.validation,
        )
    if settings.labels_at != "server":
        parts = split.label_some(labels, parts, settings.user_labels or 0, settings.seed)
    if settings.shared:
        parts = split.share(parts)
    empty = int((Hands.of(parts.users).sizes == 0).sum())
    if empty:
        raise ConfigError(
            f"{empty} of {len(parts.users)} users would have no image: lower split.users "
            "or split.server_labels, or use more images",
            key="split.users",
            value=len(parts.users),
        )
    return parts, validation


def _given_parts(config: Config, dataset: Dataset, available: Index) -> split.Parts:
    """Returns which images the server and each user own, for data that name the owner of each image.
    Validation images are left out; `available` are the numbers of all other training images."""
    labels, settings = dataset.labels.numpy(), config.split
    left = np.zeros(len(labels), bool)
    left[available] = True
    assert dataset.users is not None
    server = _server_images(config, dataset)
    if (
        dataset.server is None
        and not len(server)
        and settings.server_labels
        and settings.labels_at == "server"
    ):
        raise ConfigError(
            "every labelled image belongs to a user, so the server has none: name labelled images in server= "
            "of ssfl.Data, or give them no owner in users=",
            key="users",
        )
    if dataset.server is None and len(server) != (settings.server_labels or 0):
        server = server[split.iid(labels[server], 1, settings.server_labels or 0, settings.seed).server]
    return split.Parts(server, dataset.users.where(left))


def _dealt_parts(config: Config, dataset: Dataset, available: Index) -> split.Parts:
    """Returns which of the `available` images the server and each user own, divided as the section [split]
    says. If the data name the server's images, only the other images are divided."""
    labels, settings, count = dataset.labels.numpy(), config.split, config.split.server_labels or 0
    if dataset.server is not None:
        available, count = np.setdiff1d(available, dataset.server), 0
        if not len(available):
            raise ConfigError(
                "all images belong to the server, so there are none for the users: name fewer in server= of "
                "ssfl.Data, or pass the users' images in unlabelled=",
                key="server",
            )
    usable = available[labels[available] >= 0]
    labels_and_users = (labels[usable], settings.users)
    count_and_seed = (count, settings.seed)
    # the server gets all labelled images, even if classes are uneven
    if len(usable) < len(available) and count == len(usable):
        parts = split.Parts(np.arange(len(usable)), [np.zeros(0, np.int64)] * settings.users)
    elif settings.scheme == "skew":
        parts = split.skewed(*labels_and_users, settings.skew, *count_and_seed)
    elif settings.scheme == "iid":
        parts = split.iid(*labels_and_users, *count_and_seed)
    elif settings.scheme == "dirichlet":
        parts = split.dirichlet(*labels_and_users, settings.alpha, *count_and_seed, capped=settings.capped)
    elif settings.scheme == "shards":
        parts = split.shards(*labels_and_users, settings.classes_per_user, *count_and_seed)
    elif settings.scheme == "mixture":
        parts = split.mixture(*labels_and_users, settings.mixtures, *count_and_seed)
    else:
        raise ConfigError(
            "split.scheme = 'given' needs data that say who owns which image: pass ssfl.Data(users=...), "
            "or make a sub-folder of unlabelled/ for each user",
            key="split.scheme",
            value="given",
        )
    parts = split.Parts(usable[parts.server], Hands.of(parts.users).renamed(usable))
    if len(usable) < len(available):
        parts = split.deal_unlabelled(parts, available[labels[available] < 0], settings.seed)
    return parts if dataset.server is None else replace(parts, server=_server_images(config, dataset))
