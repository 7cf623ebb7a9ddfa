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
    usual = settings.Method().name
    chosen = METHODS[usual].get(name, {})
    for field in fields(kind):
        key = f"{name}.{field.name}"
        default: Any = field.default
        shown = "–" if default in (None, ()) else _written(default)
        if chosen.get(field.name, default) != default:
            shown = f"{_written(chosen[field.name])} with {usual}, else {shown}"
        allowed = ""
        if key in limits.RANGES:
            least, most, _ = limits.RANGES[key]
            allowed = f" ({least:,} to {most:,})" if most <= 65536 else f" (at least {least:,})"
        if not all(choice in told[field.name] for choice in limits.CHOICES.get(key, ())):
            allowed = f" (one of {', '.join(limits.CHOICES[key])})"
        found.append(Explained(key, shown, told[field.name] + allowed))
    return about, found


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
