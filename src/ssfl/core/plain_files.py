"""Reads files that may come from strangers, without the risk of hanging or crashing. It accepts only regular
files of limited size.

A FIFO (a named pipe) would block its reader for ever, and a deeply nested file would exhaust the parser's
stack.
"""

import errno
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

CONFIG = 16 << 20
"""The largest allowed size of a config file, in bytes."""
LARGEST = 2 << 30
"""The largest allowed size of a run's events.jsonl or split.json, in bytes. Real files are far smaller."""


def require_plain(path: Path) -> None:
    """Raises OSError if a path exists but is not a regular file, such as a FIFO, which would block its
    reader."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_plain(path: Path) -> BinaryIO:
    """Opens a regular file for reading and returns it. Raises OSError for anything else, such as a FIFO,
    which would block its reader."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read(path: Path, most: int = LARGEST) -> bytes:
    """Returns the content of a regular file. Raises OSError if it is not a regular file or has more than
    `most` bytes."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read(most)


def parse_json(content: bytes | str) -> Any:
    """Returns the value of a JSON text. Raises ValueError if the text is invalid or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_toml(content: bytes) -> dict[str, Any]:
    """Returns the values of a TOML text. Raises ValueError if the text is invalid or nested too deeply."""
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
