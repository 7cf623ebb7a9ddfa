"""Users spread over the processes of torchrun, on one machine or many: one exchange of weights a round.

Every rank plays the same rounds and holds the same state. It trains its share of the users and adds them to
the average as they come; the ranks then gather their partial sums and add them up in the order of the
ranks, so that all hold the same bits. The server trains on every rank alike, which costs no time.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed

from ssfl.engines.contract import Engine
from ssfl.engines.work import TrainedRows, Work
from ssfl.errors import ConfigError, RunError

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others."""
_LOST = "another rank was lost"


def rank() -> int:
    """Which of torchrun's processes this is; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """Each process of a machine takes a GPU of its own."""
    if device.type != "cuda":
        return device
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ConfigError(
            f"torchrun started more processes than the {count} GPUs here: lower --nproc-per-node"
        )
    return torch.device("cuda", place)


def local_cores(cores: int) -> int:
    """The cores of a machine, shared by its processes."""
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Dist:
    """Another engine, on every rank, for its share of the users."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.rank, self.size = engine, rank(), ranks()
        if self.size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, timeout=PATIENCE)

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """As the engine does, here."""
        return self.engine.train(rows, momentum, work)

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """As the engine does, here."""
        return self.engine.answers(rows, work)

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """As the engine does, here."""
        return self.engine.gradients(rows, work, sizes)

    def memory(self, batch_size: int) -> int:
        """As of the engine."""
        return self.engine.memory(batch_size)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """`work.positions`."""
        return self.engine.positions(base, trainers, sizes, first, count)

    def close(self) -> None:
        """Leave the group."""
        self.engine.close()
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def share(self, count: int, which: int | None = None) -> slice:
        """The places of a cohort that a rank trains, this one by itself: even, in order."""
        which = self.rank if which is None else which
        return slice(count * which // self.size, count * (which + 1) // self.size)

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """The sum of everybody's `streams`, and the rows of `each` of all `count` users in their order.

        One message carries all of it, and a sum of the bits that the round started from: ranks that
        differ would train different models without a word.
        """
        if self.size == 1:
            return [streams, *each]
        bits = start.contiguous().view(torch.int32).sum().remainder(2**20).to(streams.dtype)
        widths = [part[:1].numel() if len(part) else part.shape[1:].numel() for part in each]
        most = max(s.stop - s.start for s in (self.share(count, which) for which in range(self.size)))
        packed = torch.cat([bits[None], streams.flatten(), *(part.flatten() for part in each)])
        room = packed.new_zeros(1 + streams.numel() + most * sum(widths))
        room[: len(packed)] = packed
        told = [torch.empty_like(room) for _ in range(self.size)]
        try:
            distributed.all_gather(told, room)
        except RuntimeError as error:
            raise RunError(_LOST) from error
        if any(bool(message[0] != bits) for message in told):
            raise RunError("the ranks do not hold the same weights: start them on machines of one kind")
        total = torch.stack([message[1 : 1 + streams.numel()] for message in told])
        found: list[list[Tensor]] = [[] for _ in each]
        for which, message in enumerate(told):
            place, own = 1 + streams.numel(), self.share(count, which)
            for part, width, pieces in zip(each, widths, found, strict=True):
                size = (own.stop - own.start) * width
                pieces.append(message[place : place + size].reshape(-1, *part.shape[1:]))
                place += size
        summed = total[0]
        for one in total[1:]:
            summed = summed + one
        return [summed.reshape(streams.shape), *(torch.cat(pieces) for pieces in found)]

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Everybody's rows of a cohort, in its order."""
        return self.exchange(rows.new_zeros(1), rows.new_zeros(1), [rows], count)[1]

    def agree(self, stop: int) -> int:
        """Returns the signal by which any rank was asked to stop, or 0."""
        if self.size == 1:
            return stop
        asked = torch.tensor(float(stop))
        if distributed.get_backend() == "nccl":
            asked = asked.cuda()
        try:
            distributed.all_reduce(asked, distributed.ReduceOp.MAX)
        except RuntimeError as error:
            raise RunError(_LOST) from error
        return int(asked)
