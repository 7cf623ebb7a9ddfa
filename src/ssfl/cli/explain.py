"""Makes the output of `ssfl settings` from the docstrings below the fields in `config/settings.py`."""

import ast
import inspect
import itertools
import json
import shutil
import textwrap
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ssfl.config import settings
from ssfl.core.fields import Limits, limits_of
from ssfl.errors import ConfigError
from ssfl.methods import METHODS, find


@dataclass(frozen=True)
class Explained:
    """The description of one setting, as `ssfl settings` shows it."""

    key: str
    """The name of the setting as --set takes it, such as "train.lr"."""
    default: str
    """The default value as written in a config file. It is "–" if there is none, or if it depends on the
    data."""
    about: str
    """The meaning of the setting and its allowed values."""


def section(name: str, kind: type) -> tuple[str, list[Explained]]:
    """Returns the description of a config section and of each of its settings. `kind` is the dataclass of the
    section `name`."""
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").removeprefix(f"[{name}] ").split())
    texts, limits = docstrings(kind), limits_of(kind)
    rows = []
    for field in fields(kind):
        if field.name in limits:
            default: Any = field.default
            shown = "–" if default in (None, (), MISSING) else _written(default)
            shown = _by_method(name, field.name, default, shown)
            text = texts.get(field.name, "")
            text = f"{text} {_allowed(limits[field.name], text)}".strip()
            rows.append(Explained(f"{name}.{field.name}", shown, text))
    return about, rows


def _allowed(limits: Limits, text: str) -> str:
    """Returns the allowed values of a setting in brackets, such as "(at least 1)". Returns "" if there is no
    limit or if the description `text` names all choices."""
    if not all(choice in text for choice in limits.choices):
        return f"(one of {', '.join(limits.choices)})"
    if limits.least is not None and limits.most is not None and limits.most <= 65536:
        return f"({limits.least:,} to {limits.most:,})"
    if limits.least is not None:
        return f"(at least {limits.least:,})"
    return f"(at most {limits.most:,})" if limits.most is not None else ""


def _by_method(section: str, name: str, default: Any, shown: str) -> str:
    """Returns the default of the setting `section.name` as text. `default` is the general default, and
    `shown` is its text. If some methods have other defaults, the text lists these first, with the names of
    the methods."""
    others: dict[str, list[str]] = {}
    for method in METHODS if section != "method" else ():
        value = find(method).defaults.get(section, {}).get(name, default)
        if value != default:
            others.setdefault(_written(value), []).append(method)
    parts = [f"{value} with {', '.join(methods)}" for value, methods in others.items()]
    return "; ".join([*parts, f"otherwise {shown}"] if parts else [shown])


def _written(value: Any) -> str:
    """Returns a value as text, as it is written in a config file but without quotes."""
    return json.dumps(value).strip('"')


def docstrings(kind: type) -> dict[str, str]:
    """Returns the docstring below each field of a class, by field name. Fields of its base classes are
    included."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except (OSError, TypeError):  # a built-in class, or one typed at a prompt, has no source file
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, after in itertools.pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts


def lines(word: str = "") -> list[str]:
    """Returns the lines that `ssfl settings WORD` prints. If the word is the name of a method, the lines show
    the settings of that method. Otherwise they show all settings with this word in their name or description.
    Without a word, they show the settings of all sections except [method], and the names of all methods."""
    if word in METHODS or ":" in word:
        return _lines("method", find(word), "", f"method.name = {word}")[1:]
    shown: list[str] = []
    for name, kind in settings.SECTIONS.items():
        shown += _lines(name, kind, word)
    fields_of = {
        method: _lines("method", find(method), word or "\0", f"method.name = {method}") for method in METHODS
    }
    for lines_of_method in fields_of.values():
        shown += lines_of_method
    if not word:
        names = ", ".join(METHODS)
        shown += [
            "",
            "[method] name, and the settings of that method: `ssfl settings NAME` shows them. Methods:",
            f"  {names}",
        ]
    if not shown:
        raise ConfigError(
            f"no setting has {word!r} in its name or description: `ssfl settings` lists all settings",
            value=word,
        )
    return shown[1:] if shown[0] == "" else shown


def _lines(name: str, kind: type, word: str, title: str = "") -> list[str]:
    """Returns lines about the settings of section `name` that have `word` in their name or description. An
    empty line and a heading come first. `kind` is the dataclass of the section, and `title` is added to the
    heading. An empty `word` selects all settings. Returns [] if no setting has the word."""
    width = max(60, min(110, shutil.get_terminal_size().columns))
    about, rows = section(name, kind)
    rows = [one for one in rows if word.lower() in f"{one.key} {one.about}".lower()]
    if not rows and word:
        return []
    shown = ["", f"[{name}] {title + ': ' if title else ''}{about}"]
    for one in rows:
        shown.append(f"  {one.key} = {one.default}")
        shown += textwrap.wrap(one.about, width, initial_indent="      ", subsequent_indent="      ")
    return shown
