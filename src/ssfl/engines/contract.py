"""What every engine does."""

from typing import Protocol

from torch import Tensor

from ssfl.engines.work import TrainedRows, Work


class Engine(Protocol):
    """How the local work of a round is done."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """T steps of SGD of each of n trainers: rows [n, P + Q], momentum [n, P]."""

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """What each of n rows predicts for one weak view of every image of its batches: probabilities
        [n, T · B, classes], in eval mode."""

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Each trainer's gradient over all its data, [n, P].

        `work.batches` [n, steps, B] goes once through each trainer's `sizes` images and then repeats
        some; of its own images each weighs 1/N and the repeated ones nothing.
        """

    def close(self) -> None:
        """Give back what is held beyond memory."""

    def memory(self, batch_size: int) -> int:
        """About how many bytes one more trainer takes while it trains."""

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """`work.positions`."""
