"""What every setting is, from the docstrings under the fields of `settings.py`."""

import ast
import inspect
import json
import shutil
import textwrap
from dataclasses import dataclass, fields
from typing import Any

from ssfl import limits, settings
from ssfl.errors import ConfigError
from ssfl.methods import METHODS


@dataclass(frozen=True)
class Explained:
    """One setting."""

    key: str
    """section.name, as --set takes it."""
    default: str
    """As it is written; "–" where it is chosen when the data are known."""
    about: str


def section(name: str) -> tuple[str, list[Explained]]:
    """What a section is about, and its settings."""
    kind = settings.SECTIONS[name]
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").removeprefix(f"[{name}] ").split())
    told, found = docstrings(kind), []
    for field in fields(kind):
        key = f"{name}.{field.name}"
        default: Any = field.default
        shown = "–" if default in (None, ()) else _written(default)
        shown = _by_method(name, field.name, default, shown)
        allowed = ""
        if key in limits.RANGES:
            least, most, _ = limits.RANGES[key]
            allowed = f" ({least:,} to {most:,})" if most <= 65536 else f" (at least {least:,})"
        if not all(choice in told[field.name] for choice in limits.CHOICES.get(key, ())):
            allowed = f" (one of {', '.join(limits.CHOICES[key])})"
        found.append(Explained(key, shown, told[field.name] + allowed))
    return about, found


def _by_method(section: str, name: str, default: Any, shown: str) -> str:
    """The default, and which methods have another in their rows; the recommended one's first."""
    others: dict[str, list[str]] = {}
    for method, rows in METHODS.items():
        value = rows.get(section, {}).get(name, default)
        if value != default:
            others.setdefault(_written(value), []).append(method)
    parts = [f"{value} with {', '.join(methods)}" for value, methods in others.items()]
    return "; ".join([*parts, f"else {shown}"] if parts else [shown])


def _written(value: Any) -> str:
    return json.dumps(value).strip('"')


def docstrings(kind: type) -> dict[str, str]:
    """The string under each field of a class."""
    found = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(found, ast.ClassDef)
    told = {}
    for before, after in zip(found.body, found.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            told[before.target.id] = " ".join(str(after.value.value).split())
    return told


def lines(word: str = "") -> list[str]:
    """Every setting whose key or text holds the word, for a terminal."""
    width = max(60, min(110, shutil.get_terminal_size().columns))
    shown: list[str] = []
    for name in settings.SECTIONS:
        about, found = section(name)
        found = [one for one in found if word.lower() in f"{one.key} {one.about}".lower()]
        if found:
            shown += [*([""] if shown else []), f"[{name}] {about}"]
        for one in found:
            shown.append(f"  {one.key} = {one.default}")
            shown += textwrap.wrap(one.about, width, initial_indent="      ", subsequent_indent="      ")
    if not shown:
        raise ConfigError(f"no setting has {word!r} in its name or text: `ssfl settings` lists all")
    return shown
