"""Writes configs and single values: as TOML, as dicts, and as a user would type them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ssfl.config.settings import NAMES, Config
from ssfl.errors import ConfigError


def as_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Returns a config as {section: {key: value}} with plain Python values."""
    sections = {section: dataclasses.asdict(getattr(config, section)) for section in NAMES}
    sections["method"] = {"name": config.method.name, **sections["method"]}
    return sections


def portable(config: Config) -> dict[str, dict[str, Any]]:
    """Returns a config as `as_dict` does, but with the names of files instead of their paths, which exist
    only on this machine."""
    sections = as_dict(config)
    sections["data"]["root"] = "data"
    for section, key in (
        ("data", "path"), ("data", "name"), ("model", "name"), ("model", "weights"), ("method", "name"),
    ):  # fmt: skip
        value = sections[section][key]
        sections[section][key] = None if value is None else Path(value).name
    return sections


def to_toml(config: Config | dict[str, dict[str, Any]]) -> str:
    """Returns the config, or its sections as `as_dict` returns them, as the text of a TOML file. Settings
    that are None are left out. Raises ConfigError if a text is not UTF-8, such as the path of a folder."""
    blocks = []
    for section, values in (as_dict(config) if isinstance(config, Config) else config).items():
        lines = [f"[{section}]"]
        for key, value in values.items():
            if value is None:
                continue
            lines.append(f"{key} = {toml_value(value)}")
            try:
                lines[-1].encode()
            except UnicodeEncodeError:
                raise ConfigError(
                    f"{section}.{key} = {value!a} is not UTF-8, so no config file can hold it: rename that "
                    "file or folder",
                    key=f"{section}.{key}",
                    value=value,
                ) from None
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def plain(value: Any) -> Any:
    """Returns a value with lists as tuples, and with the numbers and arrays of numpy or torch as plain
    ones."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def word(value: Any) -> str:
    """Returns a value as a user would type it after `--set section.key=`."""
    return value if isinstance(value, str) else toml_value(value)


def toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML does not allow
