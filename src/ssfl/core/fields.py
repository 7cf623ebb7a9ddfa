"""Settings are fields of frozen dataclasses. What a field may hold stands beside it:

    users: int = setting(10, least=1, most=10_000_000, what="users")

A field with a plain default has no limits besides its type. `checked` compares a value with both.
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
    """What a setting may hold besides None."""

    least: float | None = None
    """The smallest number allowed."""
    most: float | None = None
    """The largest number allowed."""
    what: str = ""
    """What the number counts or means, for error messages."""
    choices: tuple[str, ...] = ()
    """The words allowed; empty if any are."""
    paths: bool = False
    """Whether an import path or "in memory" may stand for one of the words."""
    instead: str = ""
    """A field of the same section that is cleared when this one is set on the command line."""


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
    """A dataclass field with a default and limits."""
    made: T = field(default=default, metadata={"limits": Limits(least, most, what, choices, paths, instead)})
    return made


def limits_of(kind: type) -> dict[str, Limits]:
    """The limits of every setting of a dataclass, by field name."""
    limits: dict[str, Any] = {
        one.name: one.metadata.get("limits", Limits()) for one in fields(kind) if one.init
    }
    return limits


def checked(key: str, value: Any, hint: Any, limits: Limits) -> Any:
    """The value as the field's type, or an error that says what is allowed."""
    if value == "" and isinstance(value, str):
        raise ConfigError(f"{key} is empty: give it a value or leave it out", key=key, value=value)
    try:
        typed = _as(value, hint)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {value!r} must be {_wanted(hint)}", key=key, value=value) from None
    check_choice(key, typed, limits)
    _check_range(key, typed, limits)
    return typed


def _as(value: Any, hint: Any) -> Any:
    """The value as a type, or TypeError or ValueError.

    A whole number may stand for a float, and a list for a tuple.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for one in inner:
            with contextlib.suppress(TypeError, ValueError):
                return _as(value, one)
        raise TypeError
    if origin is tuple and isinstance(value, list | tuple):
        items = tuple(_as(item, one) for item, one in zip(value, _items(inner, len(value)), strict=True))
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
    """The types of a tuple's items."""
    return inner[:1] * count if inner[1:] == (...,) else inner


def _wanted(hint: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_wanted(one) for one in inner if one is not type(None))
    if origin is tuple:
        nested = typing.get_origin(inner[0]) is tuple
        like = "equally long rows of numbers, such as [[0.5, 0.5], [0.1, 0.9]]"
        return like if nested else f"a list, each item {_wanted(inner[0])}"
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(hint, f"a {getattr(hint, '__name__', hint)}, which a config cannot hold")


def check_choice(key: str, value: Any, limits: Limits) -> None:
    """Raises if the value is not one of the words allowed."""
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
    least, most = limits.least, limits.most
    for number in _numbers(value):
        too_small = least is not None and not number >= least  # also true of nan
        too_large = most is not None and not number <= most
        if too_small or too_large:
            allowed = f"lie between {least} and {most}"
            if least is None or most is None:
                allowed = f"be at most {most}" if least is None else f"be at least {least}"
            why = f" ({limits.what})" if limits.what else ""
            fix = f"{key}={least if too_small else most}" if number is value else None
            raise ConfigError(f"{key} = {number} must {allowed}{why}", key=key, value=value, fix=fix)


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a value."""
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or "" if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), "")


def meant(word: str) -> str:
    """The end of an error message that suggests a word."""
    return f": did you mean {word}?" if word else ""
