"""The engine "dist": users are divided among the processes (ranks) of torchrun, on one machine or many. The
ranks exchange weights once per round.

Every rank runs the same rounds and holds the same state. It trains its share of the users and adds their
models to a partial sum. The ranks then gather all partial sums and add them up in the order of the ranks, so
that all ranks have the same bits. Every rank also trains the server, which takes no extra time.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed

from ssfl.engines.contract import Engine
from ssfl.engines.work import TrainedRows, Work
from ssfl.errors import ConfigError, RunError, one_line

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for a message of the others before the run fails."""


def rank() -> int:
    """Returns the rank of this process in torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """Returns how many processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> int:
    """Returns how many of torchrun's processes are on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """Returns the device that this process uses. On a machine with several GPUs, each process has one of its
    own."""
    if device.type != "cuda":
        return device
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", place + 1))
        raise ConfigError(
            f"torchrun --nproc-per-node={processes}: there are only {count} GPUs here. Use at most {count}.",
            key="--nproc-per-node",
            value=processes,
            fix=f"--nproc-per-node={count}",
        )
    return torch.device("cuda", place)


def local_cores(cores: int) -> int:
    """Returns this process's share of the machine's CPU cores."""
    return max(1, cores // local_ranks())


def _lost(error: RuntimeError) -> RunError:
    """Returns the error to raise if another process did not take part in an exchange of tensors."""
    return RunError(
        f"the processes of torchrun cannot reach each other ({one_line(error, 200)}): probably one of them "
        "has ended; see the output of each"
    )


class Dist:
    """Wraps another engine, with which every rank trains its share of the users."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.rank, self.size = engine, rank(), ranks()
        if self.size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, timeout=PATIENCE)

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns these models after training, which is done on this rank alone."""
        return self.engine.train(rows, momentum, work)

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns these models' predictions, computed on this rank."""
        return self.engine.predict(rows, work)

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns the gradient of each trainer's loss over all its images, computed on this rank."""
        return self.engine.gradients(rows, work, sizes)

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory each further trainer takes."""
        return self.engine.memory(batch_size)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which of its images each trainer sees at places `first` to `first + count` of its random
        sequence. See the function `positions` in `engines/work.py`."""
        return self.engine.positions(base, trainers, sizes, first, count)

    def close(self) -> None:
        """Leaves the group of processes."""
        self.engine.close()
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def share(self, count: int, which: int | None = None) -> slice:
        """Returns which of the round's `count` users a rank trains (default: this rank), as a slice of their
        positions. Ranks get even shares, in order."""
        which = self.rank if which is None else which
        return slice(count * which // self.size, count * (which + 1) // self.size)

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """Returns the sum of all ranks' `streams` (the partial sums of the groups' models), and each tensor
        of `each` with the rows of all `count` users.

        A single message carries everything. It has a checksum of `start`, the model that the round started
        from, because otherwise it would go unnoticed if ranks held different models.
        """
        if self.size == 1:
            return [streams, *each]
        bits = start.contiguous().view(torch.int32).sum().remainder(2**20).to(streams.dtype)
        widths = [part[:1].numel() if len(part) else part.shape[1:].numel() for part in each]
        most = max(s.stop - s.start for s in (self.share(count, which) for which in range(self.size)))
        packed = torch.cat([bits[None], streams.flatten(), *(part.flatten() for part in each)])
        room = packed.new_zeros(1 + streams.numel() + most * sum(widths))
        room[: len(packed)] = packed
        messages = [torch.empty_like(room) for _ in range(self.size)]
        try:
            distributed.all_gather(messages, room)
        except torch.OutOfMemoryError:  # this process's own
            raise
        except RuntimeError as error:
            raise _lost(error) from error
        if any(bool(message[0] != bits) for message in messages):
            raise RunError(
                "the processes of torchrun have different weights after the same round: use the same kind of "
                "device and the same versions for all of them"
            )
        partial_sums = torch.stack([message[1 : 1 + streams.numel()] for message in messages])
        gathered: list[list[Tensor]] = [[] for _ in each]
        for which, message in enumerate(messages):
            place, share = 1 + streams.numel(), self.share(count, which)
            for part, width, pieces in zip(each, widths, gathered, strict=True):
                size = (share.stop - share.start) * width
                pieces.append(message[place : place + size].reshape(-1, *part.shape[1:]))
                place += size
        total = partial_sums[0]
        for partial_sum in partial_sums[1:]:
            total = total + partial_sum
        return [total.reshape(streams.shape), *(torch.cat(pieces) for pieces in gathered)]

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Returns the models of all `count` users of the round, one per row, in order. `rows` are those that
        this rank trained."""
        return self.exchange(rows.new_zeros(1), rows.new_zeros(1), [rows], count)[1]

    def agree(self, stop: int) -> int:
        """Returns the signal that asked any of the ranks to stop, or 0, so that all ranks stop after the same
        round."""
        if self.size == 1:
            return stop
        signal = torch.tensor(float(stop))
        if distributed.get_backend() == "nccl":
            signal = signal.cuda()
        try:
            distributed.all_reduce(signal, distributed.ReduceOp.MAX)
        except torch.OutOfMemoryError:  # this process's own
            raise
        except RuntimeError as error:
            raise _lost(error) from error
        return int(signal)
