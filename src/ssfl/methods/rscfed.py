"""The method RSCFed (Liang et al. 2022): the new model is the mean of three averages, each over a random half
of the users. In each average, a user has less weight if its model is far from the others.

In the published method, users learn from a mean teacher (a squared error with the weight 0.02, without a
threshold), and one user has labels and trains first. Here users train with the consistency loss, and the
server has the labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class RscFed(Method):
    """Random sampling consensus: the mean of several averages, each over a random half of the users. In each
    average, a user has less weight if its model is far from the others."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if the model's confidence in it is at least this."""
    consensus: int = setting(3, least=1, most=1000, what="averages")
    """How many averages over random halves of the users are made."""
    scale: float = setting(1e4, least=0, most=1e9, what="a rate")
    """β: how fast a user's weight falls with the distance of its model from the mean model of the random
    half. This mean is weighted by the users' numbers of images."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
        "federation": {"head_start": 0.1},
    }

    def needs(self) -> tuple[str, ...]:
        return ("models", "sizes")

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold)

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round: the users' models are averaged by consensus (see `sub_consensus`),
        and the server then trains the result."""
        users = fed.train_users(state.streams)
        if not users.counted:
            return parts.server_last(state, fed, users)
        pieces, key, everybody = fed.layout.sizes, fed.key("consensus"), range(len(users.indices))
        members = [list(group or everybody) for group in users.groups]
        streams = [
            self.sub_consensus(users.rows[group], users.sizes[group], pieces, key) for group in members
        ]
        return parts.server_last(state, fed, users, torch.stack(streams))

    def sub_consensus(self, rows: Tensor, counts: Tensor, pieces: Sequence[int], key: Tensor) -> Tensor:
        """Returns the consensus of the users' models, [P + Q]: the mean of several averages (`by_distance`),
        each over a random half of the users. `rows` are the users' models, each with P weights and Q running
        statistics. `counts` are the users' numbers of images. `pieces` are the lengths of a model's tensors.
        `key` determines the halves."""
        numbers = torch.arange(len(rows))
        half = -(-len(rows) // 2)
        averages = []
        for turn in range(self.consensus):
            drawn = draws.fold(draws.fold(key.cpu(), turn), numbers).argsort(stable=True)[:half].sort().values
            chosen = drawn.to(rows.device)
            averages.append(self.by_distance(rows[chosen], counts[chosen], pieces))
        return torch.stack(averages).mean(0)

    def by_distance(self, rows: Tensor, counts: Tensor, pieces: Sequence[int]) -> Tensor:
        """Returns an average of the users' models `rows`, in which models far from the mean have less weight.
        It is [P + Q], with P weights and Q running statistics.

        User k has weight n_k · exp(-β · d_k / n_k). Here n_k is its number of images (in `counts`), and d_k
        is the distance of its model from the mean model. In the mean model, user k has weight n_k. The
        distance d_k is a sum: the distance is measured for each tensor of the model, and these distances are
        added. `pieces` are the lengths of the tensors in a row of `rows`.
        """
        counts = counts.to(rows)
        middle = (counts / counts.sum()) @ rows
        layers = (rows - middle).split(list(pieces), 1)
        distances = torch.stack([torch.linalg.vector_norm(layer, dim=1) for layer in layers])
        log_weights = counts.log() - self.scale * distances.sum(0) / counts
        return log_weights.softmax(0) @ rows
