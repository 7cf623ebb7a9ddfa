"""All trainers of a round at once on one device: the step of `loop`, mapped over rows."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ssfl.engines.loop import full_batch
from ssfl.rows import Layout
from ssfl.work import Batch, Objective, Optimizer, Pool, Trained, Work, local_loss, make_batch

Named = dict[str, Tensor]


def train(
    model: nn.Module,
    layout: Layout,
    pool: Pool,
    optimizer: Optimizer,
    rows: Tensor,
    momentum: Tensor,
    work: Work,
) -> Trained:
    """T steps of SGD, each for all rows together."""
    weights, statistics = rows[:, : layout.weights].clone(), rows[:, layout.weights :]
    velocity = momentum
    told: list[Named] = []
    for step, rate in enumerate(work.rates):
        batch = make_batch(pool, work, step)
        rows = torch.cat([weights, statistics], 1)
        slope, statistics, stats = _slopes(model, layout, rows, batch, work.objective)
        slope = slope + optimizer.weight_decay * weights
        if optimizer.momentum:
            velocity = optimizer.momentum * velocity + slope
            slope = slope + optimizer.momentum * velocity if optimizer.nesterov else velocity
        weights = weights - rate * slope
        told.append(stats)
    means = {name: torch.stack([t[name] for t in told]).mean(0) for name in told[0]}
    return Trained(torch.cat([weights, statistics], 1), velocity, means)


def gradients(
    model: nn.Module, layout: Layout, pool: Pool, rows: Tensor, work: Work, sizes: Tensor
) -> Tensor:
    """The gradient of each trainer's loss over all its data, [n, P].

    `work.batches` [n, steps, B] goes once through each trainer's images and then repeats some; of
    its own images each weighs 1/N and the repeated ones nothing, so unequal trainers go together.
    """
    total = torch.zeros_like(rows[:, : layout.weights])
    for step in range(work.steps):
        batch = full_batch(pool, work, step, sizes)
        slope, statistics, _ = _slopes(model, layout, rows, batch, work.objective)
        # statistics move only for those who still have images, as in the loop
        busy = (step * work.batches.shape[2] < sizes)[:, None]
        kept = torch.where(busy, statistics, rows[:, layout.weights :])
        rows = torch.cat([rows[:, : layout.weights], kept], 1)
        total = total + torch.where(busy, slope, 0.0)
    return total


def _slopes(
    model: nn.Module, layout: Layout, rows: Tensor, batch: Batch, objective: Objective
) -> tuple[Tensor, Tensor, Named]:
    """For every row: the gradient of its loss, its new statistics, and what is told about the step."""
    tensors = layout.unflatten(rows)
    trained = {name for name, _ in model.named_parameters()}
    weights = {name: tensors[name] for name in tensors if name in trained}
    statistics = {name: tensors[name] for name in tensors if name not in trained}

    def loss(weights: Named, statistics: Named, batch: Batch) -> tuple[Tensor, tuple[Named, Named]]:
        state = weights | statistics

        def forward(images: Tensor, training: bool, key: Tensor) -> Tensor:
            model.train(training)
            return functional_call(model, state, (images, key))  # type: ignore[no-any-return]

        value, stats = local_loss(forward, batch, objective)
        # functional_call leaves the statistics that the network replaced in `state`
        return value, ({name: state[name] for name in statistics}, stats)

    slopes, (moved, stats) = vmap(grad(loss, has_aux=True))(weights, statistics, batch)
    flat = layout.flatten(moved, lead=1) if moved else rows[:, layout.weights :]
    return layout.flatten(slopes, lead=1), flat, stats
