"""Records training steps as CUDA graphs, which are then replayed with almost no work for the CPU."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ssfl.engines.buffers import StepBuffers
from ssfl.errors import warn_user
from ssfl.models.kernels import convolution

Result = TypeVar("Result")


class RecordedStep(NamedTuple):
    """A step of all trainers (users, or the server), recorded as a CUDA graph if possible. It can be run
    again for any work of the same kind (`Work.kind`), after the data of that work are copied into
    `buffers`."""

    buffers: StepBuffers
    graph: torch.cuda.CUDAGraph | None
    """The CUDA graph that is replayed; None if the step could not be recorded and must run as ordinary
    code."""
    probabilities: Tensor | None
    """The memory for predictions, [n, T, B, classes], of n models for T batches of B images. None if the step
    trains instead of predicting."""


class Recorder(NamedTuple):
    """What the CUDA graphs of one stream are recorded with. Graphs of one stream run one after another, so
    they share memory. Those of another stream may run at the same time, and need their own."""

    stream: torch.cuda.Stream
    """Where steps are recorded. A graph keeps the priority of this stream."""
    memory: Any
    """The pool of memory for the graphs."""


class Graphs:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self._recorders: dict[torch.cuda.Stream, Recorder] = {}

    def record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Returns a recording of `step`, which must have run before. Its GPU work is recorded, and not
        executed. If it cannot be recorded, warns and returns None."""
        torch.cuda.empty_cache()  # frees memory for the recording, which uses a separate pool
        graph, recorder = torch.cuda.CUDAGraph(), self._recorder(torch.cuda.current_stream())
        try:
            with torch.cuda.graph(graph, pool=recorder.memory, stream=recorder.stream):
                step()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            warn_user(
                f"a training step cannot be recorded as a CUDA graph ({_reason(error)}): training is "
                "slower, but its results are the same"
            )
            return None
        return graph

    def _recorder(self, stream: torch.cuda.Stream) -> Recorder:
        if stream not in self._recorders:
            own = torch.cuda.Stream(priority=stream.priority)
            self._recorders[stream] = Recorder(own, torch.cuda.graph_pool_handle())
        return self._recorders[stream]


def run_without_kernels_if_they_fail(run: Callable[[], Result]) -> Result:
    """Calls `run`, which uses ssfl's GPU kernels unless they are switched off, and returns its result. If
    that fails, switches the kernels off and calls it again.

    If the second run works, the kernels caused the error (they need a C compiler, for example), and they stay
    switched off. If it fails too, the cause is elsewhere, such as in a person's own method. Then the kernels
    are switched on again, and the first error is raised.
    """
    try:
        return run()
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not convolution.usable():
            raise
        convolution.use(False)
        try:
            result = run()
        except Exception:
            convolution.use(True)
            raise error from None
        warn_user(
            f"ssfl's GPU kernels failed ({_reason(error)}), so training uses PyTorch's layers, which are "
            "slower. The kernels need a C compiler: check that one is installed"
        )
        return result


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
