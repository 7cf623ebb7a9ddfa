"""The same federation with Flower's own commands: a ServerApp and a ClientApp for `flwr run`.

Flower's SuperLink and SuperNodes then carry the messages, start a process for each message, and decide who
may join. The content of answers is checked as usual. The checks of `request_filter.py` at the centre's port
are not made.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from ssfl.config.loading import load_config
from ssfl.data import sources
from ssfl.deploy import centre, silenced
from ssfl.deploy.disclosure import PublicError
from ssfl.deploy.fleet import Fleet
from ssfl.deploy.images import usable
from ssfl.deploy.site import Site, client_app
from ssfl.deploy.view import FederationView
from ssfl.errors import ConfigError
from ssfl.runs import folder, resuming
from ssfl.runs.surroundings import reproducible


@cache
def _site(name: str, data: str, device: str, threads: int | None, keep: str | None) -> Site:
    files = usable(sources.image_files([data]), print)
    return Site(name, files, device, threads, keep=Path(keep) if keep else None)


def site_of(context: Context) -> Site:
    """Returns the site that a SuperNode's --node-config describes: data, name, device, threads, keep."""
    settings: dict[str, Any] = dict(context.node_config)
    for key in ("data", "name"):  # the name is not that of the folder, because the centre gets it
        if not settings.get(key):
            raise PublicError(f"{key} is not set: use flower-supernode --node-config '{key}=\"...\"'")
    return _site(
        str(settings["name"]), str(settings["data"]), str(settings.get("device", "auto")),
        settings.get("threads"), settings.get("keep"),
    )  # fmt: skip


def same_bits(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answers a site's message with reproducible arithmetic, so that the same message gives the same bits
    every time."""
    with reproducible():
        return call_next(message, context)


client = client_app(site_of, same_bits)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the centre that the app's config describes."""
    settings: dict[str, Any] = {"config": "own", "set": "", "deadline": 120.0, "patience": 600.0} | dict(
        context.run_config
    )
    again = bool(settings.get("resume"))
    for key in ("sites", "out", "data"):
        if not settings.get(key) and not (again and key != "sites"):
            raise ConfigError(f"{key} is not set: use --run-config '{key}=...' (see docs/deploy.md)")
    loaded = None
    if not again:
        sets = [f"data.path={settings['data']}", *str(settings["set"]).split()]
        loaded = load_config(str(settings["config"]), sets)
    path, count = Path(str(settings["resume"] if again else settings["out"])), int(settings["sites"])
    view = FederationView(Console(force_terminal=False, highlight=False, width=200))
    with centre.opened(loaded, path, again, [], count) as (sim, terms, names), silenced():
        folder.write_atomic(path / resuming.SERVE, json.dumps({resuming.FLOWER: count}).encode() + b"\n")
        times = float(settings["deadline"]), float(settings["patience"])
        fleet = Fleet(grid, names, count, *times, view.tell, asked=True)
        result = centre.conduct(sim, terms, fleet, path, again, bool(settings.get("share-model")), view)
    view.tell(f"{result.score_text}  in {path}")
