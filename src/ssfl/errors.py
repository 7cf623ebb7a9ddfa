"""The errors that a user's input can cause. Each has a message of one line that says what to do, and an exit
code."""

import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from ssfl.signals import exit_code


def one_line(error: BaseException, most: int | None = None) -> str:
    """Returns an error's message as one line, cut to `most` characters (None: not cut). If the error has no
    message, returns the name of its class."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def with_class(error: BaseException, most: int | None = None) -> str:
    """Returns an error's class and message as one line, such as "ValueError: no images". The message is cut
    to `most` characters (None: not cut)."""
    name, message = type(error).__name__, one_line(error, most)
    return name if message == name else f"{name}: {message}"


def in_words(value: Any) -> str:
    """Returns in words what a person's function returned, such as "a tensor of shape [4, 16]"."""
    from torch import Tensor  # here and not above, because importing torch takes seconds

    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


class SsflError(Exception):
    """A mistake in the user's input. The command line prints only its message, without a traceback.

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
    """A setting does not exist, has a wrong value, or cannot be combined with another."""


class MethodError(SsflError):
    """The code of a method is wrong: it uses something that it did not declare in `needs()`, or returns
    something unusable."""


class DataError(SsflError):
    """A data file or folder is missing, broken or unsuitable. This class is also used if the centre or a site
    of a federation receives an invalid message."""


class RunError(SsflError):
    """A run folder or checkpoint is missing, broken or from another config, or a run cannot continue."""


class DamagedRun(RunError):
    """The run cannot be continued, because the checkpoints or events in its folder cannot be used."""


class FolderInUse(RunError):
    """Another process is writing to this run folder."""


class Stopped(SsflError):
    """Ctrl-C or SIGTERM stopped the run, and everything was saved. This is not a failure. `by` is the number
    of the signal."""

    def __init__(self, message: str, by: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.by, self.exit_code = by, exit_code(by)


class SsflWarning(UserWarning):
    """A warning for users of the package. It says what will be worse or slower than expected, and why."""


class DivergedError(SsflError):
    """Training diverged: a loss or an update is not finite."""

    exit_code = 3


def warn_user(message: str) -> None:
    """Warns of something that does not stop a run. The warning names the line outside this package that
    called it."""
    package, caller = f"{Path(__file__).parent}{os.sep}", 2
    for level, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), 2):
        if frame.f_code.co_filename.startswith(package):
            caller = level + 1
    warnings.warn(message, SsflWarning, stacklevel=caller)
