"""CBAFed (Li, Li and Wang 2023): class-balanced adaptive thresholds, weights by images, residual connection.

Published with rare second classes of unsure images: not here. Users report how many images of each class they
labelled, and everybody is told the sums.
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
    """A class that was trained on often needs more confidence. Users and server weigh by their labelled
    images."""

    threshold: float = setting(0.84, least=0, most=1, what="a probability")
    """τ: the threshold of a class with an average share."""
    highest: float = setting(0.95, least=0, most=1, what="a probability")
    """The highest threshold of a class."""
    residual: int = setting(5, least=0, most=10**6, what="rounds; 0 is never")
    """Every so many rounds the model becomes its mean with the one stored the last time."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"weight_decay": 5e-4, "clip": 5.0},
        "federation": {"head_start": 0.1},
    }
    note: ClassVar = "users tell everybody how many images of each class they label"

    def needs(self) -> tuple[str, ...]:
        return ("reports", "sends")

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: Look) -> Labels:
        threshold = thresholds.fixed(look.answers, self.threshold)
        if "counts" in look.given:
            threshold = thresholds.balanced(look.answers, self.threshold, look.given["counts"], self.highest)
        sure = parts.confident(look, threshold)
        labels = parts.labelled(look, sure, fill=True)
        images = parts.distinct(look.images.flatten(1), sure).to(look.answers.dtype)
        report = {"counts": parts.class_counts(look, sure), "images": images}
        return labels._replace(weight=images, report=report)

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def initial(self, state: State, fed: Fed) -> Named:
        return {"counts": fed.server_counts, "stored": state.average[:0].clone()}

    def round(self, state: State, fed: Fed) -> State:
        def give(users: Sequence[int]) -> Named:
            return {"counts": state.memory["counts"].expand(len(users), -1)}

        users = fed.train_users(state.streams, give=give)
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
        """The mean of users and server by their numbers of labelled images: the server is the published
        method's labelled client, which trains at the same time. Alone, it is the mean."""
        if not fed.has_server:
            return state.next(users.means, users.average, kept=[users], **memory)
        server = fed.train_server(state.average)
        if not users.counted:
            return state.next(server.row.repeat(len(state.streams), 1), server.row, kept=[server], **memory)
        images, own = users.report["images"], fed.server_counts.sum()
        groups = [list(group or range(len(images))) for group in users.groups]
        theirs = torch.stack([images[group].sum() for group in groups]).to(users.means)[:, None]
        streams = (theirs * users.means + own * server.row) / (theirs + own)
        return state.next(streams, streams.mean(0), kept=[users, server], **memory)
