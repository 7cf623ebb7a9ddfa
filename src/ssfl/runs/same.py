"""Whether a run that was found is the one that is asked for."""

from dataclasses import asdict, replace
from pathlib import Path

from ssfl.config.settings import Config
from ssfl.errors import ConfigError
from ssfl.runs import assemble, folder


def require(config: Config, path: Path) -> None:
    """A run found where one is asked for must be that one: a method's settings may have changed since.

    What images decide, and where they lie, is left open.
    """
    if not (path / "config.toml").is_file():
        return
    before, count = folder.read_config(path), max(1, round(assemble.rounds(config)))
    now = replace(config, federation=replace(config.federation, rounds=count, epochs=None))
    if before.method.name != config.method.name:
        raise ConfigError(
            f"{path} was played with method.name = {before.method.name!r}, not {config.method.name!r}: "
            "remove it, or choose another --out",
            key="method.name",
            value=config.method.name,
        )
    for section in ("data", "split", "model", "method", "federation", "privacy", "train"):
        was, wanted = asdict(getattr(before, section)), asdict(getattr(now, section))
        for key, value in wanted.items():
            left_open = value in (None, "suited") or key in ("root", "download", "path", "gate")
            users_alone = key == "server_labels" and before.split.labels_at == "users"
            given = section == "split" and before.split.scheme == "given"  # [split] deals nothing
            if was[key] != value and not left_open and not users_alone and not given:
                raise ConfigError(
                    f"{path} was played with {section}.{key} = {was[key]!r}, which is {value!r} now: "
                    "remove it, or choose another --out"
                )
