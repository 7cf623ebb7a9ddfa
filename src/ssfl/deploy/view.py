"""The terminal output of the centre: a live table of the sites, and a line for each event."""

from contextlib import suppress
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ssfl.core import progress
from ssfl.core.events import Event
from ssfl.runs.display import accuracy
from ssfl.runs.text import printable
from ssfl.simulate import privacy


class ShownFleet(Protocol):
    """The fields of a `Fleet` that are shown in the table."""

    names: list[str]
    images: dict[str, int]
    doing: dict[str, str]


class FederationView:
    """Shows a running federation on the terminal. The live table is shown inside a `with` block."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.sites: ShownFleet | None = None
        self.round = self.rounds = 0
        self.accuracy = ""
        self.inside = False  # whether the centre is training a baseline to compare with
        self.last_losses: dict[str, str] = {}
        self.refusals: dict[str, int] = {}
        self.preparing = ""
        self.live = Live(console=self.console, get_renderable=self.table, refresh_per_second=2)

    def __enter__(self) -> "FederationView":
        if self.console.is_terminal:
            self.live.start()
            progress.show_in(self._prepare)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        progress.show_in(None)
        self.live.stop()

    def _prepare(self, text: str) -> None:
        """Shows the progress of a preparation, such as decoding images, below the table."""
        self.preparing = text

    def tell(self, line: str) -> None:
        """Prints a line at once. Control characters are removed, because a stranger may have sent a part of
        the text.

        If the output goes to a full disk, the line is lost and the federation continues.
        """
        with suppress(OSError):
            self.console.print(Text(printable(line)), soft_wrap=True)
            self.console.file.flush()

    def watch(self, sites: ShownFleet, rounds: int) -> None:
        """Sets the sites to show in the table, and the number of rounds."""
        self.sites, self.rounds = sites, rounds

    def report(self, event: Event) -> None:
        """Prints an event of the run, such as a round or an evaluation, and updates the table."""
        if event["event"] == "start":
            self.inside = bool(event.get("what"))
            if self.inside:
                self.tell(f"the centre now trains the {event['what']} for comparison, without the sites")
        elif self.inside and event["event"] in ("round", "eval"):
            return
        elif event["event"] == "round":
            self._round(event)
        elif event["event"] == "eval":
            self.accuracy = f"{accuracy(event)} on held-out labels"
            self.tell(f"round {event['round']}/{self.rounds}  {self.accuracy}")
        elif event["event"] == "privacy":
            self.tell(privacy.describe(event))
        elif event["event"] == "refused" and event["site"] is not None:
            self.refusals[event["site"]] = self.refusals.get(event["site"], 0) + 1

    def _round(self, event: Event) -> None:
        """Prints a line about a finished round. Updates the loss and the mask rate (the fraction of images
        that are trained on) of each site in the table."""
        self.round = event["round"]
        names = {} if self.sites is None else dict(enumerate(self.sites.names))
        losses = ""
        if "loss" in event:  # private sites do not report it
            losses = f"loss {event['loss']:.3f}  mask rate {event['mask_rate']:.2f}  "
            each = zip(event["returned"], event["user_loss"], event["user_mask_rate"], strict=True)
            for user, loss, mask in each:
                if loss is not None and mask is not None:
                    self.last_losses[names.get(user, str(user))] = f"loss {loss:.3f}  mask rate {mask:.2f}"
        refused = f"{len(event['refused'])} refused  " if event.get("refused") else ""
        answered = f"{len(event['returned'])} of {len(event['participants'])} sites"
        if not event["participants"]:  # a head start of the server
            answered, losses = "the centre alone", ""
        self.tell(
            f"round {event['round']}/{self.rounds}  {answered}  {refused}{losses}{event['seconds']:.1f} s"
        )

    def table(self) -> Table:
        """Returns the table of sites. For each site it shows the number of images, what the site is doing,
        and how many of its messages were refused. It also shows the loss and the mask rate (the fraction of
        images that are trained on) of the site's last round."""
        title = (
            f"round {self.round} of {self.rounds}  {self.accuracy}" if self.rounds else "waiting for sites"
        )
        table = Table(
            "site",
            "images",
            "now",
            "last round",
            "refused",
            title=title,
            title_justify="left",
            caption=self.preparing or None,
        )
        if self.sites is not None:
            for name in list(self.sites.names):
                images, doing = (
                    self.sites.images.get(name, ""),
                    self.sites.doing.get(name, "not connected yet"),
                )
                cells = name, images, doing, self.last_losses.get(name, ""), self.refusals.get(name, "")
                table.add_row(*(Text(printable(str(cell))) for cell in cells))
        return table
