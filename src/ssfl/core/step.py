"""What the user side of a method sees: the batch of a step, its loss, and the pseudo-labels that are made
once a round.

`Step` is one SGD step, which a method's functions `user_loss` and `gradient` get. `Look` is what its function
`label` gets before the first step, and `Labels` is what `label` returns. Tensors are [n, ...] for n users at
once. T is the number of steps in a round and B the number of images in a step.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssfl.core import draws, losses
from ssfl.core.losses import Losses
from ssfl.errors import MethodError

Named = dict[str, Tensor]
"""Tensors by their names in the network."""
Loss = Callable[["Step"], Losses]
Network = Callable[[Named, Named, Tensor, bool, Tensor], tuple[Tensor, Named]]
"""A function (weights, buffers, images [n, B, ...], training mode or not, dropout keys [n]) that returns the
logits [n, B, classes] and the new buffers."""
Evaluate = Callable[[Loss, Named, Named, "Batch", Named | None], tuple[Tensor, Named, Named]]
"""A function (loss, weights, buffers, batch, received weights) that returns the loss of each model [n], its
metrics and the new buffers."""
METRICS = ("loss", "mask_rate", "known_rate", "correct_rate")
"""The metrics of every step: the loss; the share of images that are trained on (mask rate); the share that is
trained on and whose true label is known; the share that is trained on with the correct label."""
DRAWS = {"teacher": 0, "student": 1, "labelled": 2, "mix": 3}
"""The dropout masks of the package's own methods by name, and the number that stands for each in the key of
its random draws. See `Step.forward`."""


class Batch(NamedTuple):
    """The images of one step and their labels. Images are [n, B, C, H, W] and normalised."""

    weak: Tensor | None
    """Weakly augmented views; None unless the method uses them."""
    strong: Tensor | None
    """Strongly augmented views; None unless the method uses them."""
    labels: Tensor
    """[n, B]: the true labels, -1 where unknown."""
    own: Tensor | None
    """Weakly augmented views of the users' own labelled images; None if no user has any."""
    own_labels: Tensor | None
    """[n, B]: the labels of `own`; -1 for a user without labelled images."""
    keys: Tensor
    """[n]: the keys of the step's dropout masks, see `core/draws.py`."""
    shares: Tensor
    """[n, B]: the weight of each image in its model's loss, such as 1 / B for the mean."""
    tensors: Named
    """Further tensors of the method for this step, by name: those that the method's `label` returned, and
    those that the server sent with the model."""


