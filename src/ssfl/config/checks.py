"""Raises ConfigError for settings that cannot be combined. Some limits depend on the method: its `needs()`
lists what it requires from an engine, and not every engine provides all of it."""

from typing import Any

from ssfl.config.settings import Config, PrivacySettings
from ssfl.errors import ConfigError


def check(config: Config) -> None:
    """Raises ConfigError if two or more settings of a config cannot be combined. Single values were already
    checked when the config was read."""
    _check_counts(config)
    _check_labels(config)
    _check_averaging(config)
    if config.run.engine == "dist":
        _check_dist(config)
    if config.privacy != PrivacySettings():
        _check_privacy(config)
    _check_comparison(config)
    if config.train.nesterov and config.train.momentum == 0:
        raise _error(
            "train.nesterov", True, "needs momentum, and train.momentum is 0: set train.nesterov=false",
            "train.nesterov=false",
        )  # fmt: skip
    config.method.check(config)


def _error(key: str, value: Any, why: str, fix: str | None = None) -> ConfigError:
    """Returns the ConfigError with the message `KEY = VALUE WHY`. `fix` is an override, such as
    `run.folds=0`, that would remove the error, or None."""
    return ConfigError(f"{key} = {value!r} {why}", key=key, value=value, fix=fix)


def _check_counts(config: Config) -> None:
    """Raises for numbers that do not fit together, such as more participants than users. Also raises if two
    settings that exclude each other are both set, such as data.name and data.path. Also raises if a required
    setting is missing, such as split.mixtures for the scheme "mixture"."""
    split, federation = config.split, config.federation
    if config.data.name is not None and config.data.path is not None:
        raise ConfigError(
            f"data.name = {config.data.name!r} and data.path = {config.data.path!r} are both set: keep "
            "data.name for a known data set, or data.path for your own images",
            key="data.name",
            value=config.data.name,
        )
    participants = split.users if federation.participants is None else federation.participants
    if participants > split.users:
        raise _error(
            "federation.participants", participants,
            f"is more than the number of users (split.users = {split.users}): use at most {split.users}",
            f"federation.participants={split.users}",
        )  # fmt: skip
    groups = federation.groups
    if groups is not None and groups > participants:
        raise _error(
            "federation.groups", groups,
            f"is more than the {participants} participants of a round: use at most {participants}",
            f"federation.groups={participants}",
        )  # fmt: skip
    if (federation.rounds is None) == (federation.epochs is None):
        raise ConfigError(
            "the length of the run is not set: set federation.rounds, or federation.epochs"
            if federation.rounds is None
            else f"federation.rounds = {federation.rounds} and federation.epochs = {federation.epochs} are "
            "both set, but each of them sets the length of the run: keep only one",
            key="federation.rounds",
            value=federation.rounds,
        )
    if split.scheme == "mixture" and not split.mixtures:
        raise _error(
            "split.scheme", "mixture",
            "needs class weights, and split.mixtures is empty: set it to one row for each kind of user, "
            "with one weight for each class, such as [[0.9, 0.1], [0.1, 0.9]] for two classes",
            None,
        )  # fmt: skip


def _check_labels(config: Config) -> None:
    """Raises if users have labels, but the method does not train users or split.shared is set. Also raises if
    a setting needs labels at the server, but the server has none. Also raises if a setting needs a server
    that trains, but the method does not train the server."""
    split, method, federation = config.split, config.method, config.federation
    if split.shared and split.labels_at != "server":
        raise _error(
            "split.shared", True,
            "gives users the server's labelled images, so all labels must be at the server, but "
            f"split.labels_at = {split.labels_at!r}: set split.labels_at=server",
            "split.labels_at=server",
        )  # fmt: skip
    if split.labels_at != "server" and not method.trains_users:
        raise _error(
            "split.labels_at", split.labels_at,
            f"gives labels to users, but method.name = {method.name!r} does not train users: "
            "set split.labels_at=server",
            "split.labels_at=server",
        )  # fmt: skip
    no_server = split.labels_at == "users" or split.server_labels == 0
    untrained = f"method.name = {method.name!r} does not train the server"
    if federation.head_start and (no_server or not method.trains_server):
        why = "the server has no labelled images" if no_server else untrained
        raise _error(
            "federation.head_start", federation.head_start,
            f"lets the server train first, but {why}: set federation.head_start=0", "federation.head_start=0",
        )  # fmt: skip
    if config.model.norm_statistics == "server" and not method.trains_server:
        raise _error(
            "model.norm_statistics", "server",
            f"uses the server's running statistics, but {untrained}: set model.norm_statistics=average",
            "model.norm_statistics=average",
        )  # fmt: skip
    if federation.median_fallback and no_server:
        raise _error(
            "federation.median_fallback", True,
            "needs labelled images at the server, and the server has none: set "
            "federation.median_fallback=false",
            "federation.median_fallback=false",
        )  # fmt: skip


def _check_comparison(config: Config) -> None:
    """Raises if the server-only baseline (run.baseline) or the cross-validation (run.folds) is not possible
    with the other settings."""
    run = config.run
    if run.folds == 1:
        raise _error(
            "run.folds",
            1,
            "would hold out all labelled images and leave none to train on: use at least 2, such as 5",
            "run.folds=5",
        )
    for engine, why in (("dist", "several processes"), ("sites", "real sites")):
        if run.folds and run.engine == engine:
            message = f"cannot be combined with {why} (run.engine = {engine!r}): set run.folds=0"
            raise _error("run.folds", run.folds, message, "run.folds=0")
    if run.folds and config.privacy.clip is not None:
        raise _error(
            "run.folds", run.folds, "trains on the users' images again in every fold, which the reported "
            "privacy ε does not include: set run.folds=0",
            "run.folds=0",
        )  # fmt: skip
    if run.baseline and run.engine == "dist":
        raise _error(
            "run.baseline", True, "cannot be combined with run.engine = 'dist': set run.baseline=false",
            "run.baseline=false",
        )  # fmt: skip
    if run.folds and (config.split.labels_at == "users" or config.split.server_labels == 0):
        raise _error(
            "run.folds", run.folds, "cross-validates on the server's labelled images, and the server has "
            "none: set run.folds=0",
            "run.folds=0",
        )  # fmt: skip


