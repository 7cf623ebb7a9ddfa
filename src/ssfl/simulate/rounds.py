"""One round as a method sees it: `Round` implements `federation.Fed` for simulated users and for real sites.

It sends models, trains, checks what comes back and averages it, and remembers what the events tell. Where and
how users train is handed in: `Workers`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core import averaging, draws
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout, placed
from ssfl.data.dataset import Dataset
from ssfl.engines.local import Returned
from ssfl.engines.work import TrainedRows
from ssfl.errors import MethodError
from ssfl.federation import METRICS, NEEDS, Named, State, Trained, Users
from ssfl.simulate.gate import LENGTH, judge
from ssfl.simulate.plan import Plan
from ssfl.simulate.scoring import Evaluation

USUAL = "usual"
"""What the lengths of updates in the last rounds are called in a state's memory."""


class Experiment(Protocol):
    """What a round needs to know of the experiment that it belongs to."""

    @property
    def config(self) -> Config: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def dataset(self) -> Dataset: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def crowd(self) -> "Crowd | None": ...
    @property
    def holds_models(self) -> bool: ...
    @property
    def has_server(self) -> bool: ...
    @property
    def server_counts(self) -> Tensor: ...

    def server_images(self, most: int | None = None) -> tuple[Tensor, Tensor]: ...
    def score(self, row: Tensor, images: Tensor, labels: Tensor) -> Evaluation: ...
    def predicted(self, row: Tensor, images: Tensor) -> Tensor: ...
    def prepare(self, round: int) -> None: ...


class Workers(Protocol):
    """Who trains a round's users, in this process or elsewhere."""

    def send(self, start: Tensor, cohort: Cohort, meanwhile: Callable[[], None]) -> Cohort:
        """Send the models of the streams; the cohort as it came back. While real sites train, the server may
        (`meanwhile`)."""

    def train(self, rows: Tensor, momentum: Tensor, part: slice, given: Named) -> Returned:
        """What some of the cohort's users make of the rows that they were sent."""

    def train_server(self, rows: Tensor, momentum: Tensor) -> TrainedRows:
        """What the server makes of rows, on its labelled images."""


class Crowd(Protocol):
    """Processes that share the users of a round."""

    def share(self, count: int) -> slice:
        """The places of a cohort that this process trains."""

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """The sum of everybody's streams, and each of the rows of all users, in their order."""


@dataclass(frozen=True)
class Moved:
    """What training did, a number for each trainer."""

    metrics: Named
    """[n] each: loss, mask rate, ..."""
    norms: Tensor
    """[n]: the lengths of the updates."""
    updates: Tensor | None
    """[n, P + Q]: what they did to the rows, where that was asked for."""


@dataclass
class Log:
    """What happened in a round, for its events."""

    users: Moved | None = None
    """None where nobody came back."""
    server: Moved | None = None
    server_sent: Tensor | None = None
    """[P + Q]: what the server started from, where it trained."""
    server_row: Tensor | None = None
    """[P + Q]: what it ended with."""
    server_steps: int = 0
    """How many models the server trained."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why models were refused, by their users' places in the cohort."""
    cut: dict[int, float] = field(default_factory=dict)
    """How many times as long as is usual updates were that were far too long and have been cut."""
    usual: Tensor | None = None
    """The usual length of an update, where there is a gate."""
    told: dict[str, float] = field(default_factory=dict)
    """Further metrics of the method's round."""
    sent_bytes: int = 0
    """What users were sent besides models."""
    reported_bytes: int = 0


