"""Functions that several methods share: losses, pseudo-labels that are made once a round, and parts of a
round."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ssfl.core import draws, losses, thresholds
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Named, State, Step, Users

QUANTILES = 1024
"""The shares for mixing images (mixup) are drawn from a table of this many quantiles of the Beta
distribution."""


# --- losses -------------------------------------------------------------------------------------------------


def consistency(step: Step, threshold: float, views: str = "separate", teacher_mode: str = "eval") -> Losses:
    """Returns the users' consistency loss L_k, the paper's equation (4): the confident prediction for the
    weak view of an image is the label for its strong view.

    With `views` "joint", both views pass through the network in one batch. With "separate", they pass in two
    batches. Then `teacher_mode` says whether the weak view is predicted in "eval" or in "train" mode, which
    makes a difference with BatchNorm or dropout.
    """
    if views == "joint":
        weak, strong = step.forward(torch.cat([step.weak, step.strong], 1)).chunk(2, 1)
    else:
        # the teacher comes first, since in training mode its pass updates the running statistics
        weak = step.forward(step.weak, grad=False, train=teacher_mode == "train", draw="teacher")
        strong = step.forward(step.strong)
    return losses.consistency(weak, strong, threshold)


def round_labels(step: Step) -> Losses:
    """Returns the cross-entropy of strong views with the pseudo-labels that the method's function `label`
    made at the start of the round."""
    return losses.labelled(step.forward(step.strong), step.tensors["labels"], step.tensors["mask"])


# --- pseudo-labels once a round -----------------------------------------------------------------------------


def confident(look: Look, threshold: float | Tensor) -> Tensor:
    """Returns which images are confident enough for a pseudo-label, as booleans [n, T · B]. There are n users
    with T batches of B images each.

    An image is confident if its largest probability reaches the threshold. `threshold` is one number, or one
    number for each user and class, [n, classes]. Images of steps that a user does not take are never
    confident.
    """
    confidence, label = look.probabilities.max(-1)
    if isinstance(threshold, int | float):
        threshold = thresholds.fixed(look.probabilities, threshold)
    sure = confidence >= threshold.gather(1, label)
    return sure if look.taken is None else sure & look.drawn


def first_draws(images: Tensor) -> Tensor:
    """Returns for each of m draws of n users at which of the m places the same image is drawn for the first
    time, [n, m]. `images` [n, m] are the numbers of the images that are drawn."""
    order = images.sort(dim=1, stable=True).indices
    ordered = images.gather(1, order)
    begins = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    place = torch.arange(images.shape[1], device=images.device).expand_as(images)
    first = torch.where(begins, place, 0).cummax(1).values  # where the draws of the same image begin
    return torch.empty_like(order).scatter_(1, order, order.gather(1, first))


def once_per_image(look: Look) -> Look:
    """Returns what the model predicts, with one prediction for each image of a user: that of its first view
    in the round. In `look`, an image that a user draws several times has a prediction for each of its
    views."""
    places = first_draws(look.images.flatten(1))[:, :, None].expand(look.probabilities.shape)
    return look._replace(probabilities=look.probabilities.gather(1, places))


def labelled(look: Look, sure: Tensor, *, fill: bool = False, **extra: Tensor) -> Labels:
    """Returns the pseudo-labels of a round and their mask, for n users with T batches of B images. `sure` [n,
    T · B] says which images are confident. `extra` are further tensors of this shape, which stay together
    with their images.

    Without `fill`, images that are not confident stay in their batches, with a loss of zero. With `fill`,
    batches contain only confident images, and a user takes only as many steps as these fill. The last batch
    is completed with the user's first confident images. A user without confident images takes no step and has
    weight 0.
    """
    users, shape = len(sure), look.images.shape
    images, dtype = look.images.flatten(1), look.probabilities.dtype
    tensors = {"labels": look.probabilities.argmax(-1), "mask": sure, **extra}
    if fill:
        everybody = torch.arange(users, device=images.device)[:, None]
        place = torch.arange(images.shape[1], device=images.device).expand(users, -1)
        order = (~sure).to(torch.uint8).sort(dim=1, stable=True).indices
        chosen = order.gather(1, place % sure.sum(1, keepdim=True).clamp(min=1))
        images = images[everybody, chosen]
        tensors = {name: tensor[everybody, chosen] for name, tensor in tensors.items()}
    tensors = {
        name: tensor.to(dtype) if tensor.dtype == torch.bool else tensor for name, tensor in tensors.items()
    }
    tensors = {name: tensor.reshape(shape) for name, tensor in tensors.items()}
    labels = Labels(images.reshape(shape), tensors)
    if not fill:
        return labels
    count, drawn = sure.sum(1), look.drawn.sum(1)
    share = {"mask_rate": count.to(dtype) / drawn.clamp(min=1)}
    steps = -(-count // shape[2])
    return labels._replace(weight=(count > 0).to(dtype), metrics=share, steps=steps)


def class_counts(look: Look, sure: Tensor) -> Tensor:
    """Returns for each of n users how many images got each class as their pseudo-label, [n, classes]. Each
    user has T batches of B images, and `sure` [n, T · B] says which of these get a pseudo-label. An image
    that occurs several times is counted each time."""
    users, _, classes = look.probabilities.shape
    counts = look.probabilities.new_zeros(users, classes)
    return counts.scatter_add_(1, look.probabilities.argmax(-1), sure.to(counts.dtype))


def distinct(images: Tensor, chosen: Tensor) -> Tensor:
    """Returns for each of n users how many different images are chosen, [n]. `images` [n, m] are image
    numbers, among which an image may occur several times, and `chosen` [n, m] says which of them to count."""
    ordered = torch.where(chosen, images, -1).sort(1).values
    is_first = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    return (is_first & (ordered >= 0)).sum(1)


def mixed(labels: Labels, look: Look, alpha: float) -> Labels:
    """Returns the labels with everything that mixup needs: a partner for every image, and a mixing share for
    every step.

    The partner is drawn at random from the user's images of the round, and comes with its own pseudo-label.
    The share is drawn from a Beta distribution whose two parameters are both `alpha`.
    """
    users, steps, size = look.images.shape
    images, label = look.images.flatten(1), look.probabilities.argmax(-1)
    everybody = torch.arange(users, device=images.device)[:, None]
    place = torch.arange(steps * size, device=images.device).expand(users, -1)
    count = torch.full_like(place, steps * size)
    if look.taken is not None:
        count = (size * look.taken.clamp(min=1))[:, None].expand_as(place)
    partner = draws.below(draws.fold(look.keys[:, None], place), count)
    turn = torch.arange(steps, device=images.device)
    drawn = draws.uniform(draws.fold(draws.fold(look.keys, -1)[:, None], turn))
    table = torch.from_numpy(_quantiles(alpha)).to(look.probabilities)
    tensors = {
        "partner_labels": label[everybody, partner].reshape(look.images.shape),
        "share": table[(drawn * QUANTILES).long().clamp(max=QUANTILES - 1)],
    }
    partners = images[everybody, partner].reshape(look.images.shape)
    return labels._replace(tensors=labels.tensors | tensors, extra_images={"partner": partners})


@cache
def _quantiles(alpha: float) -> np.ndarray:
    from scipy.stats import beta

    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.asarray(beta.ppf(middles, alpha, alpha))


# --- rounds -------------------------------------------------------------------------------------------------


def server_last(
    state: State, fed: Fed, users: Users, streams: Tensor | None = None, **memory: Tensor
) -> State:
    """Returns the state after the last part of a round, in which the server trains the users' average on its
    labels. All groups then continue with the model that the server trained. If the server has no labelled
    images, each group continues with its own average.

    `streams` [S, P + Q] are models of the S groups, with P weights and Q running statistics each. If given,
    they are used instead of the averages in `users`, for example after server momentum. `memory` are tensors
    that the method keeps for the next round.
    """
    average = users.average
    if streams is None:
        streams = users.means
    elif users.counted:
        average = streams.mean(0)
    if not fed.has_server:
        return state.next(streams, average, momentum_of=[users], **memory)
    server = fed.train_server(average)
    return state.next(server.row.repeat(len(streams), 1), server.row, momentum_of=[users, server], **memory)


def server_alone(state: State, fed: Fed, **memory: Tensor) -> State:
    """Returns the state after a round of the server alone: it trains the average of the round before, and all
    groups continue with this model. `memory` are tensors that the method keeps for the next round."""
    server = fed.train_server(state.average)
    return state.next(server.row.repeat(len(state.streams), 1), server.row, momentum_of=[server], **memory)


def still(state: State, beta: float) -> Named:
    """Returns the memory that server momentum needs before the first round: a velocity of zero for each
    group, under the name "velocity". It is empty if `beta`, the momentum, is 0."""
    return {"velocity": torch.zeros_like(state.streams[:, : state.momentum.shape[1]])} if beta else {}


def momentum(state: State, users: Users, beta: float) -> tuple[Tensor, Named]:
    """Returns the models of the S groups after server momentum, [S, P + Q], with P weights and Q running
    statistics each. Also returns the new velocity, which the method must keep for the next round.

    The velocity is the change of a group's weights in this round, plus `beta` times the velocity of the last
    round. The new weights are those before the round plus the velocity. Running statistics have no momentum.
    If `beta` is 0 or no user's model was used, the group averages are returned unchanged, without a velocity.
    """
    if not beta or not users.counted:
        return users.means, {}
    count = state.momentum.shape[1]
    velocity = users.means[:, :count] - state.streams[:, :count]
    velocity = beta * state.memory["velocity"] + velocity
    moved = torch.cat([state.streams[:, :count] + velocity, users.means[:, count:]], 1)
    return moved, {"velocity": velocity}
