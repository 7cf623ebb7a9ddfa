"""What a site tells the centre about an error: nothing that names a file or a folder of the site.

The text of an error often holds a path: of an image, of the site's own code, of the home folder. So the
centre gets only the kind of an error, and the text of a `PublicError`. The site's own terminal shows the full
text.
"""

from typing import Any

from ssfl.errors import DataError

ELSEWHERE = "the terminal of this site shows the text"
LONGEST_KIND = 60
"""The number of characters of an error's kind that are sent."""


class PublicError(DataError):
    """An error at a site with a text that may be sent to the centre: `public`, by default the whole text.

    The code that raises it must make sure that `public` reveals nothing about the site. It may hold only
    counts, and values that the centre sent.
    """

    def __init__(self, message: str, *, public: str | None = None, **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.public = message if public is None else public


def for_centre(error: BaseException) -> str:
    """Returns what the centre is told about an error at this site."""
    if isinstance(error, PublicError):
        return error.public
    return f"{type(error).__name__[:LONGEST_KIND]} ({ELSEWHERE})"