class Step:
    """One SGD step of n users, or of the server. A method's loss gets it as its only argument.

    A loss may depend only on tensors. On a GPU a step is recorded once and replayed, so a Python number that
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
        """The weights and buffers by name, [n, ...] each, in float32 or float64."""
        self.tensors = batch.tensors
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
        """The weights that the users received at the start of the round."""
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
        """Returns the logits [n, B, classes] of images [n, B, ...], at the current weights or at `weights`.
        `grad` says whether gradients are needed, and `train` chooses training or evaluation mode. `draw`
        names the dropout mask: equal names give equal masks."""
        keys = draws.fold(self.batch.keys, _number(draw))
        used = self._narrow if weights is None else self._as_narrow(weights)
        if grad:
            logits, self.buffers = self._network(used, self.buffers, images, train, keys)
        else:
            with torch.no_grad():
                logits, self.buffers = self._network(used, self.buffers, images, train, keys)
        return logits.to(self.batch.shares.dtype)

    def gradient(self, loss: Loss, at: Named | None = None, *, wide: bool = True) -> tuple[Named, Named]:
        """Returns the gradient of a loss by weight name, and the loss's metrics. The gradient is taken at the
        current weights, or at the weights `at`.

        Only the first gradient at the current weights updates the running statistics. The gradient has the
        number type of the weights. With wide=False it has the type of the forward pass, such as bfloat16,
        which saves a pass over memory if the gradient is returned unchanged.
        """
        if self._evaluate is None:
            raise MethodError("step.gradient() was called in a loss: call it in the method's gradient()")
        used = self._narrow if at is None else self._as_narrow(at)
        leaves = {name: weight.detach().requires_grad_() for name, weight in used.items()}
        total, metrics, buffers = self._evaluate(loss, leaves, self.buffers, self.batch, self._received)
        # the models are independent: the gradient of the sum holds the gradient of each
        values = torch.autograd.grad(
            total.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        if at is None and not self._moved:
            self.buffers, self._moved = buffers, True
        gradients = dict(zip(leaves, values, strict=True))
        if wide:
            gradients = {name: value.to(self.weights[name].dtype) for name, value in gradients.items()}
        return gradients, metrics

    def after(self, gradients: Named) -> "Step":
        """Returns a copy of this step in which the weights have made one update of plain SGD with weight
        decay, along `gradients`. This step is not changed."""
        if self.rate is None:
            raise MethodError("step.after() was called in a loss: call it in the method's gradient()")
        moved = dict(self.weights)
        for name, gradient in gradients.items():
            weight = self.weights[name]
            moved[name] = weight - along(self.rate, weight) * (gradient + self.decay * weight)
        later = copy.copy(self)
        later.weights, later._narrow = moved, self._as_narrow(moved)
        return later

    def with_tensors(self, **tensors: Tensor) -> "Step":
        """Returns a copy of this step with some of its `tensors` replaced."""
        changed = copy.copy(self)
        changed.batch = self.batch._replace(tensors=self.tensors | tensors)
        changed.tensors = changed.batch.tensors
        return changed

    def _as_narrow(self, weights: Named) -> Named:
        """Returns the weights in the number type that the network computes in, such as bfloat16."""
        return {name: weight.to(self._narrow[name].dtype) for name, weight in weights.items()}


def _declared(value: Any, name: str) -> Any:
    if value is None:
        raise MethodError(
            f"the method reads step.{name} but uses() does not return {name!r}: add it there", key=name
        )
    return value


def _number(draw: str) -> int:
    """Returns the number that stands for the name of a dropout mask in the key of its random draws."""
    if draw in DRAWS:
        return DRAWS[draw]
    number = 0
    for letter in draw:
        number = (131 * number + ord(letter)) % 2**31
    return 16 + number


def along(numbers: Tensor, models: Tensor) -> Tensor:
    """Returns numbers [n], one per model, reshaped so that they multiply the tensor `models` [n, ...]."""
    return numbers.view(-1, *[1] * (models.dim() - 1))


def evaluated(loss: Loss, step: Step, extra: Sequence[str] = ()) -> tuple[Tensor, Named, Named]:
    """Returns the loss of each model [n], its metrics, and the buffers after the forward pass. All engines
    use this function.

    `extra` names the further metrics that the method declares.
    """
    result = loss(step)
    total = of_models(result, step.batch)
    mask, labels = result.mask, step.batch.labels
    correct = (result.label == labels).to(mask.dtype) * mask
    known = mask * (labels >= 0)
    metrics = {
        "loss": total.detach(),
        "mask_rate": mask.mean(1),
        "known_rate": known.mean(1),
        "correct_rate": correct.mean(1),
    }
    for name in extra:
        if name not in result.metrics:
            raise MethodError(
                f"the method declares the metric {name!r}, but its loss does not return it: add it to "
                "Losses.metrics",
                key=name,
            )
        metrics[name] = result.metrics[name].detach().reshape(len(mask), -1).mean(1).to(total.dtype)
    return total, metrics, {name: buffer.detach() for name, buffer in step.buffers.items()}


def of_models(result: Losses, batch: Batch) -> Tensor:
    """Returns the loss of each model, [n]. If `result` has one loss per image, it is their weighted mean."""
    return result.loss if result.loss.dim() == 1 else (result.loss * batch.shares).sum(1)


def with_own_labels(loss: Loss) -> Loss:
    """Returns a new loss: the given one plus the cross-entropy on a user's own labelled images, if it has
    any."""

    def both(step: Step) -> Losses:
        result = loss(step)
        if step.own is None or step.own_labels is None:
            return result
        logits = step.forward(step.own, draw="labelled")
        labelled = losses.cross_entropy(logits, step.own_labels.clamp(min=0))
        total = of_models(result, step.batch) + (labelled * (step.own_labels >= 0)).mean(1)
        return result._replace(loss=total)

    return both


class Look(NamedTuple):
    """What a method's `label` gets before the first step: the predictions of the received model for all
    images of the round."""

    probabilities: Tensor
    """[n, T · B, classes]: the predicted probabilities for weak views, in evaluation mode."""
    images: Tensor
    """[n, T, B]: the numbers of the images of every step. They only mean something to their owner."""
    keys: Tensor
    """[n]: the keys of the draws that `label` may need, see `core/draws.py`."""
    tensors: Named
    """What the server sent besides the model, by name, [n, ...] each."""
    has_labels: bool
    """Whether users hold labelled images of their own."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each user takes; None if all take T. Images of later steps are not
    used."""

    @property
    def drawn(self) -> Tensor:
        """[n, T · B]: whether each image belongs to a step that its user will take."""
        users, steps, size = self.images.shape
        if self.taken is None:
            return torch.ones(users, steps * size, dtype=torch.bool, device=self.images.device)
        return torch.arange(steps * size, device=self.images.device) < size * self.taken[:, None]


class Labels(NamedTuple):
    """What a method's `label` returns for a round of n users: pseudo-labels, and how each user trains."""

    images: Tensor
    """[n, T, B]: the numbers of the images of every step; they may differ from `Look.images`."""
    tensors: Named
    """[n, T, ...] each: what a step finds in `step.tensors`, such as pseudo-labels and a mask."""
    extra_images: Named = {}  # noqa: RUF012 (never changed)
    """[n, T, B] each: the numbers of further images. A step finds weak views of them in `step.tensors`."""
    weight: Tensor | None = None
    """[n]: a user's weight in the average. A user with weight 0 is treated as a dropout."""
    lr_scale: Tensor | None = None
    """[n]: the factor by which each user's learning rate is multiplied."""
    steps: Tensor | None = None
    """[n]: how many steps each user takes, at most T. Default: T."""
    update_scale: Tensor | None = None
    """[n]: the factor by which a user's update is scaled before it is sent."""
    report: Named = {}  # noqa: RUF012 (never changed)
    """[n, ...] each: numbers that users report to the server. A method's `round` reads them in
    `Users.report`."""
    metrics: Named = {}  # noqa: RUF012 (never changed)
    """[n] each: metrics that replace the metrics of the same names that the steps would report."""
