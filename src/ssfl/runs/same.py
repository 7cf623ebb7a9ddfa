"""Checks whether the run in an existing folder has the same settings as a config, before that run is
continued."""

from dataclasses import asdict, replace
from pathlib import Path

from ssfl.config.settings import NAMES, Config
from ssfl.errors import ConfigError, RunError
from ssfl.runs import folder, resolve

COMPARED = ("seed", "folds", "test")
"""The settings of the section [run] that must be the same when a run is continued."""


def require_same_parts(config: Config, path: Path, fingerprint: str) -> None:
    """Raises if the code of a person's method or network has changed since the run in the folder `path` was
    started, or if its data had another `fingerprint`. If the folder holds no run, nothing happens."""
    if not (path / "config.toml").is_file():
        return
    folder.require_same_code(path, "method", config.method.name)
    folder.require_same_code(path, "model", config.model.name)
    if folder.read_fingerprint(path) != fingerprint:
        raise RunError(
            f"the images, owners, normalisation or augmentations have changed since {path} was started: "
            "restore them, choose another --out, or remove that folder",
            key="data",
        )


def require(config: Config, path: Path) -> None:
    """Raises if the folder `path` holds a run with other settings than `config`. This can happen, for
    example, if a method's defaults have changed in a new version. If the folder holds no run, nothing
    happens.

    Of the section [run], only the settings in `COMPARED` are compared. Also not compared are federation.gate,
    the location of the images, and settings that `config` leaves open. The section [split] is not compared if
    the data name the owner of each image. Nor is split.server_labels, if only users have labels.
    """
    if not (path / "config.toml").is_file():
        return
    before, count = folder.read_config(path), max(1, round(resolve.planned_rounds(config)))
    now = replace(config, federation=replace(config.federation, rounds=count, epochs=None))
    if before.method.name != config.method.name:
        raise ConfigError(
            f"{path} was run with method.name = {before.method.name!r}, not {config.method.name!r}: "
            "choose another --out, or remove that folder",
            key="method.name",
            value=config.method.name,
        )
    for section in NAMES:
        was, wanted = asdict(getattr(before, section)), asdict(getattr(now, section))
        for key, value in wanted.items():
            if section == "run" and key not in COMPARED:
                continue
            left_open = value in (None, "suited") or key in ("root", "download", "path", "gate")
            users_alone = key == "server_labels" and before.split.labels_at == "users"
            owners_named = section == "split" and before.split.scheme == "given"  # [split] has no effect
            if was[key] != value and not left_open and not users_alone and not owners_named:
                raise ConfigError(
                    f"{path} was run with {section}.{key} = {was[key]!r}, and now it is {value!r}: "
                    "use the old value, choose another --out, or remove that folder",
                    key=f"{section}.{key}",
                    value=value,
                    fix=f"{section}.{key}={was[key]}",
                )
