"""The interface of every engine."""

from typing import Protocol

from torch import Tensor

from ssfl.engines.work import TrainedRows, Work


class Engine(Protocol):
    """Trains the models of a round. Each model is a row (`core/rows.py`), and a trainer is a user or the
    server."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models of n trainers after T steps of SGD. It starts from rows [n, P + Q] and momentum
        [n, P]."""

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the probabilities [n, T · B, classes] that each of n models predicts in eval mode, for one
        weak view of every image of its batches."""

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns each trainer's gradient over all its data, [n, P].

        `work.batches` [n, steps, B] goes once through each trainer's N images (`sizes`) and then repeats
        some. Each image has weight 1/N, and repeated ones have weight 0.
        """

    def close(self) -> None:
        """Releases processes and other resources that are not memory."""

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes each further trainer takes during training."""

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns what the function `positions` of `engines/work.py` returns."""
