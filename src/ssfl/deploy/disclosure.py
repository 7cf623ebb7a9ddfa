"""Decides what a site tells the centre about an error, so that the centre learns no name of a file or folder
of the site.

The text of an error often contains a path: of an image, of the site's own code, of the home folder. So the
centre gets only the kind of the error, such as "ValueError". The exception is a `PublicError`, whose text may
be sent. The site's own terminal shows the full text.
"""

from typing import Any

from ssfl.errors import DataError

ELSEWHERE = "the terminal of this site shows the text"
LONGEST_KIND = 60
"""How many characters of the error's class name are sent."""


class PublicError(DataError):
    """An error at a site with a text that may be sent to the centre. This text is `public`; by default it is
    the whole message.

    The code that raises it must make sure that `public` reveals nothing about the site. It may contain only
    counts, and values that the centre sent.
    """

    def __init__(self, message: str, *, public: str | None = None, **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.public = message if public is None else public


def for_centre(error: BaseException) -> str:
    """Returns the text about an error that is sent to the centre: the text of a `PublicError`, otherwise only
    the name of the error's class."""
    if isinstance(error, PublicError):
        return error.public
    return f"{type(error).__name__[:LONGEST_KIND]} ({ELSEWHERE})"
