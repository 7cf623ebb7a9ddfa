"""Runs a federation with Flower's own commands instead of `ssfl serve` and `ssfl join`. For `flwr run`, this
module defines a ServerApp (the centre) and a ClientApp (a site).

Here Flower's own SuperLink and SuperNodes carry the messages, start a process for each message, and decide
who may join. The contents of answers are checked as with `ssfl serve`. The checks of `request_filter.py` are
not made, because the centre does not have its own port.
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
from ssfl.deploy import serving, silenced
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
    """Returns the site with these settings. It is cached, so that its files are checked only once per
    process."""
    files = usable(sources.image_files([data]), print)
    return Site(name, files, device, threads, keep=Path(keep) if keep else None)


def site_of(context: Context) -> Site:
    """Returns the site that the options in a SuperNode's --node-config describe: data, name, device, threads
    and keep."""
    settings: dict[str, Any] = dict(context.node_config)
    for key in ("data", "name"):  # the folder's name is no default: the name is sent to the centre
        if not settings.get(key):
            raise PublicError(f"{key} is not set: use flower-supernode --node-config '{key}=\"...\"'")
    return _site(
        str(settings["name"]), str(settings["data"]), str(settings.get("device", "auto")),
        settings.get("threads"), settings.get("keep"),
    )  # fmt: skip


def same_bits(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Handles a site's message with deterministic arithmetic (a Flower mod), so that the same message always
    gives a bit-identical answer."""
    with reproducible():
        return call_next(message, context)


client = client_app(site_of, same_bits)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the centre. Its options are those of the Flower app's run config, such as `sites`, `out` and
    `data`."""
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
    with serving.opened(loaded, path, again, [], count) as (sim, terms, names), silenced():
        folder.write_atomic(path / resuming.SERVE, json.dumps({resuming.FLOWER: count}).encode() + b"\n")
        fleet = Fleet(
            grid=grid, names=names, needed=count, tell=view.tell, asked=True,
            deadline=float(settings["deadline"]), patience=float(settings["patience"]),
        )  # fmt: skip
        result = serving.conduct(sim, terms, fleet, path, again, bool(settings.get("share-model")), view)
    view.tell(f"{result.score_text}  in {path}")
