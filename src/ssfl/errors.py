"""Errors that a person's input can cause. Each has a one-line message that says what to do, and an exit
code."""

import signal
from typing import Any

from ssfl.signals import exit_code


def one_line(error: BaseException, most: int | None = None) -> str:
    """Returns an error's message as one line of at most `most` characters; if it has no message, the name of
    its class."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def with_class(error: BaseException, most: int | None = None) -> str:
    """Returns an error's class and message as one line, such as "ValueError: no images"."""
    name, message = type(error).__name__, one_line(error, most)
    return name if message == name else f"{name}: {message}"


class SsflError(Exception):
    """A mistake in the input. The CLI prints only its message, without a traceback.

    Programs can read three attributes. `key` is the wrong setting (section.name) or argument, and `value` is
    its value. `fix` is what to type instead, such as split.users=3, or None if there is no single answer.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, key: str | None = None, value: Any = None, fix: str | None = None
    ) -> None:
        super().__init__(message)
        self.key, self.value, self.fix = key, value, fix


class ConfigError(SsflError):
    """A key, a value or a combination of settings cannot be used."""


class MethodError(SsflError):
    """The code of a method is wrong: it uses something that it did not declare, or returns something
    unusable."""


class DataError(SsflError):
    """A data file or folder is missing, broken or unsuitable."""


class RunError(SsflError):
    """A run folder or checkpoint is missing, broken or from another config, or a run cannot continue."""


class DamagedRun(RunError):
    """A run folder whose checkpoints or events cannot be used, so that the run cannot be continued."""


class FolderInUse(RunError):
    """Another process is writing to this run folder."""


class Stopped(SsflError):
    """Ctrl-C or SIGTERM stopped the run after everything was saved. This is not a failure."""

    def __init__(self, message: str, by: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.by, self.exit_code = by, exit_code(by)


class SsflWarning(UserWarning):
    """A warning for users of the package: what will be worse or slower than expected, and why."""


class DivergedError(SsflError):
    """Training diverged: a loss or an update is not finite."""

    exit_code = 3