class Round:
    """The `Fed` of one round."""

    def __init__(self, sim: Experiment, state: State, cohort: Cohort, workers: Workers, keep: bool) -> None:
        self.sim, self.state, self.cohort, self.workers = sim, state, cohort, workers
        self.layout: Layout = sim.layout
        self.classes, self.users = len(sim.dataset.classes), sim.config.split.users
        self.shape = sim.dataset.shape
        self.needs = frozenset(sim.config.method.needs())
        self.log = Log()
        self._keep = keep
        """Whether the trainers' updates are kept, for gradient diversity."""

    @property
    def server_counts(self) -> Tensor:
        """[classes]: how many labelled images of each class the server has."""
        return self.sim.server_counts

    @property
    def has_server(self) -> bool:
        """Whether the server has labelled images to train on."""
        return self.sim.has_server

    def key(self, purpose: str, *, by_round: bool = True) -> Tensor:
        """Names the draws for a purpose, of this round or of the whole run."""
        seed = self.sim.config.run.seed
        return torch.tensor(draws.key(seed, purpose, *([self.state.round] if by_round else [])))

    def tell(self, **metrics: float) -> None:
        """Add numbers to the round's event."""
        self.log.told |= metrics

    def answers(self, rows: Tensor, images: Tensor) -> Tensor:
        """The probabilities [m, B, classes] that models predict for uint8 images."""
        if not len(rows):
            return rows.new_zeros(0, len(images), self.classes)
        return torch.stack([self.sim.predicted(row, images) for row in rows])

    def above_chance(self, row: Tensor, most: int | None = None) -> float:
        """The accuracy, averaged over classes, on `most` of the server's labelled images, minus chance."""
        each = [
            share
            for share in self.sim.score(row, *self.sim.server_images(most)).per_class
            if share is not None
        ]
        return sum(each) / len(each) - 1 / len(each)

    def confidence(self, row: Tensor, most: int | None = None) -> float:
        """The mean confidence of a model on `most` of the server's labelled images."""
        images, _ = self.sim.server_images(most)
        return float(self.sim.predicted(row, images).amax(-1).mean())

    # --- training -------------------------------------------------------------------------------------------

    def train_server(self, row: Tensor) -> Trained:
        """Train a row on the server's labelled images."""
        return self._train_server(row[None])[1]

    def _train_server(self, sent: Tensor) -> tuple[Tensor, Trained]:
        """The rows of the server, one or a replica for each group, and what is kept of the first."""
        if not self.has_server:
            raise MethodError("the round trains the server, which has no labelled images: ask fed.has_server")
        count = len(sent)
        slots = range(len(self.state.momentum) - count, len(self.state.momentum))
        trained = self.workers.train_server(sent, self._momentum(slots, sent))
        self.log.server = self._moved(sent, trained.rows, trained.metrics)
        self.log.server_sent, self.log.server_row = sent[0], trained.rows[0]
        self.log.server_steps += count
        self.sim.prepare(self.state.round + 1)  # the device is busy meanwhile
        kept = ((placed(slots, sent.device), trained.momentum),) if len(self.state.momentum) else ()
        return trained.rows, Trained(trained.rows[0], kept)

    def train_users(
        self,
        start: Tensor,
        *,
        server: Tensor | None = None,
        server_weight: float | None = None,
        replicas: int = 1,
        give: Callable[[Sequence[int]], Named] | None = None,
    ) -> Users:
        """Send every user the model of its group, let it train, and average what comes back."""
        if give is not None and "sends" not in self.needs:
            raise MethodError(f"the round needs {NEEDS['sends']}: add 'sends' to what needs() returns")
        own: list[tuple[Tensor, Trained]] = []

        def train_own() -> None:
            if server is not None and not own:
                own.append(self._train_server(server.repeat(replicas, 1)))

        cohort = self.cohort = self.workers.send(start, self.cohort, train_own)
        returned = self._trained_users(start, cohort, server is not None, server_weight, give)
        train_own()
        return self._averaged(start, returned, own, server_weight)

    def _trained_users(
        self,
        start: Tensor,
        cohort: Cohort,
        server: bool,
        server_weight: float | None,
        give: Callable[[Sequence[int]], Named] | None,
    ) -> "Sums | None":
        """Train the cohort, a part at a time, and add the models to their groups' sums as they come, so that
        no more of them are held at a time, unless all are needed together."""
        count, crowd = len(cohort.users), self.sim.crowd
        if not count:
            return None
        hold = self.sim.holds_models
        matrix = None
        if self.sim.config.method.start == "group":
            matrix = averaging.mixing(cohort.groups, server, server_weight)
            matrix = placed(matrix.to(start.dtype), start.device)
        sums = torch.zeros_like(start)
        moved, held, at_once = [], [], self.sim.config.run.users_at_once or count
        policy = self.sim.config.train.momentum_policy
        slots = cohort.users if policy == "user" else cohort.slots
        keeps = policy in ("slot", "user")
        share = slice(0, count) if crowd is None else crowd.share(count)
        kept: list[Tensor] = []
        for first in range(share.start, share.stop, at_once):
            part = slice(first, min(first + at_once, share.stop))
            # "The server sends the averaged model weights": user k of group i receives w_avg,i.
            sent = start[placed(cohort.streams[part], start.device)]
            given = {} if give is None else give(cohort.users[part])
            # "Each user locally updates its own model weights to w_k."
            momentum = self._momentum(slots[part] if keeps else None, sent)
            back = self.workers.train(sent, momentum, part, given)
            self.log.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in given.values())
            if self.sim.config.federation.skip_unlabelled:
                learned = (back.metrics["mask_rate"] > 0).to(sent.dtype)
                back = back._replace(weight=learned if back.weight is None else learned * back.weight)
            kept.append(back.momentum)
            # Equations (7) and (8): each group averages its users (the server joins in `_averaged`).
            if hold:
                held.append((sent, back))
            elif matrix is not None:
                sums = sums.addmm(matrix[:, 1 + part.start : 1 + part.stop], back.rows)
            moved.append(self._moved(sent, back.rows, back.metrics))
        uneven = ("steps",) if self.sim.config.federation.local_epochs else ()
        users = _together(moved, (*METRICS, *self.sim.config.method.metrics, *uneven), start, self._keep)
        momentum = torch.cat(kept) if kept else start[:0, : self.layout.weights]
        if crowd is not None:
            sums, users, momentum = self._exchanged(crowd, sums, users, momentum, count)
        self.log.users = users
        keep = ((placed(slots, start.device), momentum),) if keeps else ()
        return Sums(sums, matrix, keep, held)

    def _averaged(
        self,
        start: Tensor,
        returned: "Sums | None",
        own: list[tuple[Tensor, Trained]],
        server_weight: float | None,
    ) -> Users:
        """The groups' means, with the server's share, from what came back."""
        cohort = self.cohort
        matrix, kept = (None, ()) if returned is None else (returned.matrix, returned.momentum)
        who, groups = list(range(len(cohort.users))), cohort.groups
        means = start if returned is None else returned.sums
        rows = report = sizes = None
        if returned is not None and returned.held:
            sent = torch.cat([part for part, _ in returned.held])
            rows, weight, report = _joined([back for _, back in returned.held])
            self.log.reported_bytes = sum(t.numel() * t.element_size() for t in report.values())
            rows, who = self._passed(sent, rows, weight)
            kept = _only(kept, who) if len(who) < len(rows) else kept
            groups = _regrouped(cohort.groups, who)
            report = {name: tensor[who] for name, tensor in report.items()}
            weight = None if weight is None else weight[who]
            rows = rows[who]
            matrix, means = None, start
            if who and self.sim.config.method.start == "group":
                matrix = averaging.mixing(groups, bool(own), server_weight).to(rows)
                means = (1 - matrix[:, :1]) * torch.stack([self._combined(rows, weight, g) for g in groups])
        counted = returned is not None and bool(who)
        average = means.mean(0) if counted and matrix is not None else self.state.average
        if own:
            trained, first = own[0]
            # "At the same time, the server also updates its own weights from w_avg to w_s."
            means = trained.expand_as(means).clone() if matrix is None else means + matrix[:, :1] * trained
            average, kept = means.mean(0), (*kept, *first.momentum)
        users = placed(torch.tensor([cohort.users[place] for place in who], dtype=torch.int64), start.device)
        if counted and "sizes" in self.needs:
            sizes = self.sim.plan.users.sizes[users]
        return Users(means, average, counted, users, groups, kept, self.needs, rows, report, sizes)

    def _passed(self, sent: Tensor, rows: Tensor, weight: Tensor | None) -> tuple[Tensor, list[int]]:
        """The models as they count, and the places of those that the gate lets through and that have a
        weight."""
        if self.sim.config.federation.gate:
            strikes = self.state.strikes[list(self.cohort.users)]
            verdict = judge(sent, rows, strikes, self.state.memory.get(USUAL))
            rows, self.log.usual = verdict.rows, verdict.usual
            self.log.refused = {place: why for place, why in enumerate(verdict.reasons) if why}
            self.log.cut = {
                place: times
                for place, times in enumerate(verdict.times)
                if times > LENGTH and place not in self.log.refused
            }
        heavy = [True] * len(rows) if weight is None else (weight > 0).tolist()
        return rows, [place for place in range(len(rows)) if heavy[place] and place not in self.log.refused]

    def _combined(self, rows: Tensor, weight: Tensor | None, group: Sequence[int]) -> Tensor:
        """One row of a group's, or of everybody's where the group is empty: the mean or a robust average."""
        federation = self.sim.config.federation
        members = list(group) or list(range(len(rows)))
        weights = None if weight is None else weight[members]
        found = averaging.combined(federation.combine, rows[members], weights)
        return averaging.checked(found, rows[members], self._server_loss) if federation.check else found

    def _server_loss(self, row: Tensor) -> float:
        found = self.sim.score(row, *self.sim.server_images()).loss
        return found if math.isfinite(found) else math.inf

    def _momentum(self, slots: Sequence[int] | None, rows: Tensor) -> Tensor:
        """What trainers start with: kept momentum, or zeros."""
        if slots is not None and len(self.state.momentum):
            return self.state.momentum[placed(list(slots), rows.device)]
        return torch.zeros_like(rows[:, : self.layout.weights])

    def _moved(self, sent: Tensor, rows: Tensor, metrics: Named) -> Moved:
        updates = rows - sent
        norms = torch.linalg.vector_norm(updates[:, : self.layout.weights], dim=1)
        return Moved(metrics, norms, updates if self._keep else None)

    def _exchanged(
        self, crowd: Crowd, sums: Tensor, own: Moved, momentum: Tensor, count: int
    ) -> tuple[Tensor, Moved, Tensor]:
        """The sums, the metrics and the momentum of all users, from those of this process."""
        each = [torch.stack([*own.metrics.values(), own.norms], dim=1).to(sums.dtype)]
        if len(self.state.momentum):
            each.append(momentum)
        if own.updates is not None:
            each.append(own.updates)
        sums, numbers, *rest = crowd.exchange(self.state.average, sums, each, count)
        if len(self.state.momentum):
            momentum = rest.pop(0)
        *metrics, norms = numbers.unbind(1)
        named = dict(zip(own.metrics, metrics, strict=True))
        return sums, Moved(named, norms, rest[0] if rest else None), momentum


