"""What must hold between settings. What a method can be combined with follows from what it declares."""

from typing import Any

from ssfl.config.settings import Config, PrivacySettings
from ssfl.errors import ConfigError


def check(config: Config) -> None:
    """Raise where settings do not go together."""
    _check_counts(config)
    _check_labels(config)
    _check_averaging(config)
    if config.run.engine == "dist":
        _check_dist(config)
    if config.privacy != PrivacySettings():
        _check_privacy(config)
    if config.run.test != "every" and not config.data.validation:
        raise _error(
            "run.test", config.run.test, "needs other images to look at: set data.validation=0.1",
            "data.validation=0.1",
        )  # fmt: skip
    _check_comparison(config)
    if config.train.nesterov and config.train.momentum == 0:
        raise _error(
            "train.nesterov", True, "needs train.momentum above 0: set train.nesterov=false",
            "train.nesterov=false",
        )  # fmt: skip
    config.method.check(config)


def _error(key: str, value: Any, why: str, fix: str | None = None) -> ConfigError:
    """`KEY = VALUE WHY`, with the same as attributes."""
    return ConfigError(f"{key} = {value!r} {why}", key=key, value=value, fix=fix)


def _check_counts(config: Config) -> None:
    split, federation = config.split, config.federation
    if config.data.name is not None and config.data.path is not None:
        raise ConfigError(
            "set either data.name (such as digits) or data.path (your own images), not both",
            key="data.name",
            value=config.data.name,
        )
    participants = split.users if federation.participants is None else federation.participants
    if participants > split.users:
        raise _error(
            "federation.participants", participants,
            f"is more than split.users = {split.users}: set it to at most {split.users}",
            f"federation.participants={split.users}",
        )  # fmt: skip
    groups = federation.groups
    if groups is not None and groups > participants:
        raise _error(
            "federation.groups", groups,
            f"is more than the {participants} participants: set it to at most {participants}",
            f"federation.groups={participants}",
        )  # fmt: skip
    if (federation.rounds is None) == (federation.epochs is None):
        raise ConfigError(
            "set either federation.rounds or federation.epochs, not both or neither",
            key="federation.rounds",
            value=federation.rounds,
        )
    if split.scheme == "mixture" and not split.mixtures:
        raise _error(
            "split.scheme", "mixture", "needs split.mixtures, a row of weights per kind of user",
            "split.mixtures=[[0.5, 0.5]]",
        )  # fmt: skip


def _check_labels(config: Config) -> None:
    """Who holds labels, and who needs them."""
    split, method, federation = config.split, config.method, config.federation
    if split.shared and split.labels_at != "server":
        raise _error(
            "split.shared", True, "shares the server's images: use split.labels_at = 'server'",
            "split.labels_at=server",
        )  # fmt: skip
    if split.labels_at != "server" and not method.trains_users:
        raise _error(
            "split.labels_at", split.labels_at,
            f"gives labels to users, and method.name = {method.name!r} does not train them: use 'server'",
            "split.labels_at=server",
        )  # fmt: skip
    no_server = split.labels_at == "users" or split.server_labels == 0
    idle = f"method.name = {method.name!r} does not train it"
    if federation.head_start and (no_server or not method.trains_server):
        why = "it has none" if no_server else idle
        raise _error(
            "federation.head_start", federation.head_start,
            f"needs a server with labelled images, and {why}: set it to 0", "federation.head_start=0",
        )  # fmt: skip
    if config.model.norm_statistics == "server" and not method.trains_server:
        raise _error(
            "model.norm_statistics", "server", f"needs a server that trains, and {idle}: use 'average'",
            "model.norm_statistics=average",
        )  # fmt: skip
    if federation.check and no_server:
        raise _error(
            "federation.check", True, "needs the server's labels, and it has none: set it to false",
            "federation.check=false",
        )  # fmt: skip


