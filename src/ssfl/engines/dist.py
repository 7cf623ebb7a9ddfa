"""The engine "dist": divides the users among the processes of torchrun (ranks), on one or more machines. The
ranks exchange weights once per round.

Every rank runs the same rounds and has the same state. In a round, it trains its share of the users and sums
up their models. All ranks then get the partial sums of all others and add them in the order of the ranks. So
every rank gets the same result, bit by bit. Each rank also trains the server's model, since waiting for
another rank to do it would take as long.
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
"""How long a rank waits for a message from the others before the run fails. A rank that has crashed never
answers."""


def rank() -> int:
    """Returns the number of this process among those that torchrun started, from 0. It is 0 without
    torchrun."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """Returns how many processes torchrun started, on all machines; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> int:
    """Returns how many of torchrun's processes run on this machine; 1 without torchrun. They share its CPU
    cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """Returns the device that this process trains on. If `device` is a GPU, each process on this machine gets
    a different GPU. Raises ConfigError if there are more processes than GPUs."""
    if device.type != "cuda":
        return device
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", place + 1))
        raise ConfigError(
            f"torchrun --nproc-per-node={processes} needs one GPU for each process, and this machine has "
            f"{count}. Use at most {count}.",
            key="--nproc-per-node",
            value=processes,
            fix=f"--nproc-per-node={count}",
        )
    return torch.device("cuda", place)


def local_cores(cores: int) -> int:
    """Returns how many of the machine's `cores` CPU cores this process may use. The processes of torchrun on
    this machine share them equally."""
    return max(1, cores // local_ranks())


def _lost(error: RuntimeError) -> RunError:
    """Returns the error to raise if an exchange of tensors between processes failed with `error`. The
    probable cause is that another process has ended."""
    return RunError(
        f"the processes of torchrun cannot reach each other ({one_line(error, 200)}): probably one of them "
        "has ended; see the output of each"
    )


class Dist:
    """The engine "dist". It wraps another engine, with which every rank (process) trains its share of the
    users."""

    side: torch.cuda.Stream | None = None

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.rank, self.size = engine, rank(), ranks()
        if self.size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, timeout=PATIENCE)

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models, momentum and metrics of the trainers (users, or the server) in `work` after
        their steps. This rank trains them with the wrapped engine, without other ranks."""
        return self.engine.train(rows, momentum, work)

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the class probabilities [n, T · B, classes] that each of n models predicts for its own T
        batches of B images. This rank computes them with the wrapped engine."""
        return self.engine.predict(rows, work)

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns the gradient of each trainer's mean loss over all its images, [n, P], for n trainers
        (users, or the server) and P weights. This rank computes it with the wrapped engine."""
        return self.engine.gradients(rows, work, sizes)

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory one more trainer (a user or the server) needs during
        training."""
        return self.engine.memory(batch_size)

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which of its images each of n trainers (users, or the server) sees next, [n, count]. An
        image is given by its position among the trainer's own images.

        Each trainer sees its images in a random order (see `positions` in `engines/work.py`). The result is
        the elements `first` to `first + count - 1` of this sequence. It depends on the random key `base`, the
        trainer's number (in `trainers`) and its number of images (in `sizes`).
        """
        return self.engine.positions(base, trainers, sizes, first, count)

    def close(self) -> None:
        """Closes the wrapped engine and leaves the process group of torchrun."""
        self.engine.close()
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def share(self, count: int, which: int | None = None) -> slice:
        """Returns which of the round's `count` users the rank `which` trains (default: this rank), as a slice
        of their positions. The ranks get consecutive shares, whose sizes differ by at most one user."""
        which = self.rank if which is None else which
        return slice(count * which // self.size, count * (which + 1) // self.size)

    def exchange(self, start: Tensor, streams: Tensor, each: Sequence[Tensor], count: int) -> list[Tensor]:
        """Exchanges the results of a round among all ranks. Returns a list of tensors. The first is the sum
        of `streams` over all ranks. The others are the tensors of `each`, extended to all `count` users.

        `streams` has, for each group of users, the sum of the models that this rank trained. The first
        dimension of a tensor of `each` is the users that this rank trained. Such a tensor holds, for example,
        the users' metrics.

        Each rank sends a single message. It also contains a checksum of `start`, the model that the round
        started from. If the checksums differ, the ranks hold different models, and RunError is raised.
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
        except torch.OutOfMemoryError:  # of this process: no other one has ended
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
        """Returns the models of all `count` users of the round on every rank, in the order of the users. They
        are [count, P + Q], with P weights and Q running statistics each. `rows` are the models that this rank
        trained."""
        return self.exchange(rows.new_zeros(1), rows.new_zeros(1), [rows], count)[1]

    def agree(self, stop: int) -> int:
        """Returns the number of a signal that asked one of the ranks to stop, or 0 if no rank was asked.
        `stop` is the number of the signal that asked this rank, or 0. All ranks get the same result, so they
        stop after the same round."""
        if self.size == 1:
            return stop
        signal = torch.tensor(float(stop))
        if distributed.get_backend() == "nccl":
            signal = signal.cuda()
        try:
            distributed.all_reduce(signal, distributed.ReduceOp.MAX)
        except torch.OutOfMemoryError:  # of this process: no other one has ended
            raise
        except RuntimeError as error:
            raise _lost(error) from error
        return int(signal)
