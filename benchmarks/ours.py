"""ssfl itself: rounds as `Simulation.play` plays them, with the engine `loop` or `vmap`."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import jobs
from ssfl import assemble
from ssfl.work import Trained, Work


def run(spec: jobs.Spec) -> jobs.Measured:
    """Play the rounds; threads are what the library chooses by itself."""
    made = assemble.make(jobs.config(spec, [f"run.engine={spec.contestant}"]))
    measured = jobs.Measured(threads=torch.get_num_threads())
    engine = made.engine

    def counted(rows: Tensor, momentum: Tensor, work: Work) -> Trained:
        measured.steps += len(rows) * work.steps
        measured.images += work.batches.numel()
        return engine.train(rows, momentum, work)

    simulation = replace(made, engine=replace(engine, train=counted))
    state = simulation.initial()
    measured.ready = time.monotonic()
    for _ in range(spec.rounds):
        state, events = simulation.play(state)  # reads the losses, so the device is done
        measured.ends.append(time.monotonic())
        measured.losses.append(events[0]["loss"])
    return measured
