"""Fixed buffers in which all trainers of a round take their steps at once, and the SGD update on these
buffers.

A trainer is a user or the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssfl.core.rows import Layout, lengths, placed
from ssfl.core.step import Named, along
from ssfl.engines.work import Optimizer, Pool, Work


@dataclass(frozen=True)
class StepBuffers:
    """The tensors that one step of n trainers (users or the server) reads and writes, [n, ...] each."""

    weights: Named
    """The weights, in float32 or wider."""
    velocity: Named
    received: Named
    """The weights at the start of the round, if the method uses them; else empty."""
    narrow: Named
    """The weights that networks compute with: copies of `weights` in the lower precision of the network (such
    as bfloat16) if `rounded`, else `weights` themselves."""
    rounded: bool
    statistics: Named
    """The running statistics of normalisation layers."""
    work: Work
    rates: Tensor
    """[T, n]: the learning rate of each of T steps, for each of n trainers."""
    step: Tensor
    """[1]: the number of the next step, from 0."""
    metrics: Named
    """The metrics of the n trainers by name, [n] each, summed over the steps so far."""
    taken: Tensor | None = None
    """[n]: how many steps each of the n trainers takes; after these its tensors no longer change. None means
    all steps."""

    @property
    def models(self) -> int:
        return self.rates.shape[1]

    def load(self, layout: Layout, rows: Tensor, momentum: Tensor, work: Work) -> None:
        """Copies the models, momentum and work of a round's trainers into the buffers. If there is room for
        more trainers, the first ones are copied again, and these copies are not used."""
        chosen = torch.arange(self.models, device=rows.device) % len(rows)
        if self.models > len(rows):
            rows, momentum = rows[chosen], momentum[chosen]
        values = layout.unflatten(rows)
        for buffers, tensors in (
            (self.weights, values),
            (self.received, values),
            (self.narrow, values),
            (self.statistics, values),
            (self.velocity, layout.unflatten(momentum)),
        ):
            for name, buffer in buffers.items():
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
) -> StepBuffers:
    """Returns new buffers for `models` trainers with work of this kind. Their content is not set.

    Buffers for inference only (`learns` is false) hold no optimizer state. Without `received` they do not
    keep the weights at the start of the round.
    """

    def empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a new tensor [models, ...] without content. On a GPU, convolution filters have the memory
        format "channels last", as images do."""
        shape = (models, *like.shape[1:])
        if like.dim() == 5 and like.is_cuda:
            order = (shape[0], shape[1], shape[3], shape[4], shape[2])
            return like.new_empty(order, dtype=dtype).movedim(-1, 2)
        return like.new_empty(shape, dtype=dtype)

    tensors = list(layout.unflatten(rows).items())
    trained, statistics = tensors[: layout.trained], tensors[layout.trained :]
    rounded = pool.dtype != rows.dtype
    weights = {name: empty(value) for name, value in trained} if learns or not rounded else {}
    return StepBuffers(
        weights,
        {name: empty(value) for name, value in trained} if learns else {},
        {name: empty(value) for name, value in trained} if received else {},
        {name: empty(value, pool.dtype) for name, value in trained} if rounded else weights,
        rounded,
        {name: empty(value) for name, value in statistics},
        replace(work, lr_scale=None, taken=None).map(
            empty, keys=work.keys.new_zeros(len(work.keys), models), rates=()
        ),
        rows.new_zeros(len(work.rates), models),
        work.keys.new_zeros(1),
        {name: rows.new_zeros(models) for name in metrics},
        None if work.taken is None else empty(work.taken),
    )


def sgd(
    buffers: StepBuffers, gradients: Named, statistics: Named, metrics: Named, optimizer: Optimizer
) -> None:
    """Updates all weights by one step of SGD, and also the running statistics and the sums of the metrics.

    A weight without a gradient does not change, and neither does a trainer that has taken all its steps.
    """
    busy = None if buffers.taken is None else buffers.step < buffers.taken

    def write(buffer: Tensor, new: Tensor) -> None:
        buffer.copy_(new if busy is None else torch.where(along(busy, buffer), new.to(buffer.dtype), buffer))

    rates = buffers.rates.index_select(0, buffers.step)[0]
    gradients = {name: gradient.to(buffers.weights[name].dtype) for name, gradient in gradients.items()}
    if optimizer.clip:
        gradients = _cut(gradients, optimizer.clip)
    for name, gradient in gradients.items():
        weight = buffers.weights[name]
        gradient = gradient + optimizer.weight_decay * weight
        if optimizer.momentum:
            velocity = optimizer.momentum * buffers.velocity[name] + gradient
            gradient = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
            write(buffers.velocity[name], velocity)
        new = weight - along(rates, weight) * gradient
        write(weight, new)
        if buffers.rounded:
            write(buffers.narrow[name], new)
    for name, value in buffers.statistics.items():
        write(value, statistics[name])
    for name, total in buffers.metrics.items():
        total.add_(metrics[name] if busy is None else torch.where(busy, metrics[name], 0.0))
    buffers.step.add_(1)


def _cut(gradients: Named, most: float) -> Named:
    """Returns gradients in which each model's gradient is scaled down to a norm of at most `most`."""
    share = (most / (lengths(list(gradients.values())) + 1e-6)).clamp(max=1)
    return {name: gradient * along(share, gradient) for name, gradient in gradients.items()}
