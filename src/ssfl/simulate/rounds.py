"""One round as a method sees it: `Round` implements the interface `federation.Fed`, both for simulated users
and for real sites.

A round sends models, trains them, checks and averages the updates that come back, and logs what the round's
events need. The `Workers` of `protocols.py` do the training, on this machine or at real sites.

A model is a row [P + Q] of P weights and Q running statistics (`core/rows.py`).
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
"""The key in `State.memory` of the usual norms of updates in the last rounds. The usual norm of a round is
the median over users, see `gate.py`."""
TRUST = "trust"
"""The key in `State.memory` of the trust [K] in the K users. Trust says how well a user's updates agreed with
the server's labels in the last rounds, see `gate.py`."""


@dataclass(frozen=True)
class TrainedUpdates:
    """The metrics and updates of n trainers (users, or copies of the server's model) in a round."""

    metrics: Named
    """The metrics by name, such as loss and mask rate. Each is a tensor [n] with one number for each of n
    users, or for each of n copies of the server's model."""
    norms: Tensor
    """[n]: for each user, or for each copy of the server's model, the norm of the update of its weights."""
    updates: Tensor | None
    """[n, P + Q]: for each user, or for each copy of the server's model, its update of P weights and Q
    running statistics. None unless gradient diversity is measured."""


@dataclass
class Log:
    """Collects what happened in a round. The round's events are made from it."""

    users: TrainedUpdates | None = None
    """The metrics and updates of the round's users; None if no user returned a model."""
    server: TrainedUpdates | None = None
    server_sent: Tensor | None = None
    """[P + Q]: the server's model before its training (P weights and Q running statistics); None if it did
    not train."""
    server_row: Tensor | None = None
    """[P + Q]: the server's model after its training (P weights and Q running statistics); None if it did not
    train."""
    server_steps: int = 0
    """How many models the server trained in this round: 1, or more if it trains a copy for each group. (The
    number counts models, not training steps.)"""
    refused: dict[int, str] = field(default_factory=dict)
    """The users whose models the gate refused. Maps a user's position in the cohort to the reason."""
    cut: dict[int, float] = field(default_factory=dict)
    """The users whose updates were more than three times as long as allowed, and which the gate shortened but
    did not refuse. Maps a user's position in the cohort to this multiple (see `GateResult.times`)."""
    usual: Tensor | None = None
    """The usual norm of an update in this round (the median over users); None if the gate is off."""
    trust: Tensor | None = None
    """[n]: the trust in each of the cohort's n users after this round (see `gate.py`). None if the gate is
    off or the server has no labels."""
    against: dict[int, float] = field(default_factory=dict)
    """The users to which the gate gives little weight, because their updates work against the server's
    labels. Maps a user's position in the cohort to its weight, from 0 to 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics of the round, by name, which the method recorded with `Round.record`."""
    sent_bytes: int = 0
    """The number of bytes that the server sent to users in addition to the models."""
    reported_bytes: int = 0
    """The number of bytes that users sent to the server in addition to their models."""