@dataclass(frozen=True)
class Sums:
    """What came back of a cohort."""

    sums: Tensor
    """[S, P + Q]: the users' part of the groups' averages."""
    matrix: Tensor | None
    """[S, 1 + C]: the mixing matrix; None where users keep models of their own."""
    momentum: tuple[tuple[Tensor, Tensor], ...]
    held: list[tuple[Tensor, Returned]]
    """What was sent and what came back, where models are held together."""


def _joined(backs: Sequence[Returned]) -> tuple[Tensor, Tensor | None, Named]:
    """The rows, the weights and the reports of all parts of a cohort."""
    weights = [back.weight for back in backs if back.weight is not None]
    report = {name: torch.cat([back.report[name] for back in backs]) for name in backs[0].report}
    return torch.cat([back.rows for back in backs]), torch.cat(weights) if weights else None, report


def _only(momentum: tuple[tuple[Tensor, Tensor], ...], who: list[int]) -> tuple[tuple[Tensor, Tensor], ...]:
    """The momentum of those places alone: who does not count leaves no trace."""
    return tuple((slots[who], values[who]) for slots, values in momentum)


def _regrouped(groups: Sequence[Sequence[int]], who: list[int]) -> tuple[tuple[int, ...], ...]:
    """The groups without the models that do not count, as places among those that do."""
    now = {place: number for number, place in enumerate(who)}
    return tuple(tuple(now[place] for place in group if place in now) for group in groups)


def _together(parts: list[Moved], names: Sequence[str], like: Tensor, keep: bool) -> Moved:
    """Several parts as one; none at all is a cohort of nobody."""
    if not parts:
        nobody = like.new_zeros(0)
        return Moved(dict.fromkeys(names, nobody), nobody, like[:0] if keep else None)
    return Moved(
        {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        torch.cat([part.norms for part in parts]),
        torch.cat([part.updates for part in parts if part.updates is not None]) if keep else None,
    )
