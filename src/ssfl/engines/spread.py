"""Trainers spread over processes of one thread each: on a CPU, two users at a time on two cores.

Networks of a federation are too small for several threads to share one step of them well. A process
takes its part of a round's trainers through the same engine; what goes there and back are rows.
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
"""A process's own copy, from the fork."""


def possible(device: torch.device, threads: int, trainers: int) -> bool:
    """Whether there is something to spread, and a way to."""
    allowed = sys.platform == "linux" and not multiprocessing.current_process().daemon
    return device.type == "cpu" and threads > 1 and trainers > 1 and allowed


class Spread:
    """Another engine, with its trainers dealt to processes."""

    def __init__(self, engine: Engine, processes: int) -> None:
        global _engine
        self.engine, self.processes = engine, processes
        _engine = engine
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), _begin, (os.getpid(),)
        )
        with warnings.catch_warnings():  # torch's threads are idle, and the processes never use theirs
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
        """Each process trains a part; one trainer stays here."""
        if len(rows) == 1:
            return self.engine.train(rows, momentum, work)
        found: list[TrainedRows] = self._everywhere(
            "train", [(rows[part], momentum[part], work.of(part)) for part in self._parts(len(rows))]
        )
        return TrainedRows(
            torch.cat([part.rows for part in found]),
            torch.cat([part.momentum for part in found]),
            {name: torch.cat([part.metrics[name] for part in found]) for name in found[0].metrics},
        )

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """What each row says of its batches' images."""
        parts = [(rows[part], work.of(part)) for part in self._parts(len(rows))]
        return torch.cat(self._everywhere("answers", parts))

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Each trainer's gradient over all its data, [n, P]."""
        return torch.cat(
            self._everywhere(
                "gradients", [(rows[part], work.of(part), sizes[part]) for part in self._parts(len(rows))]
            )
        )

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def memory(self, batch_size: int) -> int:
        """As of the engine."""
        return self.engine.memory(batch_size)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """`work.positions`."""
        return self.engine.positions(base, trainers, sizes, first, count)

    def _parts(self, count: int) -> list[slice]:
        edges = [count * i // self.processes for i in range(self.processes + 1)]
        return [slice(a, b) for a, b in pairwise(edges) if b > a]

    def _everywhere(self, verb: str, parts: list[tuple[Any, ...]]) -> list[Any]:
        try:
            waiting = [self._pool.submit(_do, verb, _packed(part)) for part in parts]
            return [pickle.loads(waiting.pop(0).result()) for _ in parts]
        except BrokenProcessPool:
            raise RunError(
                "one of its processes was ended from outside, perhaps for want of memory: lower run.threads "
                "or run.users_at_once"
            ) from None


def _begin(parent: int) -> None:
    """A process begins: one thread, gone soon after its parent, or with the second Ctrl-C, as its parent.

    A terminal, systemd or Slurm signals every process of a group. The parent answers by ending the round, for
    which it needs this process; only what the parent sends ends it.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the thread below takes them
    _one_thread()

    def watch() -> None:
        pressed = 0
        while os.getppid() == parent:
            told = signal.sigtimedwait(signals, 0.2)
            pressed += told is not None and told.si_signo == signal.SIGINT
            if pressed > 1 or (told is not None and told.si_pid == parent):
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _one_thread() -> None:
    """For every library: on Arm some keep the count of threads they had before the fork, which are gone."""
    torch.set_num_threads(1)
    with suppress(OSError), open("/proc/self/maps") as maps:
        for library in {line.split(maxsplit=5)[-1].strip() for line in maps}:
            if re.search(r"/lib(g|i|)omp[^/]*$", library):
                with suppress(OSError, AttributeError):  # one of another kind, or gone from the disk
                    ctypes.CDLL(library).omp_set_max_active_levels(0)


def _probe() -> None:
    """A gradient: torch refuses it in a process forked after its parent has computed some on a GPU."""
    torch.ones(1, requires_grad=True).sum().backward()
    time.sleep(0.01)  # so that each process gets one


def _do(verb: str, packed: bytes) -> bytes:
    return _packed(getattr(_engine, verb)(*pickle.loads(packed)))


class _Pickler(pickle.Pickler):
    """Tensors as their bytes; torch's own way needs shared memory, of which containers have little."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
