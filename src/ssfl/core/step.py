"""The types that the user side of a method works with: a training step, and the making of pseudo-labels once
a round.

`Step` is one SGD step; a method's functions `user_loss` and `gradient` get it. `Look` is the input of a
method's function `label`, which is called before the first step of a round, and `Labels` is its result. Most
tensors are [n, ...], for n users at once. T is the number of steps in a round, and B is the number of images
in a step.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssfl.core import draws, losses
from ssfl.core.losses import Losses
from ssfl.errors import MethodError, in_words

Named = dict[str, Tensor]
"""Tensors by name, such as the weights of a network."""
Loss = Callable[["Step"], Losses]
Network = Callable[[Named, Named, Tensor, bool, Tensor], tuple[Tensor, Named]]
"""The type of a function that runs n models at once. Its arguments are the weights, the buffers (running
statistics), images [n, B, ...], whether to use training mode, and keys [n]. Each model's dropout mask is
drawn from its key. The function returns logits [n, B, classes] and the new buffers."""
Evaluate = Callable[[Loss, Named, Named, "Batch", Named | None], tuple[Tensor, Named, Named]]
"""The type of a function that computes the losses of n models. Its arguments are a loss function, weights,
buffers (running statistics), a batch, and the weights that were received at the start of the round. The
received weights may be None. The function returns the loss of each model [n], the metrics by name, and the
new buffers."""
METRICS = ("loss", "mask_rate", "known_rate", "correct_rate")
"""The metrics of every step. `loss` is the mean loss. The others are fractions of the step's images.
`mask_rate`: images that are trained on. `known_rate`: images that are trained on and whose true label is
known. `correct_rate`: images that are trained on with the correct label."""
DRAWS = {"teacher": 0, "student": 1, "labelled": 2, "mix": 3}
"""The names of the dropout masks that built-in methods use: the argument `draw` of `Step.forward`. Each name
has a number, from which the key of the mask's random draws is made."""


class Batch(NamedTuple):
    """The images of one training step of n users, and their labels. Images are normalised floats [n, B, C, H,
    W]: B images for each user, with C channels."""

    weak: Tensor | None
    """Weakly augmented views of the images; None if the method does not use them."""
    strong: Tensor | None
    """Strongly augmented views of the same images; None if the method does not use them."""
    labels: Tensor
    """[n, B]: the true label of each of the n users' B images; -1 where unknown."""
    own: Tensor | None
    """Weakly augmented views of labelled images that the users themselves have; None if no user has any."""
    own_labels: Tensor | None
    """[n, B]: the true labels of the images in `own`, for n users with B images each; -1 for a user without
    labelled images."""
    keys: Tensor
    """[n]: for each user, the key from which the dropout masks of this step are drawn (see
    `core/draws.py`)."""
    shares: Tensor
    """[n, B]: the weight of each of a model's B images in its loss. If all count equally, it is 1 / B."""
    tensors: Named
    """Further tensors of this step by name, which the method's loss may read: those that its function `label`
    made, and those that the server sent with the model."""


