"""The interface of every engine, as a Protocol."""

from typing import Protocol

import torch
from torch import Tensor

from ssfl.engines.work import TrainedRows, Work


class Engine(Protocol):
    """Trains the models of a round and makes their predictions. A trainer is a user or the server. Each model
    is a row, that is one vector of P weights and Q running statistics (`core/rows.py`).

    The argument `work` of the methods says what the n trainers of a round do. It has their images, learning
    rates and random keys, for T steps with B images each.
    """

    side: torch.cuda.Stream | None
    """A second queue of GPU work, in which the server can train at the same time as the users; None if the
    engine trains one after the other."""

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
        """Returns the models, momentum and metrics of n trainers (users, or the server) after T steps of SGD
        each. They start from the models `rows` [n, P + Q], with P weights and Q running statistics each, and
        from `momentum` [n, P]."""

    def predict(self, rows: Tensor, work: Work) -> Tensor:
        """Returns the class probabilities [n, T · B, classes] that each of n models predicts in evaluation
        mode. The method makes pseudo-labels from these probabilities. The input of a model is one weak view
        of each image in its own T batches of B images."""

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """Returns the gradient of each trainer's mean loss over all its images, [n, P], for n trainers
        (users, or the server) and P weights. It is used to measure gradient diversity.

        `work.batches` [n, steps, B] contains each of a trainer's N images once (N is in `sizes`). To fill the
        last batches, some images are repeated. Each image has weight 1/N, and its repetitions have weight 0.
        """

    def close(self) -> None:
        """Releases processes and other resources that Python does not release by itself."""

    def memory(self, batch_size: int) -> int:
        """Returns about how many bytes of memory one more trainer (a user or the server) needs during
        training with this batch size. This number decides how many users are trained together."""

    def positions(
        self, base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int
    ) -> Tensor:
        """Returns which of its images each of n trainers (users, or the server) sees next, [n, count]. An
        image is given by its position among the trainer's own images.

        Each trainer sees its images in a random order (see `positions` in `engines/work.py`). The result is
        the elements `first` to `first + count - 1` of this sequence. It depends on the random key `base`, the
        trainer's number (in `trainers`) and its number of images (in `sizes`).
        """
