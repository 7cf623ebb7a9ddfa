"""Fixed places in memory where all trainers of a round step at once, and the step itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssfl.core.rows import Layout, lengths, placed
from ssfl.engines.work import Optimizer, Pool, Work
from ssfl.federation import Named, along


@dataclass(frozen=True)
class StepBuffers:
    """Where a step of n trainers finds and leaves its numbers: every tensor [n, ...]."""

    weights: Named
    """float32 or wider."""
    velocity: Named
    received: Named
    """The weights that the round began with, where they hold the others back; else nothing."""
    narrow: Named
    """The weights as networks compute with them: copies in bfloat16 where `rounded`, else `weights`."""
    rounded: bool
    statistics: Named
    work: Work
    rates: Tensor
    """[T, n]: the learning rate of each step."""
    step: Tensor
    """[1]: which step is next."""
    metrics: Named
    """[n] each: sums over the steps so far."""
    taken: Tensor | None = None
    """[n]: how many steps each trainer takes, where they differ; then its numbers stay as they are."""

    @property
    def models(self) -> int:
        return self.rates.shape[1]

    def load(self, layout: Layout, rows: Tensor, momentum: Tensor, work: Work) -> None:
        """Put a round's rows and work into place; where there are fewer, the first trainers come twice."""
        who = torch.arange(self.models, device=rows.device) % len(rows)
        if self.models > len(rows):
            rows, momentum = rows[who], momentum[who]
        values = layout.unflatten(rows)
        for places, given in (
            (self.weights, values),
            (self.received, values),
            (self.narrow, values),
            (self.statistics, values),
            (self.velocity, layout.unflatten(momentum)),
        ):
            for name, place in places.items():
                place.copy_(given[name])
        self.work.keys.copy_(work.keys[:, who])
        self.work.batches.copy_(work.batches[who])
        if self.work.labelled is not None and work.labelled is not None:
            self.work.labelled.copy_(work.labelled[who])
        for here, given in (
            (self.work.given, work.given),
            (self.work.more, work.more),
            (self.work.sent, work.sent),
        ):
            for name, place in here.items():
                place.copy_(given[name][who])
        rates = placed(torch.tensor(work.rates, dtype=self.rates.dtype), rows.device)[:, None]
        self.rates.copy_(rates if work.pace is None else rates * work.pace[who])
        if self.taken is not None and work.taken is not None:
            self.taken.copy_(work.taken[who])
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
    """For so many models and this kind of work, not filled. Without `learns` there is no optimizer state, and
    without `received` no copy of the weights that the round began with."""

    def empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[models, ...], filters in the order of images with channels last on a GPU."""
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
        replace(work, pace=None, taken=None).map(
            empty, keys=work.keys.new_zeros(len(work.keys), models), rates=()
        ),
        rows.new_zeros(len(work.rates), models),
        work.keys.new_zeros(1),
        {name: rows.new_zeros(models) for name in metrics},
        None if work.taken is None else empty(work.taken),
    )


def sgd(place: StepBuffers, slopes: Named, moved: Named, metrics: Named, optimizer: Optimizer) -> None:
    """SGD on all weights at once, and the rest that a step leaves behind. A weight without a slope stays, and
    so does a trainer that is done."""
    busy = None if place.taken is None else place.step < place.taken

    def put(there: Tensor, new: Tensor) -> None:
        there.copy_(new if busy is None else torch.where(along(busy, there), new.to(there.dtype), there))

    rates = place.rates.index_select(0, place.step)[0]
    slopes = {name: slope.to(place.weights[name].dtype) for name, slope in slopes.items()}
    if optimizer.clip:
        slopes = _cut(slopes, optimizer.clip)
    for name, slope in slopes.items():
        weight = place.weights[name]
        slope = slope + optimizer.weight_decay * weight
        if optimizer.momentum:
            velocity = optimizer.momentum * place.velocity[name] + slope
            slope = slope + optimizer.momentum * velocity if optimizer.nesterov else velocity
            put(place.velocity[name], velocity)
        new = weight - along(rates, weight) * slope
        put(weight, new)
        if place.rounded:
            put(place.narrow[name], new)
    for name, value in place.statistics.items():
        put(value, moved[name])
    for name, total in place.metrics.items():
        total.add_(metrics[name] if busy is None else torch.where(busy, metrics[name], 0.0))
    place.step.add_(1)


def _cut(slopes: Named, most: float) -> Named:
    """Each model's gradient, at most so long."""
    share = (most / (lengths(list(slopes.values())) + 1e-6)).clamp(max=1)
    return {name: slope * along(share, slope) for name, slope in slopes.items()}
