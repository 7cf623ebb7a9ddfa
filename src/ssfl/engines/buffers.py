"""Memory for training all trainers of a round together, and the SGD update on this memory. A trainer is a
user or the server.

The tensors stay at fixed addresses. On a GPU a step is recorded as a CUDA graph, which always reads and
writes the same memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssfl.core.rows import Layout, lengths, placed
from ssfl.core.step import Named, along
from ssfl.engines.work import Optimizer, Pool, Work

APART = 64
"""Joined tensors begin at multiples of this many values. GPU kernels are faster if addresses are multiples of
16 bytes."""


@dataclass(frozen=True)
class Joined:
    """The weight vectors of n models, such as biases. They are small, so they lie in common memory, where one
    GPU kernel updates all of them. They have V values in total."""

    names: tuple[str, ...]
    owner: Tensor
    """[V]: the model to which each value belongs."""
    column: Tensor
    """[V]: the position of each value in its model's row."""
    place: Tensor
    """[V]: the position of each value in the common memory."""
    memory: Named
    """The common memory of the buffers by name: "weights", "narrow", "velocity" and "received". Those that
    the step does not need are left out."""
    parts: dict[str, Named]
    """The same memory as weight vectors [n, ...] by name, for each of these buffers."""

    def load(self, rows: Tensor, momentum: Tensor) -> None:
        """Copies the values from the models `rows` [n, P + Q], and the velocity from the `momentum` [n, P],
        into the common memory."""
        values = rows[self.owner, self.column]
        for name, memory in self.memory.items():
            source = momentum[self.owner, self.column] if name == "velocity" else values
            memory[self.place] = source.to(memory.dtype)


@dataclass(frozen=True)
class StepBuffers:
    """The tensors that a training step of n trainers (users, or the server) reads and writes. They are
    allocated once and used again in every round.

    Tensors have the shape [n, ...] unless their description gives another one.
    """

    weights: Named
    """The weights by name, in float32 or float64. The optimizer updates them."""
    velocity: Named
    received: Named
    """The weights at the start of the round by name; empty if the method does not use them."""
    narrow: Named
    """The weights that the networks compute with. If the field `rounded` is true, they are copies of
    `weights` in the networks' lower precision, such as bfloat16. Otherwise they are `weights` themselves."""
    rounded: bool
    statistics: Named
    """The running statistics of normalisation layers by name."""
    work: Work
    rates: Tensor
    """[T, n]: the learning rate of each of the round's T steps, for each of n trainers."""
    step: Tensor
    """[1]: the number of the next step of the round, counted from 0."""
    metrics: Named
    """The metrics of n trainers by name, [n] each, summed over the steps that were taken so far in this
    round."""
    taken: Tensor | None = None
    """[n]: how many of the round's T steps each trainer takes. After these steps its tensors no longer
    change. None: all take T."""
    joined: Joined | None = None
    """The vectors among the weights, if they lie in common memory."""

    @property
    def models(self) -> int:
        return self.rates.shape[1]

    @property
    def busy(self) -> Tensor | None:
        """[n]: whether each trainer takes this step. None: all do."""
        return None if self.taken is None else self.step < self.taken

    def load(self, layout: Layout, rows: Tensor, momentum: Tensor, work: Work) -> None:
        """Copies the data of a round's trainers into the buffers, before the first step. The data are the
        models `rows`, the `momentum`, and the `work`: images, learning rates and random keys. If the buffers
        have room for more trainers, the rest is filled with copies of these trainers. The results of the
        copies are ignored."""
        chosen = torch.arange(self.models, device=rows.device) % len(rows)
        if self.models > len(rows):
            rows, momentum = rows[chosen], momentum[chosen]
        values = layout.unflatten(rows)
        joined = () if self.joined is None else self.joined.names
        if self.joined is not None:
            self.joined.load(rows, momentum)
        for buffers, tensors in (
            (self.weights, values),
            (self.received, values),
            (self.narrow, values),
            (self.statistics, values),
            (self.velocity, layout.unflatten(momentum)),
        ):
            for name, buffer in buffers.items():
                if name not in joined:
                    buffer.copy_(tensors[name])
        self.work.keys.copy_(work.keys[:, chosen])
        self.work.batches.copy_(work.batches[chosen])
        if self.work.labelled is not None and work.labelled is not None:
            self.work.labelled.copy_(work.labelled[chosen])
        for buffers, tensors in (
            (self.work.tensors, work.tensors),
            (self.work.extra_images, work.extra_images),
            (self.work.sent, work.sent),
        ):
            for name, buffer in buffers.items():
                buffer.copy_(tensors[name][chosen])
        rates = placed(torch.tensor(work.rates, dtype=self.rates.dtype), rows.device)[:, None]
        self.rates.copy_(rates if work.lr_scale is None else rates * work.lr_scale[chosen])
        if self.taken is not None and work.taken is not None:
            self.taken.copy_(work.taken[chosen])
        self.step.zero_()
        for total in self.metrics.values():
            total.zero_()


