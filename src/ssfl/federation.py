"""What a federation is made of, and the paper's round. Start reading here.

A `Method` has a user side and a server side. The user side (`label`, `user_loss`, `gradient`) runs where the
images are, in a simulation or at a real site, and sees a `Look` or a `Step`. The server side (`round`) turns
one `State` into the next and sees a `Fed`: it never sees a user's image.

A model is a row: its P weights, flattened, then its Q running statistics. Tensors of the user side are
[n, ...], n users at once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ssfl.core import draws, losses
from ssfl.core.cohort import Cohort
from ssfl.core.losses import Losses
from ssfl.core.rows import Layout
from ssfl.errors import MethodError

Named = dict[str, Tensor]
"""Tensors by their names in the network."""
Loss = Callable[["Step"], Losses]
Network = Callable[[Named, Named, Tensor, bool, Tensor], tuple[Tensor, Named]]
"""(weights, buffers, images [n, B, ...], training mode or not, dropout keys [n]) -> logits [n, B, classes]
and the new buffers."""
Evaluate = Callable[[Loss, Named, Named, "Batch", Named | None], tuple[Tensor, Named, Named]]
"""(loss, weights, buffers, batch, received) -> the loss of each model [n], its metrics, the new buffers."""
METRICS = ("loss", "mask_rate", "known_rate", "correct_rate")
"""What is measured in every step: the loss, and the shares of images that are trained on, that are trained on
and whose true label is known, and whose pseudo-label is right."""
DRAWS = {"teacher": 0, "student": 1, "labelled": 2, "mix": 3}
"""The numbers of the dropout masks that the package's own methods use."""
NEEDS = {
    "models": "the single models of the users, and not only their average",
    "reports": "numbers that users report about their images",
    "sends": "to send users more than a model",
    "sizes": "how many images each user has",
    "labels": "the true labels of users' images",
}
"""What a method may declare that it needs besides averages."""


# --- the user side ------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The images of one step, [n, B, C, H, W] each, normalised."""

    weak: Tensor | None
    """None unless the method uses weak views."""
    strong: Tensor | None
    labels: Tensor
    """[n, B]: the true ones, -1 where unknown."""
    own: Tensor | None
    """Weak views of the users' own labelled images, if any have some."""
    own_labels: Tensor | None
    """[n, B]; -1 for a user without."""
    keys: Tensor
    """[n]: names the dropout masks of the step."""
    shares: Tensor
    """[n, B]: each image's share of its model's loss."""
    given: Named
    """This step's part of what `label` and the round provided."""


