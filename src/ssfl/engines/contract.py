"""The interface of every engine."""

from typing import Protocol

from torch import Tensor

from ssfl.engines.work import TrainedRows, Work


class Engine(Protocol):
    """Trains the models of a round, a row each."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Takes T steps of SGD with each of n trainers: rows [n, P + Q], momentum [n, P]."""

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the probabilities [n, T · B, classes] that each of n rows predicts, in eval mode, for one
        weak view of every image of its batches."""

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns each trainer's gradient over all its data, [n, P].

        `work.batches` [n, steps, B] goes once through each trainer's N images (`sizes`) and then repeats
        some. Each image weighs 1/N; repeated ones weigh nothing.
        """

    def close(self) -> None:
        """Releases what is held besides memory, such as processes."""

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes one more trainer takes while it trains."""

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns what `work.positions` returns."""
