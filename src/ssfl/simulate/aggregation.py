"""Averages the models that the users of a round returned. Before this, the gate checks them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.core import averaging
from ssfl.core.cohort import Cohort
from ssfl.core.rows import placed
from ssfl.engines.local import Returned
from ssfl.federation import Momentum, Named, State, Trained, Users
from ssfl.simulate.gate import LENGTH, NAMED, judge, trusted
from ssfl.simulate.log import Log
from ssfl.simulate.protocols import Experiment

USUAL = "usual"
"""The key in `State.memory` of the usual norms of updates in the last rounds. The usual norm of a round is
the median over users, see `gate.py`."""
TRUST = "trust"
"""The key in `State.memory` of the trust [K] in the K users. Trust says how well a user's updates agreed with
the server's labels in the last rounds, see `gate.py`."""


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


@dataclass(frozen=True)
class Aggregation:
    """Averages the models that the `cohort` of one round returned. What the gate does is noted in the
    `log`."""

    sim: Experiment
    state: State
    """The state before the round."""
    cohort: Cohort
    log: Log

    def averaged(
        self,
        start: Tensor,
        returned: CohortResult | None,
        server_results: list[tuple[Tensor, Trained]],
        server_weight: float | None,
    ) -> Users:
        """Returns the result of the round's users, with the averaged model of each group. Each average is
        over the models of the group's users that the gate accepted. If the server trained too
        (`server_results`), its model enters the averages with `server_weight`; None means the weight of one
        user.

        `start` has the models that were sent, and `returned` is the result of training.
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
        needs = frozenset(self.sim.config.method.needs())
        if any_counted and "sizes" in needs:
            sizes = self.sim.plan.users.sizes[indices]
        return Users(means, average, any_counted, indices, groups, momentum, needs, rows, report, sizes)

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
            verdict = judge(sent, rows, self.state.strikes[users], before, trust, self.sim.layout.sizes)
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
        return trusted(before[users], updates[:, : self.sim.layout.weights], direction)

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
