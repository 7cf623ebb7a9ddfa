"""A federation on one machine: plays rounds, evaluates, and tells what happened as events.

`assemble.py` makes one from a config; `train.py` loops over its rounds. Nothing here writes a file.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ssfl import (
    accepting,
    draws,
    engines,
    external,
    fedmatch,
    keeping,
    labelling,
    measuring,
    models,
    outside,
    scoring,
)
from ssfl.clock import Phases
from ssfl.cohort import Cohort
from ssfl.data import split
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Index
from ssfl.engines.dist import Dist
from ssfl.errors import ConfigError, DivergedError
from ssfl.federation import Outcome, State, Train, play_own_streams, play_round
from ssfl.memory import peak
from ssfl.plan import Plan
from ssfl.rows import Layout, row_of, statistics, write_row
from ssfl.runs import Event
from ssfl.sending import sent_back
from ssfl.settings import Config
from ssfl.work import Pool, Trained, Work


@dataclass(frozen=True)
class Simulation:
    """One experiment, ready to play rounds."""

    dataset: Dataset
    parts: split.Parts
    validation: Index
    pool: Pool
    model: nn.Module
    layout: Layout
    engine: engines.Engine
    plan: Plan
    device: torch.device
    make: external.Factory | None = None
    """What makes the network, if it was passed as a Python object."""
    brought: dict[str, Any] = field(default_factory=dict)
    """How a network from outside is known again: `assemble.brought`."""
    _ahead: dict[int, tuple[Cohort, Work, Work | None]] = field(default_factory=dict, repr=False)
    """What was prepared of the next round while the device was busy with the last."""

    @property
    def config(self) -> Config:
        """Resolved: nothing is left to be chosen."""
        return self.plan.config

    @property
    def crowd(self) -> Dist | None:
        """The other processes, where users are spread over some."""
        return self.engine if isinstance(self.engine, Dist) else None

    @property
    def rounds(self) -> int:
        return self.config.federation.rounds or 0

    def initial(self) -> State:
        """Every stream and the server start from the same random weights (seed run.seed)."""
        network = network_of(self.config, self.dataset, self.make)
        row = row_of(network, self.layout).to(self.device, self.pool.wide)
        slots = {
            "reset": 0,
            "slot": self.plan.participants + self.plan.replicas,
            "user": self.config.split.users + self.plan.replicas,
        }[kept_per(self.config)]
        momentum = row.new_zeros(slots, self.layout.weights)
        strikes = torch.zeros(self.config.split.users if self.config.method.gate else 0, dtype=torch.int64)
        streams = row.repeat(self.plan.streams, 1)
        weights = streams[:, : self.layout.weights]
        first = keeping.first(self.config.method, row, weights, self._server_counts())
        return State(0, streams, row, momentum, strikes, first)

    def _server_counts(self) -> Tensor:
        """How many labelled images of each class the server has, [classes]."""
        labels = self.pool.labels[self.plan.server.images]
        return torch.bincount(labels, minlength=len(self.dataset.classes)).to(self.pool.wide)

    def play(self, state: State) -> tuple[State, list[Event]]:
        """The next round and what it tells; raises where a number is not finite."""
        ready = self._ahead.get(state.round)
        cohort, users, own = self.plan.prepare(state.round) if ready is None else ready
        method, every = self.config.method, self.config.run.diversity_every
        last = state.round + 1 == self.rounds
        diverse = bool(every and (state.round % every == 0 or last) and cohort.users)
        helpers, phases = self._helpers(state, cohort), Phases(self.device)
        looks: list[Tensor | None] = []

        def train_server(rows: Tensor, kept: Tensor, part: slice) -> Trained:
            assert own is not None
            with phases.during("server"):
                return self.engine.train(rows, kept, own)

        def train_users(rows: Tensor, kept: Tensor, part: slice) -> Trained:
            work = users.of(part)
            if helpers is not None:
                near, half = helpers[part], state.momentum.shape[1] // 2
                work = replace(work, helpers=state.momentum[near, half:] * (near >= 0)[..., None])
            with phases.during("users"):
                looked = labelling.looked(self.engine, method, rows, work, state.memory.get("shares"))
                trained = self.engine.train(rows, kept, looked.work)
            looks.append(looked.counts)
            who = cohort.users[part]
            back = sent_back(self.config, self.layout, state.round, who, rows, trained.rows, looked.reach)
            found = {"weight": looked.weights, "masked": looked.sure}
            more = {name: numbers for name, numbers in found.items() if numbers is not None}
            return trained._replace(rows=back, stats=trained.stats | more)

        slots = cohort.users if kept_per(self.config) == "user" else cohort.slots
        if self.plan.own_streams:
            new, outcome = play_own_streams(
                state,
                cohort,
                train_users=train_users,
                rule=method.averaging,
                elasticity=method.elasticity or 0.0,
                slots=slots,
                keep_updates=diverse,
            )
        else:
            new, outcome = self._averaged(
                state,
                cohort,
                train_users,
                train_server,
                slots=slots,
                at_once=self.config.run.users_at_once,
                keep_updates=diverse,
                crowd=self.crowd,
            )
        if "shares" in new.memory:
            shares = torch.stack([self._server_counts(), *(c for c in looks if c is not None)]).sum(0)
            new = replace(new, memory=new.memory | {"shares": shares})
        self.prepare(new.round)
        events = [self._round_event(new.round, cohort, outcome)]
        if helpers is not None:  # half a row each
            events[0]["bytes_down"] += int((helpers >= 0).sum()) * self.message_bytes() // 2
        if diverse:
            with phases.during("diversity"):
                events.append(measuring.diversity_event(self, state, cohort, outcome))
        events[0]["phases"] = phases.seconds()
        return new, events

    def prepare(self, round: int) -> None:
        """What the next round needs of this machine, while its device works."""
        if self.device.type == "cuda" and round < self.rounds and round not in self._ahead:
            self._ahead.clear()
            self._ahead[round] = self.plan.prepare(round)

    @cached_property
    def guarded(self) -> tuple[Tensor, Tensor]:
        """What `accepting` judges averages by, found once."""
        return accepting.guarded(self)

    def _averaged(
        self, state: State, cohort: Cohort, train_users: Train, train_server: Train, **more: Any
    ) -> tuple[State, Outcome]:
        """A round as this experiment's settings want it, whoever trains."""
        method = self.config.method
        new, outcome = play_round(
            state,
            cohort,
            train_users=train_users,
            train_server=train_server,
            server=method.server,
            server_weight=method.server_weight,
            replicas=self.plan.replicas,
            statistics_from_server=self.config.model.norm_statistics == "server",
            server_momentum=method.server_momentum,
            **accepting.rules(self, state, cohort),
            **more,
        )
        return keeping.over_rounds(method, new, outcome.counted), outcome

    def evaluate(self, state: State) -> Event:
        """The averaged model on the test images, if it is time for them, and on the validation images, if
        there are any."""
        row = self.final_row(state)
        event: Event = {"event": "eval", "round": state.round, "memory": peak(self.device)}
        when = self.config.run.test
        if when == "every" or (when == "last" and state.round == self.rounds):
            test = self.dataset.test_images.to(self.device), self.dataset.test_labels
            accuracy, loss, per_class = self.score(row, *test)
            self._require_finite(state.round, "the averaged model on the test images", [loss])
            event |= {"accuracy": accuracy, "loss": loss, "class_accuracy": per_class}
            # a good average can hide streams that have collapsed
            if len(state.streams) > 1 and not self.plan.own_streams:
                event["stream_accuracy"] = [self.score(stream, *test)[0] for stream in state.streams]
        if len(self.validation):
            held = torch.from_numpy(self.validation)
            images = self.pool.images[held.to(self.device)]
            accuracy, loss, _ = self.score(row, images, self.dataset.labels[held])
            self._require_finite(state.round, "the averaged model on the validation images", [loss])
            event["validation_accuracy"] = accuracy
        return event

    def final_row(self, state: State) -> Tensor:
        """w_avg, or its slow average; statistics recomputed on the server's images where that was asked
        for."""
        row = keeping.evaluated(state)
        if self.config.model.norm_statistics != "recompute":
            return row
        write_row(self.model, self.layout, row)
        self.model.train()
        moved = {name.rpartition(".")[0] for name in statistics(self.model)}
        norms: list[Any] = [self.model.get_submodule(name) for name in sorted(moved)]
        usual = [layer.momentum for layer in norms]
        with torch.no_grad():
            for count, chosen in enumerate(self.plan.server.images.split(self.config.train.batch_size)):
                for layer in norms:  # the plain mean over batches
                    layer.momentum = 1 / (count + 1)
                key = torch.tensor(draws.key(self.config.run.seed, "dropout", count))
                self.model(
                    self.pool.normalised(self.pool.images[chosen], self.pool.wide), key.to(self.device)
                )
        for layer, momentum in zip(norms, usual, strict=True):
            layer.momentum = momentum
        return row_of(self.model, self.layout)

    def final_tensors(self, state: State) -> dict[str, Tensor]:
        """The averaged model by the names of its plain network."""
        tensors = self.layout.unflatten(self.final_row(state))
        return fedmatch.composed(tensors) if isinstance(self.model, fedmatch.Decomposed) else tensors

    def score(self, row: Tensor, images: Tensor, labels: Tensor) -> scoring.Score:
        """How well a model does on these images."""
        write_row(self.model, self.layout, row)
        return scoring.score(self.model, self.pool, images, labels, len(self.dataset.classes))

    def message_bytes(self) -> int:
        """The size of one model on its way."""
        return self.layout.length * self.pool.wide.itemsize

    def _helpers(self, state: State, cohort: Cohort) -> Tensor | None:
        """The users that help each of the cohort [n, H], in FedMatch's rounds with helpers."""
        model, seed = self.model, self.config.run.seed
        if not isinstance(model, fedmatch.Decomposed) or (state.round + 1) % fedmatch.INTERVAL:
            return None
        return fedmatch.helpers_of(model, self.pool, state.momentum, cohort.users, seed)

    def _round_event(self, round: int, cohort: Cohort, outcome: Outcome) -> Event:
        size = self.message_bytes()
        event: Event = {
            "event": "round",
            "round": round,
            "lr": self.plan.rates(round - 1)[0],
            "participants": list(cohort.drawn),
            "returned": list(cohort.users),
            "groups": [[cohort.users[place] for place in group] for group in cohort.groups],
            "bytes_down": size * len(cohort.drawn),
            "bytes_up": size * len(cohort.users),
        }
        if self.config.method.gate:
            event["refused"] = {str(cohort.users[place]): why for place, why in outcome.refused.items()}
        if outcome.users is not None:
            names = list(outcome.users.stats)
            numbers = torch.stack([*outcome.users.stats.values(), outcome.users.norms])
            *told, norms = numbers.tolist()  # the one wait for the device in a round, but for a guard's
            stats = dict(zip(names, told, strict=True))
            for place, (user, *found) in enumerate(zip(cohort.users, stats["loss"], norms, strict=True)):
                if place not in outcome.refused:
                    self._require_finite(round, f"user {user}", found)
            event |= measuring.of_users(stats, norms, outcome.refused)
        if self.config.method.guard:
            event["alone"] = int(outcome.alone)
        if outcome.server is not None:
            found = torch.stack([outcome.server.stats["loss"], outcome.server.norms]).mean(1).tolist()
            event["server_loss"], event["server_update_norm"] = found
            self._require_finite(round, "the server", found)
        return event

    def _require_finite(self, round: int, who: str, numbers: list[float]) -> None:
        if not all(math.isfinite(number) for number in numbers):
            federation = self.config.federation
            attacked = f"lower federation.attack_scale (now {federation.attack_scale}), "
            raise DivergedError(
                f"training broke down in round {round}: the loss or update of {who} is not finite; "
                f"in a new run {attacked if federation.attackers else ''}lower train.lr "
                f"(now {self.config.train.lr}) or add train.warmup steps"
            )


def network_of(config: Config, dataset: Dataset, make: external.Factory | None = None) -> nn.Module:
    """The network that is trained, with its initial weights; `make` makes one that is in memory."""
    name, norm, seed = config.model.name or "", config.model.norm, config.run.seed
    if outside.is_outside(name):
        network = external.named(name, make, len(dataset.classes), dataset.shape, seed)
    else:
        network = models.build(name, len(dataset.classes), dataset.shape, norm, seed)
    if config.method.objective != "fedmatch":
        return network
    if statistics(network):
        raise ConfigError("method.name = 'fedmatch' needs a network without batch normalisation")
    return fedmatch.Decomposed(network)


def kept_per(config: Config) -> str:
    """What a row is kept for between rounds: every "user", every "slot", or nothing ("reset")."""
    return "user" if config.method.objective == "fedmatch" else config.train.momentum_policy
