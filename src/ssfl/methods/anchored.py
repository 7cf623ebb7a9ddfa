"""The recommended method: SemiFL's skeleton, made steadier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, Named, State, Step, Users
from ssfl.methods import parts

SLOWEST = 1 / 30
"""The smallest part of the learning rate that a user with few classes takes."""
IMAGES = 1000
"""About how many of the server's images its guard looks at."""


@dataclass(frozen=True)
class Anchored(Method):
    """Users label once a round, their mean moves with momentum, and the server trains last. These three are
    SemiFL's. Besides, users with few classes take shorter steps, a guard discards rounds that undo what the
    labels taught, and the model that is evaluated is a slow average over rounds."""

    threshold: float = setting(0.8, least=0, most=1, what="a probability")
    """τ: an image gets a pseudo-label when the received model is at least this sure."""
    momentum: float = setting(0.5, least=0, most=0.999, what="below 1")
    """β: how much of the last round's movement is added to this one's."""
    guard: bool = True
    """Discard this round's user updates if the server model's margin over chance, on its own labels, falls
    below half of its best so far."""
    pace: str = setting("classes", choices=("full", "classes"))
    """By "classes": lower a user's learning rate, and scale up its update, when its pseudo-labels cover few
    classes. "full": the same steps for all users."""

    relative: bool = False
    """AdaMatch's relative threshold: τ times the received model's mean confidence on the server's labelled
    images, which users are told. With train.server_held_out by images that it has not learned by heart."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"server_views": "suited"},
        "federation": {"slow_average": 0.99},
    }

    def needs(self) -> tuple[str, ...]:
        return ("sends",) if self.relative else ()

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: Look) -> Labels:
        threshold: float | Tensor = self.threshold
        if "confidence" in look.given:
            threshold = self.threshold * look.given["confidence"][:, None].expand(-1, look.answers.shape[2])
        sure = parts.confident(look, threshold)
        labels = parts.labelled(look, sure)
        if self.pace == "full" or look.has_labels:
            return labels
        counts = parts.class_counts(look, sure)
        pace = paces(counts, parts.distinct(look.images.flatten(1), sure))
        reach = _coarse(pace.double() ** (-2 / 3)).to(pace)
        return labels._replace(pace=pace, reach=reach)

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def initial(self, state: State, fed: Fed) -> Named:
        best = {"best": state.average.new_zeros(1)} if self.guard else {}
        return parts.still(state, self.momentum) | best

    def round(self, state: State, fed: Fed) -> State:
        users = self.trained_users(state, fed)
        streams, memory = parts.momentum(state, users, self.momentum)
        new = parts.server_last(state, fed, users, streams, **memory)
        if not self.guard or not fed.has_server:
            return new
        margin, best = fed.above_chance(new.average, most=IMAGES), state.memory["best"]
        alone = users.counted and 2 * margin < float(best)
        fed.tell(alone=int(alone))
        if alone:
            server, velocity = fed.train_server(state.average), parts.still(state, self.momentum)
            new = state.next(server.row.repeat(len(streams), 1), server.row, kept=[server], **velocity)
        return replace(new, memory=new.memory | {"best": best.clamp(min=margin)})

    def trained_users(self, state: State, fed: Fed) -> Users:
        """The users' round; with a relative threshold they are told how sure the model is of labels."""
        if not self.relative or not fed.has_server or not fed.cohort.users:
            return fed.train_users(state.streams)
        sure = fed.confidence(state.average, most=IMAGES)
        fed.tell(labelled_confidence=sure)

        def give(users: Sequence[int]) -> Named:
            return {"confidence": state.average.new_full((len(users),), sure)}

        return fed.train_users(state.streams, give=give)


def paces(counts: Tensor, images: Tensor) -> Tensor:
    """The part of the learning rate that each user takes, [n], by how many labels of each class it has,
    [n, classes], and of how many images, [n].

    The fewer the classes, the sooner long steps lead to a model that knows these alone, and the mean of such
    models knows nothing. Near the model that all received, what they learn adds up. Labels as mixed as m even
    classes (m is e to their entropy) give (m / M)^1.5, where M is how many classes they could be of: all, or
    as many as there are images.
    """
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    classes = torch.special.entr(shares).sum(1).exp()
    return _coarse((classes / images.clamp(1, counts.shape[1])).pow(1.5).clamp(SLOWEST, 1)).to(counts)


def _coarse(numbers: Tensor) -> Tensor:
    """Round to 1/4096: pow() is not bit-identical for one user and for a batch."""
    return (numbers * 4096).round() / 4096
