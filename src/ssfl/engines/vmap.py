"""All trainers of a round at once on one device: the step of `loop`, with every tensor one dimension up.

On a GPU a step is recorded once, as a CUDA graph over fixed places in memory, and replayed T times
without the host: from the choice of images to the optimizer.
"""

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssfl.core.rows import Layout, placed
from ssfl.engines.buffers import StepBuffers, make_buffers, sgd
from ssfl.engines.loop import full_batch, predicted
from ssfl.engines.work import Optimizer, Pool, TrainedRows, Work, each_batch, looking, make_batch, positions
from ssfl.errors import SsflWarning
from ssfl.federation import (
    METRICS,
    Batch,
    Look,
    Loss,
    Method,
    Named,
    Step,
    evaluated,
    with_own_labels,
)
from ssfl.models.kernels import convolution


class Recorded(NamedTuple):
    """A step of one kind of work, recorded over fixed places."""

    place: StepBuffers
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
        method: Method,
        compiled: bool,
    ) -> None:
        self.layout, self.pool, self.optimizer, self.method = layout, pool, optimizer, method
        self._losses: dict[str, Loss] = {
            "user": with_own_labels(method.user_loss),
            "server": method.server_loss,
        }
        self.networks = {mode: copy.deepcopy(model).train(mode) for mode in (True, False)}
        self.compiled = compiled
        self._recorded: dict[Any, Recorded] = {}
        self._memory: Any = None
        self._functions()

    def _functions(self) -> None:
        """What a step and a round call: as they are, or compiled."""

        def made(function: Callable[..., Any], dynamic: bool | None = False) -> Callable[..., Any]:
            return _Compiled(function, dynamic) if self.compiled else function

        if self.compiled:  # one process may run many experiments, and each shape is compiled anew
            dynamo = importlib.import_module("torch._dynamo").config
            dynamo.recompile_limit = max(dynamo.recompile_limit, 256)
            # torch times two ways to sum and takes the faster: other bits on another day
            inductor = importlib.import_module("torch._inductor.config")
            for name, value in (("dynamic_scale_rblock", False), ("deterministic", True)):
                if hasattr(inductor, name):
                    setattr(inductor, name, value)
        self._views: Callable[..., Batch] = made(make_batch)
        whole = made if getattr(self.networks[True], "compilable", True) else _as_is
        self._evaluators = {"user": whole(self._evaluate_user), "server": whole(self._evaluate_server)}
        self._answers: Callable[..., Tensor] = whole(self._eager_answers)
        self._update: Callable[..., None] = made(sgd)
        self._positions: Callable[..., Tensor] = made(positions, dynamic=None)

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """T steps of SGD, each for all rows together."""
        if rows.is_cuda:
            # a place per kind of work, whose size does not change with how many users come back
            models = max(len(rows), work.seats)
            place = self._replayed((models, work.kind), models, rows, momentum, work).place
        else:
            place = self._place(len(rows), rows, work)
            place.load(self.layout, rows, momentum, work)
            for batch in each_batch(self.pool, work):
                self._step_on(place, batch)
        count = len(rows)
        found = self.layout.flatten(place.weights | place.statistics, lead=1)
        momentum = self.layout.flatten(place.velocity, lead=1)
        steps: Tensor | int = len(work.rates) if work.taken is None else work.taken.clamp(min=1).to(rows)
        metrics = {name: total[:count] / steps for name, total in place.metrics.items()}
        if work.taken is not None:
            metrics["steps"] = work.taken.to(rows)
        return TrainedRows(found[:count], momentum[:count], metrics)

    def _place(self, models: int, rows: Tensor, work: Work) -> StepBuffers:
        """A place to train in."""
        user = work.role == "user"
        names = (*METRICS, *self.method.metrics) if user else METRICS
        received = user and "received" in self.method.uses()
        return make_buffers(self.layout, self.pool, models, rows, work, names, received=received)

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """What each row says of weak views of its batches' images, in probabilities."""
        work, unmoved = looking(work), rows[:, : self.layout.weights]
        if rows.is_cuda:
            models = max(len(rows), work.seats)  # whoever returns
            said = self._replayed(
                ("answers", models, work.batches.shape[1:]), models, rows, unmoved, work
            ).said
            assert said is not None
            return said[: len(rows), : work.played].flatten(1, 2).clone()  # the next round writes over it
        place = make_buffers(self.layout, self.pool, len(rows), rows, work, learns=False)
        place.load(self.layout, rows, unmoved, work)
        batches = each_batch(self.pool, place.work)
        return torch.cat([self._answers(place.narrow, place.statistics, batch) for batch in batches], 1)

    def _replayed(self, kind: Any, models: int, rows: Tensor, momentum: Tensor, work: Work) -> Recorded:
        """T steps of this kind of work, which is recorded where it comes for the first time."""
        if kind not in self._recorded:
            self._recorded[kind] = self._record(rows, momentum, work, models, looks=kind[0] == "answers")
        found = self._recorded[kind]
        found.place.load(self.layout, rows, momentum, work)
        for _ in range(work.played):
            self._step(found.place, found.said) if found.graph is None else found.graph.replay()
        return found

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """The gradient of each trainer's loss over all its data, [n, P]."""
        place = make_buffers(self.layout, self.pool, len(rows), rows, work)
        place.load(self.layout, rows, rows[:, : self.layout.weights], work)
        total = {name: torch.zeros_like(value) for name, value in place.weights.items()}

        def those(busy: Tensor, new: Tensor, old: Tensor | float) -> Tensor:
            return torch.where(busy.view(-1, *[1] * (new.dim() - 1)), new, old)

        for number in range(work.steps):
            step = self._step_of(place, full_batch(self.pool, work, number, sizes))
            slopes, _ = step.slopes(self._losses[work.role])
            busy = number * work.batches.shape[2] < sizes  # only those who still have images, as in the loop
            for name, value in place.statistics.items():
                value.copy_(those(busy, step.buffers[name], value))
            for name, value in total.items():
                value.add_(those(busy, slopes[name], 0.0))
        return self.layout.flatten(total, lead=1)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """`work.positions`."""
        if not self.compiled:
            return positions(base, trainers, sizes, first, count)
        # a number would be compiled anew every round
        start = first if isinstance(first, Tensor) else placed(first, trainers.device)
        found: Tensor = self._positions(base, trainers, sizes, start, count)
        return found

    def close(self) -> None:
        """Nothing is held."""

    def memory(self, batch_size: int) -> int:
        """Rows in and out, the place's weights, and twice what one dry step keeps for its backward pass."""
        kept: dict[int, int] = {}

        def note(saved: Tensor) -> Tensor:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        rows = torch.zeros(1, self.layout.length, dtype=self.pool.wide, device=self.pool.images.device)
        work = self._dry_work(rows, batch_size)
        place = self._place(1, rows, work)
        place.load(self.layout, rows, rows[:, : self.layout.weights], work)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            weights = {name: value.detach().requires_grad_() for name, value in place.narrow.items()}
            batch = make_batch(self.pool, work, 0)
            self._evaluate(self._losses[work.role], work.role, weights, place.statistics, batch)
        return 2 * sum(kept.values()) + 10 * self.layout.length * self.pool.wide.itemsize

    def _dry_work(self, rows: Tensor, batch_size: int) -> Work:
        """One step of one user on any images, labels and all; the server's where users do not train."""
        nothing = torch.zeros(4, 1, dtype=torch.int64, device=rows.device)
        images = nothing[:1, :, None].expand(1, 1, batch_size)
        if not self.method.trains_users:
            return Work("server", ("weak",), nothing, images, None, (0.0,))
        views = tuple(view for view in self.method.uses() if view != "received")
        work = Work("user", views, nothing, images, None, (0.0,))
        if self.method.label is None:
            return work
        look = Look(self.answers(rows, work), images, nothing[2], {}, False)
        return work.with_labels(self.method.label(look))

    def _step(self, place: StepBuffers, said: Tensor | None) -> None:
        """One step of all trainers, in place, from the choice of images on; or what they say of them."""
        batch = self._views(self.pool, place.work, place.step)
        if said is None:
            self._step_on(place, batch)
        else:
            found = self._answers(place.narrow, place.statistics, batch)
            said.index_copy_(1, place.step, found[:, None])
            place.step.add_(1)

    def _step_on(self, place: StepBuffers, batch: Batch) -> None:
        step = self._step_of(place, batch)
        slopes, metrics = self.method.gradient(step, self._losses[place.work.role])
        self._update(place, slopes, step.buffers, metrics, self.optimizer)

    def _step_of(self, place: StepBuffers, batch: Batch) -> Step:
        """A step of all trainers, at the place's weights."""
        role = place.work.role
        rates = place.rates
        return Step(
            batch,
            place.weights,
            place.statistics,
            self._network,
            role=role,
            sees_labels=self._sees_labels(role),
            narrow=place.narrow,
            received=place.received or None,
            rate=rates.index_select(0, place.step)[0] if len(rates) else None,
            decay=self.optimizer.weight_decay,
            evaluate=partial(self._evaluated, role),
        )

    def _sees_labels(self, role: str) -> bool:
        return role == "server" or "labels" in self.method.needs()

    def _evaluated(
        self, role: str, loss: Loss, weights: Named, buffers: Named, batch: Batch, received: Named | None
    ) -> tuple[Tensor, Named, Named]:
        """The engine's own losses may be compiled, others are not."""
        if loss is self._losses[role]:
            return self._evaluators[role](weights, buffers, batch, received)  # type: ignore[no-any-return]
        return self._evaluate(loss, role, weights, buffers, batch, received)

    def _evaluate_user(
        self, weights: Named, buffers: Named, batch: Batch, received: Named | None
    ) -> tuple[Tensor, Named, Named]:
        return self._evaluate(self._losses["user"], "user", weights, buffers, batch, received)

    def _evaluate_server(
        self, weights: Named, buffers: Named, batch: Batch, received: Named | None
    ) -> tuple[Tensor, Named, Named]:
        return self._evaluate(self._losses["server"], "server", weights, buffers, batch, received)

    def _evaluate(
        self,
        loss: Loss,
        role: str,
        weights: Named,
        buffers: Named,
        batch: Batch,
        received: Named | None = None,
    ) -> tuple[Tensor, Named, Named]:
        sees_labels = self._sees_labels(role)
        step = Step(
            batch, weights, buffers, self._network, role=role, sees_labels=sees_labels, received=received
        )
        return evaluated(loss, step, self.method.metrics if role == "user" else ())

    def _eager_answers(self, weights: Named, buffers: Named, batch: Batch) -> Tensor:
        with torch.no_grad():
            return predicted(Step(batch, weights, buffers, self._network))

    def _network(
        self, weights: Named, buffers: Named, images: Tensor, training: bool, keys: Tensor
    ) -> tuple[Tensor, Named]:
        state = weights | buffers
        logits = functional_call(self.networks[training], state, (images.flatten(0, 1), keys))
        # functional_call leaves the statistics that the network replaced in `state`
        return logits.unflatten(0, images.shape[:2]), {name: state[name] for name in buffers}

    def _record(self, rows: Tensor, momentum: Tensor, work: Work, models: int, looks: bool) -> Recorded:
        """A place for this kind of work, and the step recorded on it."""
        if looks:
            place = make_buffers(self.layout, self.pool, models, rows, work, learns=False)
        else:
            place = self._place(models, rows, work)
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

        try:
            warm_up()
        except Exception as error:
            _give_up_kernels(error)
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


class _Compiled:
    """A compiled function. Where the compiler fails, it says which function and why, and runs it as it is."""

    def __init__(self, function: Callable[..., Any], dynamic: bool | None) -> None:
        self.function, self.worked = function, False
        self.fast: Callable[..., Any] | None = torch.compile(function, dynamic=dynamic, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        if self.fast is None:
            return self.function(*arguments)
        try:
            made = self.fast(*arguments)
        except Exception as error:
            if self.worked or isinstance(error, torch.OutOfMemoryError):
                raise
            self.fast = None
            why = " ".join(str(error).split())[:500] or type(error).__name__
            warnings.warn(
                f"{self.function.__name__} is not compiled, because {why}", SsflWarning, stacklevel=2
            )
            return self.function(*arguments)
        self.worked = True
        return made


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that cannot be compiled."""
    return function


def _give_up_kernels(error: Exception) -> None:
    """Go on with plain layers where the kernels cannot be built (they need a C compiler), and say so."""
    if isinstance(error, torch.OutOfMemoryError) or not convolution.usable():
        raise error
    warnings.warn(f"no kernels, because {_first_line(error)}", SsflWarning, stacklevel=2)
    convolution.use(False)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
