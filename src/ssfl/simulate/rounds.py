"""One round as a method sees it: `Round` implements the interface `federation.Fed`, both for simulated users
and for real sites.

A round sends models, trains them, and logs what the round's events need (`log.py`). The `Workers` of
`protocols.py` do the training, on this machine or at real sites. `aggregation.py` checks and averages the
models that come back.

A model is a row [P + Q] of P weights and Q running statistics (`core/rows.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssfl.core import averaging, draws
from ssfl.core.cohort import Cohort
from ssfl.core.rows import Layout, placed
from ssfl.errors import MethodError, in_words
from ssfl.federation import METRICS, NEEDS, Named, State, Trained, Users
from ssfl.simulate.aggregation import Aggregation, CohortResult
from ssfl.simulate.log import Log, TrainedUpdates, together
from ssfl.simulate.protocols import Experiment, Extra, Ranks, Workers


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
        """Whether the log keeps the whole updates of the users and of the server, and the tensors that users
        were sent. They are needed to measure gradient diversity."""

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

    def _sent(self, send: Extra, users: Sequence[int]) -> Named:
        """Returns the tensors that a method's function `send` returns for these users. Raises MethodError
        unless they are a dict of tensors with one entry for each user."""
        tensors: Any = send(users)
        if not isinstance(tensors, dict):
            raise MethodError(
                f"send() returned {in_words(tensors)}: return a dict of tensors by name", key="send"
            )
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (len(users),):
                raise MethodError(
                    f"send() returned {in_words(value)} as {name!r} for {len(users)} users: return a tensor "
                    f"[{len(users)}, ...], with one entry for each of the users that it gets",
                    key=name,
                )
        return tensors

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
        aggregation = Aggregation(self.sim, self.state, cohort, self.log)
        return aggregation.averaged(start, returned, server_results, server_weight)

    def _trained_users(
        self,
        start: Tensor,
        cohort: Cohort,
        server: bool,
        server_weight: float | None,
        send: Extra | None,
    ) -> CohortResult | None:
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
        also_sent: list[Named] = []
        policy = self.sim.config.train.momentum_policy
        slots = cohort.users if policy == "user" else cohort.slots
        keeps = policy in ("slot", "user")
        share = slice(0, count) if ranks is None else ranks.share(count)
        momenta: list[Tensor] = []
        for first in range(share.start, share.stop, at_once):
            part = slice(first, min(first + at_once, share.stop))
            # "The server sends the averaged model weights": user k of group i receives w_avg,i.
            sent = start[placed(cohort.streams[part], start.device)]
            tensors = {} if send is None else self._sent(send, cohort.users[part])
            # "Each user locally updates its own model weights to w_k."
            momentum = self._momentum(slots[part] if keeps else None, sent)
            result = self.workers.train(sent, momentum, part, tensors)
            also_sent.append(tensors if self._keep else {})
            self.log.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            if self.sim.config.federation.skip_unlabelled:
                learned = (result.metrics["mask_rate"] > 0).to(sent.dtype)
                result = result._replace(weight=learned if result.weight is None else learned * result.weight)
            if keeps or ranks is not None:
                momenta.append(result.momentum)
            # Equations (7) and (8): each group averages its users (the server joins in `Aggregation`).
            if hold:
                held.append((sent, result))
            elif matrix is not None:
                sums = sums.addmm(matrix[:, 1 + part.start : 1 + part.stop], result.rows)
            updates.append(self._measured(sent, result.rows, result.metrics))
        uneven = ("steps",) if self.sim.config.federation.local_epochs else ()
        users = together(updates, (*METRICS, *self.sim.config.method.metrics, *uneven), start, self._keep)
        momentum = torch.cat(momenta) if momenta else start[:0, : self.layout.weights]
        if ranks is not None:
            sums, users, momentum = self._exchanged(ranks, sums, users, momentum, count)
        self.log.users = users
        if also_sent:
            self.log.sent = {name: torch.cat([part[name] for part in also_sent]) for name in also_sent[0]}
        by_slot = ((placed(slots, start.device), momentum),) if keeps else ()
        return CohortResult(sums, matrix, by_slot, held)

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
