"""Applies changes of the keys folder while a federation runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from ssfl.deploy import keys
from ssfl.errors import SsflError


class WatchedFleet(Protocol):
    """The fields of a `Fleet` that `Watch` uses."""

    names: list[str]
    left_out: set[str]

    @property
    def tell(self) -> Callable[[str], None]: ...


@dataclass
class Watch:
    """Applies changes of the keys folder while a federation runs. `known` has the public keys that were
    applied last."""

    folder: Path
    known: dict[str, ec.EllipticCurvePublicKey]
    without: set[str]
    """The names of sites of this run that have no key now."""
    fleet: WatchedFleet
    renew: Callable[[str, ec.EllipticCurvePublicKey | None], None]
    """Called with a site's name and its new key, or with None if the key was removed. From then on, the port
    accepts only the new key. With None, the site can no longer connect."""
    _seen: list[tuple[str, int]] = field(default_factory=list)
    """The names and modification times of the key files when `look` last applied them."""

    def look(self) -> None:
        """Applies the changes in the folder since the last call: keys that were replaced, removed or added.
        If the folder cannot be read, prints why and leaves the changes to the next call."""
        try:
            seen = sorted((file.name, file.stat().st_mtime_ns) for file in self.folder.glob("*.pub"))
            if seen == self._seen:
                return
            now = keys.sites(self.folder)
        except (SsflError, OSError) as error:  # the folder is probably being changed right now
            self.fleet.tell(f"the changed keys were not applied, and the previous keys stay in use: {error}")
            return
        self._apply(now)
        self._seen = seen  # if the port could not be reached, the next call tries again

    def _apply(self, now: dict[str, ec.EllipticCurvePublicKey]) -> None:
        """Applies the differences between the `known` keys and `now`, the keys that are in the folder now.

        If a site of this run has a new key, the port accepts that key from now on. If its key was removed,
        the site is excluded. For a site that is not in this run, only a line is printed that says how it can
        join.
        """
        for name in sorted(now.keys() | self.known.keys()):
            key, before = now.get(name), self.known.get(name)
            if key == before:
                continue
            if name not in self.fleet.names:
                if before is None:
                    self.fleet.tell(
                        f"{name} is a new site: to let it join, stop the centre with Ctrl-C and continue "
                        "with `ssfl serve --resume RUN --keys FOLDER`"
                    )
                continue
            self.renew(name, key)
            if key is None:
                self.known.pop(name)
                self.without.add(name)
                self.fleet.left_out.add(name)
                self.fleet.tell(f"{name} is excluded from now on: its key was revoked")
            else:
                self.known[name] = key
                if name in self.without:
                    self.fleet.left_out.discard(name)
                self.without.discard(name)
                self.fleet.tell(f"the key of {name} was replaced: its old key is no longer accepted")
        self.known = now
