"""Reads and writes configs: TOML files and overrides `section.key=value`. A mistake raises an error with the
setting, its value and a fix.

Values that the user sets, in a file or an override, come first. Next come the defaults of the method (its
`defaults`), and last the defaults in `settings.py`.
"""

import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from ssfl import methods
from ssfl.config.checks import check
from ssfl.config.settings import NAMES, SECTIONS, Config
from ssfl.core import outside
from ssfl.core.fields import checked, closest, limits_of, meant
from ssfl.errors import ConfigError

if TYPE_CHECKING:
    from ssfl.federation import Method

CONFIGS = Path(__file__).parent / "presets"
PROJECT = "ssfl.toml"
"""The name of the config file in a folder that `ssfl new` made. Commands accept the folder's path in place of
the file's."""
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
OUTSIDE = ("data.name", "model.name", "method.name")
"""Settings whose value may be the import path of Python code outside the package, such as `FILE.py:NAME`."""
_SECTIONS_HINT = f": use one of {', '.join(NAMES)}"
__all__ = [
    "CONFIGS", "PROJECT", "RENAMED", "Config", "apply", "as_dict", "as_texts", "check_early",
    "check_overrides", "checked_method", "from_dict", "is_image_folder", "load_config", "presets", "read",
    "to_toml", "unchecked", "with_method",
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
    sections, overridden = _read(source), dict[str, Any]()
    apply(overridden, overrides)
    name = sections.get("method", {}).get("name")
    if source in presets() and overridden.get("method", {}).get("name", name) != name:
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
        _section(section, SECTIONS[section], values)


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
        _section(section, kind, sections.get(section, {}))


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
        _section("method", kind, values)


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
        _section(section, SECTIONS[section], values)
    if method is None:
        _check_method(name, method_settings)
    if method is None and resolved and outside.is_outside(name) and not outside.is_trusted(name):
        method = methods.recorded(name, method_settings)
    else:
        if method is None:
            method = _section("method", methods.find(name), method_settings)
        method = checked_method(method)
    defaults = {} if resolved else type(method).defaults
    typed = {
        section: _section(section, kind, {**defaults.get(section, {}), **rest[section]})
        for section, kind in SECTIONS.items()
    }
    explicit = frozenset(f"{section}.{key}" for section, values in rest.items() for key in values)
    return Config(method=method, **typed, explicit=None if resolved else explicit)


def checked_method(method: Any) -> "Method":
    """Returns a method object whose settings have the types that its class declares: a whole number becomes a
    float, for example. Raises for a setting that is not allowed, and for mistakes in the class."""
    known = methods.require(method)
    values = {name: _plain(getattr(known, name)) for name in limits_of(type(known))}
    for field in dataclasses.fields(known):
        if field.default is None and values.get(field.name, 0) is None:
            del values[field.name]  # its type may leave out None
    typed = _section("method", type(known), values)
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
        _section(section, SECTIONS[section], dict(now))  # refuses what is no setting
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


def as_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Returns a config as {section: {key: value}} with plain Python values."""
    sections = {section: dataclasses.asdict(getattr(config, section)) for section in NAMES}
    sections["method"] = {"name": config.method.name, **sections["method"]}
    return sections


def to_toml(config: Config) -> str:
    """Returns the config as the text of a TOML file. Settings that are None are left out."""
    blocks = []
    for section, values in as_dict(config).items():
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def presets() -> list[str]:
    """Returns the names of the presets, the configs that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def _read(source: str | Path) -> dict[str, Any]:
    """Returns the settings of a preset, of a TOML file, or of a folder that holds ssfl.toml or images, as
    {section: {key: value}}."""
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"the config is of type {type(source).__name__}: pass the name of a preset, a file or a folder. "
            'To change settings, use ssfl.load_config("quickstart", ["split.users=20"])',
            value=source,
        )
    path = Path(source)
    if path.suffix != ".toml":
        path = CONFIGS / f"{source}.toml"
        if not path.is_file():
            path = Path(source) / PROJECT
        if not path.is_file() and Path(source).is_dir():
            return _read_folder(Path(source))
        if not path.is_file():
            close = closest(str(source), presets())
            hint = meant(close) or f". Presets: {', '.join(presets())}"
            raise ConfigError(
                f"there is no preset or folder {str(source)!r} (a config file must end in .toml){hint}",
                value=str(source),
                fix=close or None,
            )
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        close = closest(path.name, [file.name for file in path.parent.glob("*.toml")])
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}{meant(close)}",
            value=str(source),
            fix=str(path.with_name(close)) if close else None,
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", value=str(source)) from error


