"""The interfaces of a federation (`Method`, `Fed`, `State`), and the round of the paper. Start reading here.
"The paper" is Zhang et al. 2020, wherever the code mentions it.

A `Method` has a user side and a server side. The user side (`label`, `user_loss`, `gradient`) runs where the
images are, in a simulation or at a real site. It sees a `Look` or a `Step` (`core/step.py`). The server side
(`round`) turns one `State` into the next through a `Fed`. It never sees a user's image.

A model is stored as a row: a vector of its P weights, followed by its Q running statistics. K is the number
of users, C the number that take part in a round, and S the number of groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ssfl.core import losses
from ssfl.core.cohort import Cohort
from ssfl.core.losses import Losses
from ssfl.core.rows import Layout
from ssfl.core.step import METRICS, Batch, Labels, Look, Loss, Named, Step
from ssfl.errors import MethodError, in_words

__all__ = [
    "METRICS", "NEEDS", "USES", "Batch", "Fed", "Labels", "Look", "Loss", "Method", "Momentum", "Named",
    "State", "Step", "Trained", "Users", "paper_round",
]  # fmt: skip

NEEDS = {
    "models": "the single models of the users, and not only their average",
    "reports": "numbers that users report about their images",
    "sends": "to send users more than a model",
    "numbers": "to send users a few numbers with the model",
    "sizes": "how many images each user has",
    "labels": "the true labels of users' images",
}
"""The words that a method may return from `needs()`, each with its meaning. They say what the method needs
from the users. They decide whether the method can run in several processes, with differential privacy, and
with real sites."""
USES = ("weak", "strong", "received")
"""The words that a method may return from `uses()`: the inputs of the users' training steps."""


@dataclass(frozen=True)
class State:
    """Everything that one round passes to the next: the models, the momentum, and the method's own
    tensors."""

    round: int
    """t, the number of rounds done so far."""
    streams: Tensor
    """[S, P + Q]: the model of each of the S groups (the paper's w_avg,i), from which the group's members
    start the round. A model is a row of P weights and Q running statistics. Without groups there is one
    row."""
    average: Tensor
    """[P + Q]: the averaged model (the paper's w_avg), with P weights and Q running statistics. The server
    starts its training from it. It is also the model that is evaluated, unless federation.slow_average is
    set: then its average over rounds is evaluated."""
    momentum: Tensor
    """The momentum of SGD that is kept between rounds, with one row of P numbers for each model of P weights.
    The setting train.momentum_policy decides whose momentum is kept. "reset": nobody's, and this tensor is
    empty. "server": only the server's. "user": the server's and every user's. "slot": the server's, and one
    row for each position in a round's random order of participants. The server's rows are last, one for each
    copy of its model."""
    strikes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[K]: how many models of each of the K users were refused so far. In a simulation, models are refused
    only by the gate (the checks that federation.gate switches on). If the gate is off, this tensor is empty.
    The centre of a real federation also refuses broken answers, even if the gate is off."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Further tensors that the method keeps between rounds, by name. `Method.initial` returns their initial
    values."""

    def next(
        self,
        streams: Tensor,
        average: Tensor | None = None,
        momentum_of: Sequence["Trained | Users"] = (),
        **memory: Tensor,
    ) -> "State":
        """Returns the state after a round, with these group models and this average (default: the mean of the
        group models).

        `momentum_of` lists the training results whose momentum is kept for the next round, if
        train.momentum_policy keeps any. `memory` replaces tensors of the method's memory.
        """
        unknown = memory.keys() - self.memory.keys()
        if unknown:
            names = ", ".join(sorted(unknown))
            raise MethodError(
                f"round() stores {names} in the method's memory, but initial() does not return {names}: add "
                "it to what initial() returns",
                key=names,
            )
        if not isinstance(streams, Tensor):
            raise MethodError(
                f"round() passes {in_words(streams)} to state.next(): pass the groups' models as a tensor, "
                "such as users.means",
                key="streams",
            )
        momentum = self.momentum
        for result in momentum_of:
            for slots, values in result.momentum if len(self.momentum) else ():
                momentum = momentum.index_copy(0, slots, values)
        average = streams.mean(0) if average is None else average
        return replace(
            self,
            round=self.round + 1,
            streams=streams,
            average=average,
            momentum=momentum,
            memory=self.memory | memory,
        )


Momentum = tuple[tuple[Tensor, Tensor], ...]
"""The momentum to keep after training, as pairs of two tensors. The first has the numbers of m rows in
`State.momentum`, [m]. The second has their new values, [m, P], for P weights."""


@dataclass(frozen=True)
class Trained:
    """The result of the server's training in a round: the model and the momentum to keep."""

    row: Tensor
    """The trained model, a row of P weights and Q running statistics. If the server trained several copies of
    its model (replicas), this is the first."""
    momentum: Momentum


