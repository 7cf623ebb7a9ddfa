"""Fixed places in memory where all trainers of a round step at once, and the step itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.rows import Layout, lengths, placed
from ssfl.work import TOLD, Optimizer, Pool, Work

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Place:
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
    told: Tensor
    """[4, n]: sums over the steps so far."""

    @property
    def models(self) -> int:
        return self.told.shape[1]

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
        if self.work.given is not None and work.given is not None:
            for here, value in zip(self.work.given, work.given, strict=True):
                if here is not None and value is not None:
                    here.copy_(value[who])
        rates = placed(torch.tensor(work.rates, dtype=self.rates.dtype), rows.device)[:, None]
        self.rates.copy_(rates if work.pace is None else rates * work.pace[who])
        self.step.zero_()
        self.told.zero_()


def make_place(
    layout: Layout, pool: Pool, models: int, rows: Tensor, work: Work, learns: bool = True
) -> Place:
    """For so many models and this kind of work, not filled; who only looks keeps nothing that is learned."""

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
    return Place(
        weights,
        {name: empty(value) for name, value in trained} if learns else {},
        {name: empty(value) for name, value in trained} if work.objective.proximal else {},
        {name: empty(value, pool.dtype) for name, value in trained} if rounded else weights,
        rounded,
        {name: empty(value) for name, value in statistics},
        Work(
            work.objective,
            work.keys.new_zeros(len(work.keys), models),
            empty(work.batches),
            None if work.labelled is None else empty(work.labelled),
            (),
            given=None if work.given is None else work.given.map(empty),
        ),
        rows.new_zeros(len(work.rates), models),
        work.keys.new_zeros(1),
        rows.new_zeros(len(TOLD), models),
    )


def sgd(place: Place, slopes: Named, moved: Named, told: Named, optimizer: Optimizer) -> None:
    """SGD on all weights at once, and the rest that a step leaves behind."""
    rates = place.rates.index_select(0, place.step)[0]
    slopes = {name: slopes[name].to(weight.dtype) for name, weight in place.weights.items()}
    if place.received:
        pull = place.work.objective.proximal
        slopes = {n: slope + pull * (place.weights[n] - place.received[n]) for n, slope in slopes.items()}
    if optimizer.clip:
        slopes = _cut(slopes, optimizer.clip)
    for name, weight in place.weights.items():
        slope = slopes[name] + optimizer.weight_decay * weight
        if optimizer.momentum:
            velocity = optimizer.momentum * place.velocity[name] + slope
            slope = slope + optimizer.momentum * velocity if optimizer.nesterov else velocity
            place.velocity[name].copy_(velocity)
        new = weight - _along(rates, weight) * slope
        weight.copy_(new)
        if place.rounded:
            place.narrow[name].copy_(new)
    for name, value in place.statistics.items():
        value.copy_(moved[name])
    place.told.add_(torch.stack([told[name] for name in TOLD]))
    place.step.add_(1)


def _cut(slopes: Named, most: float) -> Named:
    """Each model's gradient, at most so long."""
    share = (most / (lengths(list(slopes.values())) + 1e-6)).clamp(max=1)
    return {name: slope * _along(share, slope) for name, slope in slopes.items()}


def _along(numbers: Tensor, models: Tensor) -> Tensor:
    """A number [n] of each model, to go with [n, ...]."""
    return numbers.view(-1, *[1] * (models.dim() - 1))
