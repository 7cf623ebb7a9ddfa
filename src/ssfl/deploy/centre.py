"""The centre: labelled images, and the rounds with whatever sites are there.

A round is the simulation's: the same cohorts, the same averaging, the same run folder. What differs is that
users train elsewhere, take their time, and may not come back.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ssfl import assemble, runs, train
from ssfl.config import check
from ssfl.data import split
from ssfl.deploy import keys as keyring
from ssfl.deploy import link, silenced, wire
from ssfl.errors import ConfigError, DataError, RunError, SsflError
from ssfl.federation import State, only, play_round
from ssfl.runs import Checkpoint, Event
from ssfl.settings import Config
from ssfl.simulation import Simulation
from ssfl.work import TOLD, Trained

POLL = 0.25
"""Seconds between two looks for answers."""
LINE_EVERY = 10.0
"""Seconds between two lines about who is missing."""
Tell = Callable[[str], None]


@dataclass
class Fleet:
    """The sites, as the centre reaches them."""

    grid: Grid
    names: list[str]
    """In the order of the users' numbers."""
    needed: int
    """How many sites must be there when a round begins."""
    deadline: float
    """Seconds that sites have for a round."""
    patience: float
    """Seconds to wait for missing sites."""
    tell: Tell
    asked: bool = False
    """Whether sites tell their names themselves, for want of keys."""
    images: dict[str, int] = field(default_factory=dict)
    """How many images each site has."""
    _nodes: dict[int, str] = field(default_factory=dict)
    """Who is behind a number of Flower's."""

    def connected(self) -> dict[int, int]:
        """Flower's number of each user that is there."""
        online = {node.node_id: node.name for node in self.grid.get_nodes()}
        self._nodes = {node: name for node, name in self._nodes.items() if node in online}
        self._greet({node: name for node, name in online.items() if node not in self._nodes})
        found = {name: node for node, name in self._nodes.items()}
        return {user: found[name] for user, name in enumerate(self.names) if name in found}

    def _greet(self, strangers: Mapping[int, str]) -> None:
        """Ask new sites who they are and how many images they have."""
        asked = {node: RecordDict({"config": ConfigRecord({"ask": "who"})}) for node in strangers}
        for node, content in self.exchange(asked, "query", 30.0).items():
            try:
                name = str(content["config"]["name"]) if self.asked else strangers[node]
                count = int(content["told"]["images"])
            except (KeyError, ValueError, TypeError):
                continue
            if self.asked and name not in self.names and len(self.names) < self.needed:
                self.names = sorted([*self.names, name])
            if name not in self.names or name in self._nodes.values():
                self.tell(
                    f"{name} is turned away: " + ("twice the same name" if name in self.names else "no seat")
                )
                continue
            self._nodes[node], self.images[name] = name, count
            self.tell(f"{name} is connected with {count} images")

    def gather(self) -> dict[int, int]:
        """Wait until enough sites are there."""
        end, told = time.monotonic() + self.patience, 0.0
        while True:
            there = self.connected()
            if len(there) >= self.needed:
                return there
            missing = [name for user, name in enumerate(self.names) if user not in there]
            line = f"{len(there)} of {self.needed} sites are there"
            line += f", {', '.join(missing[:10])} not" if missing else ""
            if time.monotonic() > end:
                raise RunError(
                    f"{line}, after {self.patience:.0f} s: get them to join, or ask for fewer with --sites"
                )
            if time.monotonic() - told > LINE_EVERY:
                told = time.monotonic()
                self.tell(f"waiting: {line}")
            time.sleep(1)

    def exchange(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, RecordDict]:
        """Send each node its content; the answers that come in time."""
        if not contents:
            return {}
        end, inbox = time.monotonic() + deadline, Queue[tuple[int, Message | Exception]]()
        pause = POLL * max(1, len(contents) / 10)

        def fetch(node: int, name: str) -> None:
            """One thread for each: a site that stops in the middle of its answer holds up nobody else."""
            try:
                while time.monotonic() < end:
                    for reply in self.grid.pull_messages([name]):
                        return inbox.put((node, reply))
                    time.sleep(pause)
            except Exception as error:
                inbox.put((node, error))

        for node, content in contents.items():
            message = Message(content, dst_node_id=node, message_type=kind, ttl=deadline)
            for name in self.grid.push_messages([message]):
                threading.Thread(target=fetch, args=(node, name), daemon=True).start()
        meanwhile()
        answers: dict[int, RecordDict] = {}
        missing = set(contents)
        with suppress(Empty):
            while missing:
                node, reply = inbox.get(timeout=max(end - time.monotonic(), 0.01))
                missing.discard(node)
                if isinstance(reply, Message) and reply.has_content():
                    answers[node] = reply.content
                else:
                    why = reply.error.reason if isinstance(reply, Message) else reply
                    self.tell(f"{self._nodes.get(node, node)} has no answer: {why}")
        for node in missing:
            self.tell(f"{self._nodes.get(node, node)} did not answer within {deadline:.0f} s")
        return answers

    def train(
        self, rows: Mapping[int, Tensor], terms: str, round: int, meanwhile: Callable[[], None]
    ) -> tuple[Collection[int], dict[int, tuple[Tensor, dict[str, float]]]]:
        """Who was sent a model, and the models and numbers of those that came back in time."""
        nodes = self.gather()
        users = {nodes[user]: user for user in rows if user in nodes}
        contents = {
            node: wire.pack(rows[user], terms=terms, user=user, round=round) for node, user in users.items()
        }
        came = {}
        for node, content in self.exchange(contents, "train", self.deadline, meanwhile).items():
            try:
                came[users[node]] = wire.unpack(content, rows[users[node]].numel()), wire.read_told(content)
            except DataError as error:
                self.tell(f"{self._nodes.get(node, node)} is left out of round {round + 1}: it sent {error}")
        return list(users.values()), came

    def dismiss(self, why: str) -> None:
        """Tell everybody that all rounds are played; who leaves at once need not answer."""
        self.tell = lambda line: None
        end = {"ask": "end", "why": why}
        self.exchange(
            {node: RecordDict({"config": ConfigRecord(end)}) for node in self._nodes}, "query", 10.0
        )


