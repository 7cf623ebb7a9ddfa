"""Pieces that several methods share."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ssfl.core import draws, losses, thresholds
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Named, State, Step, Users

QUANTILES = 1024
"""The resolution of the Beta distribution that mixtures are drawn from."""


# --- losses -------------------------------------------------------------------------------------------------


def consistency(step: Step, threshold: float, views: str = "separate", teacher_mode: str = "eval") -> Losses:
    """The paper's L_k (4): the weak view's confident prediction is the label of the strong view.

    The views pass through the network in one "joint" batch or in "separate" ones. Separate predictions are
    made in "eval" or in "train" mode; with BatchNorm or dropout this makes a difference.
    """
    if views == "joint":
        weak, strong = step.forward(torch.cat([step.weak, step.strong], 1)).chunk(2, 1)
    else:
        # the teacher first: in training mode its pass moves the running statistics
        weak = step.forward(step.weak, grad=False, train=teacher_mode == "train", draw="teacher")
        strong = step.forward(step.strong)
    return losses.consistency(weak, strong, threshold)


def round_labels(step: Step) -> Losses:
    """Cross-entropy of strong views with the labels that were made before the round."""
    return losses.labelled(step.forward(step.strong), step.given["labels"], step.given["mask"])


# --- pseudo-labels once a round -----------------------------------------------------------------------------


def confident(look: Look, threshold: float | Tensor) -> Tensor:
    """[n, T · B]: whether the model is sure enough of each image, by one threshold or one per class. Images
    of steps that a user does not take do not count."""
    confidence, label = look.answers.max(-1)
    if isinstance(threshold, float):
        threshold = thresholds.fixed(look.answers, threshold)
    sure = confidence >= threshold.gather(1, label)
    return sure if look.taken is None else sure & look.drawn


def labelled(look: Look, sure: Tensor, *, fill: bool = False, **extra: Tensor) -> Labels:
    """Pseudo-labels and their mask; `extra` tensors [n, T · B] follow the images they belong to.

    With `fill`, batches hold confident images alone, instead of counting the others as zeros. A user takes as
    many steps as they fill, of which the last is filled up with the first ones; without any it takes none and
    has no weight.
    """
    users, shape = len(sure), look.images.shape
    images, dtype = look.images.flatten(1), look.answers.dtype
    given = {"labels": look.answers.argmax(-1), "mask": sure, **extra}
    if fill:
        everybody = torch.arange(users, device=images.device)[:, None]
        place = torch.arange(images.shape[1], device=images.device).expand(users, -1)
        order = (~sure).to(torch.uint8).sort(dim=1, stable=True).indices
        chosen = order.gather(1, place % sure.sum(1, keepdim=True).clamp(min=1))
        images = images[everybody, chosen]
        given = {name: tensor[everybody, chosen] for name, tensor in given.items()}
    given = {
        name: tensor.to(dtype) if tensor.dtype == torch.bool else tensor for name, tensor in given.items()
    }
    given = {name: tensor.reshape(shape) for name, tensor in given.items()}
    labels = Labels(images.reshape(shape), given)
    if not fill:
        return labels
    count, drawn = sure.sum(1), look.drawn.sum(1)
    share = {"mask_rate": count.to(dtype) / drawn.clamp(min=1)}
    steps = -(-count // shape[2])
    return labels._replace(weight=(count > 0).to(dtype), metrics=share, steps=steps)


def class_counts(look: Look, sure: Tensor) -> Tensor:
    """[n, classes]: how many images got each label."""
    users, _, classes = look.answers.shape
    counts = look.answers.new_zeros(users, classes)
    return counts.scatter_add_(1, look.answers.argmax(-1), sure.to(counts.dtype))


def distinct(images: Tensor, chosen: Tensor) -> Tensor:
    """[n]: how many different images [n, m] are among the chosen ones."""
    ordered = torch.where(chosen, images, -1).sort(1).values
    fresh = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    return (fresh & (ordered >= 0)).sum(1)


def mixed(labels: Labels, look: Look, alpha: float) -> Labels:
    """Labels with a partner for every image, any image with whatever label, and a share per step, drawn from
    a Beta distribution with both parameters `alpha`."""
    users, steps, size = look.images.shape
    images, label = look.images.flatten(1), look.answers.argmax(-1)
    everybody = torch.arange(users, device=images.device)[:, None]
    place = torch.arange(steps * size, device=images.device).expand(users, -1)
    many = torch.full_like(place, steps * size)
    if look.taken is not None:
        many = (size * look.taken.clamp(min=1))[:, None].expand_as(place)
    other = draws.below(draws.fold(look.keys[:, None], place), many)
    turn = torch.arange(steps, device=images.device)
    drawn = draws.uniform(draws.fold(draws.fold(look.keys, -1)[:, None], turn))
    table = torch.from_numpy(_quantiles(alpha)).to(look.answers)
    given = {
        "partner_labels": label[everybody, other].reshape(look.images.shape),
        "share": table[(drawn * QUANTILES).long().clamp(max=QUANTILES - 1)],
    }
    partners = images[everybody, other].reshape(look.images.shape)
    return labels._replace(given=labels.given | given, more={"partner": partners})


@cache
def _quantiles(alpha: float) -> np.ndarray:
    from scipy.stats import beta

    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.asarray(beta.ppf(middles, alpha, alpha))


# --- rounds -------------------------------------------------------------------------------------------------


def server_last(
    state: State, fed: Fed, users: Users, streams: Tensor | None = None, **memory: Tensor
) -> State:
    """The server trains the users' average, so that the labels have the last word. Without labels the average
    stays as it is. `streams` replace the groups' means."""
    average = users.average
    if streams is None:
        streams = users.means
    elif users.counted:
        average = streams.mean(0)
    if not fed.has_server:
        return state.next(streams, average, kept=[users], **memory)
    server = fed.train_server(average)
    return state.next(server.row.repeat(len(streams), 1), server.row, kept=[users, server], **memory)


def still(state: State, beta: float) -> Named:
    """The velocity of a server with momentum, before the first round."""
    return {"velocity": torch.zeros_like(state.streams[:, : state.momentum.shape[1]])} if beta else {}


def momentum(state: State, users: Users, beta: float) -> tuple[Tensor, Named]:
    """The groups' means, moved on by `beta` of the last round's movement, and the velocity to be kept."""
    if not beta or not users.counted:
        return users.means, {}
    count = state.momentum.shape[1]
    velocity = users.means[:, :count] - state.streams[:, :count]
    velocity = beta * state.memory["velocity"] + velocity
    moved = torch.cat([state.streams[:, :count] + velocity, users.means[:, count:]], 1)
    return moved, {"velocity": velocity}
