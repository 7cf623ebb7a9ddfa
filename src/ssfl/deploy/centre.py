"""The centre: the server of a real federation. It has the labelled images, and runs the rounds with the sites
that are connected.

A round is the same as in a simulation: the same cohorts, averaging and run folder. The difference is that the
users train on other machines, take longer, and may drop out.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from queue import Queue
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssfl.config.checks import check
from ssfl.config.settings import Config
from ssfl.core.clock import Phases
from ssfl.core.cohort import Cohort, only
from ssfl.core.events import Event
from ssfl.data import gentle, inventory, split
from ssfl.deploy import keys as keyring
from ssfl.deploy import link, silenced, wire
from ssfl.deploy.fleet import Answers, Fleet
from ssfl.deploy.view import FederationView
from ssfl.engines.local import Returned
from ssfl.engines.work import TrainedRows
from ssfl.errors import ConfigError, RunError, SsflError
from ssfl.federation import METRICS, Named, State
from ssfl.runs import (
    assemble,
    checkpoints,
    doubts,
    folder,
    resolve,
    resuming,
    roster,
    round_loop,
    surroundings,
    train,
)  # fmt: skip
from ssfl.runs.checkpoints import Checkpoint
from ssfl.runs.result import Result
from ssfl.simulate import measuring
from ssfl.simulate.gate import STRIKES
from ssfl.simulate.protocols import Extra
from ssfl.simulate.rounds import Round
from ssfl.simulate.simulation import Simulation

KEPT_BACK = ("loss", "mask_rate", "pseudo_accuracy", "user_loss", "user_mask_rate")
"""The metrics that are removed from the event of a round (its line in events.jsonl) if the run has
differential privacy. In such a run, sites do not report these metrics."""


@dataclass(frozen=True, kw_only=True)
class Centre(Simulation):
    """A simulation in which real sites train instead of simulated users. `terms` is the text with the
    settings that all sites must share."""

    terms: str
    fleet: Fleet

    def play(self, state: State) -> tuple[State, list[Event]]:
        """Runs the next round: sends the models, trains at the centre and at the sites, and averages the
        returned models. Returns the next state and the round's events."""
        phases = Phases(self.device)
        self.leave_out(state)
        self.make_views(state.round, phases)
        workers = _Sites(self, state.round, phases)
        fed = Round(self, state, self.plan.cohort(state.round), workers, keep=False)
        new, answers = self.played(state, fed), workers.answers
        for place, why in fed.log.refused.items():
            self.fleet.refuse(self.fleet.names[fed.cohort.users[place]], why, counts=False)
        for place, times in fed.log.cut.items():
            self.fleet.cut(self.fleet.names[fed.cohort.users[place]], times)
        for place, weight in fed.log.against.items():
            self.fleet.weakened(self.fleet.names[fed.cohort.users[place]], weight)
        strikes = new.strikes.clone()
        for user in answers.refused:
            strikes[user] += 1
        event = measuring.round_event(self.plan, self.message_bytes(), new.round, fed) | dict(answers.traffic)
        if answers.missing:
            event["missing"] = answers.missing
        if answers.again:
            event["asked_again"] = answers.again
        event["phases"] = phases.seconds()
        if self.config.privacy.clip is not None:  # private sites do not report these
            event = {key: value for key, value in event.items() if key not in KEPT_BACK}
        event["refused"] = event.get("refused", {}) | {
            str(user): why for user, why in answers.refused.items()
        }
        return replace(new, strikes=strikes), [event, *self.refusals(new.round)]

    def prepare(self, round: int) -> None:
        """Does nothing. A simulation prepares the next round on the CPU here, but real sites do that
        themselves."""

    def initial(self) -> State:
        """Returns the state before the first round. Unlike in a simulation, it always has a count of refused
        models per user (`strikes`). The centre refuses broken answers even if the gate (the check of updates,
        the setting federation.gate) is off."""
        strikes = torch.zeros(self.config.split.users, dtype=torch.int64)
        return replace(super().initial(), strikes=strikes)

    def leave_out(self, state: State) -> None:
        """Excludes the users whose models were refused `STRIKES` times or more."""
        self.fleet.leave_out([user for user, count in enumerate(state.strikes.tolist()) if count >= STRIKES])

    def refusals(self, round: int) -> list[Event]:
        """Returns the events about refused messages and about updates with reduced weight since the last
        call. All get this round's number. The list of these events is then cleared."""
        events = [event | {"round": round} for event in self.fleet.log]
        self.fleet.log.clear()
        return events


