"""All trainers of a round at once on one device: the step of `loop`, with every tensor one dimension up.

On a GPU a step is recorded once, as a CUDA graph over fixed places in memory, and replayed T times
without the host: from the choice of images to the optimizer.
"""

import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssfl.engines.loop import full_batch
from ssfl.engines.place import Named, Place, make_place, sgd
from ssfl.errors import SsflWarning
from ssfl.kernels import convolution
from ssfl.losses import answered, certain, disagreement, local_loss, uphill
from ssfl.rows import Layout, placed
from ssfl.work import (
    TOLD,
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


class Recorded(NamedTuple):
    """A step of one kind of work, recorded over fixed places."""

    place: Place
    graph: torch.cuda.CUDAGraph | None
    """None where it could not be recorded."""
    said: Tensor | None
    """[n, T, B, classes]: where answers are left, if the step only looks."""


class Vmap:
    """The engine "vmap"."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        pool: Pool,
        optimizer: Optimizer,
        compiled: bool,
    ) -> None:
        self.layout, self.pool, self.optimizer = layout, pool, optimizer
        self.networks = {mode: copy.deepcopy(model).train(mode) for mode in (True, False)}
        self.compiled = compiled
        self._recorded: dict[Any, Recorded] = {}
        self._memory: Any = None
        self._functions()

    def _functions(self) -> None:
        """What a step and a round call: as they are, or compiled."""

        def made(function: Callable[..., Any], dynamic: bool | None = False) -> Callable[..., Any]:
            return torch.compile(function, dynamic=dynamic, fullgraph=True) if self.compiled else function

        if self.compiled:  # one process may run many experiments, and each shape is compiled anew
            dynamo = importlib.import_module("torch._dynamo").config
            dynamo.recompile_limit = max(dynamo.recompile_limit, 256)
        self._views: Callable[..., Batch] = made(make_batch)
        whole = getattr(self.networks[True], "compilable", True)
        self._losses: Callable[..., tuple[Tensor, Named, Named]] = (
            made(self._eager_losses) if whole else self._eager_losses
        )
        self._answers: Callable[..., Tensor] = made(self._eager_answers) if whole else self._eager_answers
        self._update: Callable[..., None] = made(sgd)
        self._positions: Callable[..., Tensor] = made(positions, dynamic=None)

    def _give_up_compiling(self, error: Exception) -> None:
        """Go on without a compiler, and say so; errors that are not its own come again."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if not self.compiled:
            return
        warnings.warn(f"not compiled, because {_first_line(error)}", SsflWarning, stacklevel=2)
        self.compiled = False
        self._functions()

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> Trained:
        """T steps of SGD, each for all rows together."""
        if rows.is_cuda:
            # a place per kind of work, whose size does not change with how many users come back
            models = max(len(rows), work.seats)
            kind = (models, work.objective, work.batches.shape[1:], work.labelled is None, work.given is None)
            place = self._replayed(kind, models, rows, momentum, work).place
        else:
            place = make_place(self.layout, self.pool, len(rows), rows, work)
            place.load(self.layout, rows, momentum, work)
            for batch in each_batch(self.pool, work):
                self._step_on(place, batch)
        count = len(rows)
        found = self.layout.flatten(place.weights | place.statistics, lead=1)
        momentum = self.layout.flatten(place.velocity, lead=1)
        told = dict(zip(TOLD, place.told[:, :count] / len(work.rates), strict=True))
        return Trained(found[:count], momentum[:count], told)

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """What each row says of weak views of its batches' images, in probabilities."""
        work, unmoved = looking(work), rows[:, : self.layout.weights]
        if rows.is_cuda:
            models = max(len(rows), work.seats)  # whoever returns
            said = self._replayed(
                ("answers", models, work.batches.shape[1:]), models, rows, unmoved, work
            ).said
            assert said is not None
            return said[: len(rows)].flatten(1, 2).clone()  # the next round writes over it
        place = make_place(self.layout, self.pool, len(rows), rows, work, learns=False)
        place.load(self.layout, rows, unmoved, work)
        batches = each_batch(self.pool, place.work)
        return torch.cat([self._answers(place.narrow, place.statistics, batch) for batch in batches], 1)

    def _replayed(self, kind: Any, models: int, rows: Tensor, momentum: Tensor, work: Work) -> Recorded:
        """T steps of this kind of work, which is recorded where it comes for the first time."""
        if kind not in self._recorded:
            self._recorded[kind] = self._record(rows, momentum, work, models, looks=kind[0] == "answers")
        found = self._recorded[kind]
        found.place.load(self.layout, rows, momentum, work)
        for _ in work.rates:
            self._step(found.place, found.said) if found.graph is None else found.graph.replay()
        return found

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """The gradient of each trainer's loss over all its data, [n, P]."""
        place = make_place(self.layout, self.pool, len(rows), rows, work)
        place.load(self.layout, rows, rows[:, : self.layout.weights], work)
        total = {name: torch.zeros_like(value) for name, value in place.weights.items()}

        def those(busy: Tensor, new: Tensor, old: Tensor | float) -> Tensor:
            return torch.where(busy.view(-1, *[1] * (new.dim() - 1)), new, old)

        for step in range(work.steps):
            batch = full_batch(self.pool, work, step, sizes)
            slopes, moved, _ = self._slopes(place, batch, work.objective)
            busy = step * work.batches.shape[2] < sizes  # only those who still have images, as in the loop
            for name, value in place.statistics.items():
                value.copy_(those(busy, moved[name], value))
            for name, value in total.items():
                value.add_(those(busy, slopes[name], 0.0))
        return self.layout.flatten(total, lead=1)

    def positions(self, base: int, trainers: Tensor, sizes: Tensor, first: int, count: int) -> Tensor:
        """`work.positions`."""
        if not self.compiled:
            return positions(base, trainers, sizes, first, count)
        start = placed(first, trainers.device)  # a number would be compiled anew every round
        try:
            return self._positions(base, trainers, sizes, start, count)
        except Exception as error:
            self._give_up_compiling(error)
            return positions(base, trainers, sizes, first, count)

    def close(self) -> None:
        """Nothing is held."""

    def memory(self, objective: Objective, batch_size: int) -> int:
        """Rows in and out, the place's weights, and twice what the pass keeps for the way back."""
        kept: dict[int, int] = {}

        def note(saved: Tensor) -> Tensor:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        rows = torch.zeros(1, self.layout.length, dtype=self.pool.wide, device=self.pool.images.device)
        nothing = torch.zeros(4, 1, dtype=torch.int64, device=rows.device)
        work = Work(objective, nothing, nothing[:1, :, None].expand(1, 1, batch_size), None, (0.0,))
        if objective.name == "none":
            work = replace(work, objective=Objective("supervised"))
        place = make_place(self.layout, self.pool, 1, rows, work)
        place.load(self.layout, rows, rows[:, : self.layout.weights], work)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            weights = {name: value.detach().requires_grad_() for name, value in place.narrow.items()}
            batch = make_batch(self.pool, work, 0)
            self._eager_losses(weights, place.statistics, batch, work.objective)
        return 2 * sum(kept.values()) + 10 * self.layout.length * self.pool.wide.itemsize

    def _step(self, place: Place, said: Tensor | None) -> None:
        """One step of all trainers, in place, from the choice of images on; or what they say of them."""
        batch = self._views(self.pool, place.work, place.step)
        if said is None:
            self._step_on(place, batch)
        else:
            found = self._answers(place.narrow, place.statistics, batch)
            said.index_copy_(1, place.step, found[:, None])
            place.step.add_(1)

    def _step_on(self, place: Place, batch: Batch) -> None:
        slopes, moved, told = self._slopes(place, batch, place.work.objective)
        self._update(place, slopes, moved, told, self.optimizer)

    def _slopes(self, place: Place, batch: Batch, objective: Objective) -> tuple[Named, Named, Named]:
        """Every model's gradient, its new statistics, and what is told about the step."""
        weights = {name: value.detach().requires_grad_() for name, value in place.narrow.items()}
        loss, moved, told = self._losses(weights, place.statistics, batch, objective)
        # models do not touch each other: the gradient of the sum is each one's own
        slopes = torch.autograd.grad(
            loss.sum(), list(weights.values()), allow_unused=True, materialize_grads=True
        )
        if objective.sharpness and batch.given is not None:
            around = self._around(weights, place.statistics, batch, objective)
            slopes = tuple(a + b for a, b in zip(slopes, around, strict=True))
        return dict(zip(weights, slopes, strict=True)), moved, told

    def _around(
        self, weights: Named, statistics: Named, batch: Batch, objective: Objective
    ) -> tuple[Tensor, ...]:
        """The gradient of (FL)²'s consistency with the weights around these."""
        sure = self._losses(weights, statistics, certain(batch), objective)[0]
        slopes = torch.autograd.grad(
            sure.sum(), list(weights.values()), allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            steps = uphill(weights, slopes, objective.sharpness)
        moved = {
            name: (weight.detach() + step).requires_grad_()
            for (name, weight), step in zip(weights.items(), steps, strict=True)
        }
        here, there = (partial(self._forward, state | statistics) for state in (weights, moved))
        apart = disagreement(here, there, batch)
        return torch.autograd.grad(
            apart.sum(), list(moved.values()), allow_unused=True, materialize_grads=True
        )

    def _eager_losses(
        self, weights: Named, statistics: Named, batch: Batch, objective: Objective
    ) -> tuple[Tensor, Named, Named]:
        state = weights | statistics
        loss, told = local_loss(partial(self._forward, state), batch, objective)
        # functional_call leaves the statistics that the network replaced in `state`
        return loss, {name: state[name].detach() for name in statistics}, told

    def _eager_answers(self, weights: Named, statistics: Named, batch: Batch) -> Tensor:
        with torch.no_grad():
            return answered(partial(self._forward, weights | statistics), batch)

    def _forward(self, state: Named, images: Tensor, training: bool, keys: Tensor) -> Tensor:
        logits = functional_call(self.networks[training], state, (images.flatten(0, 1), keys))
        return logits.unflatten(0, images.shape[:2])  # type: ignore[no-any-return]

    def _record(self, rows: Tensor, momentum: Tensor, work: Work, models: int, looks: bool) -> Recorded:
        """A place for this kind of work, and the step recorded on it."""
        place = make_place(self.layout, self.pool, models, rows, work, learns=not looks)
        place.load(self.layout, rows, momentum, work)
        said = None
        if looks:
            with torch.no_grad():
                classes = self.networks[False](self.pool.normalised(self.pool.images[:1], self.pool.wide))
            said = classes.new_empty(models, *work.batches.shape[1:], classes.shape[1])
        make_batch(self.pool, place.work, place.step)  # makes the views' tables, which nothing may record

        def warm_up() -> None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    place.step.zero_()
                    self._step(place, said)
            torch.cuda.current_stream().wait_stream(side)

        for give_up in (self._give_up_compiling, _give_up_kernels):
            try:
                warm_up()
                break
            except Exception as error:
                give_up(error)
        else:
            warm_up()
        torch.cuda.empty_cache()  # the recording has memory of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                self._step(place, said)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(f"no CUDA graph, because {_first_line(error)}", SsflWarning, stacklevel=2)
            return Recorded(place, None, said)
        self._memory = self._memory or graph.pool()
        return Recorded(place, graph, said)


def _give_up_kernels(error: Exception) -> None:
    """Go on with plain layers where the kernels cannot be built (they need a C compiler), and say so."""
    if isinstance(error, torch.OutOfMemoryError) or not convolution.usable():
        raise error
    warnings.warn(f"no kernels, because {_first_line(error)}", SsflWarning, stacklevel=2)
    convolution.use(False)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
