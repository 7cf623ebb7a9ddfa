"""Divides trainers (users or the server) among processes with one thread each. For example, a CPU with two
cores then trains two users at the same time.

Most networks here are so small that several threads do not make a single training step faster. So each
process trains some of a round's users with the same engine, in one thread. The models are sent between the
processes.
"""

import ctypes
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ssfl.engines.contract import Engine
from ssfl.engines.work import TrainedRows, Work
from ssfl.errors import RunError

_engine: Engine | None = None
"""The engine that a forked process trains with. It is set just before the processes are forked, so that each
of them inherits a copy."""


def possible(device: torch.device, threads: int, trainers: int) -> bool:
    """Returns whether trainers (users or the server) can be divided among processes. This needs several
    trainers, a CPU as the device, and more than one thread (`threads`). It also needs Linux, and a process
    that may start others."""
    allowed = sys.platform == "linux" and not multiprocessing.current_process().daemon
    return device.type == "cpu" and threads > 1 and trainers > 1 and allowed


class Spread:
    """Wraps another engine and divides its trainers (users or the server) among processes, so that all CPU
    cores are used."""

    side: torch.cuda.Stream | None = None

    def __init__(self, engine: Engine, processes: int) -> None:
        global _engine
        self.engine, self.processes = engine, processes
        _engine = engine
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), _begin, (os.getpid(),)
        )
        # Python warns when a process with threads forks; here torch's threads are idle
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                for started in [self._pool.submit(_probe) for _ in range(processes)]:
                    started.result()
            except BaseException:
                self.close()
                raise
            finally:
                _engine = None

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models, momentum and metrics of n trainers (users, or the server) after their training
        steps in a round. Each process trains some of the n trainers. If n is 1, no other process is used."""
        if len(rows) == 1:
            return self.engine.train(rows, momentum, work)
        parts: list[TrainedRows] = self._everywhere(
            "train", [(rows[part], momentum[part], work.of(part)) for part in self._parts(len(rows))]
        )
        return TrainedRows(
            torch.cat([part.rows for part in parts]),
            torch.cat([part.momentum for part in parts]),
            {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        )

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the class probabilities [n, T · B, classes] that n models predict in evaluation mode. The
        models are the rows of `rows`, one for each of n users. Each model predicts weak views of its user's
        images, which are T batches of B images. The method makes pseudo-labels from these probabilities."""
        parts = [(rows[part], work.of(part)) for part in self._parts(len(rows))]
        return torch.cat(self._everywhere("predict", parts))

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns a gradient for each of n trainers (users, or the server), [n, P], where P is the number of
        weights. It is the gradient of the trainer's mean loss over all its images. `sizes` [n] are the
        trainers' numbers of images. Gradient diversity is measured with these gradients."""
        return torch.cat(
            self._everywhere(
                "gradients", [(rows[part], work.of(part), sizes[part]) for part in self._parts(len(rows))]
            )
        )

    def close(self) -> None:
        """Ends the processes that were started for training."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory one more trainer (a user or the server) needs during
        training with batches of `batch_size` images."""
        return self.engine.memory(batch_size)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which images each of n trainers (users, or the server) sees next, [n, count]. An image is
        given by its position among the trainer's own images.

        Each trainer sees its images in a random sequence (see `positions` in `engines/work.py`). The result
        is the elements `first` to `first + count - 1` of this sequence. It depends on the random key `base`,
        the trainer's number (in `trainers`) and its number of images (in `sizes`).
        """
        return self.engine.positions(base, trainers, sizes, first, count)

    def _parts(self, count: int) -> list[slice]:
        edges = [count * i // self.processes for i in range(self.processes + 1)]
        return [slice(a, b) for a, b in pairwise(edges) if b > a]

    def _everywhere(self, verb: str, parts: list[tuple[Any, ...]]) -> list[Any]:
        """Calls the engine's function `verb`, such as "train", in the processes, once for each tuple of
        arguments in `parts`. Returns the results in the order of `parts`. Raises RunError if a process was
        killed."""
        try:
            waiting = [self._pool.submit(_do, verb, _packed(part)) for part in parts]
            return [pickle.loads(waiting.pop(0).result()) for _ in parts]
        except BrokenProcessPool:
            raise RunError(
                "one of the run's processes was killed, perhaps because memory ran out: lower run.threads or "
                "run.users_at_once",
                key="run.threads",
                value=self.processes,
            ) from None


def _begin(parent: int) -> None:
    """Prepares a new process: limits it to one thread, and makes it end in three cases. These are: its parent
    ends, its parent sends it SIGTERM or SIGINT, or Ctrl-C is pressed a second time.

    A terminal, systemd or Slurm sends a signal to the parent and to all its processes. The parent then still
    finishes its round, and needs this process for that. So this process ignores SIGTERM and the first Ctrl-C
    if they do not come from its parent.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the thread below waits for them
    _one_thread()

    def watch() -> None:
        pressed = 0
        while os.getppid() == parent:
            received = signal.sigtimedwait(signals, 0.2)
            pressed += received is not None and received.si_signo == signal.SIGINT
            if pressed > 1 or (received is not None and received.si_pid == parent):
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _one_thread() -> None:
    """Limits torch and the OpenMP libraries of this process to one thread. On Arm, some of these libraries
    would still use the number of threads from before the fork."""
    torch.set_num_threads(1)
    with suppress(OSError), open("/proc/self/maps") as maps:
        for library in {line.split(maxsplit=5)[-1].strip() for line in maps}:
            if re.search(r"/lib(g|i|)omp[^/]*$", library):
                with suppress(OSError, AttributeError):  # not an OpenMP library, or its file was deleted
                    ctypes.CDLL(library).omp_set_max_active_levels(0)


def _probe() -> None:
    """Computes a small gradient, to find out whether this process is able to. torch refuses to compute
    gradients in a process that was forked after a gradient was computed on a GPU."""
    torch.ones(1, requires_grad=True).sum().backward()
    time.sleep(0.01)  # so that each process gets one of these calls


def _do(verb: str, packed: bytes) -> bytes:
    return _packed(getattr(_engine, verb)(*pickle.loads(packed)))


class _Pickler(pickle.Pickler):
    """Pickles tensors as plain bytes, to send them between processes. torch would send them through shared
    memory, of which containers have little."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
