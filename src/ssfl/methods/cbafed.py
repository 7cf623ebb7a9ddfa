"""The method CBAFed (Li, Li and Wang 2023): thresholds that depend on the class balance, averages weighted by
numbers of images, and a residual connection between rounds.

Users report how many images of each class they labelled, and all users are sent the sums.

Several parts differ from the authors' code, and lower the accuracy. Users train on strong views instead of
the weak ones, the server trains less, and the first average with a stored model is left out. Images with low
confidence are not trained on with their second most likely class. docs/methods.md has all differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core import thresholds
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, Named, State, Step, Users
from ssfl.methods import parts


@dataclass(frozen=True)
class CbaFed(Method):
    """Classes that were trained on often get higher thresholds. In the average, users and server are weighted
    by their numbers of labelled images."""

    threshold: float = setting(0.84, least=0, most=1, what="a probability")
    """τ: the base of all thresholds. A class's threshold is τ, plus the class's share of the images trained
    on in the last round, minus the standard deviation of all shares. Shares are scaled: if all classes had
    equally many images, each share would be 0.1."""
    highest: float = setting(0.95, least=0, most=1, what="a probability")
    """The upper limit of every class's threshold."""
    residual: int = setting(5, least=0, most=10**6, what="a number of rounds; 0 means never")
    """n: after every n rounds, the model is averaged with the model that was stored n rounds before. 0 means
    never."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
        "federation": {"head_start": 0.1},
    }
    note: ClassVar = "everybody is sent how many images of each class users label"

    def needs(self) -> tuple[str, ...]:
        return ("reports", "sends")

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: Look) -> Labels:
        """Returns pseudo-labels, made with thresholds that are higher for frequent classes. Each user also
        reports its number of pseudo-labelled images, in total and per class."""
        threshold = thresholds.fixed(look.probabilities, self.threshold)
        if "counts" in look.tensors:
            threshold = thresholds.balanced(
                look.probabilities, self.threshold, look.tensors["counts"], self.highest
            )
        sure = parts.confident(look, threshold)
        labels = parts.labelled(look, sure, fill=True)
        images = parts.distinct(look.images.flatten(1), sure).to(look.probabilities.dtype)
        report = {"counts": parts.class_counts(look, sure), "images": images}
        return labels._replace(weight=images, report=report)

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def initial(self, state: State, fed: Fed) -> Named:
        return {"counts": fed.server_counts, "stored": state.average[:0].clone()}

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round. After every n rounds (the setting `residual`), the new model is
        averaged with the model that was stored n rounds before."""

        def send(users: Sequence[int]) -> Named:
            return {"counts": state.memory["counts"].expand(len(users), -1)}

        users = fed.train_users(state.streams, send=send)
        counts = fed.server_counts
        if users.counted:
            counts = counts + users.report["counts"].sum(0)
        new = self.averaged(state, fed, users, counts=counts)
        if not self.residual or not users.counted or new.round % self.residual:
            return new
        stored = state.memory["stored"]
        average = (new.average + (stored if len(stored) else new.average)) / 2
        streams = average.repeat(len(new.streams), 1)
        return replace(new, streams=streams, average=average, memory=new.memory | {"stored": average.clone()})

    def averaged(self, state: State, fed: Fed, users: Users, **memory: Tensor) -> State:
        """Returns the state with the new average of the users' models and the server's model. The weights are
        their numbers of labelled images. `memory` are tensors that the method keeps for the next round.

        In the published method, a user with labels trains at the same time as the others. Here the server
        takes the part of this user. If no user's model was used in this round, the server's model is the
        result.
        """
        if not fed.has_server:
            return state.next(users.means, users.average, momentum_of=[users], **memory)
        server = fed.train_server(state.average)
        if not users.counted:
            return state.next(
                server.row.repeat(len(state.streams), 1), server.row, momentum_of=[server], **memory
            )
        images, server_images = users.report["images"], fed.server_counts.sum()
        groups = [list(group or range(len(images))) for group in users.groups]
        group_images = torch.stack([images[group].sum() for group in groups]).to(users.means)[:, None]
        streams = (group_images * users.means + server_images * server.row) / (group_images + server_images)
        return state.next(streams, streams.mean(0), momentum_of=[users, server], **memory)
