"""Translates config files of the first release. Run folders that the first release wrote can then still be
read."""

from typing import Any

from ssfl import methods
from ssfl.config.sections import RENAMED
from ssfl.core.fields import limits_of

Sections = dict[str, dict[str, Any]]
NEUTRAL = {"pace": "full", "guard": False, "momentum": 0.0}
"""Settings of [method] that some configs of the first release do not have, because these configs were written
before the setting existed. A config without such a setting gets the value here, with which the setting has no
effect."""


def is_old(config: Sections) -> bool:
    """Returns whether the first release wrote this config. Its configs can be recognised because they list
    the settings of all methods, such as `objective`."""
    return "objective" in config.get("method", {})


def with_new_names(config: Sections) -> Sections:
    """Returns a copy of the config in which every setting that was renamed after the first release has its
    present name. The section [method] is left unchanged; `translated` converts it."""
    new = dict(config)
    for old, today in RENAMED.items():
        (section, _, key), (home, _, name) = old.partition("."), today.partition(".")
        values = new.get(section)
        if section != "method" and isinstance(values, dict) and key in values:
            new[section] = {other: value for other, value in values.items() if other != key}
            new[home] = {**new.get(home, {}), name: values[key]}
    return new


def translated(config: Sections) -> Sections:
    """Returns a config of the first release in the form that this version reads. Settings that belong to
    another method than the config's are left out."""
    new = {section: dict(values) for section, values in config.items()}
    method = new["method"] = {"name": config["method"].get("name", methods.DEFAULT)}
    fields = limits_of(methods.find(method["name"]))
    method |= {key: value for key, value in NEUTRAL.items() if key in fields}
    for key, value in config["method"].items():
        section, _, name = RENAMED.get(f"method.{key}", f"method.{key}").partition(".")
        if section != "method":
            new.setdefault(section, {})[name] = "mean" if value == "distance" else value
        elif name in fields:
            method[name] = value
    return new
