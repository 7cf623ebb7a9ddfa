"""Makes a section of a config from its values, and finds the right name for a setting that does not exist."""

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import MISSING
from typing import Any

from ssfl.config.settings import SECTIONS
from ssfl.config.writing import word
from ssfl.core.fields import checked, closest, limits_of, meant
from ssfl.errors import ConfigError

RENAMED = {
    "method.slow": "federation.slow_average",
    "method.head_start": "federation.head_start",
    "method.gate": "federation.gate",
    "method.combine": "federation.combine",
    "method.check": "federation.median_fallback",
    "federation.check": "federation.median_fallback",
    "method.server_views": "train.server_views",
    "method.server_momentum": "method.momentum",
}
"""Settings that were renamed since the first release. Each old name maps to the present name."""
GONE = {
    "method.objective": "choose another method.name",
    "method.labels": "choose method.name=alternate, which makes pseudo-labels in every step, or "
    "method.name=anchored, which makes them once a round",
    "method.thresholds": "choose method.name=flexmatch, freematch, fl2 or cbafed",
    "method.fill": "choose method.name=semifl",
    "method.weighting": "choose method.name=fl2 or cbafed",
    "method.averaging": "set federation.groups to average in groups, or method.server_weight to weight the "
    "server",
    "method.server": "set split.labels_at=users or split.server_labels=0 to leave the server without labels",
}
"""Settings of the first release that were removed. Each maps to advice, which the error message shows."""


def make_section(name: str, kind: type, values: dict[str, Any]) -> Any:
    """Returns a section as an object of its dataclass `kind`. Raises if a key is unknown, if a value does not
    fit its field, or if a setting without default is missing."""
    limits, typed = limits_of(kind), {}
    try:
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"[{name}]: a field of {kind.__name__} has a type that is not defined ({error}): import it in "
            "the same file",
            key=name,
        ) from error
    for field, value in values.items():
        key = f"{name}.{field}"
        if field not in limits:
            raise unknown(key, value, limits)
        typed[field] = checked(key, value, hints[field], limits[field])
    for field_ in dataclasses.fields(kind):
        needed = field_.default is MISSING and field_.default_factory is MISSING
        if needed and field_.name in limits and field_.name not in typed:
            key = f"{name}.{field_.name}"
            raise ConfigError(f"{key} has no default: set it, such as --set {key}=VALUE", key=key)
    return kind(**typed)


def unknown(key: str, value: Any, fields: Iterable[str]) -> ConfigError:
    """Returns the error for a setting that does not exist. Its message suggests the setting's new name if it
    was renamed, or else a setting with a similar name."""
    section, _, field = key.partition(".")
    if section == "method":  # every method also has its name
        fields = dict.fromkeys(("name", *fields))
    if key in RENAMED:
        new_key, message = RENAMED[key], f"{key} was renamed: use {RENAMED[key]}"
    elif key in GONE:
        return ConfigError(f"{key} was removed: {GONE[key]}", key=key, value=value, fix=GONE[key])
    else:
        close = closest(field, fields)
        homes = [section] if close else [home for home in homes_of(field) if _allows(home, field, value)]
        new_key = f"{homes[0]}.{close or field}" if homes else ""
        hint = meant(new_key) or f": [{section}] has {', '.join(fields)}"
        message = f"there is no setting {key}{hint}"
    return ConfigError(message, key=key, value=value, fix=f"{new_key}={word(value)}" if new_key else None)


def homes_of(field: str) -> list[str]:
    """Returns the names of the sections that have a setting `field`, such as "split" for "users"."""
    return [section for section, kind in SECTIONS.items() if field in limits_of(kind)]


def _allows(section: str, field: str, value: Any) -> bool:
    """Returns whether the setting `section.field` would accept this value."""
    kind = SECTIONS[section]
    try:
        checked(f"{section}.{field}", value, typing.get_type_hints(kind)[field], limits_of(kind)[field])
    except ConfigError:
        return False
    return True