class Step:
    """One SGD step of n users, or of the server. It is the only argument of a method's loss function.

    A loss may depend only on tensors. On a GPU, a step is recorded once and then replayed. So a Python number
    that changes from round to round would keep its first value.
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
        """The weights and the buffers (running statistics) of n models by name, [n, ...] each, in float32 or
        float64."""
        self.tensors = batch.tensors
        self.own, self.own_labels = batch.own, batch.own_labels
        self.rate, self.decay = rate, decay
        self._sees_labels = sees_labels
        self._network, self._narrow = network, weights if narrow is None else narrow
        self._received, self._evaluate, self._moved = received, evaluate, False

    @property
    def weak(self) -> Tensor:
        """Weakly augmented views of this step's images, [n, B, C, H, W] for n users with B images each."""
        return _declared(self.batch.weak, "weak")  # type: ignore[no-any-return]

    @property
    def strong(self) -> Tensor:
        """Strongly augmented views of the same images as in `weak`, [n, B, C, H, W]."""
        return _declared(self.batch.strong, "strong")  # type: ignore[no-any-return]

    @property
    def labels(self) -> Tensor:
        """[n, B]: the true labels of the images. At a user, all are -1 unless the method declares "labels" in
        `needs`, so that no method sees them by mistake."""
        labels = self.batch.labels
        return labels if self._sees_labels else torch.full_like(labels, -1)

    @property
    def received(self) -> Named:
        """The weights that the users received at the start of the round, by name, [n, ...] each. Only for
        methods that list "received" in `uses`."""
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
        """Returns the logits [n, B, classes] of images [n, B, ...]: the forward pass of n models at their
        current weights, or at `weights`.

        `grad` says whether gradients are needed. `train` chooses training or evaluation mode. `draw` names
        the dropout mask: two passes with the same name use the same mask.
        """
        keys = draws.fold(self.batch.keys, DRAWS[draw] if draw in DRAWS else draws.number(draw))
        used = self._narrow if weights is None else self._as_narrow(weights)
        if grad:
            logits, self.buffers = self._network(used, self.buffers, images, train, keys)
        else:
            with torch.no_grad():
                logits, self.buffers = self._network(used, self.buffers, images, train, keys)
        return logits.to(self.batch.shares.dtype)

    def gradient(self, loss: Loss, at: Named | None = None, *, wide: bool = True) -> tuple[Named, Named]:
        """Returns the gradient of a loss by weight name, and the metrics of the loss. It is the gradient at
        the current weights, or at the weights `at`.

        Running statistics are updated only by the first call without `at`. The gradient has the number type
        of the weights, float32 or float64. With wide=False it has the type of the forward pass, such as
        bfloat16. That saves time in a method whose function `gradient` returns this gradient unchanged.
        """
        if self._evaluate is None:
            raise MethodError("step.gradient() was called in a loss: call it in the method's gradient()")
        used = self._narrow if at is None else self._as_narrow(at)
        leaves = {name: weight.detach().requires_grad_() for name, weight in used.items()}
        total, metrics, buffers = self._evaluate(loss, leaves, self.buffers, self.batch, self._received)
        if not total.requires_grad:
            raise MethodError(
                f"{_name(loss)} returned a loss that does not depend on the model: compute it from the "
                "logits of step.forward(), without detach(). For a loss of zero, multiply the logits by 0",
                key="loss",
            )
        # the models are independent, so the gradient of the summed loss contains each model's gradient
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
        """Returns a copy of this step after one update of plain SGD with weight decay, w - rate · (gradient +
        decay · w). This step itself is not changed."""
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
        """Returns a copy of this step in which the given tensors, such as `mask`, replace those of the same
        names in `step.tensors`. Tensors with new names are added."""
        changed = copy.copy(self)
        changed.batch = self.batch._replace(tensors=self.tensors | tensors)
        changed.tensors = changed.batch.tensors
        return changed

    def _as_narrow(self, weights: Named) -> Named:
        """Returns the weights in the number type that the network computes in. This type, such as bfloat16,
        may be narrower than that of the stored weights."""
        return {name: weight.to(self._narrow[name].dtype) for name, weight in weights.items()}


def _declared(value: Any, name: str) -> Any:
    if value is None:
        raise MethodError(
            f"the method reads step.{name} but uses() does not return {name!r}: add it there", key=name
        )
    return value


def along(numbers: Tensor, models: Tensor) -> Tensor:
    """Returns one number per model, [n], reshaped to [n, 1, 1, ...]. Each number then multiplies its own
    model in the tensor `models` [n, ...]."""
    return numbers.view(-1, *[1] * (models.dim() - 1))


def evaluated(loss: Loss, step: Step, extra: Sequence[str] = ()) -> tuple[Tensor, Named, Named]:
    """Returns the loss of each of n models [n], the metrics by name, and the buffers (running statistics)
    after the forward pass. Every engine (an implementation of training) calls this function, so all compute
    the same numbers.

    `extra` are the names of further metrics that the method declares.
    """
    result = _losses(loss, step)
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
    undeclared = [name for name in result.metrics if name not in extra]
    if undeclared and step.role == "user":
        raise MethodError(
            f"{_name(loss)} returned the metric {undeclared[0]!r}, which the method does not declare: add it "
            f"to the class, as metrics = ({undeclared[0]!r},)",
            key=undeclared[0],
        )
    for name in extra:
        if name not in result.metrics:
            raise MethodError(
                f"the method declares the metric {name!r}, but its loss does not return it: add it to "
                "Losses.metrics",
                key=name,
            )
        metrics[name] = result.metrics[name].detach().reshape(len(mask), -1).mean(1).to(total.dtype)
    return total, metrics, {name: buffer.detach() for name, buffer in step.buffers.items()}


def _losses(loss: Loss, step: Step) -> Losses:
    """Returns the result of a method's loss function. Raises MethodError if it is not an `ssfl.Losses` with
    tensors of the right shapes."""
    result = loss(step)
    if not isinstance(result, Losses):
        raise MethodError(
            f"{_name(loss)} returned {in_words(result)}: return ssfl.Losses(loss, mask, label)", key="Losses"
        )
    shape = step.batch.labels.shape
    for name, value in (("loss", result.loss), ("mask", result.mask), ("label", result.label)):
        fits = isinstance(value, Tensor) and (
            value.shape == shape or (name == "loss" and value.shape == shape[:1])
        )
        if not fits:
            one = f" or {list(shape[:1])}, one number for each model" if name == "loss" else ""
            raise MethodError(
                f"{_name(loss)} returned {in_words(value)} as Losses.{name}: return a tensor of shape "
                f"{list(shape)}, one number for each image{one}",
                key=name,
            )
    if not result.mask.is_floating_point():
        raise MethodError(
            f"{_name(loss)} returned a tensor of type {result.mask.dtype} as Losses.mask: return floats "
            "from 0 to 1, such as mask.to(loss.dtype)",
            key="mask",
        )
    return result