@dataclass
class _Sites:
    """Implements `Workers` (what a round calls to train models) for real sites. The sites train the users'
    models, and this process trains the server's model."""

    centre: Centre
    round: int
    phases: Phases
    answers: Answers = field(default_factory=lambda: Answers((), {}, {}, {}))

    def send(
        self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None], extra: Extra | None
    ) -> Cohort:
        """Sends a model to each user of the cohort (the users of this round), and waits for the trained
        models. `start` has one model per row, and `cohort.streams` says which row each user gets. Returns the
        cohort without the users that did not return a model.

        `meanwhile` is called while the sites train. `extra` is a function that returns the tensors that the
        method sends with the model; None if it sends only the model.
        """
        models = {
            user: wire.Sent(start[stream], {} if extra is None else extra([user]))
            for user, stream in zip(cohort.users, cohort.streams, strict=True)
        }
        with self.phases.during("users"):
            self.answers = self.centre.fleet.train(
                models, self.centre.terms, self.round, meanwhile, self.centre.has_server
            )
        back = only(cohort, self.answers.sent, self.answers.returned)
        if not back.users and not self.centre.has_server:
            raise RunError(
                f"no site sent a usable model in round {self.round + 1}: see the reasons above, and check "
                "the sites"
            )
        self._users = back.users
        return back

    def train(self, rows: Tensor, momentum: Tensor, part: slice, sent: Named) -> Returned:
        """Returns the models and metrics that the sites sent back. `part` says for which users: it is a slice
        of the users that returned a model. Nothing is computed here, because the sites did the training.
        `momentum` is returned unchanged, and `sent` is not used."""
        back = [self.answers.returned[user] for user in self._users[part]]
        metrics = {name: torch.tensor([numbers[name] for _, numbers in back]).to(rows) for name in METRICS}
        return Returned(torch.stack([row for row, _ in back]).to(rows), momentum, metrics)

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """Trains models on the server's labelled images in this process, and returns the result. Each of
        `rows` is a model to train, as one vector of weights and running statistics. `momentum` has the
        optimiser's momentum of each model."""
        with self.phases.during("server"):
            return self.centre.engine.train(rows, momentum, self.centre.plan.server_work(self.round))


def prepare(config: Config) -> tuple[Simulation, str]:
    """Returns a simulation that has the centre's images and no users' images, and the terms. The terms are a
    text with the settings that all sites must share."""
    wire.check(config)
    original = config
    dataset = replace(resolve.load_data(config), users=None, names=(), loose=0)  # the sites are the users
    if gentle.kind_of(dataset.weak, dataset.strong) != config.data.views:
        raise ConfigError(
            f"{config.data.name} has its own augmentations, which cannot be sent to sites: remove weak and "
            "strong from its ssfl.Data",
            key="data.name",
            value=config.data.name,
        )
    labels = dataset.labels.numpy()
    held, kept = resolve.set_aside(config, dataset)
    if dataset.server is not None:
        kept = np.intersect1d(kept, dataset.server)
    server = kept[labels[kept] >= 0]
    config = replace(config, split=replace(config.split, server_labels=len(server)))
    gate = config.federation.gate is not False
    config = replace(config, federation=replace(config.federation, gate=gate))
    rounds = config.run.eval_every or 1, config.run.checkpoint_every or 1
    config = replace(config, run=replace(config.run, eval_every=rounds[0], checkpoint_every=rounds[1]))
    config = resolve.resolve(config, dataset)
    parts = split.Parts(server, [np.zeros(0, np.int64)] * config.split.users)
    at_sites = replace(config, run=replace(config.run, engine="sites"))
    doubts.warn(original, at_sites, dataset, parts, held)
    run = replace(config.run, engine="loop", users_at_once=1)
    device = assemble.choose_device(config.run.device)
    sim = assemble.build(replace(config, run=run), dataset, parts, held, device)
    terms = wire.Terms.of(config, dataset, sim.brought).text()
    # Each site chooses its own precision unless the user's config sets one. Keep the train section as it was,
    # so that this also holds after a resume.
    centre_config = replace(sim.config, train=config.train, run=replace(sim.config.run, engine="sites"))
    return replace(sim, plan=replace(sim.plan, config=centre_config)), terms


def with_sites(sim: Simulation, terms: str, fleet: Fleet) -> Centre:
    """Returns the centre: the same simulation, except that the sites in `fleet` train the users' models.
    `terms` is the text with the settings that all sites must share."""
    return Centre(**{part.name: getattr(sim, part.name) for part in fields(sim)}, terms=terms, fleet=fleet)


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
    known = {} if place.keys is None else keyring.sites(place.keys)
    if place.keys is not None:
        if not known:
            raise SsflError(
                f"{place.keys} has no key of a site: make one with `ssfl keys add NAME --dir "
                f"{quote(str(place.keys))}`"
            )
        keyring.check_dates(place.keys)
    count = place.sites if place.keys is None else len(known)
    needed = place.sites or len(known)
    if not count:
        raise ConfigError("the number of sites is unknown: without keys, set it with --sites")
    if needed > count:
        raise ConfigError(f"--sites {needed}: only {count} sites have keys. Add keys, or use at most {count}")
    with opened(config, path, again, list(known), count) as (sim, terms, names), silenced():
        folder.write_atomic(path / resuming.SERVE, json.dumps(place.options()).encode() + b"\n")
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
                fleet.look = keyring.Watch(place.keys, known, set(gone), fleet, grid.renew).look
            return conduct(sim, terms, fleet, path, again, place.share, view)


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