@dataclass(frozen=True)
class Users:
    """The result of the users' training in a round, as the server sees it. The settings may ask for checks of
    the users' models (the gate), a robust average or privacy noise. All of these have already been
    applied."""

    means: Tensor
    """[S, P + Q]: the new model of each of the S groups, the paper's equation (7). P is the number of
    weights, and Q the number of running statistics.

    If no model of a group's users was used, there are three cases. If the server trained at the same time,
    the new model is the server's. Otherwise it is the mean over the users of all groups. If no user's model
    was used at all, it is the model that was sent.

    If the method's `start` is "user", users' models are not averaged. These are then the models that were
    sent.
    """
    average: Tensor
    """[P + Q]: the mean of the groups' models, the paper's equation (7)."""
    counted: bool
    """Whether at least one user's model was used in the average: it came back, was not refused, and has a
    weight above 0."""
    indices: Tensor
    """[m]: the numbers of the m users whose models were used in the average."""
    groups: tuple[tuple[int, ...], ...]
    """For each group, the positions of its members in `indices`. Users whose models were not used are left
    out."""
    momentum: Momentum
    declared: frozenset[str] = frozenset()
    _rows: Tensor | None = None
    _report: Named | None = None
    _sizes: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The models of the m users whose models were used, [m, P + Q]: P weights and Q running statistics
        each. Only for methods that declare "models" in `needs`."""
        return self._needing("models", self._rows)  # type: ignore[no-any-return]

    @property
    def report(self) -> Named:
        """The numbers that the method's `label` reported at each of the m users whose models were used, by
        name, [m, ...] each. Only for methods that declare "reports" in `needs`."""
        return self._needing("reports", self._report)  # type: ignore[no-any-return]

    @property
    def sizes(self) -> Tensor:
        """[m]: the number of images of each of the m users whose models were used. Only for methods that
        declare "sizes" in `needs`."""
        return self._needing("sizes", self._sizes)  # type: ignore[no-any-return]

    def _needing(self, need: str, value: Any) -> Any:
        """Returns `value`. Raises MethodError if the method has not declared `need` in `needs`. So a method
        cannot use something that it did not declare, and that real sites may not provide."""
        if need not in self.declared:
            raise MethodError(f"the round uses {NEEDS[need]}: add {need!r} to what needs() returns", key=need)
        return value


class Fed(Protocol):
    """Everything that a method's `round` can see and do. The simulator and the centre of a real federation
    implement this interface."""

    cohort: Cohort
    layout: Layout
    classes: int
    users: int
    """K, the number of users."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""

    @property
    def server_counts(self) -> Tensor:
        """[classes]: how many labelled images of each class the server has."""

    @property
    def has_server(self) -> bool:
        """Whether the server has labelled images to train on."""

    def key(self, purpose: str, *, by_round: bool = True) -> Tensor:
        """Returns the key from which the random numbers for a purpose are drawn (see `core/draws.py`). Every
        round has a different key. With `by_round=False`, the key is the same for the whole run."""

    def train_users(
        self,
        start: Tensor,
        *,
        server: Tensor | None = None,
        server_weight: float | None = None,
        replicas: int = 1,
        send: Callable[[Sequence[int]], Named] | None = None,
    ) -> Users:
        """Sends each participant a model, trains the model there, and averages the trained models that come
        back, group by group.

        `start` [S, P + Q] are the models to send: one for each of the S groups. If the method's `start` is
        "user", they are one for each user instead.

        If `server` [P + Q] is given, the server trains this model at the same time. Its trained model then
        enters the average of every group with weight `server_weight`; None means the same weight as each
        user. With `replicas` above 1, the server trains that many copies of the model, one for each group.

        `send(users)` returns further tensors to send to the given n users, [n, ...] each.
        """

    def train_server(self, row: Tensor) -> Trained:
        """Trains the model `row` [P + Q] on the server's labelled images, and returns the trained model and
        its momentum."""

    def predict(self, rows: Tensor, images: Tensor) -> Tensor:
        """Returns the class probabilities [m, B, classes] that m models [m, P + Q] predict for B uint8 images
        [B, channels, height, width]."""

    def above_chance(self, row: Tensor, most: int | None = None) -> float:
        """Returns the balanced accuracy of the model `row` minus the accuracy of guessing. The balanced
        accuracy is measured on about `most` of the server's labelled images; None means all. The accuracy of
        guessing is 1 divided by the number of classes in these images."""

    def confidence(self, row: Tensor, most: int | None = None) -> float:
        """Returns the mean confidence of the model `row`, where the confidence in an image is its largest
        class probability. It is measured on about `most` of the server's labelled images; None means all."""

    def record(self, **metrics: float) -> None:
        """Adds metrics of the method to this round's event in events.jsonl."""


