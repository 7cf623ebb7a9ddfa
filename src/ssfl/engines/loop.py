"""One trainer after another in plain PyTorch: the specification that every other engine equals."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssfl.losses import answered, certain, disagreement, local_loss, uphill
from ssfl.rows import Layout, row_of, trained, write_row
from ssfl.work import (
    Batch,
    Objective,
    Optimizer,
    Pool,
    Trained,
    Work,
    each_batch,
    looking,
    make_batch,
    positions,
)


class Loop:
    """The engine "loop"."""

    def __init__(self, model: nn.Module, layout: Layout, pool: Pool, optimizer: Optimizer) -> None:
        self.model, self.layout, self.pool, self.optimizer = model, layout, pool, optimizer

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> Trained:
        """Each trainer's T steps of SGD from its own row."""
        results = [self._train_one(rows[i], momentum[i], work.of(slice(i, i + 1))) for i in range(len(rows))]
        new_rows, new_momentum, stats = zip(*results, strict=True)
        return Trained(
            torch.stack(new_rows),
            torch.stack(new_momentum),
            {name: torch.cat([s[name] for s in stats]) for name in stats[0]},
        )

    def _train_one(
        self, row: Tensor, momentum: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        write_row(self.model, self.layout, row)
        weights = list(trained(self.model).values())
        sgd = torch.optim.SGD(
            weights,
            lr=0.0,
            momentum=self.optimizer.momentum,
            nesterov=self.optimizer.nesterov,
            weight_decay=self.optimizer.weight_decay,
        )
        velocity = [v.clone() for v in momentum.split([w.numel() for w in weights])]
        for weight, v in zip(weights, velocity, strict=True):
            sgd.state[weight]["momentum_buffer"] = v.reshape(weight.shape)
        told: list[dict[str, Tensor]] = []
        pull = work.objective.proximal
        received = [weight.detach().clone() for weight in weights] if pull else []
        pace = 1.0 if work.pace is None else float(work.pace)
        for rate, batch in zip(work.rates, each_batch(self.pool, work), strict=True):
            sgd.param_groups[0]["lr"] = rate * pace
            sgd.zero_grad()
            loss, stats = local_loss(self._forward, batch, work.objective)
            loss.sum().backward()
            if work.objective.sharpness and batch.given is not None:
                self._look_around(weights, batch, work.objective)
            for weight, start in zip(weights, received, strict=False):
                weight.grad = pull * (weight.detach() - start) + (0 if weight.grad is None else weight.grad)
            if self.optimizer.clip:
                nn.utils.clip_grad_norm_(weights, self.optimizer.clip)
            sgd.step()
            told.append(stats)
        if self.optimizer.momentum:
            velocity = [sgd.state[weight]["momentum_buffer"].reshape(-1) for weight in weights]
        means = {name: torch.stack([t[name] for t in told]).mean(0) for name in told[0]}
        return row_of(self.model, self.layout), torch.cat(velocity), means

    def _look_around(self, weights: list[nn.Parameter], batch: Batch, objective: Objective) -> None:
        """Add the gradient of (FL)²'s consistency with the weights around these."""
        sure = local_loss(self._forward, certain(batch), objective)[0].sum()
        slopes = torch.autograd.grad(sure, weights, allow_unused=True, materialize_grads=True)
        names = list(trained(self.model))
        with torch.no_grad():
            own = {name: weight[None] for name, weight in zip(names, weights, strict=True)}
            steps = [step[0] for step in uphill(own, [slope[None] for slope in slopes], objective.sharpness)]
        moved = [
            (weight.detach() + step).requires_grad_() for weight, step in zip(weights, steps, strict=True)
        ]

        def there(images: Tensor, training: bool, keys: Tensor) -> Tensor:
            state = {n: w.to(self.pool.dtype) for n, w in zip(names, moved, strict=True)}
            return functional_call(self.model, state, (images[0], keys[0]))[None]  # type: ignore[no-any-return]

        disagreement(self._forward, there, batch).sum().backward()
        for weight, other in zip(weights, moved, strict=True):
            if other.grad is not None:
                weight.grad = other.grad + (0 if weight.grad is None else weight.grad)

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """What each row says of weak views of its batches' images, in probabilities."""
        found = []
        with torch.no_grad():
            for i in range(len(rows)):
                write_row(self.model, self.layout, rows[i])
                batches = each_batch(self.pool, looking(work.of(slice(i, i + 1))))
                said = [answered(self._forward, batch) for batch in batches]
                found.append(torch.cat(said, 1))
        return torch.cat(found)

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """The gradient of each trainer's loss over all its data, [n, P]."""
        found = []
        for i in range(len(rows)):
            write_row(self.model, self.layout, rows[i])
            mine = work.of(slice(i, i + 1))
            self.model.zero_grad()
            for step in range(-(-int(sizes[i]) // work.batches.shape[2])):
                batch = full_batch(self.pool, mine, step, sizes[i : i + 1])
                local_loss(self._forward, batch, work.objective)[0].sum().backward()
            found.append(torch.cat([_gradient(weight) for weight in trained(self.model).values()]))
        return torch.stack(found)

    def close(self) -> None:
        """Nothing is held."""

    def memory(self, objective: Objective, batch_size: int) -> int:
        """What a round keeps of a trainer: its row and momentum, as they go and as they come."""
        return 6 * self.layout.length * self.pool.wide.itemsize

    def positions(self, base: int, trainers: Tensor, sizes: Tensor, first: int, count: int) -> Tensor:
        """`work.positions`."""
        return positions(base, trainers, sizes, first, count)

    def _forward(self, images: Tensor, training: bool, keys: Tensor) -> Tensor:
        """Of the one trainer: [1, B, ...] to [1, B, classes]."""
        self.model.train(training)
        arguments = (images[0], keys[0])
        if self.pool.dtype == self.pool.wide:
            return self.model(*arguments)[None]  # type: ignore[no-any-return]
        narrow = {name: weight.to(self.pool.dtype) for name, weight in trained(self.model).items()}
        return functional_call(self.model, narrow, arguments)[None]  # type: ignore[no-any-return]


def full_batch(pool: Pool, work: Work, step: int, sizes: Tensor) -> Batch:
    """The step's part of a pass over all data: each image weighs 1/N, repeated ones nothing."""
    batch = make_batch(pool, work, step)
    size = work.batches.shape[2]
    place = torch.arange(step * size, (step + 1) * size, device=sizes.device)
    weights = torch.where(place < sizes[:, None], 1 / sizes[:, None].to(pool.wide), 0.0)
    return batch._replace(weights=weights)


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight).reshape(-1) if weight.grad is None else weight.grad.reshape(-1)
