"""A real federation: a centre with labelled images, sites with unlabelled ones, and Flower between them.

Open `centre.py` first, then `site.py`. Flower carries the messages (TLS, signed by each site's key). Only
weights, counts and plain numbers travel: unlike Flower's own clients, a site runs nothing that it was sent.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ssfl.errors import SsflError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is first imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
Tell = Callable[[str], None]
"""Shows a line to whoever runs this process."""


def require_flower() -> None:
    """Say how to install Flower where it is missing."""
    try:
        import flwr
    except ImportError:
        raise SsflError("this needs Flower: install it with `pip install 'ssfl[flower]'`") from None
    major_minor = tuple(int(part) for part in flwr.__version__.split(".")[:2])
    if major_minor != (1, 41):
        raise SsflError(f"this needs Flower 1.41, not {flwr.__version__}: `pip install 'ssfl[flower]'`")


@contextmanager
def silenced() -> Iterator[list[str]]:
    """Keep Flower's log off the terminal; its last warnings are in the list."""
    warnings: list[str] = []
    logger = logging.getLogger("flwr")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())
            del warnings[:-20]

    handlers, logger.handlers = logger.handlers, [Keep(logging.WARNING)]
    try:
        yield warnings
    finally:
        logger.handlers = handlers