def paper_round(
    state: State, fed: Fed, server_weight: float | None = None, server_replicas: bool = False
) -> State:
    """Returns the state after a round as in the paper (Zhang et al. 2020), equations (7) and (8).

    Users and server train at the same time. Each group averages the models of its own users with the server's
    model. `server_weight` is the server's weight in this average; None means the same weight as each user.
    With `server_replicas`, the server trains one copy of its model per group.
    """
    server = state.average if fed.has_server else None
    replicas = len(state.streams) if server_replicas else 1
    users = fed.train_users(state.streams, server=server, server_weight=server_weight, replicas=replicas)
    return state.next(users.means, users.average, momentum_of=[users])


@dataclass(frozen=True)
class Method:
    """A method of federated learning. Its fields are its settings, the section [method] of a config. To write
    a method, subclass it as a frozen dataclass."""

    called: ClassVar[str] = ""
    """The built-in name or the import path by which the method was loaded; empty for a Python object. It is
    read through `name`."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The method's defaults for other sections of the config, by section and key. Settings in a config or
    with --set override them."""
    start: ClassVar[str] = "group"
    """Which model a user starts a round from. "group": the model of its group. "user": its own model, which
    the method keeps between rounds."""
    grouped: ClassVar[bool] = False
    """Whether the method divides the participants into several groups by default (`federation.groups`)."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """The names of the metrics that the method's losses return in addition to those that every method has."""
    note: ClassVar[str] = ""
    """A remark that tables of results show beside the method, such as that it needs the users' labels."""
    label: ClassVar[Any] = None
    """A function `label(self, look: Look) -> Labels` that makes a user's pseudo-labels once a round. None if
    the method does not make pseudo-labels at the start of a round."""
    keeps_models: ClassVar[bool] = False
    """Whether the method keeps a model of every user between rounds, in the tensors that `initial` returns.
    If so, the memory check before a run counts one model for every user, and not only for the
    participants."""
    trains_users: ClassVar[bool] = True
    """Whether the method's `round` trains users."""
    trains_server: ClassVar[bool] = True
    """Whether the method's `round` trains the server, if the server has labelled images."""

    @property
    def name(self) -> str:
        """The method's built-in name, its import path, or "in memory" for a method passed as a Python
        object."""
        return str(type(self).__dict__.get("called") or "in memory")

    def needs(self) -> tuple[str, ...]:
        """Returns the words of `NEEDS` that say what the method needs from the users. They decide whether the
        method can run with the engine "dist" (several processes), with differential privacy, and with real
        sites."""
        return ()

    def uses(self) -> tuple[str, ...]:
        """Returns which inputs the users' training steps need: "weak" views, "strong" views, or the weights
        that the user "received" at the start of the round. Inputs that are not listed are not computed."""
        return ("weak", "strong")

    def passes(self) -> int:
        """Returns how many forward and backward passes a user makes for each image in a training step.
        Contests use it to compare methods at equal cost."""
        return 1

    def check(self, config: Any) -> None:
        """Raises ConfigError if the method cannot be combined with other settings of this config."""

    def network(self, network: torch.nn.Module) -> torch.nn.Module:
        """Returns the network to train: the given one, or one that the method builds around it, for example
        with each weight as the sum of two."""
        return network

    def plain(self, tensors: Named) -> Named:
        """Returns the tensors of the original network by name. `tensors` are those of the network that the
        function `network` built around it. The saved model is the original network."""
        return tensors

    def initial(self, state: State, fed: Fed) -> Named:
        """Returns the tensors that the method keeps between rounds, by name, as they are before the first
        round."""
        return {}

    def user_loss(self, step: Step) -> Losses:
        """Returns the loss of a user's training step. Default: the paper's consistency loss with threshold τ
        = 0.95."""
        teacher = step.forward(step.weak, grad=False, train=False, draw="teacher")
        return losses.consistency(teacher, step.forward(step.strong), 0.95)

    def server_loss(self, step: Step) -> Losses:
        """Returns the loss of a training step at the server. Default: cross-entropy with the true labels, the
        paper's equation (3)."""
        return losses.supervised(step.forward(step.weak), step.labels)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        """Returns the gradient of the loss in one training step, by the names of the weights, and the step's
        metrics. Weights that are missing from the gradient stay unchanged."""
        return step.gradient(loss, wide=False)

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round that starts from `state`. Default: the paper's round."""
        return paper_round(state, fed)
