"""The interface of every engine, as a Protocol."""

from typing import Protocol

from torch import Tensor

from ssfl.engines.work import TrainedRows, Work


class Engine(Protocol):
    """Trains the models of a round and makes their predictions. Each model is a row, that is one vector
    (`core/rows.py`). A trainer is a user or the server."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models, momentum and metrics of n trainers after T steps of SGD each. They start from
        `rows` [n, P + Q], with P weights and Q running statistics each, and from `momentum` [n, P]."""

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the class probabilities [n, T · B, classes] that each of n models predicts in evaluation
        mode. The method makes pseudo-labels from them. The input of a model is one weak view of each image in
        its own T batches of B images."""

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns the gradient of each trainer's mean loss over all its images, [n, P], for n trainers and P
        weights. It is used to measure gradient diversity.

        `work.batches` [n, steps, B] contains each of a trainer's N images once (N is in `sizes`), and then
        repeats some to fill the last batches. Each image has weight 1/N, and repeated ones have weight 0.
        """

    def close(self) -> None:
        """Releases processes and other resources that Python does not release by itself."""

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory one more trainer needs during training with this batch size.
        It decides how many users are trained together."""

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which of its images each of n trainers sees next, [n, count], as positions among the
        trainer's own images.

        Each trainer sees its images in a random order (see `positions` in `engines/work.py`). The result is
        the elements `first` to `first + count - 1` of this sequence. It depends on the random key `base`, the
        trainer's number (in `trainers`) and its number of images (in `sizes`).
        """
