"""The method "anchored", which is recommended: rounds as in SemiFL (Diao, Ding and Tarokh 2022), with
safeguards against a collapse of the model."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, Named, State, Step, Users
from ssfl.methods import parts

SLOWEST = 1 / 30
"""The smallest factor by which a user's learning rate is multiplied if its pseudo-labels cover few
classes."""
IMAGES = 1000
"""About how many of the server's labelled images a model is evaluated on, for the settings `guard` and
`relative`."""
NEVER = 2.0
"""A confidence threshold that no probability reaches, so that no image gets a pseudo-label."""


@dataclass(frozen=True)
class Anchored(Method):
    """Rounds as in SemiFL, with safeguards. Users make pseudo-labels once a round and train, their models are
    averaged with server momentum, and the server trains last.

    There are three safeguards. Users whose pseudo-labels cover few classes train with a lower learning rate.
    A guard discards user updates that make the model much worse on the server's labels. The model that is
    evaluated is a slow average over rounds.
    """

    threshold: float = setting(0.8, least=0, most=1, what="a probability")
    """τ: an image gets a pseudo-label if the confidence of the received model is at least this."""
    momentum: float = setting(0.5, least=0, most=0.999, what="a momentum")
    """β, the server's momentum: this fraction of the last round's movement of the model is added to this
    round's."""
    guard: bool = True
    """Whether to discard a round's user updates if they damage the model. The measure is the new model's
    margin: its balanced accuracy on the server's labels, minus that of guessing. Updates are discarded if the
    margin falls below half of the best margin so far."""
    pace: str = setting("classes", choices=("full", "classes"))
    """"classes": lower a user's learning rate if its pseudo-labels cover few classes, and scale up its update
    in return. "full": use the same learning rate for all users."""
    relative: bool = False
    """Use AdaMatch's relative threshold: τ times the model's mean confidence on the server's labelled images.
    The threshold is sent to the users; in the first round they make no pseudo-labels. With
    train.server_held_out, the confidence is measured on images that the server does not train on."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "train": {"server_views": "suited"},
        "federation": {"slow_average": 0.99},
    }

    def needs(self) -> tuple[str, ...]:
        return ("numbers",) if self.relative else ()

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: Look) -> Labels:
        """Returns pseudo-labels for the images in which the model has high confidence. With `pace` =
        "classes", also returns two factors for each user: one for its learning rate and one for its
        update."""
        threshold: float | Tensor = self.threshold
        if "threshold" in look.tensors:
            threshold = look.tensors["threshold"][:, None].expand(-1, look.probabilities.shape[2])
        sure = parts.confident(look, threshold)
        labels = parts.labelled(look, sure)
        if self.pace == "full" or look.has_labels:
            return labels
        counts = parts.class_counts(look, sure)
        lr_scale = lr_scales(counts, parts.distinct(look.images.flatten(1), sure))
        update_scale = _coarse(lr_scale.double() ** (-2 / 3)).to(lr_scale)
        return labels._replace(lr_scale=lr_scale, update_scale=update_scale)

    def user_loss(self, step: Step) -> Losses:
        return parts.round_labels(step)

    def initial(self, state: State, fed: Fed) -> Named:
        best = {"best": state.average.new_zeros(1)} if self.guard else {}
        return parts.still(state, self.momentum) | best

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round: users train, their models are averaged with server momentum, and
        the server trains last.

        If the setting `guard` is on, the new model's margin is then compared with the best margin so far. The
        margin is the balanced accuracy on the server's labels, minus that of guessing. If the new margin is
        less than half of the best, the round is repeated without the users.
        """
        users = self.trained_users(state, fed)
        streams, memory = parts.momentum(state, users, self.momentum)
        new = parts.server_last(state, fed, users, streams, **memory)
        if not self.guard or not fed.has_server:
            return new
        margin, best = fed.above_chance(new.average, most=IMAGES), state.memory["best"]
        discarded = users.counted and 2 * margin < float(best)
        fed.record(alone=int(discarded))
        if discarded:
            new = parts.server_alone(state, fed, **parts.still(state, self.momentum))
        return replace(new, memory=new.memory | {"best": best.clamp(min=margin)})

    def trained_users(self, state: State, fed: Fed) -> Users:
        """Returns the result of the users' training. With `relative`, it first computes the threshold from
        the server's labelled images and sends it to the users."""
        if not self.relative or not fed.has_server or not fed.cohort.users:
            return fed.train_users(state.streams)
        confidence = fed.confidence(state.average, most=IMAGES)
        fed.record(labelled_confidence=confidence)
        # the initial model has learned nothing, so in the first round no image gets a pseudo-label
        threshold, full = self.threshold * confidence if state.round else NEVER, state.average.new_full
        return fed.train_users(
            state.streams, send=lambda users: {"threshold": full((len(users),), threshold)}
        )


def lr_scales(counts: Tensor, images: Tensor) -> Tensor:
    """Returns a factor for the learning rate of each of n users, [n]. It is smaller for users whose
    pseudo-labels cover few classes. `counts` [n, classes] are each user's numbers of pseudo-labels per class.
    `images` [n] are their numbers of different pseudo-labelled images.

    With large steps, a user with few classes forgets the other classes, and the average of such models is
    useless. If all users stay near the model that they received, their updates add up.

    The factor is (m / M)^1.5, but at least `SLOWEST`. Here m is the effective number of classes, e to the
    entropy of the user's pseudo-labels. M is the largest possible m: the number of classes, or of images if
    there are fewer images.
    """
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    classes = torch.special.entr(shares).sum(1).exp()
    return _coarse((classes / images.clamp(1, counts.shape[1])).pow(1.5).clamp(SLOWEST, 1)).to(counts)


def _coarse(numbers: Tensor) -> Tensor:
    """Returns the numbers rounded to multiples of 1/4096. Without this, results for one user and for many
    users would differ, because pow() rounds differently for single numbers and for tensors."""
    return (numbers * 4096).round() / 4096
