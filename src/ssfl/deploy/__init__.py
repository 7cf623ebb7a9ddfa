"""A real federation: a centre with labelled images, sites with unlabelled images, and Flower between them.

Read `centre.py` first, then `site.py`. Flower carries the messages, over TLS and signed with each site's key.
Messages hold only weights, counts, settings and numbers. Unlike Flower's own clients, a site never runs code
that it was sent.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ssfl.errors import SsflError, one_line

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # flwr reads this when it is first imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
Tell = Callable[[str], None]
"""A function that shows a line of text to the person who runs this process."""


def require_flower() -> None:
    """Raises if Flower is missing or has another version than 1.41; the error says how to install it."""
    try:
        import flwr
    except ImportError as error:
        raise SsflError(
            f"this needs Flower, which cannot be imported ({one_line(error, 200)}): run "
            "`pip install 'ssfl[flower]'`"
        ) from None
    major_minor = tuple(int(part) for part in flwr.__version__.split(".")[:2])
    if major_minor != (1, 41):
        raise SsflError(f"this needs Flower 1.41, not {flwr.__version__}: run `pip install 'ssfl[flower]'`")


@contextmanager
def silenced() -> Iterator[list[str]]:
    """Hides Flower's log messages from the terminal inside a `with` block. Yields a list of the last 20
    warnings that Flower logged, for error messages and tests."""
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
