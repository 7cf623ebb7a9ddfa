"""Run folders of the first release: their configs in today's words, so that they can still be read."""

from typing import Any

from ssfl import methods
from ssfl.config.loading import RENAMED
from ssfl.core.fields import limits_of

Given = dict[str, dict[str, Any]]
NEUTRAL = {"pace": "full", "guard": False, "momentum": 0.0}
"""Fields that came during the first release: a config without one was played without that part."""


def is_old(given: Given) -> bool:
    """Whether a resolved config was written by the first release: there every method had all settings."""
    return "objective" in given.get("method", {})


def translated(given: Given) -> Given:
    """The same config as far as today's settings say it; settings that its method never read are left out."""
    new = {section: dict(values) for section, values in given.items()}
    own = new["method"] = {"name": given["method"].get("name", methods.DEFAULT)}
    known = limits_of(methods.find(own["name"]))
    own |= {key: value for key, value in NEUTRAL.items() if key in known}
    for key, value in given["method"].items():
        section, _, name = RENAMED.get(f"method.{key}", f"method.{key}").partition(".")
        if section != "method":
            new.setdefault(section, {})[name] = "mean" if value == "distance" else value
        elif name in known:
            own[name] = value
    return new
