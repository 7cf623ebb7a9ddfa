"""Configs: TOML in and out, dotted overrides, errors that name the key, the value and the fix.

Order of precedence: a person's keys, the method's row in `methods.py`, the defaults in `settings.py`.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ssfl import outside
from ssfl.checks import check
from ssfl.errors import ConfigError
from ssfl.limits import CHOICES, INSTEAD, RANGES
from ssfl.methods import METHODS
from ssfl.settings import SECTIONS, Config, Method

CONFIGS = Path(__file__).parent / "configs"
PROJECT = "ssfl.toml"
"""The config in a folder that `ssfl new` made; the folder's name will do for it."""
OUTSIDE = ("data.name",)
"""Settings that may name code from outside by an import path."""
__all__ = [
    "CONFIGS", "Config", "apply", "from_dict", "load_config", "presets", "read", "to_toml", "unchecked",
]  # fmt: skip


def load_config(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """A config from a preset's name, a TOML file or a folder with ssfl.toml in it, and `key=value`s.

    The default is `quickstart`, or `own` where the overrides name other data: the quickstart's settings
    are for the digits.
    """
    return from_dict(read(source, overrides))


def read(source: str | Path | None = None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """What a person said, section by section; the rest is open."""
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    if source is None:
        other = any(override.startswith(("data.path=", "data.name=")) for override in overrides)
        source = "own" if other else "quickstart"
    given = _read(source)
    apply(given, overrides)
    return given


def apply(given: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put `section.key=value`s into the nested dict of a config."""
    for override in overrides:
        _set(given, override)


def from_dict(given: dict[str, dict[str, Any]], *, resolved: bool = False) -> Config:
    """A checked config: the given keys over the method's over the defaults.

    What a resolved one lacks is plain: its method had no part that has come since.
    """
    config = unchecked(given, resolved=resolved)
    check(config)
    return config


def unchecked(given: dict[str, dict[str, Any]], *, resolved: bool = False) -> Config:
    """A config whose settings are each allowed; whether they go together nobody has asked."""
    for section, values in given.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}]{_suggest(section, SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"[{section}] must be a section with keys, not {values!r}")
    name = given.get("method", {}).get("name", Method.name)
    _check_choice("method.name", name)
    settings = {} if resolved else METHODS[name]
    sections = {
        section: _section(section, settings.get(section, {}) | given.get(section, {})) for section in SECTIONS
    }
    return Config(**sections)


def to_toml(config: Config) -> str:
    """The config as TOML; a setting that is None is left out."""
    blocks = []
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(config, section))
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def presets() -> list[str]:
    """The names of the ready-made configs."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if path.suffix != ".toml":
        path = CONFIGS / f"{source}.toml"
        if not path.is_file():
            path = Path(source) / PROJECT
        if not path.is_file() and Path(source).is_dir():
            raise ConfigError(f"{source} has no {PROJECT}: `ssfl new {source} --images FOLDER` writes one")
        if not path.is_file():
            hint = _suggest(str(source), presets()) or f"; presets: {', '.join(presets())}"
            what = "folder or preset" if len(path.parts) > 2 else "preset"
            raise ConfigError(f"no {what} {str(source)!r} (a file's name must end in .toml){hint}")
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        hint = _suggest(path.name, [other.name for other in path.parent.glob("*.toml")])
        raise ConfigError(f"cannot read the config {path}: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _set(given: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the nested dict; the value is TOML, or else a plain word."""
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        homes = [s for s, kind in SECTIONS.items() if equals and section in typing.get_type_hints(kind)]
        meant = f"{homes[0]}.{override}" if homes else "split.users=20"
        raise ConfigError(f"--set {override!r}: write section.key=value, such as {meant}")
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r} in --set {override}{_suggest(section, SECTIONS)}")
    values = given.setdefault(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"[{section}] must be a section with keys, not {values!r}")
    values.pop(INSTEAD.get(key.strip(), ""), None)
    values[name.strip()] = value = _value(text.strip())
    if key.strip() in OUTSIDE and isinstance(value, str) and outside.is_path(value):
        outside.trust(value)


def _value(text: str) -> Any:
    """A value from the command line: TOML, or a number as people write it (.4), or a plain word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _section(section: str, values: dict[str, Any]) -> Any:
    kind = SECTIONS[section]
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown key {section}.{key}{_suggest(key, hints, section)}")
        values = values | {key: _typed(f"{section}.{key}", value, hints[key])}
        _check_choice(f"{section}.{key}", values[key])
        _check_range(f"{section}.{key}", values[key])
    return kind(**values)


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the field's type, or an error; a whole number may stand for a float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if key == "split.mixtures":
        if isinstance(value, list | tuple) and all(isinstance(row, list | tuple) for row in value):
            try:
                rows = tuple(tuple(float(number) for number in row) for row in value)
                if len({len(row) for row in rows}) <= 1 and all(sum(row) < 1e9 for row in rows):
                    return rows
            except (TypeError, ValueError, OverflowError):
                pass
        raise ConfigError(f"{key} must be equally long rows of numbers, such as [[0.5, 0.5], [0.1, 0.9]]")
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(min(max(value, -(10**300)), 10**300))
    if value == "" and str in allowed:
        raise ConfigError(f"{key} is empty: give it a value or leave it out")
    if type(value) in allowed:
        return value
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    wanted = " or ".join(names[kind] for kind in allowed if kind in names)
    raise ConfigError(f"{key} = {value!r} must be {wanted}")


def _check_choice(key: str, value: Any) -> None:
    if key in OUTSIDE and isinstance(value, str) and outside.is_outside(value):
        return
    if value is not None and key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(
            f"{key} = {value!r} is not one of {', '.join(CHOICES[key])}{_suggest(str(value), CHOICES[key])}"
        )


def _check_range(key: str, value: Any) -> None:
    if key in RANGES and value is not None:
        least, most, why = RANGES[key]
        if not least <= value <= most:
            raise ConfigError(f"{key} = {value} must lie between {least} and {most} ({why})")


def _suggest(word: str, known: Iterable[str], section: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    if close:
        return f": did you mean {section + '.' if section else ''}{close[0]}?"
    if section:
        homes = [s for s, kind in SECTIONS.items() if word in typing.get_type_hints(kind)]
        if homes:
            return f": did you mean {homes[0]}.{word}?"
        return f"; [{section}] has {', '.join(known)}"
    return ""


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
