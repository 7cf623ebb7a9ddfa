"""The centre's port under attack: a real SuperLink in its own process, TLS, light sites and strangers."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest

import light
from ssfl.deploy import keys, link
from ssfl.deploy.fleet import Fleet
from ssfl.errors import SsflError
from stage import free_port
from waiting import wait_until

SITES = ("aachen", "bonn", "calais")
NUMBERS = 20_000
"""Weights of the model that travels."""


@dataclass
class Scene:
    """A SuperLink with light sites."""

    fleet: Fleet
    crowd: light.Crowd
    host: str
    port: int
    folder: Path
    lines: list[str] = field(default_factory=list)

    def round(self) -> int:
        """Send all sites that are there a model; how many came back."""
        nodes = self.fleet.connected().values()
        return len(self.fleet.exchange({node: light.model(NUMBERS) for node in nodes}, "train", 60.0))

    def gathered(self) -> None:
        wait_until(lambda: len(self.fleet.connected()) == len(SITES), lambda: f"not all came: {self.lines}")

    def refused(self) -> list[dict[str, Any]]:
        self.fleet.listen()
        return [event for event in self.fleet.log if event["event"] == "refused"]


@contextmanager
def scene(folder: Path, host: str = "127.0.0.1") -> Iterator[Scene]:
    """A SuperLink with three light sites that are there."""
    ring, port, lines, notes = folder / "keys", free_port(), list[str](), Queue[dict[str, Any]]()
    keys.init(ring, [host])
    sites = [keys.read_site(keys.add(ring, name)) for name in SITES]
    with link.running(
        folder / "link", ring, host, port, keys.sites(ring), 60.0, 4 * NUMBERS, notes.put
    ) as grid:
        fleet = Fleet(grid, list(SITES), len(SITES), 60.0, 60.0, lines.append, notes)
        with light.crowd(f"{host}:{port}", sites) as there:
            made = Scene(fleet, there, host, port, folder, lines)
            made.gathered()
            yield made


def test_the_port_opens_on_one_interface_alone(tmp_path: Path) -> None:
    with scene(tmp_path, "127.0.0.2") as made:
        assert made.round() == 3
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", made.port), 5)
        # what a proxy would say of where a request comes from is not believed
        with httpx.Client(verify=False, headers={"x-forwarded-for": "10.9.8.7"}) as anybody:
            assert anybody.post(f"https://127.0.0.2:{made.port}/v1/control/start-run").status_code == 403
        wait_until(made.refused, "the refusal was not told")
        assert {event["from"] for event in made.refused()} == {"127.0.0.1"}


def test_a_port_that_cannot_be_opened_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SsflError, match="--port"), link.listening("127.0.0.1", port):
            pass
    for host in ("203.0.113.7", "no such host"):
        with pytest.raises(SsflError, match="--host"), link.listening(host, free_port()):
            pass
