"""What can go wrong through somebody's input: one line that says what to do, and an exit code."""

import signal
from typing import Any

from ssfl.signals import exit_code


class SsflError(Exception):
    """A mistake that its author can mend; the CLI prints the message alone, without a traceback.

    A program can ask it for `key`, the setting (section.name) or argument that is wrong; `value`, what it was
    set to; and `fix`, what to type instead, such as split.users=3, or None if there is no single answer.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, key: str | None = None, value: Any = None, fix: str | None = None
    ) -> None:
        super().__init__(message)
        self.key, self.value, self.fix = key, value, fix


class ConfigError(SsflError):
    """A key, value or combination of settings that cannot be used."""


class MethodError(SsflError):
    """A method that uses something it did not declare, or returns something else than it should."""


class DataError(SsflError):
    """A data file or folder that is missing, broken or unsuitable."""


class RunError(SsflError):
    """A run folder or checkpoint that is missing, broken, or does not belong to this config."""


class Stopped(SsflError):
    """Stopped by Ctrl-C or SIGTERM with everything saved, which is no failure."""

    def __init__(self, message: str, by: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.by, self.exit_code = by, exit_code(by)


class SsflWarning(UserWarning):
    """Something that is done less well than it could be, and why."""


class DivergedError(SsflError):
    """Training produced a number that is not finite."""

    exit_code = 3
