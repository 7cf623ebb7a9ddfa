"""Settings and their limits. A setting is a field of a frozen dataclass, declared with its default and its
limits:

    users: int = setting(10, least=1, most=10_000_000, what="users")

A field with a plain default may have any value of its type. The function `checked` checks a value against the
type and the limits.
"""

import contextlib
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ssfl.core import outside
from ssfl.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits on the values of a setting, in addition to its type. The value None is always allowed if the
    type allows it."""

    least: float | None = None
    """The smallest number allowed."""
    most: float | None = None
    """The largest number allowed."""
    what: str = ""
    """What the number in the setting means, such as "users" or "a probability". The error message about a
    number outside the limits shows it."""
    choices: tuple[str, ...] = ()
    """The allowed words. If it is empty, every string is allowed."""
    paths: bool = False
    """Whether the setting may also name code from outside the package: by an import path, or as "in memory"
    for an object that was passed from Python."""
    instead: str = ""
    """The name of another field in the same section that is an alternative to this field. When a person sets
    this field on the command line, any value that was given for the other field before is dropped."""


def setting(
    default: T,
    *,
    least: float | None = None,
    most: float | None = None,
    what: str = "",
    choices: tuple[str, ...] = (),
    paths: bool = False,
    instead: str = "",
) -> T:
    """Returns a dataclass field with a default and limits. The keyword arguments are the fields of
    `Limits`."""
    limits = Limits(least, most, what, choices, paths, instead)
    with_limits: T = field(default=default, metadata={"limits": limits})
    return with_limits


def limits_of(kind: type) -> dict[str, Limits]:
    """Returns the limits of every setting of a dataclass by field name. A setting without declared limits
    gets an empty `Limits`."""
    limits: dict[str, Any] = {
        setting.name: setting.metadata.get("limits", Limits()) for setting in fields(kind) if setting.init
    }
    return limits


def checked(key: str, value: Any, hint: Any, limits: Limits) -> Any:
    """Returns the value of the setting `key`, converted to the type `hint`. Raises ConfigError if the type or
    the limits do not allow this value."""
    if value == "" and isinstance(value, str):
        raise ConfigError(f"{key} is an empty string: set a value, or leave {key} out", key=key, value=value)
    try:
        typed = _as(value, hint)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {value!r} must be {_in_words(hint)}", key=key, value=value) from None
    check_choice(key, typed, limits)
    _check_range(key, typed, limits)
    return typed


def _as(value: Any, hint: Any) -> Any:
    """Returns the value converted to the type `hint`. Raises TypeError or ValueError if that is not possible.

    A whole number may be given for a float, and a list for a tuple. If the items of a tuple are tuples, all
    of these must be equally long.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for option in inner:
            with contextlib.suppress(TypeError, ValueError):
                return _as(value, option)
        raise TypeError
    if origin is tuple and isinstance(value, list | tuple):
        items = tuple(_as(item, kind) for item, kind in zip(value, _items(inner, len(value)), strict=True))
        rows = [item for item in items if isinstance(item, tuple)]
        if len({len(row) for row in rows}) > 1:
            raise ValueError
        return items
    if hint is float and type(value) is int:
        return float(min(max(value, -(10**300)), 10**300))
    if hint is typing.Any or type(value) is hint or (origin is typing.Literal and value in inner):
        return value
    raise TypeError


def _items(inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Returns the types of the `count` items of a tuple, so that each item can be checked. `inner` are the
    arguments of the tuple's type: for tuple[float, ...] they are float and Ellipsis."""
    return inner[:1] * count if inner[1:] == (...,) else inner


def _in_words(hint: Any) -> str:
    """Returns a type in words, such as "a whole number", for error messages."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_in_words(option) for option in inner if option is not type(None))
    if origin is tuple:
        nested = typing.get_origin(inner[0]) is tuple
        rows = "equally long rows of numbers, such as [[0.5, 0.5], [0.1, 0.9]]"
        return rows if nested else f"a list, each item {_in_words(inner[0])}"
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if hint is list or origin is list:
        return "a tuple: declare it as one in the class, such as tuple[float, ...]"
    return names.get(hint, f"a {getattr(hint, '__name__', hint)}, which a config cannot hold")


def check_choice(key: str, value: Any, limits: Limits) -> None:
    """Raises ConfigError if the setting `key` has a value that is not one of its allowed words
    (`limits.choices`). Every value is allowed if there are no such words, and None always is. If
    `limits.paths` is true, names of code from outside the package are allowed too."""
    if limits.paths and outside.is_outside(value):
        return
    if value is not None and limits.choices and value not in limits.choices:
        close = closest(str(value), limits.choices)
        raise ConfigError(
            f"{key} = {value!r} is not one of {', '.join(limits.choices)}{meant(close)}",
            key=key,
            value=value,
            fix=f"{key}={close}" if close else None,
        )


def _check_range(key: str, value: Any, limits: Limits) -> None:
    """Raises ConfigError if the value of the setting `key`, or a number inside it, lies outside the limits.
    If there is a limit, nan counts as outside."""
    least, most = limits.least, limits.most
    for number in _numbers(value):
        too_small = least is not None and not number >= least  # also true for nan
        too_large = most is not None and not number <= most
        if too_small or too_large:
            allowed = f"lie between {least} and {most}"
            if least is None or most is None:
                allowed = f"be at most {most}" if least is None else f"be at least {least}"
            meaning = f" ({limits.what})" if limits.what else ""
            fix = f"{key}={least if too_small else most}" if number is value else None
            raise ConfigError(f"{key} = {number} must {allowed}{meaning}", key=key, value=value, fix=fix)


def _numbers(value: Any) -> Iterator[float]:
    """Yields all numbers in a value, which may be a number or nested tuples of numbers."""
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def closest(word: str, known: Iterable[str]) -> str:
    """Returns the known word that is most similar to `word`, to suggest it after a typing mistake. Returns ""
    if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), "")


def meant(word: str) -> str:
    """Returns the end of an error message, ": did you mean WORD?". Returns "" if `word` is empty."""
    return f": did you mean {word}?" if word else ""
