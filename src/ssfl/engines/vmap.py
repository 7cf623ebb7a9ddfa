"""The engine "vmap": trains all trainers of a round (users, or the server) together on one device. It takes
the same steps as the engine "loop", but its tensors have one more dimension, the trainers.

On a GPU, a whole step is recorded once as a CUDA graph, from the choice of images to the optimizer. The graph
is then replayed for each step, with almost no work for the CPU. It always reads and writes the same memory,
the buffers.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssfl.core import compile_cache
from ssfl.core.machine import cores
from ssfl.core.rows import Layout
from ssfl.core.step import METRICS, Batch, Look, Loss, Named, Step, evaluated, with_own_labels
from ssfl.engines import compiling
from ssfl.engines.buffers import StepBuffers, make_buffers, sgd, sgd_by_kernels
from ssfl.engines.dist import local_cores
from ssfl.engines.local import checked_labels
from ssfl.engines.loop import full_batch, predicted
from ssfl.engines.recording import Graphs, RecordedStep, run_without_kernels_if_they_fail
from ssfl.engines.work import (
    SHUFFLE_ROUNDS,
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
from ssfl.models.kernels import convolution, launching
from ssfl.models.kernels import views as view_kernels

IN_KERNELS = 128 * 128
"""The largest number of pixels for which GPU kernels do nearly all the work of some networks (`in_kernels`).
The kernel for group norm takes no larger images."""


class Vmap:
    """The engine "vmap", which trains all trainers together."""

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
        # steps that are recorded may use kernels for views, because `_record` does without kernels that fail
        self._step_pool = replace(pool, kernels=True)
        self._losses: dict[str, Loss] = {
            "user": with_own_labels(method.user_loss),
            "server": method.server_loss,
        }
        self.networks = {mode: copy.deepcopy(model).train(mode) for mode in (True, False)}
        self.compiled = compiled
        self._recorded: dict[Any, RecordedStep] = {}
        self._graphs = Graphs()
        self.side = torch.cuda.Stream(priority=-1) if pool.images.is_cuda else None
        self._functions()

    def _functions(self) -> None:
        """Chooses the functions that a step calls: compiled by torch if the engine compiles, otherwise the
        plain ones."""

        def prepared(function: Callable[..., Any]) -> Callable[..., Any]:
            return compiling.Compiled(function) if self.compiled else function

        if self.compiled:
            compile_cache.use()
        self._with_kernels = convolution.usable()
        self._views: Callable[..., Batch] = make_batch if self._step_pool.by_kernels else prepared(make_batch)
        whole = prepared if self._compiles_networks() else _not_compiled
        self._evaluators = {"user": whole(self._evaluate_user), "server": whole(self._evaluate_server)}
        self._predict: Callable[..., Tensor] = whole(self._eager_predict)
        self._sgd: Callable[..., None] = prepared(sgd)

    def _compiles_networks(self) -> bool:
        """Returns whether networks are compiled, if the engine compiles. A network that consists of ssfl's
        GPU kernels is not: compiling it takes long, and gains nothing."""
        network, images = self.networks[True], self.pool.images
        if not getattr(network, "compilable", True):
            return False
        few = images.shape[2] * images.shape[3] <= IN_KERNELS
        ready = images.is_cuda and self.pool.dtype == torch.bfloat16 and few and convolution.usable()
        return not (ready and getattr(network, "in_kernels", False))

    def _from_package(self) -> bool:
        """Returns whether method and network belong to ssfl. Only their steps may run on arbitrary numbers:
        code from outside could use such a number as an index, for example."""
        return type(self.method).__module__.startswith("ssfl.") and getattr(
            self.networks[True], "compilable", True
        )

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models, momentum and metrics of n trainers (users, or the server) after up to T steps
        of SGD. Each step is computed for all trainers together."""
        if rows.is_cuda:
            # one set of buffers for each kind of work; their size does not depend on how many users drop out
            models = max(len(rows), work.seats)
            buffers = self._replayed((models, work.kind), models, rows, momentum, work).buffers
        else:
            buffers = self._buffers(len(rows), rows, work)
            buffers.load(self.layout, rows, momentum, work)
            for batch in each_batch(self.pool, work):
                self._step_on(buffers, batch)
        count = len(rows)
        trained = self.layout.flatten(buffers.weights | buffers.statistics, lead=1)
        momentum = self.layout.flatten(buffers.velocity, lead=1)
        steps: Tensor | int = len(work.rates) if work.taken is None else work.taken.clamp(min=1).to(rows)
        metrics = {name: total[:count] / steps for name, total in buffers.metrics.items()}
        if work.taken is not None:
            metrics["steps"] = work.taken.to(rows)
        return TrainedRows(trained[:count], momentum[:count], metrics)

    def _buffers(self, models: int, rows: Tensor, work: Work) -> StepBuffers:
        """Returns new buffers (the memory that a step reads and writes) for training `models` models with
        work like `work`."""
        names = (*METRICS, *self.method.metrics) if work.role == "user" else METRICS
        return make_buffers(
            self.layout,
            self.pool,
            models,
            rows,
            work,
            names,
            received=self._uses_received(work.role),
            join=self._updates_by_kernels,
        )

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the class probabilities [n, T · B, classes] that n models predict in evaluation mode. The
        models are the rows of `rows`, one for each of n users. Each model predicts weak views of its user's
        images, which are T batches of B images. The method makes pseudo-labels from these probabilities."""
        work, unused = for_prediction(work), rows[:, : self.layout.weights]
        if rows.is_cuda:
            models = max(len(rows), work.seats)  # the same number, however many users drop out
            probabilities = self._replayed(
                ("predict", models, work.kind), models, rows, unused, work
            ).probabilities
            assert probabilities is not None
            # a copy, because the next round overwrites the memory
            return probabilities[: len(rows), : work.played].flatten(1, 2).clone()
        buffers = make_buffers(self.layout, self.pool, len(rows), rows, work, learns=False)
        buffers.load(self.layout, rows, unused, work)
        batches = each_batch(self.pool, buffers.work)
        return torch.cat([self._predict(buffers.narrow, buffers.statistics, batch) for batch in batches], 1)

    def _replayed(self, kind: Any, models: int, rows: Tensor, momentum: Tensor, work: Work) -> RecordedStep:
        """Runs all steps of `work`, and returns the recorded step. Its buffers then contain the trained
        models or, if the step predicts, its `probabilities` contain the predictions.

        At the first call with a `kind`, the step is recorded as a CUDA graph, with buffers for `models`
        models. This call and later ones with the same `kind` replay the graph. If recording failed, they run
        the step as ordinary code. Each stream has its own recordings, because those of two streams may run at
        the same time, and must not share memory.
        """
        key = torch.cuda.current_stream(rows.device), kind
        if key not in self._recorded:
            self._recorded[key] = self._record(rows, momentum, work, models, trains=kind[0] != "predict")
        recorded = self._recorded[key]
        recorded.buffers.load(self.layout, rows, momentum, work)
        for _ in range(work.played):
            if recorded.graph is None:
                self._step(recorded.buffers, recorded.probabilities)
            else:
                recorded.graph.replay()
        return recorded

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns a gradient for each of n trainers (users, or the server), [n, P], where P is the number of
        weights. It is the gradient of the trainer's mean loss over all its images. `sizes` [n] are the
        trainers' numbers of images. Gradient diversity is measured with these gradients."""
        received = self._uses_received(work.role)
        buffers = make_buffers(self.layout, self.pool, len(rows), rows, work, received=received)
        buffers.load(self.layout, rows, rows[:, : self.layout.weights], work)
        total = {name: torch.zeros_like(value) for name, value in buffers.weights.items()}

        def where_busy(busy: Tensor, new: Tensor, old: Tensor | float) -> Tensor:
            return torch.where(busy.view(-1, *[1] * (new.dim() - 1)), new, old)

        for number in range(work.steps):
            step = self._step_of(buffers, full_batch(self.pool, work, number, sizes))
            gradients, _ = step.gradient(self._losses[work.role])
            # trainers that still have images; the others must not change
            busy = number * work.batches.shape[2] < sizes
            for name, value in buffers.statistics.items():
                value.copy_(where_busy(busy, step.buffers[name], value))
            for name, value in total.items():
                value.add_(where_busy(busy, gradients[name], 0.0))
        return self.layout.flatten(total, lead=1)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which images each of n trainers (users, or the server) sees next, [n, count]. An image is
        given by its position among the trainer's own images.

        Each trainer sees its images in a random sequence (see `positions` in `engines/work.py`). The result
        is the elements `first` to `first + count - 1` of this sequence. It depends on the random key `base`,
        the trainer's number (in `trainers`) and its number of images (in `sizes`).
        """

        def chosen() -> Tensor:
            if trainers.is_cuda and convolution.usable():
                return view_kernels.positions(base, trainers, sizes, first, count, SHUFFLE_ROUNDS)
            return positions(base, trainers, sizes, first, count)

        return run_without_kernels_if_they_fail(chosen)

    def close(self) -> None:
        """Does nothing, because this engine has no processes to end."""

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory one more trainer (a user or the server) needs during
        training with batches of `batch_size` images. This number decides how many users are trained together.

        The estimate includes the trainer's model before and after training, its buffers, and twice the memory
        that a trial step saves for the backward pass.
        """
        saved_bytes: dict[int, int] = {}

        def note(saved: Tensor) -> Tensor:
            saved_bytes[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        rows = torch.zeros(1, self.layout.length, dtype=self.pool.wide, device=self.pool.images.device)
        work = self._trial_work(rows, batch_size)
        buffers = self._buffers(1, rows, work)
        buffers.load(self.layout, rows, rows[:, : self.layout.weights], work)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            weights = {name: value.detach().requires_grad_() for name, value in buffers.narrow.items()}
            batch = make_batch(self.pool, work, 0)
            self._trial_loss(work, weights, buffers, batch)
        return 2 * sum(saved_bytes.values()) + 10 * self.layout.length * self.pool.wide.itemsize

    def _trial_work(self, rows: Tensor, batch_size: int) -> Work:
        """Returns a small piece of work with which `memory` measures memory: one step of one user with
        pseudo-labels, or of the server if the method trains no users."""
        nothing = torch.zeros(4, 1, dtype=torch.int64, device=rows.device)
        images = nothing[:1, :, None].expand(1, 1, batch_size)
        if not self.method.trains_users:
            return Work("server", ("weak",), nothing, images, None, (0.0,))
        views = tuple(view for view in self.method.uses() if view != "received")
        work = Work("user", views, nothing, images, None, (0.0,))
        if self.method.label is None:
            return work
        look = Look(self.predict(rows, work), images, nothing[2], {}, False)
        try:
            return work.with_labels(checked_labels(self.method.label(look), look))
        except KeyError:
            if not self._gets_tensors:
                raise
            return work

    def _trial_loss(self, work: Work, weights: Named, buffers: StepBuffers, batch: Batch) -> None:
        """Computes the loss of a step with which `memory` measures memory. If the method reads tensors that
        the server sends in real rounds, all views of the images pass through the network instead."""
        received = buffers.received or None
        try:
            self._evaluate(self._losses[work.role], work.role, weights, buffers.statistics, batch, received)
        except KeyError:
            if not self._gets_tensors:
                raise
            step = Step(batch, weights, buffers.statistics, self._network)
            for views in (batch.weak, batch.strong, batch.own):
                if views is not None:
                    step.forward(views).log_softmax(-1)

    @property
    def _gets_tensors(self) -> bool:
        """Whether the server sends the method's users tensors besides the model."""
        return bool({"sends", "numbers"} & set(self.method.needs()))

    def _step(self, buffers: StepBuffers, probabilities: Tensor | None) -> None:
        """Runs one step of all models in the buffers. If `probabilities` is None, the step trains the models.
        Otherwise the models only predict the step's images, and the predictions are written into
        `probabilities`."""
        batch = self._views(self._step_pool, buffers.work, buffers.step)
        if probabilities is None:
            self._step_on(buffers, batch)
        else:
            predictions = self._predict(buffers.narrow, buffers.statistics, batch)
            probabilities.index_copy_(1, buffers.step, predictions[:, None])
            buffers.step.add_(1)

    def _step_on(self, buffers: StepBuffers, batch: Batch) -> None:
        step = self._step_of(buffers, batch)
        gradients, metrics = self.method.gradient(step, self._losses[buffers.work.role])
        update = sgd_by_kernels if self._updates_by_kernels else self._sgd
        update(buffers, gradients, step.buffers, metrics, self.optimizer)

    @property
    def _updates_by_kernels(self) -> bool:
        """Whether GPU kernels update the weights."""
        on_gpu = self.pool.images.is_cuda and self.pool.dtype == torch.bfloat16
        return on_gpu and not self.optimizer.clip and convolution.usable()

    def _step_of(self, buffers: StepBuffers, batch: Batch) -> Step:
        """Returns the `Step` that a method's functions get, for all trainers (users, or the server) together.
        It contains their batches, and functions that compute logits and gradients at the weights in the
        buffers."""
        role = buffers.work.role
        rates = buffers.rates
        return Step(
            batch,
            buffers.weights,
            buffers.statistics,
            self._network,
            role=role,
            sees_labels=self._sees_labels(role),
            narrow=buffers.narrow,
            received=buffers.received or None,
            rate=rates.index_select(0, buffers.step)[0] if len(rates) else None,
            decay=self.optimizer.weight_decay,
            evaluate=partial(self._evaluated, role),
        )

    def _uses_received(self, role: str) -> bool:
        """Returns whether the loss may read the weights that users received at the start of the round."""
        return role == "user" and "received" in self.method.uses()

    def _sees_labels(self, role: str) -> bool:
        return role == "server" or "labels" in self.method.needs()

    def _evaluated(
        self, role: str, loss: Loss, weights: Named, buffers: Named, batch: Batch, received: Named | None
    ) -> tuple[Tensor, Named, Named]:
        """Returns the value of `loss` for each model, the metrics, and the new running statistics. `role`
        says who trains, "user" or "server", and `buffers` are the running statistics before. `received` are
        the weights that users got at the start of the round; None if the method does not use them.

        If the engine compiles, the method's user loss and server loss are evaluated by compiled functions.
        All other losses are evaluated by ordinary code.
        """
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

    def _eager_predict(self, weights: Named, buffers: Named, batch: Batch) -> Tensor:
        with torch.no_grad():
            return predicted(Step(batch, weights, buffers, self._network))

    def _network(
        self, weights: Named, buffers: Named, images: Tensor, training: bool, keys: Tensor
    ) -> tuple[Tensor, Named]:
        state = weights | buffers
        logits = functional_call(self.networks[training], state, (images.flatten(0, 1), keys))
        # after the call, `state` contains the new running statistics
        return logits.unflatten(0, images.shape[:2]), {name: state[name] for name in buffers}

    def _record(self, rows: Tensor, momentum: Tensor, work: Work, models: int, trains: bool) -> RecordedStep:
        """Returns a new step with new buffers for `models` models, recorded as a CUDA graph if possible. If
        `trains` is true, the step trains the models; otherwise it only writes their predictions."""
        probabilities = None
        if trains:
            buffers = self._buffers(models, rows, work)
        else:
            buffers = make_buffers(
                self.layout, self.pool, models, rows, work, learns=False, join=self._updates_by_kernels
            )
            with torch.no_grad():
                logits = self.networks[False](self.pool.normalised(self.pool.images[:1], self.pool.wide))
            probabilities = logits.new_empty(models, *work.batches.shape[1:], logits.shape[1])
        buffers.load(self.layout, rows, momentum, work)
        # lookup tables of the views cannot be made as part of the recording
        if self._step_pool.by_kernels:
            view_kernels.tables(self.pool.images)
        make_batch(self.pool, buffers.work, buffers.step)

        def warm_up() -> None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if self._from_package() and convolution.usable():
                    launching.compile_ahead(lambda: self._step(buffers, probabilities), local_cores(cores()))
                for _ in range(2):
                    buffers.step.zero_()
                    self._step(buffers, probabilities)
            torch.cuda.current_stream().wait_stream(side)

        run_without_kernels_if_they_fail(warm_up)
        if convolution.usable() != self._with_kernels:  # without kernels, torch should compile the network
            self._functions()
            warm_up()
        graph = self._graphs.record(lambda: self._step(buffers, probabilities))
        return RecordedStep(buffers, graph, probabilities)


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