class Step:
    """One SGD step of n users, or of the server, as a method's losses see it.

    Only tensors belong in a loss: on a GPU a step is recorded once and replayed, and a Python number that
    changes from round to round would keep its first value.
    """

    def __init__(
        self,
        batch: Batch,
        weights: Named,
        buffers: Named,
        network: Network,
        *,
        role: str = "user",
        sees_labels: bool = False,
        narrow: Named | None = None,
        received: Named | None = None,
        rate: Tensor | None = None,
        decay: float = 0.0,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.batch, self.role = batch, role
        self.weights, self.buffers = weights, buffers
        """[n, ...] in float32 or wider."""
        self.given = batch.given
        self.own, self.own_labels = batch.own, batch.own_labels
        self.rate, self.decay = rate, decay
        self._sees_labels = sees_labels
        self._network, self._narrow = network, weights if narrow is None else narrow
        self._received, self._evaluate, self._moved = received, evaluate, False

    @property
    def weak(self) -> Tensor:
        """Weakly augmented views of the batch's images."""
        return _declared(self.batch.weak, "weak")  # type: ignore[no-any-return]

    @property
    def strong(self) -> Tensor:
        """Strongly augmented views of the same images."""
        return _declared(self.batch.strong, "strong")  # type: ignore[no-any-return]

    @property
    def labels(self) -> Tensor:
        """[n, B]: the true labels if the method declares that it needs them, else -1."""
        labels = self.batch.labels
        return labels if self._sees_labels else torch.full_like(labels, -1)

    @property
    def received(self) -> Named:
        """The weights that the round began with."""
        return _declared(self._received, "received")  # type: ignore[no-any-return]

    def forward(
        self,
        images: Tensor,
        *,
        grad: bool = True,
        train: bool = True,
        draw: str = "student",
        weights: Named | None = None,
    ) -> Tensor:
        """The logits [n, B, classes] of images [n, B, ...]; `draw` names the dropout mask."""
        keys = draws.fold(self.batch.keys, _number(draw))
        used = self._narrow if weights is None else self._as_narrow(weights)
        if grad:
            logits, self.buffers = self._network(used, self.buffers, images, train, keys)
        else:
            with torch.no_grad():
                logits, self.buffers = self._network(used, self.buffers, images, train, keys)
        return logits.to(self.batch.shares.dtype)

    def slopes(self, loss: Loss, at: Named | None = None, *, wide: bool = True) -> tuple[Named, Named]:
        """The gradient of a loss, at the current weights or at others, and the loss's metrics.

        Running statistics move with the first gradient at the current weights alone. The gradient is in the
        weights' own type; with wide=False it stays in the type of the forward pass (bfloat16, perhaps), for
        whoever hands it on as it is: that saves a pass over memory.
        """
        if self._evaluate is None:
            raise MethodError("slopes() belongs in gradient(), not in a loss")
        used = self._narrow if at is None else self._as_narrow(at)
        leaves = {name: weight.detach().requires_grad_() for name, weight in used.items()}
        total, metrics, buffers = self._evaluate(loss, leaves, self.buffers, self.batch, self._received)
        # models do not touch each other: the gradient of the sum is each one's own
        found = torch.autograd.grad(
            total.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        if at is None and not self._moved:
            self.buffers, self._moved = buffers, True
        slopes = dict(zip(leaves, found, strict=True))
        if wide:
            slopes = {name: slope.to(self.weights[name].dtype) for name, slope in slopes.items()}
        return slopes, metrics

    def after(self, slopes: Named) -> "Step":
        """The same step after one update of plain SGD with weight decay, without side effects."""
        if self.rate is None:
            raise MethodError("after() belongs in gradient(), not in a loss")
        moved = dict(self.weights)
        for name, slope in slopes.items():
            weight = self.weights[name]
            moved[name] = weight - along(self.rate, weight) * (slope + self.decay * weight)
        other = copy.copy(self)
        other.weights, other._narrow = moved, self._as_narrow(moved)
        return other

    def having(self, **given: Tensor) -> "Step":
        """The same step with other tensors in `given`."""
        other = copy.copy(self)
        other.batch = self.batch._replace(given=self.given | given)
        other.given = other.batch.given
        return other

    def _as_narrow(self, weights: Named) -> Named:
        """Weights in the numbers that the network computes in."""
        return {name: weight.to(self._narrow[name].dtype) for name, weight in weights.items()}


def _declared(value: Any, name: str) -> Any:
    if value is None:
        raise MethodError(f"the method reads step.{name} but uses() does not return {name!r}: add it there")
    return value


def _number(draw: str) -> int:
    """The number of a dropout mask by its name."""
    if draw in DRAWS:
        return DRAWS[draw]
    number = 0
    for letter in draw:
        number = (131 * number + ord(letter)) % 2**31
    return 16 + number


def along(numbers: Tensor, models: Tensor) -> Tensor:
    """A number [n] of each model, shaped to go with [n, ...]."""
    return numbers.view(-1, *[1] * (models.dim() - 1))


def evaluated(loss: Loss, step: Step, extra: Sequence[str] = ()) -> tuple[Tensor, Named, Named]:
    """The loss of each model [n], its metrics and the buffers afterwards: what every engine computes."""
    found = loss(step)
    total = of_models(found, step.batch)
    mask, labels = found.mask, step.batch.labels
    right = (found.label == labels).to(mask.dtype) * mask
    known = mask * (labels >= 0)
    metrics = {
        "loss": total.detach(),
        "mask_rate": mask.mean(1),
        "known_rate": known.mean(1),
        "correct_rate": right.mean(1),
    }
    for name in extra:
        if name not in found.metrics:
            raise MethodError(f"the method declares the metric {name!r}, but its loss returns none: add it")
        metrics[name] = found.metrics[name].detach().reshape(len(mask), -1).mean(1).to(total.dtype)
    return total, metrics, {name: buffer.detach() for name, buffer in step.buffers.items()}


def of_models(found: Losses, batch: Batch) -> Tensor:
    """The loss of each model, [n]: the mean over its images, unless the loss is that already."""
    return found.loss if found.loss.dim() == 1 else (found.loss * batch.shares).sum(1)


def with_own_labels(loss: Loss) -> Loss:
    """The loss, and the cross-entropy of users' own labelled images where they have some."""

    def both(step: Step) -> Losses:
        found = loss(step)
        if step.own is None or step.own_labels is None:
            return found
        logits = step.forward(step.own, draw="labelled")
        labelled = losses.cross_entropy(logits, step.own_labels.clamp(min=0))
        total = of_models(found, step.batch) + (labelled * (step.own_labels >= 0)).mean(1)
        return found._replace(loss=total)

    return both


class Look(NamedTuple):
    """What `label` sees before the first step: the received model's view of the round's images."""

    answers: Tensor
    """[n, T · B, classes]: predicted probabilities of weak views, in eval mode."""
    images: Tensor
    """[n, T, B]: which images, as indices that only mean something to their owner."""
    keys: Tensor
    """[n]: names the draws that `label` may need."""
    given: Named
    """What the round sent besides the model, [n, ...]."""
    has_labels: bool
    """Whether users hold labelled images of their own."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each user takes, where users differ; what the others show does not
    count."""

    @property
    def drawn(self) -> Tensor:
        """[n, T · B]: whether each image belongs to a step that its user takes."""
        users, steps, size = self.images.shape
        if self.taken is None:
            return torch.ones(users, steps * size, dtype=torch.bool, device=self.images.device)
        return torch.arange(steps * size, device=self.images.device) < size * self.taken[:, None]


class Labels(NamedTuple):
    """What `label` decides for a round of n users."""

    images: Tensor
    """[n, T, B]: the images of every step; they may be other ones than `Look.images`."""
    given: Named
    """[n, T, ...] each: what a step finds in `step.given`, such as labels and a mask."""
    more: Named = {}  # noqa: RUF012 (never changed)
    """[n, T, B] each: further images, of which a step finds weak views in `step.given`."""
    weight: Tensor | None = None
    """[n]: a user's weight in the average; 0 is as if it had dropped out."""
    pace: Tensor | None = None
    """[n]: the part of the learning rate that a user takes."""
    steps: Tensor | None = None
    """[n]: how many steps each user takes, at most those it was asked for; None is all of them."""
    reach: Tensor | None = None
    """[n]: the factor by which a user's update is scaled before it is sent."""
    report: Named = {}  # noqa: RUF012 (never changed)
    """[n, ...] each: numbers for the round, `Users.report`."""
    metrics: Named = {}  # noqa: RUF012 (never changed)
    """[n] each: metrics that replace those of the steps."""


# --- the server side ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Everything that passes from one round to the next."""

    round: int
    """t, how many rounds are done."""
    streams: Tensor
    """[S, P + Q]: w_avg,i, the model that members of group i start from; one row without groups."""
    average: Tensor
    """[P + Q]: w_avg, the model that the server starts from, and that is evaluated."""
    momentum: Tensor
    """[slots + 1, P]: momentum kept between rounds, the server's row last; empty when it is not kept."""
    strikes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[K]: how often each user's model was refused; empty without a gate."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What a method keeps besides, by name: `Method.initial` names all of it."""

    def next(
        self,
        streams: Tensor,
        average: Tensor | None = None,
        kept: Sequence["Trained | Users"] = (),
        **memory: Tensor,
    ) -> "State":
        """The state after a round; `kept` says whose momentum is carried on, where it is kept at all."""
        unknown = memory.keys() - self.memory.keys()
        if unknown:
            raise MethodError(f"the round keeps {', '.join(sorted(unknown))}, which initial() does not name")
        momentum = self.momentum
        for one in kept:
            for slots, values in one.momentum if len(self.momentum) else ():
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
"""Pairs of slots [m] and the momentum [m, P] that belongs there."""


@dataclass(frozen=True)
class Trained:
    """What the server's training gave."""

    row: Tensor
    """[P + Q]: the trained model; of replicas the first."""
    momentum: Momentum


@dataclass(frozen=True)
class Users:
    """What the users' training gave, once the checks, the robust average and the noise are applied."""

    means: Tensor
    """[S, P + Q]: equation (7), the new model of every group; what was sent where no user counted."""
    average: Tensor
    """[P + Q]: equation (8), the mean of the groups' models."""
    counted: bool
    """Whether any user's model counted."""
    who: Tensor
    """[m]: the users whose models counted."""
    groups: tuple[tuple[int, ...], ...]
    """Places in `who`, by group."""
    momentum: Momentum
    declared: frozenset[str] = frozenset()
    _rows: Tensor | None = None
    _report: Named | None = None
    _sizes: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """[m, P + Q]: the models themselves. Needs "models"."""
        return self._needing("models", self._rows)  # type: ignore[no-any-return]

    @property
    def report(self) -> Named:
        """[m, ...] each: what `label` reported. Needs "reports"."""
        return self._needing("reports", self._report)  # type: ignore[no-any-return]

    @property
    def sizes(self) -> Tensor:
        """[m]: how many images each user has. Needs "sizes"."""
        return self._needing("sizes", self._sizes)  # type: ignore[no-any-return]

    def _needing(self, need: str, value: Any) -> Any:
        if need not in self.declared:
            raise MethodError(f"the round uses {NEEDS[need]}: add {need!r} to what needs() returns")
        return value


class Fed(Protocol):
    """Everything that a round can see; the simulator and the real centre implement it."""

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
        """Names the draws for a purpose, of this round or of the whole run."""

    def train_users(
        self,
        start: Tensor,
        *,
        server: Tensor | None = None,
        server_weight: float | None = None,
        replicas: int = 1,
        give: Callable[[Sequence[int]], Named] | None = None,
    ) -> Users:
        """Send every user the model of its group, let it train, and average what comes back.

        With `server`, the server trains that row at the same time and joins every group's average, with
        `server_weight` if given. `give(users)` returns further tensors [n, ...] for them.
        """

    def train_server(self, row: Tensor) -> Trained:
        """Train a row on the server's labelled images."""

    def answers(self, rows: Tensor, images: Tensor) -> Tensor:
        """The probabilities [m, B, classes] that models [m, P + Q] predict for uint8 images."""

    def above_chance(self, row: Tensor, most: int | None = None) -> float:
        """The accuracy, averaged over classes, on `most` of the server's labelled images, minus chance."""

    def confidence(self, row: Tensor, most: int | None = None) -> float:
        """The mean confidence of a model on `most` of the server's labelled images."""

    def tell(self, **metrics: float) -> None:
        """Add numbers to the round's event."""


def paper_round(
    state: State, fed: Fed, server_weight: float | None = None, server_replicas: bool = False
) -> State:
    """Equations (7) and (8): users and server train at the same time, and every group averages its own."""
    server = state.average if fed.has_server else None
    replicas = len(state.streams) if server_replicas else 1
    users = fed.train_users(state.streams, server=server, server_weight=server_weight, replicas=replicas)
    return state.next(users.means, users.average, kept=[users])


@dataclass(frozen=True)
class Method:
    """A method: its fields are its settings, [method] in a config. Subclass it as a frozen dataclass."""

    called: ClassVar[str] = ""
    """The name by which it was found; see `name`."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Defaults for other sections, which a person's own settings override."""
    start: ClassVar[str] = "group"
    """What a user starts a round from: the model of its "group", or its own one ("user")."""
    grouped: ClassVar[bool] = False
    """Whether users are dealt into several groups unless `federation.groups` says otherwise."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """The names of further metrics that its losses return."""
    note: ClassVar[str] = ""
    """What a table of results must say about it."""
    label: ClassVar[Any] = None
    """`label(self, look: Look) -> Labels`: pseudo-labels made once a round; None makes none."""
    keeps_models: ClassVar[bool] = False
    """Whether `initial` keeps a model of every user, for which there must be memory."""
    trains_users: ClassVar[bool] = True
    trains_server: ClassVar[bool] = True
    """Whether its round trains the server, where that has labelled images."""

    @property
    def name(self) -> str:
        """A built-in name, an import path, or "in memory" for a class that was passed as an object."""
        return str(type(self).__dict__.get("called") or "in memory")

    def needs(self) -> tuple[str, ...]:
        """Which of `NEEDS` it needs. What is possible (dist, privacy, real sites) follows from it."""
        return ()

    def uses(self) -> tuple[str, ...]:
        """What users' steps use: "weak" and "strong" views, "received" weights."""
        return ("weak", "strong")

    def passes(self) -> int:
        """How often a user's step sends each of its images forward and backward."""
        return 1

    def check(self, config: Any) -> None:
        """Raise ConfigError where other settings do not go with the method."""

    def network(self, network: torch.nn.Module) -> torch.nn.Module:
        """The network that is trained, if it is not the plain one."""
        return network

    def plain(self, tensors: Named) -> Named:
        """The tensors of the plain network, from those of `network`."""
        return tensors

    def initial(self, state: State, fed: Fed) -> Named:
        """All memory tensors by name, before round 0."""
        return {}

    def user_loss(self, step: Step) -> Losses:
        """The users' loss; by default the paper's consistency loss with τ = 0.95."""
        teacher = step.forward(step.weak, grad=False, train=False, draw="teacher")
        return losses.consistency(teacher, step.forward(step.strong), 0.95)

    def server_loss(self, step: Step) -> Losses:
        """The server's loss: cross-entropy with true labels, equation (3)."""
        return losses.supervised(step.forward(step.weak), step.labels)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        """The gradient of a step, by name, and its metrics; a weight that is left out stays as it is."""
        return step.slopes(loss, wide=False)

    def round(self, state: State, fed: Fed) -> State:
        """The next state; by default the paper's round."""
        return paper_round(state, fed)
