"""The method RSCFed (Liang et al. 2022): the new model is the mean of three averages, each over a random half
of the users and the server. In each average, a model has less weight if it is far from the others.

In the published method, one user has labels. Here the server takes its place: it trains at the same time as
the users, is drawn into the halves like a user, and has most of the weight in a half.

As published, users learn from a mean teacher: a moving average of their own model over all their steps. Here
the teacher is the model that a user received. A moving average over steps would need a second model that a
step can change and the next step can read. But a step changes only weights, by SGD with momentum, and running
statistics. docs/methods.md has all differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core import draws
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, State, Step, Trained, Users
from ssfl.methods import parts

TEMPERATURE = 0.5
"""The teacher's probabilities are raised to the power of 1 divided by this, and then divided by their sum. So
the target of the student is sharper than the teacher's prediction."""


@dataclass(frozen=True)
class RscFed(Method):
    """Random sampling consensus: the mean of several averages, each over a random half of the users and the
    server. In each average, a model has less weight if it is far from the others."""

    consistency: float = setting(0.02, least=0, most=1e6, what="a weight")
    """λ_u: the weight of the users' loss, the squared error between the predictions of student and teacher
    for two weak views."""
    consensus: int = setting(3, least=1, most=1000, what="averages")
    """How many averages over random halves are made."""
    scale: float = setting(1e4, least=0, most=1e9, what="a rate")
    """β: how fast a user's weight falls with the distance of its model from the mean model of the random
    half. This mean is weighted by numbers of images."""
    server_scale: float = setting(100.0, least=0, most=1e9, what="a rate")
    """β in a half that the server belongs to."""
    server_factor: float = setting(6.0, least=1e-3, most=1e6, what="a factor")
    """The server's number of images is multiplied by this in the mean model of a half, and by the square of
    this in the weighted average."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
        "federation": {"head_start": 0.1},
    }

    def needs(self) -> tuple[str, ...]:
        return ("models", "sizes")

    def uses(self) -> tuple[str, ...]:
        return ()  # `label` asks for the students' views

    def label(self, look: Look) -> Labels:
        """Returns the target of each image: the sharpened probabilities that the received model, the teacher,
        predicts for one weak view. The student sees another weak view. All images are used."""
        sharp = look.probabilities ** (1 / TEMPERATURE)
        least = torch.finfo(sharp.dtype).tiny  # images of steps that are not taken have only zeros
        target = sharp / sharp.sum(-1, keepdim=True).clamp(min=least)
        tensors = {"target": target.unflatten(1, look.images.shape[1:])}
        return Labels(look.images, tensors, extra_images={"view": look.images})

    def user_loss(self, step: Step) -> Losses:
        """Returns λ_u times the squared distance between the probabilities of student and target."""
        target = step.tensors["target"]
        probabilities = step.forward(step.tensors["view"]).softmax(-1)
        loss = self.consistency * (probabilities - target).square().sum(-1)
        return Losses(loss, torch.ones_like(loss), target.argmax(-1))

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round: users and server train at the same time, and their models are
        averaged by consensus (see `sub_consensus`). If no user's model was used, the server's model is the
        result."""
        users = fed.train_users(state.streams)
        if not users.counted:
            if fed.has_server:
                return parts.server_alone(state, fed)
            return state.next(users.means, users.average)
        server = fed.train_server(state.average) if fed.has_server else None
        everybody = range(len(users.indices))
        streams = torch.stack([self.of_group(users, list(g or everybody), server, fed) for g in users.groups])
        return state.next(streams, momentum_of=[users] if server is None else [users, server])

    def of_group(self, users: Users, members: list[int], server: Trained | None, fed: Fed) -> Tensor:
        """Returns the new model of a group, [P + Q], with P weights and Q running statistics. `members` are
        the positions of its users in `users`. The server's model, if it is not None, belongs to every
        group."""
        rows, counts = users.rows[members], users.sizes[members]
        if server is not None:
            rows = torch.cat([rows, server.row[None]])
            counts = torch.cat([counts, fed.server_counts.sum(0, keepdim=True).to(counts)])
        key = fed.key("consensus")
        return self.sub_consensus(rows, counts, fed.layout.sizes, key, server is not None)

    def sub_consensus(
        self, rows: Tensor, counts: Tensor, pieces: Sequence[int], key: Tensor, with_server: bool = False
    ) -> Tensor:
        """Returns the consensus of models, [P + Q]: the mean of several averages (`by_distance`), each over a
        random half of the models.

        `rows` are the models, each with P weights and Q running statistics. If `with_server`, the last one is
        the server's. The others are the users'. `counts` are their owners' numbers of images. `pieces` are
        the lengths of a model's tensors. `key` determines the halves.
        """
        numbers = torch.arange(len(rows))
        half = -(-len(rows) // 2)
        averages = []
        for turn in range(self.consensus):
            drawn = draws.fold(draws.fold(key.cpu(), turn), numbers).argsort(stable=True)[:half].sort().values
            includes_server = with_server and int(drawn[-1]) == len(rows) - 1
            chosen = drawn.to(rows.device)
            averages.append(self.by_distance(rows[chosen], counts[chosen], pieces, includes_server))
        return torch.stack(averages).mean(0)

    def by_distance(
        self, rows: Tensor, counts: Tensor, pieces: Sequence[int], with_server: bool = False
    ) -> Tensor:
        """Returns an average of the models `rows`, in which models far from the mean have less weight. It is
        [P + Q], with P weights and Q running statistics. If `with_server`, the last model is the server's.

        Model k has weight f_k² · n_k · exp(-β · d_k / n_k). Here n_k is its owner's number of images (in
        `counts`), and d_k is the distance of the model from the mean model. In the mean model, model k has
        weight f_k · n_k. The factor f_k is `server_factor` for the server and 1 for users. The rate β is
        `server_scale` if the server is one of the owners, and `scale` otherwise.

        The distance d_k is a sum: the distance is measured for each tensor of the model, and these distances
        are added. `pieces` are the lengths of the tensors in a row of `rows`.
        """
        counts = counts.to(rows)
        factors = torch.ones_like(counts)
        if with_server:
            factors[-1] = self.server_factor
        shares = factors * counts
        middle = (shares / shares.sum()) @ rows
        layers = (rows - middle).split(list(pieces), 1)
        distances = torch.stack([torch.linalg.vector_norm(layer, dim=1) for layer in layers])
        scale = self.server_scale if with_server else self.scale
        log_weights = (factors * shares).log() - scale * distances.sum(0) / counts
        return log_weights.softmax(0) @ rows
