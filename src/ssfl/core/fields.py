"""Settings are fields of frozen dataclasses, each with its limits:

    users: int = setting(10, least=1, most=10_000_000, what="users")

A field with a plain default is limited only by its type. `checked` checks a value against type and limits.
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
    """The values that a setting may have. Whether None is allowed follows from its type."""

    least: float | None = None
    """The smallest number allowed."""
    most: float | None = None
    """The largest number allowed."""
    what: str = ""
    """What the number counts or means, for error messages."""
    choices: tuple[str, ...] = ()
    """The allowed words; empty if all are allowed."""
    paths: bool = False
    """Whether other code is allowed besides `choices`: an import path, or "in memory" for an object that was
    passed from Python."""
    instead: str = ""
    """Another field of the same section, an alternative to this one. It is cleared when this one is set on
    the command line."""


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
    """Returns a dataclass field with a default and limits. The other arguments are the fields of `Limits`."""
    limits = Limits(least, most, what, choices, paths, instead)
    with_limits: T = field(default=default, metadata={"limits": limits})
    return with_limits


def limits_of(kind: type) -> dict[str, Limits]:
    """Returns the limits of every setting of a dataclass, by field name."""
    limits: dict[str, Any] = {
        setting.name: setting.metadata.get("limits", Limits()) for setting in fields(kind) if setting.init
    }
    return limits


def checked(key: str, value: Any, hint: Any, limits: Limits) -> Any:
    """Returns the value of the setting `key`, converted to the type `hint`; raises ConfigError if the type or
    the limits do not allow it."""
    if value == "" and isinstance(value, str):
        raise ConfigError(f"{key} is empty: set a value or leave it out", key=key, value=value)
    try:
        typed = _as(value, hint)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {value!r} must be {_in_words(hint)}", key=key, value=value) from None
    check_choice(key, typed, limits)
    _check_range(key, typed, limits)
    return typed


def _as(value: Any, hint: Any) -> Any:
    """Returns the value converted to the type `hint`; raises TypeError or ValueError if that is not possible.

    A whole number is allowed for a float, and a list for a tuple.
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
    """Returns the types of a tuple's `count` items. `inner` are the arguments of its type, such as (float,
    ...)."""
    return inner[:1] * count if inner[1:] == (...,) else inner


def _in_words(hint: Any) -> str:
    """Returns the description of a type for error messages, such as "a whole number"."""
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
    return names.get(hint, f"a {getattr(hint, '__name__', hint)}, which a config cannot hold")


def check_choice(key: str, value: Any, limits: Limits) -> None:
    """Raises if the value is not one of the allowed words."""
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
    """Raises ConfigError if a number of the value lies outside the limits, or is nan."""
    least, most = limits.least, limits.most
    for number in _numbers(value):
        too_small = least is not None and not number >= least  # also true of nan
        too_large = most is not None and not number <= most
        if too_small or too_large:
            allowed = f"lie between {least} and {most}"
            if least is None or most is None:
                allowed = f"be at most {most}" if least is None else f"be at least {least}"
            meaning = f" ({limits.what})" if limits.what else ""
            fix = f"{key}={least if too_small else most}" if number is value else None
            raise ConfigError(f"{key} = {number} must {allowed}{meaning}", key=key, value=value, fix=fix)


def _numbers(value: Any) -> Iterator[float]:
    """Yields all numbers of a value, which may be a tuple of tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def closest(word: str, known: Iterable[str]) -> str:
    """Returns the known word that was probably meant, or "" if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), "")


def meant(word: str) -> str:
    """Returns the end of an error message, ": did you mean WORD?", or "" if `word` is empty."""
    return f": did you mean {word}?" if word else ""
