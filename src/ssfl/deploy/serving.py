"""The work of `ssfl serve`: listens for sites, runs all rounds with them, and sends them the result.
`opened` and `conduct` also serve federations that run under Flower's own commands (`flower.py`)."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from shlex import quote
from typing import Any

import numpy as np

from ssfl.config.checks import check
from ssfl.config.settings import Config
from ssfl.data import inventory
from ssfl.deploy import key_changes, link, silenced
from ssfl.deploy import keys as keyring
from ssfl.deploy.centre import prepare, with_sites
from ssfl.deploy.fleet import Fleet
from ssfl.deploy.view import FederationView
from ssfl.errors import ConfigError, RunError, SsflError, Stopped
from ssfl.runs import (
    checkpoints,
    folder,
    resuming,
    roster,
    round_loop,
    surroundings,
    train,
)  # fmt: skip
from ssfl.runs.checkpoints import Checkpoint
from ssfl.runs.result import Result
from ssfl.signals import Terminated
from ssfl.simulate.simulation import Simulation

DEFAULTS = {"--host": "0.0.0.0", "--port": 8443, "--deadline": 120.0, "--patience": 600.0}
"""The default values of `ssfl serve` options. Options with these values are left out of the command that
resumes a run."""


@dataclass(frozen=True)
class Place:
    """The options of `ssfl serve`: where the centre listens, and how long and for how many sites it waits."""

    keys: Path | None
    """The keys folder. None: connections are not encrypted, and only this machine can connect."""
    host: str
    port: int
    sites: int | None
    """How many sites to wait for before the first round. None: all sites that have keys. Without keys, it
    must not be None."""
    deadline: float
    patience: float
    quorum: int | None = None
    """How many sites a round needs. None: two thirds of the sites that have joined, and at least two."""
    share: bool = False
    """Whether the final model is sent to the sites."""

    def options(self) -> dict[str, Any]:
        """Returns the options, with their values, that `ssfl serve` needs to resume this run in the same way.
        Options with default values are left out."""
        secure = self.keys is not None
        values: dict[str, Any] = {
            "--keys": str(self.keys) if secure else None, "--insecure": None if secure else True,
            "--host": self.host if secure else None, "--port": self.port, "--sites": self.sites,
            "--deadline": float(self.deadline), "--patience": float(self.patience), "--quorum": self.quorum,
            "--share-model": True if self.share else None,
        }  # fmt: skip
        return {key: value for key, value in values.items() if value not in (None, DEFAULTS.get(key))}


def serve(config: Config | None, path: Path, place: Place, again: bool, view: FederationView) -> Result:
    """Runs a whole federation as its centre: listens for sites, runs the rounds and returns the result.

    With `again`, it continues the stopped run in the folder `path`, whose config it reads; `config` is then
    not used. Otherwise it creates this folder. `place` has the options of `ssfl serve`, and `view` shows the
    progress.
    """
    warning = "" if place.keys is None else keyring.check_dates(place.keys)
    known = {} if place.keys is None else keyring.sites(place.keys)
    if place.keys is not None and not known:
        raise SsflError(
            f"{place.keys} has no key of a site: make one with `ssfl keys add NAME --dir "
            f"{quote(str(place.keys))}`"
        )
    count = place.sites if place.keys is None else len(known)
    needed = place.sites or len(known)
    if not count:
        raise ConfigError("the number of sites is unknown: without keys, set it with --sites")
    if needed > count:
        raise ConfigError(f"--sites {needed}: only {count} sites have keys. Add keys, or use at most {count}")
    with (
        opened(config, path, again, list(known), count) as (sim, terms, names),
        silenced(),
        _stoppable(sim.config, path),
    ):
        folder.write_atomic(path / resuming.SERVE, json.dumps(place.options()).encode() + b"\n")
        if warning:
            view.tell(f"warning: {warning}")
        view.tell(_labelled(sim))
        notes: Queue[dict[str, Any]] = Queue()
        size = sim.message_bytes()
        with link.running(
            path / "flower", place.keys, place.host, place.port, known, place.deadline, size, notes.put
        ) as grid:
            security = "not encrypted, only from this machine" if place.keys is None else "TLS"
            view.tell(
                f"listening on {place.host}:{place.port} ({security}); sites: {', '.join(known) or count}"
            )
            gone = [name for name in names if known and name not in known]
            new = set(names) - set(roster.begun_with(path)) if again and known else ()
            if new:
                view.tell(f"new sites since this run began: {', '.join(sorted(new))}")
            if gone:
                view.tell(f"excluded because they have no key: {', '.join(gone)}")
            fleet = Fleet(
                grid=grid, names=names, needed=needed, quorum=place.quorum, asked=place.keys is None,
                deadline=place.deadline, patience=place.patience,
                tell=view.tell, notes=notes, exclude=grid.exclude, left_out=set(gone),
            )  # fmt: skip
            if place.keys is not None:
                fleet.look = key_changes.Watch(place.keys, known, set(gone), fleet, grid.renew).look
            return conduct(sim, terms, fleet, path, again, place.share, view)


@contextmanager
def _stoppable(config: Config, path: Path) -> Iterator[None]:
    """If Ctrl-C or SIGTERM stops the `with` block outside of a round, raises an error with the command that
    continues the run in the folder `path`. If the run is finished, nothing is changed."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        if folder.read_summary(path) is not None:
            raise
        by = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        raise Stopped(f"stopped; continue with `{resuming.command(config, path)}`", by) from None


