"""Measures how many seconds each phase of a round takes, such as training or averaging, on a CPU or on a
GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """A stopwatch that adds up the seconds that each named phase of a round takes.

    A GPU works asynchronously, so its times are measured by CUDA events in its queue. The events are read
    only at the end of the round. So the CPU does not have to wait for the GPU after each phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._passed: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measures the time spent inside a `with` block and adds it to the total of the phase with this
        name."""
        if self._gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._marks.append((phase, first, last))
        else:
            began = time.perf_counter()
            yield
            self._add(phase, time.perf_counter() - began)

    def seconds(self) -> dict[str, float]:
        """Returns the total seconds of each phase so far, by the phase's name. On a GPU it waits until the
        measured work is finished."""
        for phase, first, last in self._marks:
            last.synchronize()
            self._add(phase, first.elapsed_time(last) / 1000)
        self._marks.clear()
        return self._passed

    def _add(self, phase: str, seconds: float) -> None:
        self._passed[phase] = self._passed.get(phase, 0.0) + seconds