def make_buffers(
    layout: Layout,
    pool: Pool,
    models: int,
    rows: Tensor,
    work: Work,
    metrics: Sequence[str] = (),
    *,
    learns: bool = True,
    received: bool = False,
    join: bool = False,
) -> StepBuffers:
    """Returns new buffers for `models` trainers. `StepBuffers.load` must set their values before a step.

    `rows` are the models of a round's trainers, each as one vector. `work` has their images, learning rates
    and random keys. They determine all other dimensions of the buffers. `metrics` are the names of the
    metrics that are summed. If `learns` is false, the buffers are for prediction only and hold no optimizer
    state. If `received` is true, they also keep the weights at the start of the round. If `join` is
    true, weight vectors lie in common memory (`Joined`).
    """

    def empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a new, uninitialised tensor [models, ...] with the other dimensions of `like`. On a GPU,
        convolution filters get the memory format "channels last", which the images have too."""
        shape = (models, *like.shape[1:])
        if like.dim() == 5 and like.is_cuda:
            order = (shape[0], shape[1], shape[3], shape[4], shape[2])
            return like.new_empty(order, dtype=dtype).movedim(-1, 2)
        return like.new_empty(shape, dtype=dtype)

    tensors = list(layout.unflatten(rows).items())
    trained, statistics = tensors[: layout.trained], tensors[layout.trained :]
    rounded = pool.dtype != rows.dtype
    kinds = {"weights": rows.dtype} if learns or not rounded else {}
    kinds |= {"velocity": rows.dtype} if learns else {}
    kinds |= {"received": rows.dtype} if received else {}
    kinds |= {"narrow": pool.dtype} if rounded else {}
    joined = _join(layout, rows, models, kinds) if join else None

    def each(kind: str) -> Named:
        if kind not in kinds:
            return {}
        small = {} if joined is None else joined.parts[kind]
        return {n: small[n] if n in small else empty(value, kinds[kind]) for n, value in trained}

    weights = each("weights")
    return StepBuffers(
        weights,
        each("velocity"),
        each("received"),
        each("narrow") if rounded else weights,
        rounded,
        {name: empty(value) for name, value in statistics},
        replace(work, lr_scale=None, taken=None).map(
            empty, keys=work.keys.new_zeros(len(work.keys), models), rates=()
        ),
        rows.new_zeros(len(work.rates), models),
        work.keys.new_zeros(1),
        {name: rows.new_zeros(models) for name in metrics},
        None if work.taken is None else empty(work.taken),
        joined,
    )


def _join(layout: Layout, rows: Tensor, models: int, kinds: dict[str, torch.dtype]) -> Joined | None:
    """Returns common memory for the weight vectors of `models` models, for buffers of these kinds and number
    types. Returns None if the network has fewer than two of them."""
    trained = list(zip(layout.names, layout.sizes, layout.shapes, strict=True))[: layout.trained]
    vectors = tuple(name for name, _, shape in trained if len(shape) == 1)
    if len(vectors) < 2:
        return None
    owners, columns, places, start, end = [], [], [], 0, 0
    spans: dict[str, slice] = {}
    for name, size, _ in trained:
        if name in vectors:
            values = torch.arange(models * size)
            owners.append(values // size)
            columns.append(values % size + start)
            places.append(values + end)
            spans[name] = slice(end, end + len(values))
            end += -(-len(values) // APART) * APART
        start += size
    memory = {kind: rows.new_zeros(end, dtype=dtype) for kind, dtype in kinds.items()}
    parts = {
        kind: {name: whole[span].view(models, -1) for name, span in spans.items()}
        for kind, whole in memory.items()
    }
    owner, column, place = (torch.cat(each).to(rows.device) for each in (owners, columns, places))
    return Joined(vectors, owner, column, place, memory, parts)


def sgd(
    buffers: StepBuffers, gradients: Named, statistics: Named, metrics: Named, optimizer: Optimizer
) -> None:
    """Takes one step of SGD with all trainers, in place: updates the weights, the momentum and the running
    statistics, and adds the metrics to their sums.

    A weight without a gradient does not change. A trainer that has already taken all its steps does not
    change either.
    """
    busy, rates = buffers.busy, buffers.rates.index_select(0, buffers.step)[0]
    gradients = {name: gradient.to(buffers.weights[name].dtype) for name, gradient in gradients.items()}
    if optimizer.clip:
        gradients = _cut(gradients, optimizer.clip)
    for name, gradient in gradients.items():
        weight = buffers.weights[name]
        gradient = gradient + optimizer.weight_decay * weight
        if optimizer.momentum:
            velocity = optimizer.momentum * buffers.velocity[name] + gradient
            gradient = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
            _write(buffers.velocity[name], velocity, busy)
        new = weight - along(rates, weight) * gradient
        _write(weight, new, busy)
        if buffers.rounded:
            _write(buffers.narrow[name], new, busy)
    _end_step(buffers, statistics, metrics)


def _write(buffer: Tensor, new: Tensor, busy: Tensor | None) -> None:
    """Copies new values [n, ...] into a buffer, but only for trainers that take this step (`busy`)."""
    buffer.copy_(new if busy is None else torch.where(along(busy, buffer), new.to(buffer.dtype), buffer))


def sgd_by_kernels(
    buffers: StepBuffers, gradients: Named, statistics: Named, metrics: Named, optimizer: Optimizer
) -> None:
    """Does the same as `sgd` on a GPU, with one kernel for each large weight tensor, and one for all weight
    vectors. There is no gradient clipping (`Optimizer.clip`)."""
    from ssfl.models.kernels import triton_sgd

    constants = optimizer.weight_decay, optimizer.momentum, optimizer.nesterov
    joined, when = buffers.joined, (buffers.rates, buffers.step, buffers.taken)
    if joined is not None and all(name in gradients for name in joined.names):
        memory, small = joined.memory, [gradients[name].flatten() for name in joined.names]
        triton_sgd.update_joined(
            memory["weights"], memory["velocity"], torch.cat(small), memory.get("narrow"),
            joined.owner, joined.place, *when, *constants,
        )  # fmt: skip
        gradients = {name: value for name, value in gradients.items() if name not in joined.names}
    for name, gradient in gradients.items():
        weight = buffers.weights[name]
        if not _same_format(gradient, weight):
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        triton_sgd.update(
            weight, buffers.velocity[name], gradient, buffers.narrow[name] if buffers.rounded else None,
            *when, *constants,
        )  # fmt: skip
    _end_step(buffers, statistics, metrics)


def _same_format(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same shape and memory format. The stride of a dimension of size 1
    does not matter."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    return one.shape == other.shape and all(a == b for size, a, b in strides if size > 1)


def _end_step(buffers: StepBuffers, statistics: Named, metrics: Named) -> None:
    """Writes the new running statistics, adds the metrics to their sums, and counts the step."""
    busy = buffers.busy
    old, new = list(buffers.statistics.values()), [statistics[name] for name in buffers.statistics]
    if old and busy is None:
        torch._foreach_copy_(old, new)  # few kernels on a GPU for many small tensors
    else:
        for buffer, value in zip(old, new, strict=True):
            _write(buffer, value, busy)
    for name, total in buffers.metrics.items():
        total.add_(metrics[name] if busy is None else torch.where(busy, metrics[name], 0.0))
    buffers.step.add_(1)


def _cut(gradients: Named, most: float) -> Named:
    """Returns the gradients after gradient clipping: each model's whole gradient is scaled down to a norm of
    at most `most`."""
    share = (most / (lengths(list(gradients.values())) + 1e-6)).clamp(max=1)
    return {name: gradient * along(share, gradient) for name, gradient in gradients.items()}
