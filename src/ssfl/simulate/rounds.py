"""One round as a method sees it: `Round` implements `federation.Fed` for simulated users and for real sites.

It sends models, trains them, checks and averages the updates that come back, and logs what the round's events
need. `Workers` (see `protocols.py`) decides where and how users train.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssfl.core import averaging, draws
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout, placed
from ssfl.engines.local import Returned
from ssfl.errors import MethodError
from ssfl.federation import METRICS, NEEDS, Momentum, Named, State, Trained, Users
from ssfl.simulate.gate import LENGTH, NAMED, judge, trusted
from ssfl.simulate.protocols import Experiment, Extra, Ranks, Workers

USUAL = "usual"
"""The key in `State.memory` for the usual norms of updates (medians over users) in the last rounds, see
`gate.py`."""
TRUST = "trust"
"""The key in `State.memory` for the users' trust: how well their updates agreed with the server's labels in
the last rounds, see `gate.py`."""


@dataclass(frozen=True)
class TrainedUpdates:
    """The metrics and updates of n trainers."""

    metrics: Named
    """The metrics of the n trainers by name, [n] each: loss, mask rate and others."""
    norms: Tensor
    """[n]: the norm of each trainer's update."""
    updates: Tensor | None
    """[n, P + Q]: the update of each of the n trainers (P weights and Q running statistics); None unless
    gradient diversity is measured."""


@dataclass
class Log:
    """Records what happened in a round, for its events."""

    users: TrainedUpdates | None = None
    """The metrics and updates of the round's users; None if no user returned a model."""
    server: TrainedUpdates | None = None
    server_sent: Tensor | None = None
    """[P + Q]: the model that the server started from (P weights and Q running statistics); None if it did
    not train."""
    server_row: Tensor | None = None
    """[P + Q]: the model that the server ended with (P weights and Q running statistics); None if it did not
    train."""
    server_steps: int = 0
    """How many models the server trained in this round. Each copy (replica) counts."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why the gate refused a model, by the position of its user in the cohort."""
    cut: dict[int, float] = field(default_factory=dict)
    """Updates that were far too long and were shortened: their norm as a multiple of the usual norm (the
    median over users), by the position of their user in the cohort."""
    usual: Tensor | None = None
    """The usual norm of an update in this round (the median over users); None without a gate."""
    trust: Tensor | None = None
    """[n]: the trust in each of the cohort's users after this round (see `gate.py`); None without a gate or
    without labels at the server."""
    against: dict[int, float] = field(default_factory=dict)
    """The weights of users that the gate hardly trusts, by their positions in the cohort."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics that the method recorded."""
    sent_bytes: int = 0
    """Bytes that users were sent besides models."""
    reported_bytes: int = 0
    """Bytes that users reported besides models."""


