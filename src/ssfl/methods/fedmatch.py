"""The method FedMatch (Jeong et al., ICLR 2021): every weight θ of the network is a sum θ = σ + ψ. Labelled
images train σ and unlabelled images train ψ, each while the other is fixed.

If the server has the labels, users train ψ, the average of the users replaces ψ, and the server then trains
σ. A round of the original ends after the users' training; here it ends after the server's. If users have the
labels, every step trains σ on a labelled batch and then ψ on an unlabelled one, and both are averaged.

In every tenth round, a user that has taken part before gets two helpers. These are other users whose last
models make the most similar predictions to its own last model, for a fixed image of noise. A helper's model
consists of the received σ and the helper's ψ.

Differences from the original:

The learning rate follows the section [train]; the original divides it by 3 on a plateau. The original drops
small weights and small changes when it sends or evaluates a model; here they are kept. Labelled images are
seen in weak views instead of unaugmented, and so are unlabelled ones when the received model and the helpers
predict their labels. Strong views include Cutout. The penalties include biases. The original sets a weight
decay but never adds it to a loss; here σ or ψ decays by train.weight_decay while it is trained. If users have
the labels, the original makes batches of 10 labelled images, and divides the unlabelled ones into as many
batches. Here both kinds come in batches of train.batch_size. Networks and initial weights are those of the
other methods.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ssfl.core import draws, losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.errors import ConfigError
from ssfl.federation import Fed, Loss, Method, Named, State, Step
from ssfl.methods import parts

HALVES = ("sigma.", "psi.")
"""With FedMatch, the names of weights begin with one of these, because each weight is a sum σ + ψ."""
START = 0.2
"""Before training, ψ is this multiple of σ. FedMatch's weights are a sum σ + ψ, where labelled images train σ
and unlabelled ones train ψ."""


@dataclass(frozen=True)
class FedMatch(Method):
    """Disjoint learning: labelled and unlabelled images train separate weights σ and ψ, whose sum is the
    model. Users also learn from helpers, which are other users with similar models."""

    threshold: float = setting(0.75, least=0, most=1, what="a probability")
    """τ: an unlabelled image is trained on if the model's confidence is at least this."""
    helpers: int = setting(2, least=0, most=100, what="users")
    """H: how many helpers a user gets. Helpers are other users with similar models, from whose predictions
    the user learns."""
    interval: int = setting(10, least=1, most=10**6, what="rounds")
    """n: users get helpers only in every n-th round."""
    supervised: float = setting(10.0, least=0, most=1e6, what="a weight")
    """λ_s: the weight of the cross-entropy with true labels."""
    consistency: float = setting(0.01, least=0, most=1e6, what="a weight")
    """λ_i: the weight of the difference (KL divergence) between a user's predictions and those of its
    helpers."""
    agreement: float = setting(0.01, least=0, most=1e6, what="a weight")
    """λ_a: the weight of the cross-entropy of strong views with the label that most models (the user's and
    its helpers') predict."""
    l2: float = setting(10.0, least=0, most=1e6, what="a weight")
    """λ_L2: the weight of the penalty ‖σ - ψ‖², a sum over all weights. It keeps the two parts σ and ψ of
    each weight close."""
    l1: float | None = setting(None, least=0, most=1e6, what="a weight")
    """λ_L1: the weight of the penalty ‖ψ‖₁, which keeps ψ sparse. Default: 1e-5 if the server has the labels,
    1e-4 if users have them."""

    defaults: ClassVar = {
        "model": {"norm": "none"},
        "train": {"lr": 0.001, "momentum": 0.0, "nesterov": False, "momentum_policy": "reset"},
    }
    note: ClassVar = "users are shown the weights of others"
    keeps_models: ClassVar = True

    def needs(self) -> tuple[str, ...]:
        return ("models", "sends")

    def uses(self) -> tuple[str, ...]:
        return ("weak", "strong", "received")

    def check(self, config: Any) -> None:
        """Raises ConfigError for settings that cannot be used with FedMatch, whose weights are a sum σ +
        ψ."""
        train = config.train
        fitting = [
            (config.model.norm != "batch", "model.norm", config.model.norm, "model.norm=none"),
            ((config.federation.groups or 1) == 1, "federation.groups", config.federation.groups,
             "federation.groups=1"),
            (train.momentum == 0, "train.momentum", train.momentum, "train.momentum=0"),
            (train.clip == 0, "train.clip", train.clip, "train.clip=0"),
            (train.lr < 0.1, "train.lr", train.lr, "train.lr=0.001"),  # else ‖σ - ψ‖² grows
            (config.run.diversity_every == 0, "run.diversity_every", config.run.diversity_every,
             "run.diversity_every=0"),
        ]  # fmt: skip
        for fits, key, value, fix in fitting:
            if not fits:
                raise ConfigError(
                    f"{key} = {value!r} cannot be combined with method.name = 'fedmatch': set {fix}",
                    key=key,
                    value=value,
                    fix=fix,
                )

    def network(self, network: nn.Module) -> nn.Module:
        return Decomposed(network)

    def plain(self, tensors: Named) -> Named:
        return composed(tensors)

    def server_loss(self, step: Step) -> Losses:
        result = losses.supervised(step.forward(step.weak, draw="labelled"), step.labels)
        return result._replace(loss=self.supervised * result.loss)

    def user_loss(self, step: Step) -> Losses:
        """Returns the users' loss on unlabelled images, one value per user, [n]. Its gradient trains ψ. The
        L1 and L2 penalties are not included; `gradient` adds them."""
        helpers = self._helper_weights(step)
        weak_logits = step.forward(step.weak, grad=bool(helpers), train=False, draw="teacher")
        helper_logits = [
            step.forward(step.weak, grad=False, train=False, draw="teacher", weights=h) for h in helpers
        ]
        exist = [tensor.flatten(1).any(1) for tensor in step.tensors["helpers"].unbind(1)] if helpers else []
        result = self.unlabelled(weak_logits, step.forward(step.strong), helper_logits, exist)
        return result._replace(loss=result.loss.sum(1) / result.mask.sum(1).clamp(min=1))

    def unlabelled(
        self, weak: Tensor, strong: Tensor, helpers: Sequence[Tensor], exist: Sequence[Tensor]
    ) -> Losses:
        """Returns the loss of each unlabelled image. `weak` and `strong` are the logits of the user's model
        for both views. `helpers` are the logits of each helper's model for the weak view.

        The loss is λ_i · D + λ_a · CE. D is the mean over helpers of KL(p_h ‖ p), where p and p_h are the
        probabilities that user and helper predict. CE is the cross-entropy of the strong view with the label
        that most models vote for; in a tie the first label wins. The loss is zero if the user's own
        confidence is below τ. For each helper, `exist` has a tensor [n] that says which of the n users have
        it; a missing helper has no vote.
        """
        _, mask = losses.pseudo_label(weak, self.threshold)
        votes = _vote(weak)
        for logits, exists in zip(helpers, exist, strict=True):
            votes = votes + _vote(logits) * exists[:, None, None]
        label = votes.argmax(-1)
        loss = self.agreement * losses.cross_entropy(strong, label)
        if helpers:
            own_log, divergence = weak.log_softmax(-1), torch.zeros_like(loss)
            for logits, exists in zip(helpers, exist, strict=True):
                target = logits.log_softmax(-1)
                to_helper = F.kl_div(own_log, target, reduction="none", log_target=True).sum(-1)
                divergence = divergence + to_helper * exists[:, None]
            count = torch.stack(list(exist)).sum(0).clamp(min=1)
            loss = loss + self.consistency * divergence / count[:, None]
        return Losses(loss * mask, mask, label)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        """Returns the gradient of one step by weight name, and the step's metrics. At the server, it has only
        entries for σ. At a user, the entries for ψ come from unlabelled images and the penalties. If users
        have labelled images, there are also entries for σ, from these images."""
        if step.role == "server":
            gradients, metrics = step.gradient(loss)
            return _half(gradients, "sigma."), metrics
        trained: Named = {}
        labelled_loss = step.rate.new_zeros(len(step.rate)) if step.rate is not None else None
        if step.own is not None and step.own_labels is not None:
            trained, labelled_loss = self._labelled_gradient(step, step.own, step.own_labels)
            step = step.after(trained)
        gradients, metrics = step.gradient(self.user_loss)
        total = metrics["loss"] if labelled_loss is None else metrics["loss"] + labelled_loss
        l1 = (1e-5 if step.own is None else 1e-4) if self.l1 is None else self.l1
        for name, gradient in _half(gradients, "psi.").items():
            sigma, psi = step.weights["sigma." + name.removeprefix("psi.")], step.weights[name]
            trained[name] = (l1 * psi.sign() - self.l2 * (2 * (sigma - psi))) + gradient
            penalty = self.l2 * (sigma - psi).flatten(1).square().sum(1) + l1 * psi.flatten(1).abs().sum(1)
            total = total + penalty
        return trained, metrics | {"loss": total}

    def _labelled_gradient(self, step: Step, images: Tensor, labels: Tensor) -> tuple[Named, Tensor]:
        """Returns the gradient of σ on labelled images that the users themselves have, and the loss of each
        user, [n]. For a user without labelled images, the gradient cancels the weight decay, so that σ does
        not change."""
        has = (labels >= 0).all(1)

        def loss(step: Step) -> Losses:
            result = losses.supervised(step.forward(images, draw="labelled"), labels.clamp(min=0))
            return result._replace(loss=self.supervised * result.loss * has[:, None])

        gradients, metrics = step.gradient(loss)
        still = {name: -step.decay * step.weights[name] for name in gradients}  # cancels weight decay
        sigma = {
            name: torch.where(has.view(-1, *[1] * (gradient.dim() - 1)), gradient, still[name])
            for name, gradient in _half(gradients, "sigma.").items()
        }
        return sigma, metrics["loss"]

    def _helper_weights(self, step: Step) -> list[Named]:
        """Returns the weights of each helper's model by name: the received σ, and the ψ of the helper. The
        list is empty in rounds without helpers."""
        if "helpers" not in step.tensors:
            return []
        sigma, psi = (_half(step.received, half) for half in ("sigma.", "psi."))
        sizes = [weight[0].numel() for weight in psi.values()]
        helpers = []
        for flat in step.tensors["helpers"].unbind(1):
            pieces = zip(psi.items(), flat.split(sizes, 1), strict=True)
            helpers.append(sigma | {name: piece.reshape(weight.shape) for (name, weight), piece in pieces})
        return helpers

    def initial(self, state: State, fed: Fed) -> Named:
        return {"last": state.average.new_zeros(fed.users, len(state.average))}

    def round(self, state: State, fed: Fed) -> State:
        """Returns the state after a round. In every n-th round (the setting `interval`), each user is also
        sent the ψ of its helpers."""
        last, send = state.memory["last"], None
        if self.helpers and (state.round + 1) % self.interval == 0:
            near, places = self.helpers_of(last, fed), {user: i for i, user in enumerate(fed.cohort.users)}

            def send(users: Sequence[int]) -> Named:
                chosen = near[[places[user] for user in users]]
                return {"helpers": last[chosen, last.shape[1] // 2 :] * (chosen >= 0)[..., None]}

        users = fed.train_users(state.streams, send=send)
        if users.counted:
            last = last.index_copy(0, users.indices, users.rows)
        return parts.server_last(state, fed, users, last=last)

    def helpers_of(self, last: Tensor, fed: Fed) -> Tensor:
        """Returns the helpers of each of the n participants: the numbers of H other users with similar
        models, [n, H]. -1 means no helper.

        `last` [K, P + Q] are the models that the K users sent last, with P weights and Q running statistics
        each. They are zeros for users that have not taken part yet.
        """
        seen = last.any(1).nonzero().flatten()
        probabilities = fed.predict(last[seen], noise(fed.key("noise", by_round=False), fed.shape))[:, 0]
        return nearest(probabilities, seen, fed.cohort.users, self.helpers)


def _vote(logits: Tensor) -> Tensor:
    """Returns the vote of a model for each image, [..., classes]: 1 for the class with the largest logit, 0
    for the others."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return (logits.argmax(-1)[..., None] == classes).long()  # F.one_hot would wait for the GPU


class Decomposed(nn.Module):
    """Wraps a network so that each of its weights is a sum σ + ψ. Its row (the model as one vector) contains
    all weights σ, and then all weights ψ."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.sigma, self.psi = network, copy.deepcopy(network)
        with torch.no_grad():
            for weight in self.psi.parameters():
                weight.mul_(START)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        psi = dict(self.psi.named_parameters())
        theta = {name: weight + psi[name] for name, weight in self.sigma.named_parameters()}
        return functional_call(self.sigma, theta, (x, key))  # type: ignore[no-any-return]


def composed(tensors: Named) -> Named:
    """Returns the weights θ = σ + ψ of the plain network by name, to save or use it without FedMatch.
    `tensors` contains σ and ψ by name."""
    sigma, psi = (_half(tensors, half) for half in ("sigma.", "psi."))
    return {
        name.removeprefix("sigma."): weight + psi["psi." + name.removeprefix("sigma.")]
        for name, weight in sigma.items()
    }


def _half(tensors: Named, half: str) -> Named:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(half)}


def nearest(probabilities: Tensor, seen: Tensor, users: Sequence[int], count: int) -> Tensor:
    """Returns for each of n `users` the `count` other users whose predictions are most similar to that user's
    predictions. The result [n, count] contains user numbers; -1 means that there is no further user to
    choose.

    `probabilities` [m, classes] are the predictions of the m users in `seen` [m], those that have taken part
    before. A user that is not in `seen` gets only -1. If two users are equally similar, the first one in
    `seen` is taken.
    """
    chosen = torch.full((len(users), count), -1, device=seen.device)
    place = {user: i for i, user in enumerate(seen.tolist())}
    for row, user in enumerate(users):
        if user in place:
            distances = torch.linalg.vector_norm(probabilities - probabilities[place[user]], dim=1)
            distances[place[user]] = torch.inf
            helpers = seen[distances.sort(stable=True).indices[: min(count, len(seen) - 1)]]
            chosen[row, : len(helpers)] = helpers
    return chosen


def noise(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the image of noise on which FedMatch compares the users' models, uint8 [1, C, H, W]. Its values
    are from a normal distribution with mean and standard deviation 125, truncated to the range from 0 to
    255."""
    count = torch.Size(shape).numel()
    drawn = draws.uniform(draws.bits(key.cpu(), count)).double()
    low, high = (torch.special.ndtr(torch.tensor((end - 125) / 125).double()) for end in (0, 255))
    values = 125 + 125 * torch.special.ndtri(low + drawn * (high - low))
    return values.round().clamp(0, 255).to(torch.uint8).reshape(1, *shape)  # type: ignore[no-any-return]
