"""The engine "loop": trains one trainer (a user or the server) after another in plain PyTorch. It defines the
results that all other engines must give."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.sgd import sgd

from ssfl.core.rows import Layout
from ssfl.core.step import METRICS, Batch, Loss, Named, Step, evaluated, with_own_labels
from ssfl.engines.work import (
    Optimizer,
    Pool,
    TrainedRows,
    Work,
    each_batch,
    for_prediction,
    make_batch,
    positions,
)
from ssfl.federation import Method


class Loop:
    """The engine "loop", which trains one trainer (a user or the server) after another."""

    side: torch.cuda.Stream | None = None

    def __init__(
        self, model: nn.Module, layout: Layout, pool: Pool, optimizer: Optimizer, method: Method
    ) -> None:
        self.model, self.layout, self.pool, self.optimizer = model, layout, pool, optimizer
        self.method = method
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self.tied = len(named) > len({id(tensor) for _, tensor in named})
        """Whether the network uses one tensor under several names (tied weights). Only then does
        `functional_call` have to search for such tensors, which takes time."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models, momentum and metrics of n trainers (users, or the server) after their steps of
        SGD. Trains one after another."""
        results = [self._train_one(rows[i], momentum[i], work.of(slice(i, i + 1))) for i in range(len(rows))]
        new_rows, new_momentum, metrics = zip(*results, strict=True)
        return TrainedRows(
            torch.cat(new_rows),
            torch.cat(new_momentum),
            {name: torch.cat([of_trainer[name] for of_trainer in metrics]) for name in metrics[0]},
        )

    def _train_one(self, row: Tensor, momentum: Tensor, work: Work) -> tuple[Tensor, Tensor, Named]:
        """Returns the model [1, P + Q], momentum [1, P] and metrics of one trainer (a user or the server)
        after its steps. P is the number of weights, and Q the number of running statistics."""
        weights, buffers = self._unpacked(row)
        velocity = {name: value.clone() for name, value in self.layout.unflatten(momentum[None]).items()}
        received = None
        if self._uses_received(work.role):
            received = {name: weight.clone() for name, weight in weights.items()}
        lr_scale = 1.0 if work.lr_scale is None else float(work.lr_scale)
        measured: list[Named] = []
        if work.taken is not None:
            work = replace(work, longest=int(work.taken))
        rates = work.rates[: work.played]
        for rate, batch in zip(rates, each_batch(self.pool, work), strict=True):
            step = self._step(batch, weights, buffers, work.role, received, rate * lr_scale)
            gradients, metrics = self.method.gradient(step, self._loss(work.role))
            for name, weight in weights.items():
                weight.grad = gradients[name].to(weight.dtype) if name in gradients else None
            if self.optimizer.clip:
                nn.utils.clip_grad_norm_(list(weights.values()), self.optimizer.clip)
            self._update(weights, velocity, rate * lr_scale)
            buffers = step.buffers
            measured.append(metrics)
        names = (*METRICS, *self.method.metrics) if work.role == "user" else METRICS
        means = dict.fromkeys(names, row.new_zeros(1))
        if measured:
            means = {name: torch.stack([one[name] for one in measured]).mean(0) for name in measured[0]}
        if work.taken is not None:
            means["steps"] = work.taken.to(row)
        return self.layout.flatten(weights | buffers, lead=1), self.layout.flatten(velocity, lead=1), means

    def _update(self, weights: Named, velocity: Named, lr: float) -> None:
        """Takes one step of SGD in place, exactly as torch.optim.SGD does. A torch.optim.SGD object is not
        used, because making one imports torch's compiler, which takes as long as importing torch."""
        trained = [name for name, weight in weights.items() if weight.grad is not None]
        with torch.no_grad():
            sgd(
                [weights[name] for name in trained],
                [cast(Tensor, weights[name].grad) for name in trained],
                [velocity[name] for name in trained],
                weight_decay=self.optimizer.weight_decay,
                momentum=self.optimizer.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=self.optimizer.nesterov,
                maximize=False,
            )

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the class probabilities that each of n models (the rows of `rows`) predicts in evaluation
        mode, [n, T · B, classes]. The input of a model is one weak view of each image in its own T batches of
        B images. The method makes pseudo-labels from the probabilities."""
        probabilities = []
        with torch.no_grad():
            for i, row in enumerate(rows):
                weights, buffers = self._unpacked(row)
                batches = each_batch(self.pool, for_prediction(work.of(slice(i, i + 1))))
                steps = (self._step(batch, weights, buffers, work.role) for batch in batches)
                probabilities.append(torch.cat([predicted(step) for step in steps], 1))
        return torch.cat(probabilities)

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns the gradient of each trainer's mean loss over all its images, [n, P], for n trainers
        (users, or the server) and P weights. It is used to measure gradient diversity."""
        totals = []
        for i, row in enumerate(rows):
            weights, buffers = self._unpacked(row)
            own_work = work.of(slice(i, i + 1))
            total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for number in range(-(-int(sizes[i]) // work.batches.shape[2])):
                batch = full_batch(self.pool, own_work, number, sizes[i : i + 1])
                received = weights if self._uses_received(work.role) else None
                step = self._step(batch, weights, buffers, work.role, received)
                gradients, _ = step.gradient(self._loss(work.role))
                buffers = step.buffers
                total = {name: value + gradients[name] for name, value in total.items()}
            totals.append(self.layout.flatten(total, lead=1))
        return torch.cat(totals)

    def close(self) -> None:
        """Does nothing, because this engine has no processes to end."""

    def memory(self, batch_size: int) -> int:
        """Returns how many bytes of memory one more trainer (a user or the server) needs: for its model and
        momentum, before and after training."""
        return 6 * self.layout.length * self.pool.wide.itemsize

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which of its images each of n trainers (users, or the server) sees next, [n, count]. An
        image is given by its position among the trainer's own images.

        Each trainer sees its images in a random order (see `positions` in `engines/work.py`). The result is
        the elements `first` to `first + count - 1` of this sequence. It depends on the random key `base`, the
        trainer's number (in `trainers`) and its number of images (in `sizes`).
        """
        return positions(base, trainers, sizes, first, count)

    def _unpacked(self, row: Tensor) -> tuple[Named, Named]:
        """Splits the vector `row` of one model into its tensors. Returns the weights by name and the running
        statistics by name, each with a first dimension of 1. The weights are copies, because training changes
        them in place."""
        tensors = list(self.layout.unflatten(row[None]).items())
        count = self.layout.trained
        return {n: w.clone() for n, w in tensors[:count]}, dict(tensors[count:])

    def _uses_received(self, role: str) -> bool:
        """Returns whether the loss may read the weights that users received at the start of the round."""
        return role == "user" and "received" in self.method.uses()

    def _loss(self, role: str) -> Loss:
        return self.method.server_loss if role == "server" else with_own_labels(self.method.user_loss)

    def _step(
        self,
        batch: Batch,
        weights: Named,
        buffers: Named,
        role: str,
        received: Named | None = None,
        rate: float = 0.0,
    ) -> Step:
        """Returns the `Step` that a method's functions get, for one trainer (a user or the server, as `role`
        says). It contains the trainer's batch and weights, and functions that compute logits and gradients.

        `buffers` are the running statistics. `received` are the weights that the user got at the start of the
        round; None if the method does not use them. `rate` is the learning rate of this step.
        """
        narrow = None
        if self.pool.dtype != self.pool.wide:
            narrow = {name: weight.to(self.pool.dtype) for name, weight in weights.items()}
        sees_labels = role == "server" or "labels" in self.method.needs()

        def evaluate(
            loss: Loss, weights: Named, buffers: Named, batch: Batch, received: Named | None
        ) -> tuple[Tensor, Named, Named]:
            inner = Step(
                batch, weights, buffers, self._network, role=role, sees_labels=sees_labels, received=received
            )
            return evaluated(loss, inner, self.method.metrics if role == "user" else ())

        return Step(
            batch,
            weights,
            buffers,
            self._network,
            role=role,
            sees_labels=sees_labels,
            narrow=narrow,
            received=received,
            rate=batch.shares.new_full((1,), rate),
            decay=self.optimizer.weight_decay,
            evaluate=evaluate,
        )

    def _network(
        self, weights: Named, buffers: Named, images: Tensor, training: bool, keys: Tensor
    ) -> tuple[Tensor, Named]:
        """Returns the logits [1, B, classes] that one model computes for B images [1, B, ...], and its new
        running statistics by name. `buffers` are the running statistics before. `training` chooses training
        or evaluation mode. `keys` [1] determine the dropout masks."""
        if self.model.training != training:
            self.model.train(training)
        state = {name: tensor[0] for name, tensor in (weights | buffers).items()}
        logits = functional_call(self.model, state, (images[0], keys[0]), tie_weights=self.tied)
        # after the call, `state` contains the new running statistics
        return logits[None], {name: state[name][None] for name in buffers}


def predicted(step: Step) -> Tensor:
    """Returns the class probabilities [n, B, classes] that n models predict in evaluation mode. Each model
    predicts the weak views of its own B images in this step."""
    return step.forward(step.weak, grad=False, train=False, draw="teacher").softmax(-1)


def full_batch(pool: Pool, work: Work, step: int, sizes: Tensor) -> Batch:
    """Returns one batch for each of n trainers (users, or the server): batch number `step` of a pass over all
    the trainer's images.

    The gradients of all batches of the pass add up to the gradient of the trainer's mean loss. For this, each
    image has weight 1 / size, where `sizes` [n] are the trainers' numbers of images. Images that only fill up
    the last batch have weight 0.
    """
    batch = make_batch(pool, work, step)
    size = work.batches.shape[2]
    place = torch.arange(step * size, (step + 1) * size, device=sizes.device)
    shares = torch.where(place < sizes[:, None], 1 / sizes[:, None].to(pool.wide), 0.0)
    return batch._replace(shares=shares)
