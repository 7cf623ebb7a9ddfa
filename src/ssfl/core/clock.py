"""Measures how long the phases of a round take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Adds up the seconds that each phase of a round takes.

    A GPU works asynchronously, so its times come from CUDA events in its queue. These are read at the end of
    the round, so that the CPU does not have to wait for the GPU after each phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._passed: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside the `with` block to this phase."""
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
        """Returns the seconds of each phase so far."""
        for phase, first, last in self._marks:
            last.synchronize()
            self._add(phase, first.elapsed_time(last) / 1000)
        self._marks.clear()
        return self._passed

    def _add(self, phase: str, seconds: float) -> None:
        self._passed[phase] = self._passed.get(phase, 0.0) + seconds