def _check_comparison(config: Config) -> None:
    """The comparison with the server alone, and its folds, need the whole federation in this process."""
    run = config.run
    if run.folds == 1:
        raise _error("run.folds", 1, "holds out everything: use at least 2, such as 5", "run.folds=5")
    for engine, why in (("dist", "several processes"), ("sites", "real sites")):
        if run.folds and run.engine == engine:
            raise _error("run.folds", run.folds, f"does not go with {why}: set run.folds=0", "run.folds=0")
    if run.folds and config.privacy.clip is not None:
        raise _error(
            "run.folds", run.folds, "would spend the users' privacy again in every fold: set run.folds=0",
            "run.folds=0",
        )  # fmt: skip
    if run.baseline and run.engine == "dist":
        raise _error(
            "run.baseline", True, "does not go with run.engine = 'dist': set run.baseline=false",
            "run.baseline=false",
        )  # fmt: skip
    if run.folds and (config.split.labels_at == "users" or config.split.server_labels == 0):
        raise _error(
            "run.folds", run.folds, "divides the server's labelled images, and it has none: set run.folds=0",
            "run.folds=0",
        )  # fmt: skip


def _check_averaging(config: Config) -> None:
    """A method that averages in its own way leaves no room for another average."""
    method, federation = config.method, config.federation
    robust = [
        ("federation.combine", federation.combine, federation.combine != "mean", "mean"),
        ("federation.check", federation.check, federation.check, "false"),
    ]
    own = "averages models itself" if "models" in method.needs() else "weighs the users of the average"
    if {"models", "reports"} & set(method.needs()):
        for key, value, on, plain in robust:
            if on:
                why = f"does not go with method.name = {method.name!r}, which {own}: set {key}={plain}"
                raise _error(key, value, why, f"{key}={plain}")
    if method.start == "user":
        keeps = f"does not go with method.name = {method.name!r}, whose users keep models of their own"
        groups = federation.groups
        for key, value, on, plain in [
            ("federation.groups", groups, groups not in (None, 1), "1"),
            ("federation.gate", federation.gate, bool(federation.gate), "false"),
            ("federation.attackers", federation.attackers, federation.attackers > 0, "0"),
        ]:
            if on:
                raise _error(key, value, f"{keeps}: set {key}={plain}", f"{key}={plain}")


def _check_dist(config: Config) -> None:
    """Processes exchange sums alone: nobody holds all models."""
    federation = config.federation
    for key, value, on, plain in [
        ("federation.gate", federation.gate, federation.gate, "false"),
        ("federation.check", federation.check, federation.check, "false"),
        ("federation.skip_unlabelled", federation.skip_unlabelled, federation.skip_unlabelled, "false"),
        ("federation.combine", federation.combine, federation.combine != "mean", "mean"),
        ("federation.attackers", federation.attackers, federation.attackers > 0, "0"),
    ]:
        if on:
            raise _error(
                key, value,
                f"does not go with run.engine = 'dist': set {key}={plain}, or use run.engine=auto",
                f"{key}={plain}",
            )  # fmt: skip
    why = obstacle(config, ("models", "reports", "sends", "sizes"))
    if why:
        raise _error("run.engine", "dist", f"does not go with {why}: use run.engine=auto", "run.engine=auto")


def _check_privacy(config: Config) -> None:
    """Where clipping and noise on what users send would not keep the promise, they are refused."""
    privacy, method, users = config.privacy, config.method, config.split.users
    if privacy.clip is None or privacy.noise is None:
        raise ConfigError(
            "privacy.clip and privacy.noise go together: set both, such as 1.0 and 0.5", key="privacy.clip"
        )
    if privacy.delta is not None and privacy.delta * users >= 1:
        raise _error("privacy.delta", privacy.delta, f"is no promise to {users} users: set it below 1/K")
    why = obstacle(config, ("models", "reports", "sends"))
    if not method.trains_users:
        why = f"method.name = {method.name!r}, which does not train users"
    if config.federation.skip_unlabelled:
        why = "federation.skip_unlabelled = true, which tells who had no pseudo-label"
    if config.train.momentum_policy == "slot":
        why = "train.momentum_policy = 'slot', which hands momentum on"
    if why:
        raise ConfigError(
            f"[privacy] cannot hold with {why}; change that, or leave [privacy] out", key="privacy.clip"
        )


def obstacle(config: Config, needs: tuple[str, ...]) -> str:
    """Why a method cannot run where these needs cannot be met, or "" where it can."""
    from ssfl.federation import NEEDS  # it imports torch

    method = config.method
    if method.start == "user":
        return f"method.name = {method.name!r}, whose users keep models of their own"
    for need in method.needs():
        if need in needs:
            return f"method.name = {method.name!r}, which needs {NEEDS[need]}"
    return ""
