"""The centre: the server of a real federation. It has the labelled images, and runs the rounds with the sites
that are connected.

A round is the same as in a simulation: the same cohorts, averaging and run folder. The difference is that the
users train on other machines, take longer, and may drop out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core.clock import Phases
from ssfl.core.cohort import Cohort, only
from ssfl.core.events import Event
from ssfl.data import split
from ssfl.data.views import kind_of
from ssfl.deploy import wire
from ssfl.deploy.fleet import Answers, Fleet
from ssfl.engines.local import Returned
from ssfl.engines.work import TrainedRows
from ssfl.errors import ConfigError, RunError
from ssfl.federation import METRICS, Named, State
from ssfl.runs import (
    assemble,
    doubts,
    resolve,
)  # fmt: skip
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
    if kind_of(dataset.weak, dataset.strong) != config.data.views:
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
