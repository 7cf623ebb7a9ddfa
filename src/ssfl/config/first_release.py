"""Translates the configs of the first release's run folders, so that they can still be read."""

from typing import Any

from ssfl import methods
from ssfl.config.loading import RENAMED
from ssfl.core.fields import limits_of

Sections = dict[str, dict[str, Any]]
NEUTRAL = {"pace": "full", "guard": False, "momentum": 0.0}
"""Fields that were added during the first release: a config without one was played without that part."""


def is_old(config: Sections) -> bool:
    """Returns whether a resolved config was written by the first release: there every method had all
    settings."""
    return "objective" in config.get("method", {})


def translated(config: Sections) -> Sections:
    """Returns the same config with today's settings; settings that its method never used are left out."""
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
