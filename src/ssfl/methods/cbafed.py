"""The method CBAFed (Li, Li and Wang 2023): thresholds that depend on the class balance, averages weighted by
numbers of images, and a residual connection between rounds.

In the published method, one user has labels. Here the server takes its place. Users report how many images of
each class they labelled, and all users are sent the sums.

Some differences to the authors' code remain. Their labelled user trains for 11 epochs in a round, and
averages its own model every 5 epochs. Here the server takes T steps. By default, users and server keep no
momentum between rounds, and have the same learning rate. docs/methods.md has all differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core import losses, thresholds
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, Named, State, Step, Users
from ssfl.methods import parts

RARE = 0.03
"""A class is rare if its share of the images that were trained on in the last round is less than this. Shares
are scaled: if all classes had equally many images, each share would be 0.1."""


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
    """n: in every n-th round after the first round with users, the new model is averaged with the stored
    model, and the result is stored. The first stored model is the server's at the end of the head start.
    Without a head start, the first of these rounds only stores its model. 0 means never."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
        "federation": {"head_start": 0.1},
    }
    note: ClassVar = "everybody is sent how many images of each class users label"

    def needs(self) -> tuple[str, ...]:
        return ("reports", "sends")

    def uses(self) -> tuple[str, ...]:
        return ("weak",)

    def label(self, look: Look) -> Labels:
        """Returns pseudo-labels, one for each image of a user, made with thresholds that are higher for
        frequent classes. An image below its threshold is still used if its second most likely class is rare,
        with this class as its label.

        Each user also reports its number of different images with a pseudo-label, in total and per class.
        """
        look = parts.once_per_image(look)
        threshold = thresholds.fixed(look.probabilities, self.threshold)
        if "counts" in look.tensors:
            threshold = thresholds.balanced(
                look.probabilities, self.threshold, look.tensors["counts"], self.highest
            )
        chosen = parts.confident(look, threshold)
        if "counts" in look.tensors:
            chosen, look = with_rare_classes(look, chosen)
        labels = parts.labelled(look, chosen, fill=True)
        images = look.images.flatten(1)
        first = parts.first_draws(images) == torch.arange(images.shape[1], device=images.device)
        counts = parts.class_counts(look, chosen & first)
        total = counts.sum(1)
        return labels._replace(weight=total, report={"counts": counts, "images": total})

    def user_loss(self, step: Step) -> Losses:
        """Returns the cross-entropy of weak views with the pseudo-labels."""
        return losses.labelled(step.forward(step.weak), step.tensors["labels"], step.tensors["mask"])

    def initial(self, state: State, fed: Fed) -> Named:
        return {
            "counts": fed.server_counts,
            "stored": state.average[:0].clone(),
            "rounds": torch.zeros(1, dtype=torch.int64),
        }

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round. In every n-th round (the setting `residual`), the new model is
        averaged with the stored model."""

        def send(users: Sequence[int]) -> Named:
            return {"counts": state.memory["counts"].expand(len(users), -1)}

        alone = not fed.cohort.drawn  # the head start: only the server trains
        users = fed.train_users(state.streams, send=send)
        counts = fed.server_counts
        if users.counted:
            counts = counts + users.report["counts"].sum(0)
        rounds = state.memory["rounds"]
        new = self.averaged(state, fed, users, counts=counts, rounds=rounds if alone else rounds + 1)
        if alone:
            return replace(new, memory=new.memory | {"stored": new.average.clone()})
        before = int(rounds)
        if not self.residual or not before or before % self.residual:
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
        if not users.counted:
            return parts.server_alone(state, fed, **memory)
        server = fed.train_server(state.average)
        images, server_images = users.report["images"], fed.server_counts.sum()
        groups = [list(group or range(len(images))) for group in users.groups]
        group_images = torch.stack([images[group].sum() for group in groups]).to(users.means)[:, None]
        streams = (group_images * users.means + server_images * server.row) / (group_images + server_images)
        return state.next(streams, streams.mean(0), momentum_of=[users, server], **memory)


def with_rare_classes(look: Look, chosen: Tensor) -> tuple[Tensor, Look]:
    """Returns which images get a pseudo-label, [n, T · B], and what the models predict, after adding images
    whose second most likely class is rare. `chosen` says which images are confident enough already.

    For an added image, the most likely class gets probability 0, so that the second one is its label.
    """
    top = look.probabilities.argmax(-1, keepdim=True)
    without = look.probabilities.scatter(-1, top, 0.0)
    is_rare = thresholds.class_shares(look.tensors["counts"]) < RARE
    added = is_rare.gather(1, without.argmax(-1)) & ~chosen & look.drawn
    probabilities = torch.where(added[:, :, None], without, look.probabilities)
    return chosen | added, look._replace(probabilities=probabilities)