def _name(loss: Loss) -> str:
    """Returns the name of a loss function with that of its class, such as "Mine.user_loss"."""
    return str(getattr(loss, "__qualname__", type(loss).__name__)).replace("<locals>.", "")


def of_models(result: Losses, batch: Batch) -> Tensor:
    """Returns the loss of each of n models, [n]. If `result` has one loss per image, the model's loss is
    their sum, weighted by `batch.shares`; usually this is the mean. If `result` already has one loss per
    model, these are returned unchanged."""
    return result.loss if result.loss.dim() == 1 else (result.loss * batch.shares).sum(1)


def with_own_labels(loss: Loss) -> Loss:
    """Returns a new loss function: the given loss plus the cross-entropy on labelled images that the users
    themselves have. A user without labelled images has only the given loss."""

    @functools.wraps(loss)  # so that errors name the method's function
    def both(step: Step) -> Losses:
        result = _losses(loss, step)
        if step.own is None or step.own_labels is None:
            return result
        logits = step.forward(step.own, draw="labelled")
        labelled = losses.cross_entropy(logits, step.own_labels.clamp(min=0))
        total = of_models(result, step.batch) + (labelled * (step.own_labels >= 0)).mean(1)
        return result._replace(loss=total)

    return both


class Look(NamedTuple):
    """The input of a method's function `label`, which makes the pseudo-labels of a round before the first
    step: the received models' predictions for all images of the round."""

    probabilities: Tensor
    """[n, T · B, classes]: the class probabilities that each of n users' received models predicts, in
    evaluation mode. They are for weak views of the B images of each of T steps."""
    images: Tensor
    """[n, T, B]: the numbers of the B images of each of T steps, for n users. A number identifies an image
    only at its owner."""
    keys: Tensor
    """[n]: for each user, the key from which `label` may draw random numbers (see `core/draws.py`)."""
    tensors: Named
    """Further tensors that the server sent to n users with the model, by name, [n, ...] each."""
    has_labels: bool
    """Whether any user has labelled images of its own."""
    taken: Tensor | None = None
    """[n]: how many of the T steps each user takes; None if all users take T. The images of later steps are
    not used."""

    @property
    def drawn(self) -> Tensor:
        """[n, T · B]: for each image of n users (T steps of B images), whether it belongs to a step that its
        user will take (see `taken`)."""
        users, steps, size = self.images.shape
        if self.taken is None:
            return torch.ones(users, steps * size, dtype=torch.bool, device=self.images.device)
        return torch.arange(steps * size, device=self.images.device) < size * self.taken[:, None]


class Labels(NamedTuple):
    """The result of a method's function `label` for n users: the pseudo-labels of a round, and how each user
    trains with them."""

    images: Tensor
    """[n, T, B]: the numbers of the B images of each of T steps, for n users. Each is one of the same user's
    numbers in `Look.images`. They differ from `Look.images` if, for example, only confident images are
    trained on."""
    tensors: Named
    """Tensors for n users and T steps by name, [n, T, ...] each, such as pseudo-labels and a mask. In each
    step, the loss finds that step's part in `step.tensors`."""
    extra_images: Named = {}  # noqa: RUF012 (never changed)
    """The numbers of further images by name, such as partners for mixup, [n, T, B] each: B images in each of
    T steps, for n users. The loss finds weak views of them in `step.tensors`."""
    weight: Tensor | None = None
    """[n]: the weight of each of n users in the average of the models; None: all have the same weight. A user
    with weight 0 is left out, as if it had dropped out of the round."""
    lr_scale: Tensor | None = None
    """[n]: for each of n users, a factor by which its learning rate is multiplied; None means 1."""
    steps: Tensor | None = None
    """[n]: how many of the round's T steps each of n users takes. None means all T."""
    update_scale: Tensor | None = None
    """[n]: for each of n users, a factor by which its update (the change of its model) is multiplied before
    it is sent. None means 1."""
    report: Named = {}  # noqa: RUF012 (never changed)
    """Numbers that n users report to the server, by name, [n, ...] each. A method's function `round` reads
    them in `Users.report`."""
    metrics: Named = {}  # noqa: RUF012 (never changed)
    """Metrics of n users by name, [n] each. They replace metrics of the same names that the training steps
    measure."""