class Round:
    """What a method's function `round` works with: it trains users and the server, and averages their models.
    Implements the interface `federation.Fed` for a single round."""

    def __init__(self, sim: Experiment, state: State, cohort: Cohort, workers: Workers, keep: bool) -> None:
        self.sim, self.state, self.cohort, self.workers = sim, state, cohort, workers
        self.layout: Layout = sim.layout
        self.classes, self.users = len(sim.dataset.classes), sim.config.split.users
        self.shape = sim.dataset.shape
        self.needs = frozenset(sim.config.method.needs())
        self.log = Log()
        self._keep = keep
        """Whether the log keeps the whole updates of the users and of the server, which are needed to measure
        gradient diversity."""

    @property
    def server_counts(self) -> Tensor:
        """[classes]: the number of the server's labelled training images in each class."""
        return self.sim.server_counts

    @property
    def has_server(self) -> bool:
        """Whether the server has labelled images to train on."""
        return self.sim.has_server

    def key(self, purpose: str, *, by_round: bool = True) -> Tensor:
        """Returns the key from which a method draws its random numbers (see `core/draws.py`). Different
        purposes have independent keys. With `by_round`, the key is new in each round; otherwise it is the
        same in the whole run."""
        seed = self.sim.config.run.seed
        return torch.tensor(draws.key(seed, purpose, *([self.state.round] if by_round else [])))

    def record(self, **metrics: float) -> None:
        """Adds metrics, by name, to the event of this round. A tensor with one element counts as its
        number."""
        for name, value in metrics.items():
            try:
                self.log.metrics[name] = value if isinstance(value, int | float) else float(value)
            except (TypeError, ValueError, RuntimeError):
                method = type(self.sim.config.method).__name__
                shown = " ".join(repr(value).split())[:60]
                raise MethodError(
                    f"{method}.round calls fed.record({name}={shown}): pass one number for each name",
                    key=name,
                ) from None

    def predict(self, rows: Tensor, images: Tensor) -> Tensor:
        """Returns the class probabilities [m, N, classes] that each of the m models `rows` [m, P + Q]
        predicts for N uint8 images."""
        if not len(rows):
            return rows.new_zeros(0, len(images), self.classes)
        return torch.stack([self.sim.predicted(row, images) for row in rows])

    def above_chance(self, row: Tensor, most: int | None = None) -> float:
        """Returns the balanced accuracy of the model `row` [P + Q] minus the accuracy of guessing. It is
        measured on about `most` of the server's labelled images; None means all. The accuracy of guessing is
        1 divided by the number of classes that these images have."""
        per_class = self.sim.server_score(row, most).per_class
        accuracies = [accuracy for accuracy in per_class if accuracy is not None]
        return sum(accuracies) / len(accuracies) - 1 / len(accuracies)

    def confidence(self, row: Tensor, most: int | None = None) -> float:
        """Returns the mean confidence (the probability of the most likely class) of the model `row` [P + Q].
        It is measured on about `most` of the server's labelled images; None means all."""
        images, _ = self.sim.server_images(most)
        return float(self.sim.predicted(row, images).amax(-1).mean())

    # --- training -------------------------------------------------------------------------------------------

    def train_server(self, row: Tensor) -> Trained:
        """Trains the model `row` [P + Q] on the server's labelled images. Returns the trained model and its
        momentum."""
        return self._train_server(row[None])[1]

    def _train_server(self, sent: Tensor) -> tuple[Tensor, Trained]:
        """Trains the m models `sent` [m, P + Q] on the server's labelled images. Returns all m trained
        models, and the first of them with the momentum of all. Usually m = 1; some methods train a copy of
        the server's model for each group."""
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
        """Trains the round's participants and returns the average of each group.

        `start` [S, P + Q] are the models of the S groups, or of all users if each keeps its own. Each
        participant receives its model, and the tensors that `send` returns for it, and trains.

        If `server` [P + Q] is not None, the server trains `replicas` copies of this model at the same time. A
        single copy enters the average of every group; otherwise there is one copy for each group. Its weight
        in the average is `server_weight`; None means the weight of one user.
        """
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
        self.sim.prepare(self.state.round + 1)  # while the device is busy
        return self._averaged(start, returned, server_results, server_weight)

    def _trained_users(
        self,
        start: Tensor,
        cohort: Cohort,
        server: bool,
        server_weight: float | None,
        send: Extra | None,
    ) -> "CohortResult | None":
        """Trains the cohort and returns the result; None if the cohort is empty. `server` says whether the
        server's model will enter the averages, and `server_weight` is its weight; None means that of one
        user.

        Users are trained in parts of run.users_at_once. After each part, its models are added to the sums of
        their groups and dropped, to save memory. All models are kept only if something needs them together,
        such as a median.
        """
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
            if keeps or ranks is not None:
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
        """Returns the result of the round's users, with the averaged model of each group. Each average is
        over the models of the group's users that the gate accepted. If the server trained too
        (`server_results`), its model enters the averages with `server_weight`; None means the weight of one
        user.

        `start` has the models that were sent, and `returned` is the result of `_trained_users`.
        """
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
        """Applies the gate, if federation.gate is on, to the models `rows` [n, P + Q] that n users trained
        from `sent` [n, P + Q]. `weight` [n] are the users' weights before the gate; None if all are equal.

        Returns the models, in which long updates have been shortened, the users' weights [n], and the
        positions of the users to average. The weights are None if all are equal. Users that were refused or
        have weight 0 are left out of the positions.
        """
        if self.sim.config.federation.gate:
            users, log = list(self.cohort.users), self.log
            trust = log.trust = self._trust(users, rows - sent)
            before = self.state.memory.get(USUAL)
            verdict = judge(sent, rows, self.state.strikes[users], before, trust, self.layout.sizes)
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
        """Returns the trust [n] in the cohort's n users after this round, computed from their `updates` (see
        `gate.py`); None if the server has no labels."""
        before = self.state.memory.get(TRUST)
        direction = None if before is None else self.sim.descent(self.state.average, self.state.round)
        if before is None or direction is None:
            return None
        return trusted(before[users], updates[:, : self.layout.weights], direction)

    def _combined(self, rows: Tensor, weight: Tensor | None, group: Sequence[int]) -> Tensor:
        """Returns the average [P + Q] of the models in a group, by the rule of federation.combine: mean,
        trimmed mean or median. With federation.median_fallback, returns the median instead if that has a
        lower loss on the server's images. `group` are positions in `rows`; for an empty group, all models are
        averaged."""
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
        """Returns the momentum [n, P] with which n users, or n copies of the server's model, start the round.
        P is the number of weights. `slots` has n positions, which say which rows of the state's momentum are
        used. If `slots` is None or the state keeps no momentum, the result is zero."""
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
        """Exchanges results with the other processes of torchrun. `sums`, `own` and `momentum` are the
        results of the users that this process trained. Returns the same three results for all `count` users
        of the round. They are the sum of the models of each group, the metrics and updates, and the
        momentum."""
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
    """The result of training a cohort, before the averages are computed."""

    sums: Tensor
    """[S, P + Q]: for each of S groups, the weighted sum of its users' models; zero if the models are in
    `held`. The server's model, with its weight, is added later."""
    matrix: Tensor | None
    """[S, 1 + C]: the weights of the server (first column) and of the C users in the averages of the S
    groups, see `core/averaging.py`. None if users keep models of their own, so that nothing is averaged."""
    momentum: Momentum
    held: list[tuple[Tensor, Returned]]
    """The models that were sent and the results. There is one pair for each part of the cohort, of at most
    run.users_at_once users. The list is empty unless all models must be kept until they are averaged
    (`holds_models`)."""