def _read_folder(folder: Path) -> dict[str, Any]:
    """Returns the settings for a folder of images: those of the preset `own`, with data.path set to the
    folder. Raises if it is a run folder or has no sub-folders."""
    if (folder / "config.toml").is_file():
        command = f"ssfl resume {quote(str(folder))}"
        raise ConfigError(
            f"{folder} is a run folder, not a config: continue it with `{command}`, or start a new run with "
            f"its settings: `ssfl run {quote(str(folder / 'config.toml'))}`",
            value=str(folder),
            fix=command,
        )
    if not is_image_folder(folder):
        raise ConfigError(
            f"{folder} has neither {PROJECT} nor sub-folders that can be read: put the images of each class "
            "into a sub-folder, and unlabelled ones into unlabelled/",
            value=str(folder),
        )
    sections = _read("own")
    sections["data"] = {**sections.get("data", {}), "path": str(folder)}
    return sections


def is_image_folder(source: str | Path | None) -> bool:
    """Returns whether `source` is a folder of images: it has sub-folders, but no config file."""
    if source is None or (CONFIGS / f"{source}.toml").is_file():
        return False
    folder = Path(source)
    try:
        if not folder.is_dir() or any((folder / name).is_file() for name in (PROJECT, "config.toml")):
            return False
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())
    except OSError:
        return False


def _set(sections: dict[str, Any], override: str) -> None:
    """Writes one override `section.key=value` into `sections`, which is changed in place. If the value is the
    import path of code outside the package, that code is trusted from now on, because the user typed it."""
    key, equals, text = override.partition("=")
    section, dot, name = (part.strip() for part in key.partition("."))
    if not equals or not dot:
        homes = _homes(section) if equals else []
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


def _section(name: str, kind: type, values: dict[str, Any]) -> Any:
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
            raise _unknown(key, value, limits)
        typed[field] = checked(key, value, hints[field], limits[field])
    for field_ in dataclasses.fields(kind):
        needed = field_.default is MISSING and field_.default_factory is MISSING
        if needed and field_.name in limits and field_.name not in typed:
            key = f"{name}.{field_.name}"
            raise ConfigError(f"{key} has no default: set it, such as --set {key}=VALUE", key=key)
    return kind(**typed)


def _unknown(key: str, value: Any, fields: Iterable[str]) -> ConfigError:
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
        homes = [section] if close else [home for home in _homes(field) if _allows(home, field, value)]
        new_key = f"{homes[0]}.{close or field}" if homes else ""
        hint = meant(new_key) or f": [{section}] has {', '.join(fields)}"
        message = f"there is no setting {key}{hint}"
    return ConfigError(message, key=key, value=value, fix=f"{new_key}={_word(value)}" if new_key else None)


def _homes(field: str) -> list[str]:
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


def _as_text(key: Any, value: Any) -> str:
    """Returns an item of a dict of overrides as a text `section.key=value`. Raises if it is no setting, or if
    a config cannot hold the value."""
    if not isinstance(key, str) or "." not in key:
        homes = _homes(key) if isinstance(key, str) else []
        example = f"{homes[0]}.{key}" if homes else "split.users"
        if isinstance(value, Mapping) and value:
            example = f"{key}.{next(iter(value))}"
        raise ConfigError(
            f"{key!r} is not the name of a setting: write section.key, such as {example!r}", key=str(key)
        )
    value = str(value) if isinstance(value, Path) else _plain(value)
    if not isinstance(value, str | bool | int | float | tuple):
        raise ConfigError(
            f"{key} = {value!r}: a config holds numbers, texts, true or false, and lists of these; leave a "
            "setting out to use its default",
            key=key,
            value=value,
        )
    return f"{key}={_toml(value)}"


def _plain(value: Any) -> Any:
    """Returns a value with lists as tuples, and with the numbers and arrays of numpy or torch as plain
    ones."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _word(value: Any) -> str:
    """Returns a value as a user would type it after `--set section.key=`."""
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
