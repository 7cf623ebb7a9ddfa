"""The contestants of ssfl itself, with the engine `loop` or `vmap`. Rounds are run by `Simulation.play`, as
in `ssfl run`. A name such as `vmap-float32` also sets the precision."""

import time

import torch
from torch import Tensor

from benchmarks import jobs
from ssfl.engines.spread import Spread
from ssfl.engines.work import TrainedRows, Work
from ssfl.runs import assemble
from ssfl.runs.surroundings import reproducible


def run(spec: jobs.Spec) -> jobs.Measured:
    """Runs the job's rounds with ssfl and returns the measurements. Threads and other settings are the
    library's defaults."""
    engine, _, precision = spec.contestant.partition("-")
    overrides = [f"run.engine={engine}", *([f"train.precision={precision}"] if precision else [])]
    if spec.device != "cpu" and engine == "vmap":
        overrides.append("run.compile=true")  # a run of usual length would choose this too
    with reproducible():
        simulation = assemble.make(jobs.config(spec, overrides))
        measured = jobs.Measured(threads=torch.get_num_threads())
        if isinstance(simulation.engine, Spread):
            measured.processes = simulation.engine.processes
        train = simulation.engine.train

        def counted(rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
            measured.steps += len(rows) * work.steps
            measured.images += work.batches.numel()
            return train(rows, momentum, work)

        setattr(simulation.engine, "train", counted)  # noqa: B010
        state = simulation.initial()
        measured.ready = time.monotonic()
        for _ in range(spec.rounds):
            state, events = simulation.play(state)  # it reads the losses, so it waits for the device
            measured.ends.append(time.monotonic())
            measured.losses.append(events[0]["loss"])
    return measured