@dataclass(frozen=True, kw_only=True)
class Centre(Simulation):
    """A simulation whose users are real."""

    terms: str
    fleet: Fleet

    def play(self, state: State) -> tuple[State, list[Event]]:
        """The next round: send, train here and there, average what came back."""
        drawn, method, engine = self.plan.cohort(state.round), self.config.method, self.engine
        own = self.plan.server_work(state.round) if method.server != "none" else None
        trained: list[Trained] = []  # by a parallel server, while the sites train

        def train_server(rows: Tensor, kept: Tensor, part: slice) -> Trained:
            if own is None:
                raise RuntimeError("a server without images does not train")
            return trained.pop() if trained else engine.train(rows, kept, own)

        def meanwhile() -> None:
            if method.server == "parallel":
                rows = state.average.repeat(self.plan.replicas, 1)
                trained.append(train_server(rows, torch.zeros_like(rows[:, : self.layout.weights]), slice(0)))

        rows = {user: state.streams[stream] for user, stream in zip(drawn.users, drawn.streams, strict=True)}
        sent, came = self.fleet.train(rows, self.terms, state.round, meanwhile)
        cohort = only(drawn, sent, came)
        if not cohort.users:
            raise RunError(
                f"no site gave a model in round {state.round + 1}: look at the sites, or give them longer "
                "with --deadline"
            )

        def train_users(rows: Tensor, kept: Tensor, part: slice) -> Trained:
            back = [came[user] for user in cohort.users[part]]
            told = {name: torch.tensor([numbers[name] for _, numbers in back]) for name in TOLD}
            models = torch.stack([row for row, _ in back]).to(rows)
            return Trained(models, kept, {name: values.to(rows) for name, values in told.items()})

        new, outcome = play_round(
            state,
            cohort,
            train_users=train_users,
            train_server=train_server,
            server=method.server,
            server_weight=method.server_weight,
            replicas=self.plan.replicas,
            slots=cohort.slots,
            statistics_from_server=self.config.model.norm_statistics == "server",
        )
        return new, [self._round_event(new.round, cohort, outcome)]


