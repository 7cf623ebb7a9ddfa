"""The contestant pfl: its SimulatedBackend, FederatedAveraging, PyTorchModel and its own local training loop.

With several processes it is started by torchrun, which pfl detects. pfl 0.6 gives every process its own GPU.
If there are fewer GPUs, `share_gpu` lets the processes share one.
"""

import os
import time
from typing import Any

import numpy as np
import torch


def share_gpu() -> None:
    """Lets several processes of pfl use the first GPU together. pfl would choose one GPU for each, and NCCL,
    which cannot send between processes on one GPU. Gloo can."""
    begin, choose = torch.distributed.init_process_group, torch.cuda.set_device
    torch.distributed.init_process_group = lambda *_, **__: begin("gloo")
    torch.cuda.set_device = lambda device: choose(0)


if 0 < torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
    share_gpu()  # before pfl is imported, which begins to communicate

# ruff: noqa: E402
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks import jobs, peers


class Module(nn.Module):
    """A network with the methods `loss` and `metrics`, which pfl's PyTorchModel requires."""

    def __init__(self, task: peers.Task) -> None:
        super().__init__()
        self.network = task.network
        self.task = task

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.task.loss(self.network, images, labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Returns the metrics of pfl's evaluation, which is not part of the job. pfl always evaluates in its
        first iteration; here this is cheap, and falls into the warm-up."""
        return {"nothing": Weighted(0.0, len(images))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """A callback that records when each round ends, and the sum of its losses."""

    def __init__(self, task: peers.Task) -> None:
        self.task = task
        self.ends: list[float] = []
        self.totals: list[float] = []

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        if self.task.images.is_cuda:
            torch.cuda.synchronize()
        self.ends.append(time.monotonic())
        self.totals.append(float(self.task.total))
        return False, Metrics()


def run(spec: jobs.Spec) -> jobs.Measured:
    """Runs the job with pfl and returns the measurements. Every process returns the same numbers, summed over
    all processes."""
    workers = pytorch_ops.distributed
    assert workers is not None
    np.random.seed(1)  # noqa: NPY002  pfl draws from numpy's global generator, alike in all processes
    task = peers.prepare(spec)
    torch.manual_seed(1 + workers.global_rank)
    if workers.world_size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers.world_size))
    module = Module(task)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=task.sgd,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )

    def dataset(user: int) -> Dataset:
        return Dataset(task.draw(user), user_id=str(user))

    # every user is drawn once before any is drawn again, so no user is in a cohort twice
    users = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(len(task.users)))))
    train = task.config.train
    clock = Clock(task)
    ready = time.monotonic()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=spec.rounds,
            evaluation_frequency=spec.rounds + 1,
            train_cohort_size=jobs.participants(task.config),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=train.lr, local_batch_size=train.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    totals = [task.steps, task.seen, *np.diff(clock.totals, prepend=0.0)]
    (counts,) = workers.all_reduce([torch.tensor(totals, device=task.images.device)])
    steps, seen, *totals = counts.tolist()
    each = steps / spec.rounds
    return jobs.Measured(
        ready, clock.ends, [total / each for total in totals], round(steps), round(seen),
        workers.world_size, torch.get_num_threads(),
    )  # fmt: skip
