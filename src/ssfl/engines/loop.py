"""One trainer after another in plain PyTorch: the specification that every other engine equals."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ssfl.rows import Layout, row_of, write_row
from ssfl.work import Batch, Optimizer, Pool, Trained, Work, local_loss, make_batch


def train(
    model: nn.Module,
    layout: Layout,
    pool: Pool,
    optimizer: Optimizer,
    rows: Tensor,
    momentum: Tensor,
    work: Work,
) -> Trained:
    """Each trainer's T steps of SGD from its own row."""
    results = [
        _train_one(model, layout, pool, optimizer, rows[i], momentum[i], work.of(slice(i, i + 1)))
        for i in range(len(rows))
    ]
    new_rows, new_momentum, stats = zip(*results, strict=True)
    return Trained(
        torch.stack(new_rows),
        torch.stack(new_momentum),
        {name: torch.stack([s[name] for s in stats]) for name in stats[0]},
    )


def _train_one(
    model: nn.Module,
    layout: Layout,
    pool: Pool,
    optimizer: Optimizer,
    row: Tensor,
    momentum: Tensor,
    work: Work,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    write_row(model, layout, row)
    weights = list(model.parameters())
    sgd = torch.optim.SGD(
        weights,
        lr=0.0,
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        weight_decay=optimizer.weight_decay,
    )
    velocity = [v.clone() for v in momentum.split([w.numel() for w in weights])]
    for weight, v in zip(weights, velocity, strict=True):
        sgd.state[weight]["momentum_buffer"] = v.reshape(weight.shape)
    told: list[dict[str, Tensor]] = []
    for step, rate in enumerate(work.rates):
        batch = Batch(*(part[0] for part in make_batch(pool, work, step)))
        sgd.param_groups[0]["lr"] = rate
        sgd.zero_grad()
        loss, stats = local_loss(_forward(model), batch, work.objective)
        loss.backward()
        sgd.step()
        told.append(stats)
    if optimizer.momentum:
        velocity = [sgd.state[weight]["momentum_buffer"].reshape(-1) for weight in weights]
    means = {name: torch.stack([t[name] for t in told]).mean(0) for name in told[0]}
    return row_of(model, layout), torch.cat(velocity), means


def gradients(
    model: nn.Module, layout: Layout, pool: Pool, rows: Tensor, work: Work, sizes: Tensor
) -> Tensor:
    """The gradient of each trainer's loss over all its data, [n, P]; see `vmap.gradients`."""
    found = []
    for i in range(len(rows)):
        write_row(model, layout, rows[i])
        mine = work.of(slice(i, i + 1))
        model.zero_grad()
        for step in range(-(-int(sizes[i]) // work.batches.shape[2])):
            batch = Batch(*(part[0] for part in full_batch(pool, mine, step, sizes[i : i + 1])))
            local_loss(_forward(model), batch, work.objective)[0].backward()
        found.append(torch.cat([_gradient(weight) for weight in model.parameters()]))
    return torch.stack(found)


def full_batch(pool: Pool, work: Work, step: int, sizes: Tensor) -> Batch:
    """The step's part of a pass over all data: each image weighs 1/N, repeated ones nothing."""
    batch = make_batch(pool, work, step)
    size = work.batches.shape[2]
    place = torch.arange(step * size, (step + 1) * size, device=sizes.device)
    weights = torch.where(place < sizes[:, None], 1 / sizes[:, None].to(pool.dtype), 0.0)
    return batch._replace(weights=weights)


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight).reshape(-1) if weight.grad is None else weight.grad.reshape(-1)


def _forward(model: nn.Module) -> Callable[[Tensor, bool, Tensor], Tensor]:
    def forward(images: Tensor, training: bool, key: Tensor) -> Tensor:
        model.train(training)
        return model(images, key)  # type: ignore[no-any-return]

    return forward