def _joined(parts: Sequence[Returned]) -> tuple[Tensor, Tensor | None, Named]:
    """Joins the results of all parts in which a cohort was trained. Returns the models [n, P + Q] of its n
    users and their weights [n] in the average. Also returns, by name, the numbers that the method reported
    for each user. The weights are None if all are equal."""
    weights = [part.weight for part in parts if part.weight is not None]
    report = {name: torch.cat([part.report[name] for part in parts]) for name in parts[0].report}
    return torch.cat([part.rows for part in parts]), torch.cat(weights) if weights else None, report


def _only(momentum: Momentum, places: list[int]) -> Momentum:
    """Returns the momentum of the users at these positions only. Users that were left out of the average then
    have no influence on the next round."""
    return tuple((slots[places], values[places]) for slots, values in momentum)


def _regrouped(groups: Sequence[Sequence[int]], counted: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the members of each group, without users that were left out of the average. `groups` has
    positions in the cohort, and `counted` the positions of the users that remain. The result has positions in
    `counted`."""
    position = {place: number for number, place in enumerate(counted)}
    return tuple(tuple(position[place] for place in group if place in position) for group in groups)


def _together(parts: list[TrainedUpdates], names: Sequence[str], like: Tensor, keep: bool) -> TrainedUpdates:
    """Joins the metrics and updates of all `parts` in which a cohort was trained. The whole updates are
    included only if `keep` is true; otherwise only their norms are. If there are no parts, the result has no
    users. Its metrics then have these `names`, and its tensors have the type and device of `like`."""
    if not parts:
        nobody = like.new_zeros(0)
        return TrainedUpdates(dict.fromkeys(names, nobody), nobody, like[:0] if keep else None)
    return TrainedUpdates(
        {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        torch.cat([part.norms for part in parts]),
        torch.cat([part.updates for part in parts if part.updates is not None]) if keep else None,
    )