def _check_averaging(config: Config) -> None:
    """Raises if a setting that changes how models are averaged cannot be combined with the method. For
    example, federation.combine = "median" ignores weights, so a method that weights its users differently
    does not allow it. A method whose users keep models of their own does not allow groups."""
    method, federation = config.method, config.federation
    robust = [
        ("federation.combine", federation.combine, federation.combine != "mean", "mean"),
        ("federation.median_fallback", federation.median_fallback, federation.median_fallback, "false"),
    ]
    reason = (
        "averages models in its own way" if "models" in method.needs() else "may give users different weights"
    )
    if {"models", "reports"} & set(method.needs()):
        for key, value, on, plain in robust:
            if on:
                why = f"cannot be combined with method.name = {method.name!r}, which {reason}"
                raise _error(key, value, f"{why}: set {key}={plain}", f"{key}={plain}")
    if method.start == "user":
        keeps = f"cannot be combined with method.name = {method.name!r}, whose users keep models of their own"
        groups = federation.groups
        for key, value, on, plain in [
            ("federation.groups", groups, groups not in (None, 1), "1"),
            ("federation.gate", federation.gate, bool(federation.gate), "false"),
            ("federation.attackers", federation.attackers, federation.attackers > 0, "0"),
        ]:
            if on:
                raise _error(key, value, f"{keeps}: set {key}={plain}", f"{key}={plain}")


def _check_dist(config: Config) -> None:
    """Raises if the settings or the method cannot be combined with the engine "dist". Its processes exchange
    only sums of models, but some settings need all users' models in one process. `check` calls this only if
    run.engine is "dist"."""
    federation, statistics = config.federation, config.model.norm_statistics
    for key, value, on, plain in [
        ("federation.gate", federation.gate, federation.gate, "false"),
        ("federation.median_fallback", federation.median_fallback, federation.median_fallback, "false"),
        ("federation.skip_unlabelled", federation.skip_unlabelled, federation.skip_unlabelled, "false"),
        ("federation.combine", federation.combine, federation.combine != "mean", "mean"),
        ("federation.attackers", federation.attackers, federation.attackers > 0, "0"),
        ("model.norm_statistics", statistics, statistics == "everyone", "average"),
    ]:
        if on:
            raise _error(
                key, value,
                f"cannot be combined with run.engine = 'dist': set {key}={plain} or run.engine=auto",
                f"{key}={plain}",
            )  # fmt: skip
    why = obstacle(config, ("models", "reports", "sends", "numbers", "sizes"))
    if why:
        message = f"cannot be combined with {why}: set run.engine=auto"
        raise _error("run.engine", "dist", message, "run.engine=auto")


def _check_privacy(config: Config) -> None:
    """Raises if differential privacy is not possible with the other settings, or if its own settings are
    incomplete. It is not possible if users would send or reveal more than their clipped and noised updates,
    because the reported ε would then be wrong. `check` calls this only if [privacy] is used."""
    privacy, method, users = config.privacy, config.method, config.split.users
    if privacy.clip is None or privacy.noise is None:
        raise ConfigError(
            f"privacy.clip = {privacy.clip} and privacy.noise = {privacy.noise}: differential privacy needs "
            "both. Set both, such as 1.0 and 0.5",
            key="privacy.clip",
            value=privacy.clip,
        )
    if privacy.delta is not None and privacy.delta * users >= 1:
        raise _error(
            "privacy.delta", privacy.delta, f"is too large for {users} users: use less than {1 / users:.2g}"
        )
    key, value, why = "method.name", str(method.name), obstacle(config, ("models", "reports", "sends"))
    if not method.trains_users:
        why = f"method.name = {method.name!r}, which does not train users"
    if config.federation.skip_unlabelled:
        key, value = "federation.skip_unlabelled", "true"
        why = "federation.skip_unlabelled = true, which reveals which users had no pseudo-label"
    if config.train.momentum_policy == "slot":
        key, value = "train.momentum_policy", "slot"
        why = "train.momentum_policy = 'slot', which passes one user's momentum on to another"
    if why:
        raise ConfigError(
            f"[privacy] cannot be combined with {why}: change that setting, or leave the section [privacy] "
            "out",
            key=key,
            value=value,
        )


def obstacle(config: Config, needs: tuple[str, ...]) -> str:
    """Returns why the method cannot be used with the engine "dist", with real sites or with differential
    privacy. The result is a text for an error message, or "" if the method can be used.

    `needs` lists what is not allowed there, in the words of `NEEDS` in `federation.py`. The method cannot be
    used if its `needs()` contains one of these words. It also cannot be used if its users keep models of
    their own.
    """
    from ssfl.federation import NEEDS  # here and not above, because it imports torch

    method = config.method
    if method.start == "user":
        return f"method.name = {method.name!r}, whose users keep models of their own"
    for need in method.needs():
        if need in needs:
            return f"method.name = {method.name!r}, which needs {NEEDS[need]}"
    return ""
