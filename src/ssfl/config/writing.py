"""Writes configs and single values: as TOML, as dicts, and as a user would type them."""

import dataclasses
import json
from typing import Any

from ssfl.config.settings import NAMES, Config


def as_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Returns a config as {section: {key: value}} with plain Python values."""
    sections = {section: dataclasses.asdict(getattr(config, section)) for section in NAMES}
    sections["method"] = {"name": config.method.name, **sections["method"]}
    return sections


def to_toml(config: Config) -> str:
    """Returns the config as the text of a TOML file. Settings that are None are left out."""
    blocks = []
    for section, values in as_dict(config).items():
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{section}]", *lines]))
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
    return json.dumps(value, ensure_ascii=False)