def _labelled(sim: Simulation) -> str:
    """Returns a line that describes the classes and numbers of the centre's labelled images. It is shown
    before sites connect, so that the operator notices a wrong folder."""
    data = sim.dataset
    without = int((data.labels < 0).sum())
    ignored = f"; {without} images without a label are not used" if without else ""
    return (
        f"{len(data.classes)} classes ({', '.join(data.classes[:5])}{', ...' if data.classes[5:] else ''}): "
        f"{len(sim.parts.server)} labelled images to train on, {len(data.test_labels)} to test on{ignored}"
    )


@contextmanager
def opened(
    config: Config | None, path: Path, again: bool, known: list[str], count: int
) -> Iterator[tuple[Simulation, str, list[str]]]:
    """Creates the run folder `path`, or reopens it with `again`, and locks it until the end of the `with`
    block. With `again`, `config` is not used: the folder has the config. `known` are the names of the sites
    with keys. `count` is the number of sites with keys or, without keys, of sites that may join.

    Yields the simulation with the centre's images, the terms (a text with the settings that all sites must
    share), and the names of the sites.
    """
    if again:
        config = folder.read_config(path)
        if config.run.engine != "sites":
            raise RunError(
                f"{path} is a simulated run, not one of `ssfl serve`: continue it with "
                f"`{resuming.command(config, path)}`"
            )
        if folder.read_summary(path) is not None:
            raise RunError(f"{path} is finished: start a new run with --data")
        folder.require_resumable(path)
        folder.require_same_code(path, "model", config.model.name)
        folder.require_same_code(path, "method", config.method.name)
        config, known = roster.going_on(path, config, known, count)
    else:
        folder.require_free(path)
        assert config is not None
        config = replace(config, split=replace(config.split, users=count))
    check(config)
    with surroundings.reproducible(), surroundings.enough_memory():
        sim, terms = prepare(config)
        if not again:
            folder.create(path, sim.config, _described(sim) | {"sites": known}, sim.brought)
        with folder.locked(path):
            if again:
                train.check_unchanged(sim, path)
            yield sim, terms, known


def conduct(
    sim: Simulation, terms: str, fleet: Fleet, path: Path, again: bool, share: bool, view: FederationView
) -> Result:
    """Runs all remaining rounds with the sites in `fleet` and returns the result. `terms` is the text with
    the settings that all sites must share. With `again`, it starts from the newest checkpoint in the folder
    `path`. At the end it tells the sites that the run is over, and sends them the final model if `share` is
    true."""
    start = checkpoints.newest(path, sim.device) if again else None
    centre = with_sites(sim, terms, fleet)
    now = round_loop.conditions(sim)
    if start is None:
        start = Checkpoint(centre.initial(), {}, now)
    start = replace(start, state=roster.grown(start.state, sim.config.split.users))
    train.require_frozen(start, now, sim.config, path)
    changed = train.changes(start.conditions, now)
    if changed:
        view.tell(f"warning: {changed}: results may differ from now on")
    view.watch(fleet, sim.rounds)
    command = resuming.command(sim.config, path)
    folder.cut_events(path, start.state.round, sim.config.privacy.clip is not None)
    centre.leave_out(start.state)
    try:
        try:
            fleet.gather(first=True)
        except RunError as error:
            raise RunError(f"{error}; then continue with `{command}`") from error
        folder.write_split(path, _described(sim) | _shares(fleet))  # the names, and the sizes known so far
        result = round_loop.play(centre, path, start, view.report)
    finally:
        with suppress(RunError):  # if a full disk ended the run, that error is the one to show
            last = max((event["round"] for event in folder.read_events(path)), default=0)
            for event in centre.refusals(last):
                folder.append_event(path, event)
            folder.write_split(path, _described(sim) | _shares(fleet))
    why = f"all {sim.rounds} rounds are done; {result.score_text}"
    if share:
        tensors, card = folder.read_model(path / "model.safetensors")
        del card["data"]  # the path of the centre's images is not sent to the sites
        fleet.dismiss(why, sim.layout.flatten(tensors), json.dumps(card))
    else:
        fleet.dismiss(why)
    return result


def _described(sim: Simulation) -> dict[str, Any]:
    """Returns the content of split.json that describes the centre's own images."""
    return inventory.describe_split(sim.dataset, sim.parts, sim.validation)


def _shares(fleet: Fleet) -> dict[str, Any]:
    """Returns the content of split.json that describes the sites: their names, and the numbers of images that
    they report."""
    sizes = [fleet.images.get(name, 0) for name in fleet.names]
    return {
        "sites": fleet.names,
        "sizes": sizes,
        "size_quartiles": np.quantile(sizes or [0], [0, 0.25, 0.5, 0.75, 1]).tolist(),
    }