def prepare(config: Config) -> tuple[Simulation, str]:
    """The centre's half of the federation, and the terms for the sites."""
    wire.check(config)
    dataset = assemble.load_data(config)
    labels = dataset.labels.numpy()
    held, kept = split.hold_out(labels, config.data.validation, config.split.seed)
    server = kept[labels[kept] >= 0]
    config = replace(config, split=replace(config.split, server_labels=len(server)))
    rounds = config.run.eval_every or 1, config.run.checkpoint_every or 1
    config = replace(config, run=replace(config.run, eval_every=rounds[0], checkpoint_every=rounds[1]))
    config = assemble.resolve(config, dataset)
    terms = wire.Terms.of(config, dataset).text()
    parts = split.Parts(server, [np.zeros(0, np.int64)] * config.split.users)
    run = replace(config.run, engine="loop", users_at_once=1)
    device = assemble.choose_device(config.run.device)
    sim = assemble.build(replace(config, run=run), dataset, parts, held, device)
    own = replace(sim.config, run=replace(sim.config.run, engine="sites"))
    return replace(sim, plan=replace(sim.plan, config=own)), terms


def with_sites(sim: Simulation, terms: str, fleet: Fleet) -> Centre:
    """The centre's half, and the sites."""
    return Centre(**{part.name: getattr(sim, part.name) for part in fields(sim)}, terms=terms, fleet=fleet)


@dataclass(frozen=True)
class Place:
    """Where a centre listens and how long it waits."""

    keys: Path | None
    """The keys folder; without one nothing is encrypted, on this machine alone."""
    host: str
    port: int
    sites: int | None
    """How many sites must be there; by itself all that have keys."""
    deadline: float
    patience: float


def serve(
    config: Config | None, path: Path, place: Place, again: bool, tell: Tell, report: train.Report | None
) -> train.Result:
    """Play the rounds with the sites, into a new run folder, or into one that was stopped."""
    known = {} if place.keys is None else keyring.sites(place.keys)
    if place.keys is not None and not known:
        raise SsflError(
            f"{place.keys} holds no site's key: add one with `ssfl keys add NAME --dir {place.keys}`"
        )
    count = place.sites if place.keys is None else len(known)
    needed = place.sites or len(known)
    if not count:
        raise ConfigError("without keys, say with --sites how many sites there will be")
    if needed > count:
        raise ConfigError(
            f"--sites {needed} is more than the {count} sites that have keys: add keys, or lower it"
        )
    if again:
        config = runs.read_config(path)
        if config.run.engine != "sites":
            raise RunError(f"{path} is a simulation: go on with `ssfl resume {path}`")
        if config.split.users != count:
            raise RunError(f"{path} was begun with {config.split.users} sites, there are keys of {count} now")
    else:
        runs.require_free(path)
    assert config is not None
    config = replace(config, split=replace(config.split, users=count))
    check(config)
    with train.reproducible(), train.enough_memory():
        sim, terms = prepare(config)
        told = assemble.describe_split(sim.dataset, sim.parts, sim.validation)
        if not again:
            runs.create(path, sim.config, told | {"sites": list(known)})
        with runs.locked(path), silenced():
            if again:
                train.check_unchanged(sim, path)
            with link.running(
                path / "flower", place.keys, place.host, place.port, known, place.deadline
            ) as grid:
                shown = "not encrypted, this machine alone" if place.keys is None else "TLS"
                tell(f"listening on {place.host}:{place.port} ({shown}); sites: {', '.join(known) or count}")
                fleet = Fleet(
                    grid, list(known), needed, place.deadline, place.patience, tell, place.keys is None
                )
                try:
                    fleet.gather()
                except RunError as error:
                    raise RunError(f"{error}; then go on with `ssfl serve --resume {path}`") from error
                runs.write_split(path, told | _shares(fleet))
                start = runs.load_checkpoint(path, sim.device) if again else None
                if start is None:
                    start = Checkpoint(sim.initial(), {}, train.conditions(sim))
                runs.cut_events(path, start.state.round)
                result = train.rounds(with_sites(sim, terms, fleet), path, start, report)
                fleet.dismiss(f"all {sim.rounds} rounds are played; accuracy {100 * result.accuracy:.1f} %")
                return result


def _shares(fleet: Fleet) -> dict[str, Any]:
    """Of split.json: the sites and how many images they say they have."""
    sizes = [fleet.images.get(name, 0) for name in fleet.names]
    return {
        "sites": fleet.names,
        "sizes": sizes,
        "size_quartiles": np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist(),
    }
