"""The interface of every engine."""

from typing import Protocol

from torch import Tensor

from ssfl.engines.work import TrainedRows, Work


class Engine(Protocol):
    """Trains the models of a round. Each model is a row (`core/rows.py`), and a trainer is a user or the
    server."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models of n trainers after T steps of SGD. It starts from `rows` [n, P + Q], each with
        P weights and Q running statistics, and from `momentum` [n, P]."""

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the probabilities [n, T · B, classes] that each of n models predicts in eval mode. The
        images are those of the model's own T batches of B images, in one weak view each."""

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns the gradient of each trainer's loss over all its images, [n, P], for n trainers and P
        weights.

        `work.batches` [n, steps, B] goes once through each trainer's N images (`sizes`) and then repeats
        some, to fill the last batches. Each image has weight 1/N, and repeated ones have weight 0.
        """

    def close(self) -> None:
        """Releases processes and other resources that are not memory."""

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory each further trainer takes during training."""

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which of its images each trainer sees at places `first` to `first + count` of its random
        sequence, [n, count]. See the function `positions` in `engines/work.py`."""