class Round:
    """Implements `Fed`, the interface that a method's `round` uses, for one round."""

    def __init__(self, sim: Experiment, state: State, cohort: Cohort, workers: Workers, keep: bool) -> None:
        self.sim, self.state, self.cohort, self.workers = sim, state, cohort, workers
        self.layout: Layout = sim.layout
        self.classes, self.users = len(sim.dataset.classes), sim.config.split.users
        self.shape = sim.dataset.shape
        self.needs = frozenset(sim.config.method.needs())
        self.log = Log()
        self._keep = keep
        """Whether the log keeps the trainers' updates, for gradient diversity."""

    @property
    def server_counts(self) -> Tensor:
        """[classes]: how many labelled images of each class the server has."""
        return self.sim.server_counts

    @property
    def has_server(self) -> bool:
        """Whether the server has labelled images to train on."""
        return self.sim.has_server

    def key(self, purpose: str, *, by_round: bool = True) -> Tensor:
        """Returns the key from which random numbers for a purpose are drawn (see `core/draws.py`), for this
        round or for the whole run."""
        seed = self.sim.config.run.seed
        return torch.tensor(draws.key(seed, purpose, *([self.state.round] if by_round else [])))

    def record(self, **metrics: float) -> None:
        """Adds metrics to the round's event."""
        self.log.metrics |= metrics

    def predict(self, rows: Tensor, images: Tensor) -> Tensor:
        """Returns the probabilities [m, B, classes] that each of m models predicts for B uint8 images."""
        if not len(rows):
            return rows.new_zeros(0, len(images), self.classes)
        return torch.stack([self.sim.predicted(row, images) for row in rows])

    def above_chance(self, row: Tensor, most: int | None = None) -> float:
        """Returns a model's balanced accuracy minus chance, on about `most` of the server's labelled
        images."""
        per_class = self.sim.server_score(row, most).per_class
        accuracies = [accuracy for accuracy in per_class if accuracy is not None]
        return sum(accuracies) / len(accuracies) - 1 / len(accuracies)

    def confidence(self, row: Tensor, most: int | None = None) -> float:
        """Returns a model's mean confidence on about `most` of the server's labelled images."""
        images, _ = self.sim.server_images(most)
        return float(self.sim.predicted(row, images).amax(-1).mean())

    # --- training -------------------------------------------------------------------------------------------

    def train_server(self, row: Tensor) -> Trained:
        """Returns a model after training on the server's labelled images."""
        return self._train_server(row[None])[1]

    def _train_server(self, sent: Tensor) -> tuple[Tensor, Trained]:
        """Trains the models in `sent` on the server's labelled images. Returns all of them, and the result
        for the first. There is one model, or several copies (replicas) if each group has one of its own."""
        if not self.has_server:
            raise MethodError(
                "the round trains the server, which has no labelled images: check fed.has_server first",
                key="has_server",
            )
        count = len(sent)
        slots = range(len(self.state.momentum) - count, len(self.state.momentum))
        trained = self.workers.train_server(sent, self._momentum(slots, sent))
        self.log.server = self._measured(sent, trained.rows, trained.metrics)
        self.log.server_sent, self.log.server_row = sent[0], trained.rows[0]
        self.log.server_steps += count
        self.sim.prepare(self.state.round + 1)  # while the device is busy
        momentum = ((placed(slots, sent.device), trained.momentum),) if len(self.state.momentum) else ()
        return trained.rows, Trained(trained.rows[0], momentum)

    def train_users(
        self,
        start: Tensor,
        *,
        server: Tensor | None = None,
        server_weight: float | None = None,
        replicas: int = 1,
        send: Extra | None = None,
    ) -> Users:
        """Sends each participant the model of its group, trains it there, and averages the updates that come
        back."""
        if send is not None and not self.needs & {"sends", "numbers"}:
            raise MethodError(
                f"the round needs {NEEDS['sends']}: add 'sends' to what needs() returns", key="sends"
            )
        server_results: list[tuple[Tensor, Trained]] = []

        def train_server() -> None:
            if server is not None and not server_results:
                server_results.append(self._train_server(server.repeat(replicas, 1)))

        cohort = self.cohort = self.workers.send(start, self.cohort, train_server, send)
        returned = self._trained_users(start, cohort, server is not None, server_weight, send)
        train_server()
        return self._averaged(start, returned, server_results, server_weight)

    def _trained_users(
        self,
        start: Tensor,
        cohort: Cohort,
        server: bool,
        server_weight: float | None,
        send: Extra | None,
    ) -> "CohortResult | None":
        """Trains the cohort, a part at a time, and returns the result. The models of each part are added to
        their groups' sums at once, so that only one part is in memory, unless all models are needed
        together."""
        count, ranks = len(cohort.users), self.sim.ranks
        if not count:
            return None
        hold = self.sim.holds_models
        matrix = None
        if self.sim.config.method.start == "group":
            matrix = averaging.mixing(cohort.groups, server, server_weight)
            matrix = placed(matrix.to(start.dtype), start.device)
        sums = torch.zeros_like(start)
        updates, held, at_once = [], [], self.sim.config.run.users_at_once or count
        policy = self.sim.config.train.momentum_policy
        slots = cohort.users if policy == "user" else cohort.slots
        keeps = policy in ("slot", "user")
        share = slice(0, count) if ranks is None else ranks.share(count)
        momenta: list[Tensor] = []
        for first in range(share.start, share.stop, at_once):
            part = slice(first, min(first + at_once, share.stop))
            # "The server sends the averaged model weights": user k of group i receives w_avg,i.
            sent = start[placed(cohort.streams[part], start.device)]
            tensors = {} if send is None else send(cohort.users[part])
            # "Each user locally updates its own model weights to w_k."
            momentum = self._momentum(slots[part] if keeps else None, sent)
            result = self.workers.train(sent, momentum, part, tensors)
            self.log.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            if self.sim.config.federation.skip_unlabelled:
                learned = (result.metrics["mask_rate"] > 0).to(sent.dtype)
                result = result._replace(weight=learned if result.weight is None else learned * result.weight)
            momenta.append(result.momentum)
            # Equations (7) and (8): each group averages its users (the server joins in `_averaged`).
            if hold:
                held.append((sent, result))
            elif matrix is not None:
                sums = sums.addmm(matrix[:, 1 + part.start : 1 + part.stop], result.rows)
            updates.append(self._measured(sent, result.rows, result.metrics))
        uneven = ("steps",) if self.sim.config.federation.local_epochs else ()
        users = _together(updates, (*METRICS, *self.sim.config.method.metrics, *uneven), start, self._keep)
        momentum = torch.cat(momenta) if momenta else start[:0, : self.layout.weights]
        if ranks is not None:
            sums, users, momentum = self._exchanged(ranks, sums, users, momentum, count)
        self.log.users = users
        by_slot = ((placed(slots, start.device), momentum),) if keeps else ()
        return CohortResult(sums, matrix, by_slot, held)

    def _averaged(
        self,
        start: Tensor,
        returned: "CohortResult | None",
        server_results: list[tuple[Tensor, Trained]],
        server_weight: float | None,
    ) -> Users:
        """Returns the users' result with the average of each group, over the models that came back and the
        server's model with its weight."""
        cohort = self.cohort
        matrix, momentum = (None, ()) if returned is None else (returned.matrix, returned.momentum)
        counted, groups = list(range(len(cohort.users))), cohort.groups
        means = start if returned is None else returned.sums
        rows = report = sizes = None
        if returned is not None and returned.held:
            sent = torch.cat([part for part, _ in returned.held])
            rows, weight, report = _joined([result for _, result in returned.held])
            self.log.reported_bytes = sum(t.numel() * t.element_size() for t in report.values())
            rows, weight, counted = self._passed(sent, rows, weight)
            momentum = _only(momentum, counted) if len(counted) < len(rows) else momentum
            groups = _regrouped(cohort.groups, counted)
            report = {name: tensor[counted] for name, tensor in report.items()}
            weight = None if weight is None else weight[counted]
            rows = rows[counted]
            matrix, means = None, start
            if counted and self.sim.config.method.start == "group":
                matrix = averaging.mixing(groups, bool(server_results), server_weight).to(rows)
                means = (1 - matrix[:, :1]) * torch.stack([self._combined(rows, weight, g) for g in groups])
        any_counted = returned is not None and bool(counted)
        average = means.mean(0) if any_counted and matrix is not None else self.state.average
        if server_results:
            trained, first = server_results[0]
            # "At the same time, the server also updates its own weights from w_avg to w_s."
            means = trained.expand_as(means).clone() if matrix is None else means + matrix[:, :1] * trained
            average, momentum = means.mean(0), (*momentum, *first.momentum)
        indices = torch.tensor([cohort.users[place] for place in counted], dtype=torch.int64)
        indices = placed(indices, start.device)
        if any_counted and "sizes" in self.needs:
            sizes = self.sim.plan.users.sizes[indices]
        return Users(means, average, any_counted, indices, groups, momentum, self.needs, rows, report, sizes)

    def _passed(
        self, sent: Tensor, rows: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Returns the models after the gate (federation.gate), their weights, and the positions of the users
        that count: the gate accepted their models, and their weight is above 0."""
        if self.sim.config.federation.gate:
            users, log = list(self.cohort.users), self.log
            trust = log.trust = self._trust(users, rows - sent)
            verdict = judge(sent, rows, self.state.strikes[users], self.state.memory.get(USUAL), trust)
            rows, log.usual, gate_weights = verdict.rows, verdict.usual, verdict.weights
            log.refused = {place: reason for place, reason in enumerate(verdict.reasons) if reason}
            log.cut = {
                place: times
                for place, times in enumerate(verdict.times)
                if times > LENGTH and place not in log.refused
            }
            shares = gate_weights.tolist()
            log.against = {place: share for place, share in enumerate(shares) if share < NAMED}
            if min(shares) < 1:
                weight = gate_weights if weight is None else weight * gate_weights
        heavy = [True] * len(rows) if weight is None else (weight > 0).tolist()
        counted = [place for place in range(len(rows)) if heavy[place] and place not in self.log.refused]
        return rows, weight, counted

    def _trust(self, users: list[int], updates: Tensor) -> Tensor | None:
        """Returns the trust of the cohort's users after this round (see `gate.py`); None if the server has no
        labels."""
        before = self.state.memory.get(TRUST)
        direction = None if before is None else self.sim.descent(self.state.average, self.state.round)
        if before is None or direction is None:
            return None
        return trusted(before[users], updates[:, : self.layout.weights], direction)

    def _combined(self, rows: Tensor, weight: Tensor | None, group: Sequence[int]) -> Tensor:
        """Returns the mean or the robust average of the models in a group, or of all models if the group is
        empty."""
        federation = self.sim.config.federation
        members = list(group) or list(range(len(rows)))
        weights = None if weight is None else weight[members]
        aggregate = averaging.combined(federation.combine, rows[members], weights)
        if not federation.median_fallback:
            return aggregate
        return averaging.better_of_median(aggregate, rows[members], self._server_loss)

    def _server_loss(self, row: Tensor) -> float:
        loss = self.sim.server_score(row).loss
        return loss if math.isfinite(loss) else math.inf

    def _momentum(self, slots: Sequence[int] | None, rows: Tensor) -> Tensor:
        """Returns the momentum that trainers start with. It is kept from the last round, at the rows `slots`
        of the state's momentum, or it is zero."""
        if slots is not None and len(self.state.momentum):
            return self.state.momentum[placed(list(slots), rows.device)]
        return torch.zeros_like(rows[:, : self.layout.weights])

    def _measured(self, sent: Tensor, rows: Tensor, metrics: Named) -> TrainedUpdates:
        updates = rows - sent
        norms = torch.linalg.vector_norm(updates[:, : self.layout.weights], dim=1)
        return TrainedUpdates(metrics, norms, updates if self._keep else None)

    def _exchanged(
        self, ranks: Ranks, sums: Tensor, own: TrainedUpdates, momentum: Tensor, count: int
    ) -> tuple[Tensor, TrainedUpdates, Tensor]:
        """Exchanges results with the other processes of torchrun. Returns the sums, the metrics and the
        momentum of all users, given those of this process."""
        each = [torch.stack([*own.metrics.values(), own.norms], dim=1).to(sums.dtype)]
        if len(self.state.momentum):
            each.append(momentum)
        if own.updates is not None:
            each.append(own.updates)
        sums, numbers, *rest = ranks.exchange(self.state.average, sums, each, count)
        if len(self.state.momentum):
            momentum = rest.pop(0)
        *metrics, norms = numbers.unbind(1)
        by_name = dict(zip(own.metrics, metrics, strict=True))
        return sums, TrainedUpdates(by_name, norms, rest[0] if rest else None), momentum


@dataclass(frozen=True)
class CohortResult:
    """The result of a cohort's training."""

    sums: Tensor
    """[S, P + Q]: for each of the S groups, the weighted sum of its users' models, to which the server's part
    is added later."""
    matrix: Tensor | None
    """[S, 1 + C]: the weights with which the server and C users enter the averages of S groups, see
    `core/averaging.py`. None if users keep models of their own."""
    momentum: Momentum
    held: list[tuple[Tensor, Returned]]
    """For each part of the cohort, the models that were sent and the results. It is empty unless all models
    are needed together."""


def _joined(parts: Sequence[Returned]) -> tuple[Tensor, Tensor | None, Named]:
    """Returns the models, the weights and the reports of all parts of a cohort together."""
    weights = [part.weight for part in parts if part.weight is not None]
    report = {name: torch.cat([part.report[name] for part in parts]) for name in parts[0].report}
    return torch.cat([part.rows for part in parts]), torch.cat(weights) if weights else None, report


def _only(momentum: Momentum, places: list[int]) -> Momentum:
    """Returns the momentum at these places only, so that users that do not count have no influence on the
    next round."""
    return tuple((slots[places], values[places]) for slots, values in momentum)


def _regrouped(groups: Sequence[Sequence[int]], counted: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the groups without the users that do not count. `counted` are the positions of those that
    count, and the returned positions are positions in `counted`."""
    position = {place: number for number, place in enumerate(counted)}
    return tuple(tuple(position[place] for place in group if place in position) for group in groups)


def _together(parts: list[TrainedUpdates], names: Sequence[str], like: Tensor, keep: bool) -> TrainedUpdates:
    """Returns the metrics and updates of all parts of a cohort together; for no parts, those of an empty
    cohort."""
    if not parts:
        nobody = like.new_zeros(0)
        return TrainedUpdates(dict.fromkeys(names, nobody), nobody, like[:0] if keep else None)
    return TrainedUpdates(
        {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        torch.cat([part.norms for part in parts]),
        torch.cat([part.updates for part in parts if part.updates is not None]) if keep else None,
    )
