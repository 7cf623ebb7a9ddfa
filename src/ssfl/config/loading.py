"""Makes checked configs from TOML files and overrides `section.key=value`. A mistake raises an error with the
setting, its value and a fix.

Values that the user sets, in a file or an override, come first. Next come the defaults of the method (its
`defaults`), and last the defaults in `settings.py`.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssfl import methods
from ssfl.config.checks import check
from ssfl.config.sections import homes_of, make_section
from ssfl.config.settings import NAMES, SECTIONS, Config
from ssfl.config.sources import is_image_folder, presets, read_source
from ssfl.config.writing import plain, toml_value
from ssfl.core import outside
from ssfl.core.fields import closest, limits_of, meant
from ssfl.errors import ConfigError

if TYPE_CHECKING:
    from ssfl.federation import Method

OUTSIDE = ("data.name", "model.name", "method.name")
"""Settings whose value may be the import path of Python code outside the package, such as `FILE.py:NAME`."""
_SECTIONS_HINT = f": use one of {', '.join(NAMES)}"
__all__ = [
    "Config", "apply", "as_texts", "check_early", "check_overrides", "checked_method", "from_dict",
    "load_config", "read", "unchecked", "with_method",
]  # fmt: skip


def load_config(
    source: str | Path | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    method: "Method | None" = None,
) -> Config:
    """Returns the checked config from `source`, after applying overrides: texts `section.key=value`, or a
    dict {"section.key": value}. The source is the name of a preset, a TOML file, or a folder with ssfl.toml
    or with images.

    If `source` is None, the preset `quickstart` is used. But if an override sets data.path or data.name, the
    preset `own` is used, because the settings of `quickstart` suit only its own data set, digits. A `method`
    object replaces the section [method].
    """
    return from_dict(read(source, overrides), method=method)


def as_texts(overrides: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """Returns overrides as a list of texts `section.key=value`. They may be given as such texts, as a single
    text, or as a dict {"section.key": value}."""
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [_as_text(key, value) for key, value in overrides.items()]
    return list(overrides)


def read(
    source: str | Path | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> dict[str, Any]:
    """Returns the settings that the source and the overrides contain, as {section: {key: value}}. No defaults
    are added and no values are checked. If `source` is None, a preset is read, chosen as in `load_config`.

    If the source is a preset and the overrides choose another method, the preset's settings of its own method
    are left out.
    """
    overrides = as_texts(overrides)
    if source is None:
        own_data = any(override.startswith(("data.path=", "data.name=")) for override in overrides)
        source = "own" if own_data else "quickstart"
    sections, overridden = read_source(source), dict[str, Any]()
    apply(overridden, overrides)
    name = sections.get("method", {}).get("name")
    if str(source) in presets() and overridden.get("method", {}).get("name", name) != name:
        sections["method"] = {}
    apply(sections, overrides)
    return sections


def apply(sections: dict[str, Any], overrides: Iterable[str]) -> None:
    """Writes each override `section.key=value` into `sections`, which is {section: {key: value}} and is
    changed in place. Raises if an override has another form or names an unknown section."""
    for override in overrides:
        _set(sections, override)


def check_overrides(overrides: Iterable[str]) -> None:
    """Raises if an override `section.key=value` would be wrong with any config: its setting does not exist,
    or its value is not allowed.

    If no override sets method.name, the settings of all built-in methods are allowed, because the method is
    not known yet.
    """
    sections: dict[str, Any] = {}
    apply(sections, overrides)
    method_settings = sections.pop("method", {})
    name = method_settings.pop("name", None)
    if isinstance(name, str):
        methods.check_name(name)
        _check_method(name, method_settings)
    else:
        for key, value in method_settings.items():
            fits = [name for name in methods.METHODS if key in limits_of(methods.settings_of(name) or Config)]
            _check_method(fits[0] if len(fits) == 1 else "" if fits else methods.DEFAULT, {key: value})
    for section, values in sections.items():
        make_section(section, SECTIONS[section], values)


def check_early(source: str | Path | None, overrides: Iterable[str] = ()) -> None:
    """Raises for mistakes in a config that can be found without importing torch, which takes seconds. A user
    who mistyped a setting then sees the error at once."""
    overrides = list(overrides)
    sections = read(source, overrides)
    name = sections.get("method", {}).get("name", methods.DEFAULT)
    _check_keys(sections)
    overridden: dict[str, Any] = {}
    apply(overridden, overrides)
    if "name" not in overridden.get("method", {}) and is_image_folder(source):
        check_overrides(overrides)  # the method is chosen later, by the images
    elif isinstance(name, str):
        methods.check_name(name)
        values = {key: value for key, value in sections.get("method", {}).items() if key != "name"}
        _check_method(name, values)
    for section, kind in SECTIONS.items():
        make_section(section, kind, sections.get(section, {}))


def _check_keys(sections: dict[str, Any]) -> None:
    """Raises if a section does not exist, or is a single value instead of a section with keys."""
    for section, values in sections.items():
        if section not in NAMES:
            close = closest(section, NAMES)
            raise ConfigError(
                f"there is no section [{section}]{meant(close) or _SECTIONS_HINT}",
                key=section,
                value=values,
                fix=f"[{close}]" if close else None,
            )
        _check_section(section, values)


def _check_method(name: str, values: dict[str, Any]) -> None:
    """Raises for a mistake in the settings `values` of the built-in method `name`. Needs no import of torch.
    Methods from outside the package are not checked here."""
    kind = methods.settings_of(name)
    if kind is not None:
        make_section("method", kind, values)


def from_dict(
    sections: dict[str, dict[str, Any]], *, resolved: bool = False, method: "Method | None" = None
) -> Config:
    """Returns a checked config from settings given as {section: {key: value}}. Missing settings get the
    method's defaults, or else those in `settings.py`.

    A `resolved` config, such as that of a run folder, already has every setting. The method's defaults are
    then not applied. A `method` object, if given, is used instead of the section [method].
    """
    config = unchecked(sections, resolved=resolved, method=method)
    check(config)
    return config


def unchecked(
    sections: dict[str, dict[str, Any]], *, resolved: bool = False, method: "Method | None" = None
) -> Config:
    """Returns the same config as `from_dict`, for the same arguments, but checks only each setting alone. It
    does not check whether the settings can be combined."""
    _check_keys(sections)
    method_settings = dict(sections.get("method", {}))
    name = method_settings.pop("name", methods.DEFAULT)
    if not isinstance(name, str):
        raise ConfigError(f"method.name = {name!r} must be a string", key="method.name", value=name)
    methods.check_name(name)
    rest = {section: sections.get(section, {}) for section in SECTIONS}
    for section, values in rest.items():  # typing mistakes show before torch is imported
        make_section(section, SECTIONS[section], values)
    if method is None:
        _check_method(name, method_settings)
    if method is None and resolved and outside.is_outside(name) and not outside.is_trusted(name):
        method = methods.recorded(name, method_settings)
    else:
        if method is None:
            method = make_section("method", methods.find(name), method_settings)
        method = checked_method(method)
    defaults = {} if resolved else type(method).defaults
    typed = {
        section: make_section(section, kind, {**defaults.get(section, {}), **rest[section]})
        for section, kind in SECTIONS.items()
    }
    explicit = frozenset(f"{section}.{key}" for section, values in rest.items() for key in values)
    return Config(method=method, **typed, explicit=None if resolved else explicit)


def checked_method(method: Any) -> "Method":
    """Returns a method object whose settings have the types that its class declares: a whole number becomes a
    float, for example. Raises for a setting that is not allowed, and for mistakes in the class."""
    known = methods.require(method)
    values = {name: plain(getattr(known, name)) for name in limits_of(type(known))}
    for field in dataclasses.fields(known):
        if field.default is None and values.get(field.name, 0) is None:
            del values[field.name]  # its type may leave out None
    typed = make_section("method", type(known), values)
    changed = {
        name: getattr(typed, name)
        for name in values
        if repr(getattr(typed, name)) != repr(getattr(known, name))
    }
    return dataclasses.replace(known, **changed) if changed else known


def with_method(config: Config, method: "Method") -> Config:
    """Returns the config with another method. Settings that have defaults of the old method get the defaults
    of the new one, as if the config had been loaded with it. Settings that were set explicitly, or changed
    since the config was loaded, keep their values."""
    method = checked_method(method)
    if config.explicit is None:
        return dataclasses.replace(config, method=method)
    old, new, changed = type(config.method).defaults, type(method).defaults, dict[str, Any]()
    for section in {**old, **new}:
        was, now = old.get(section, {}), new.get(section, {})
        make_section(section, SECTIONS[section], dict(now))  # refuses what is no setting
        general, values = SECTIONS[section](), getattr(config, section)
        left = [
            key
            for key in {**was, **now}
            if f"{section}.{key}" not in config.explicit
            and getattr(values, key) == was.get(key, getattr(general, key))
        ]
        changes = {key: now.get(key, getattr(general, key)) for key in left}
        changed[section] = dataclasses.replace(values, **changes)
    return dataclasses.replace(config, method=method, **changed)


def _set(sections: dict[str, Any], override: str) -> None:
    """Writes one override `section.key=value` into `sections`, which is changed in place. If the value is the
    import path of code outside the package, that code is trusted from now on, because the user typed it."""
    key, equals, text = override.partition("=")
    section, dot, name = (part.strip() for part in key.partition("."))
    if not equals or not dot:
        homes = homes_of(section) if equals else []
        example = f"{homes[0]}.{override}" if homes else "split.users=20"
        raise ConfigError(
            f"--set {override!r}: write section.key=value, such as {example}",
            key=key.strip(),
            value=text.strip() or None,
            fix=example if homes else None,
        )
    if section not in NAMES:
        close = closest(section, NAMES)
        raise ConfigError(
            f"--set {override}: there is no section {section!r}{meant(close) or _SECTIONS_HINT}",
            key=f"{section}.{name}",
            value=_value(text.strip()),
            fix=f"{close}.{name}={text.strip()}" if close else None,
        )
    values = sections.setdefault(section, {})
    _check_section(section, values)
    limits = limits_of(SECTIONS[section]) if section in SECTIONS else {}
    values.pop(limits[name].instead if name in limits else "", None)
    values[name] = value = _value(text.strip())
    if f"{section}.{name}" in OUTSIDE and isinstance(value, str) and outside.is_path(value):
        outside.trust(value)


def _value(text: str) -> Any:
    """Returns the value of a text that the user typed, such as 3 for "3". The text is read as TOML, or as a
    number such as .4, which TOML does not allow. Otherwise the text itself is returned."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _check_section(section: str, values: Any) -> None:
    if not isinstance(values, dict):
        raise ConfigError(
            f"[{section}] must be a section with keys, not {values!r}", key=section, value=values
        )


def _as_text(key: Any, value: Any) -> str:
    """Returns an item of a dict of overrides as a text `section.key=value`. Raises if it is no setting, or if
    a config cannot hold the value."""
    if not isinstance(key, str) or "." not in key:
        homes = homes_of(key) if isinstance(key, str) else []
        example = f"{homes[0]}.{key}" if homes else "split.users"
        if isinstance(value, Mapping) and value:
            example = f"{key}.{next(iter(value))}"
        raise ConfigError(
            f"{key!r} is not the name of a setting: write section.key, such as {example!r}", key=str(key)
        )
    value = str(value) if isinstance(value, Path) else plain(value)
    if not isinstance(value, str | bool | int | float | tuple):
        raise ConfigError(
            f"{key} = {value!r}: a config holds numbers, texts, true or false, and lists of these; leave a "
            "setting out to use its default",
            key=key,
            value=value,
        )
    return f"{key}={toml_value(value)}"
