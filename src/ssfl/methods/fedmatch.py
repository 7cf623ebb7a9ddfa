"""FedMatch (Jeong et al., ICLR 2021): every weight is a sum θ = σ + ψ; labels move σ, and unlabelled images
move ψ, each while the other stands still.

With labels at the server, users move ψ, their mean replaces it, and the server then moves σ: FedMatch's
round, cut after the server's turn instead of after the users'. With labels at the users, every step moves
σ on a labelled batch and then ψ on an unlabelled one, and both halves are averaged.

In every tenth round a user that was seen before has helpers: the two users whose last models answer most
like its own last one to a fixed image of noise. A helper is the received σ with that user's last ψ.

Left out of the original: the learning rate divided by 3 on a plateau (the schedule of [train] stands in),
and sending and evaluating without small weights and small changes. Its labelled and clean images are not
augmented, where ours are weak views; its strong views have no Cutout. It sets a weight decay but never adds
it to a loss; here the half that moves decays by train.weight_decay. With labels at the users it cuts an epoch
of both kinds of images into as many batches of 10 labelled ones; here both kinds come in batches of
train.batch_size. Networks and initial weights are those of every method.
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

START = 0.2
"""ψ begins as this much of σ."""


@dataclass(frozen=True)
class FedMatch(Method):
    """Disjoint learning of labelled and unlabelled images, with helpers."""

    threshold: float = setting(0.75, least=0, most=1, what="a probability")
    """τ: an image counts when the model is at least this sure."""
    helpers: int = setting(2, least=0, most=100, what="users")
    """H: the helpers of a user."""
    interval: int = setting(10, least=1, most=10**6, what="rounds")
    """Rounds from one with helpers to the next."""
    supervised: float = setting(10.0, least=0, most=1e6, what="a weight")
    """λ_s: the weight of cross-entropy with true labels."""
    consistency: float = setting(0.01, least=0, most=1e6, what="a weight")
    """λ_i: the weight of the distance to the helpers' answers."""
    agreement: float = setting(0.01, least=0, most=1e6, what="a weight")
    """λ_a: the weight of the strong view's cross-entropy with the label voted for."""
    l2: float = setting(10.0, least=0, most=1e6, what="a weight")
    """λ_L2: the weight of ‖σ - ψ‖², a sum over all weights."""
    l1: float | None = setting(None, least=0, most=1e6, what="a weight")
    """λ_L1: the weight of ‖ψ‖₁; default: 1e-5 with labels at the server, else 1e-4."""

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
        train = config.train
        fitting = [
            (config.model.norm != "batch", "model.norm", config.model.norm, "model.norm=none"),
            ((config.federation.groups or 1) == 1, "federation.groups", config.federation.groups,
             "federation.groups=1"),
            (train.momentum == 0, "train.momentum", train.momentum, "train.momentum=0"),
            (train.clip == 0, "train.clip", train.clip, "train.clip=0"),
            (train.lr < 0.1, "train.lr", train.lr, "train.lr=0.001"),  # more draws ψ beyond σ
            (config.run.diversity_every == 0, "run.diversity_every", config.run.diversity_every,
             "run.diversity_every=0"),
        ]  # fmt: skip
        for fits, key, value, fix in fitting:
            if not fits:
                raise ConfigError(
                    f"{key} = {value!r} does not go with method.name = 'fedmatch': set {fix}",
                    key=key,
                    value=value,
                    fix=fix,
                )

    def network(self, network: nn.Module) -> nn.Module:
        return Decomposed(network)

    def plain(self, tensors: Named) -> Named:
        return composed(tensors)

    def server_loss(self, step: Step) -> Losses:
        found = losses.supervised(step.forward(step.weak, draw="labelled"), step.labels)
        return found._replace(loss=self.supervised * found.loss)

    def user_loss(self, step: Step) -> Losses:
        """The unlabelled loss of ψ, without its penalties."""
        helpers = self._helper_weights(step)
        own = step.forward(step.weak, grad=bool(helpers), train=False, draw="teacher")
        answers = [
            step.forward(step.weak, grad=False, train=False, draw="teacher", weights=h) for h in helpers
        ]
        exist = [tensor.flatten(1).any(1) for tensor in step.given["helpers"].unbind(1)] if helpers else []
        found = self.unlabelled(own, step.forward(step.strong), answers, exist)
        return found._replace(loss=found.loss.sum(1) / found.mask.sum(1).clamp(min=1))

    def unlabelled(
        self, own: Tensor, strong: Tensor, helpers: Sequence[Tensor], exist: Sequence[Tensor]
    ) -> Losses:
        """The loss of each image from logits of its weak view (own and helpers') and its strong view.

        λ_i · mean over helpers of KL(p_h ‖ p) + λ_a · cross-entropy of the strong view with the label that
        most of them vote for (of equals the first), zero where the own answer is less sure than τ. A helper
        that does not `exist` [n] has no vote.
        """
        _, mask = losses.pseudo_label(own, self.threshold)
        votes = _vote(own)
        for answer, there in zip(helpers, exist, strict=True):
            votes = votes + _vote(answer) * there[:, None, None]
        label = votes.argmax(-1)
        loss = self.agreement * losses.cross_entropy(strong, label)
        if helpers:
            mine, apart = own.log_softmax(-1), torch.zeros_like(loss)
            for answer, there in zip(helpers, exist, strict=True):
                other = F.kl_div(mine, answer.log_softmax(-1), reduction="none", log_target=True).sum(-1)
                apart = apart + other * there[:, None]
            count = torch.stack(list(exist)).sum(0).clamp(min=1)
            loss = loss + self.consistency * apart / count[:, None]
        return Losses(loss * mask, mask, label)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        if step.role == "server":
            slopes, metrics = step.slopes(loss)
            return _half(slopes, "sigma."), metrics
        moving: Named = {}
        labelled = step.rate.new_zeros(len(step.rate)) if step.rate is not None else None
        if step.own is not None and step.own_labels is not None:
            moving, labelled = self._labelled_slopes(step, step.own, step.own_labels)
            step = step.after(moving)
        slopes, metrics = step.slopes(self.user_loss)
        loss_now = metrics["loss"] if labelled is None else metrics["loss"] + labelled
        l1 = (1e-5 if step.own is None else 1e-4) if self.l1 is None else self.l1
        for name, slope in _half(slopes, "psi.").items():
            sigma, psi = step.weights["sigma." + name.removeprefix("psi.")], step.weights[name]
            moving[name] = (l1 * psi.sign() - self.l2 * (2 * (sigma - psi))) + slope
            penalty = self.l2 * (sigma - psi).flatten(1).square().sum(1) + l1 * psi.flatten(1).abs().sum(1)
            loss_now = loss_now + penalty
        return moving, metrics | {"loss": loss_now}

    def _labelled_slopes(self, step: Step, images: Tensor, labels: Tensor) -> tuple[Named, Tensor]:
        """σ's gradient on users' own labelled images; a user without any stands still."""
        has = (labels >= 0).all(1)

        def loss(step: Step) -> Losses:
            found = losses.supervised(step.forward(images, draw="labelled"), labels.clamp(min=0))
            return found._replace(loss=self.supervised * found.loss * has[:, None])

        slopes, metrics = step.slopes(loss)
        still = {name: -step.decay * step.weights[name] for name in slopes}  # what weight decay would add
        kept = {
            name: torch.where(has.view(-1, *[1] * (slope.dim() - 1)), slope, still[name])
            for name, slope in _half(slopes, "sigma.").items()
        }
        return kept, metrics["loss"]

    def _helper_weights(self, step: Step) -> list[Named]:
        """The weights of each helper: the received σ with its ψ."""
        if "helpers" not in step.given:
            return []
        sigma, psi = (_half(step.received, half) for half in ("sigma.", "psi."))
        sizes = [weight[0].numel() for weight in psi.values()]
        found = []
        for flat in step.given["helpers"].unbind(1):
            pieces = zip(psi.items(), flat.split(sizes, 1), strict=True)
            found.append(sigma | {name: piece.reshape(weight.shape) for (name, weight), piece in pieces})
        return found

    def initial(self, state: State, fed: Fed) -> Named:
        return {"last": state.average.new_zeros(fed.users, len(state.average))}

    def round(self, state: State, fed: Fed) -> State:
        last, give = state.memory["last"], None
        if self.helpers and (state.round + 1) % self.interval == 0:
            near, places = self.helpers_of(last, fed), {user: i for i, user in enumerate(fed.cohort.users)}

            def give(users: Sequence[int]) -> Named:
                chosen = near[[places[user] for user in users]]
                return {"helpers": last[chosen, last.shape[1] // 2 :] * (chosen >= 0)[..., None]}

        users = fed.train_users(state.streams, give=give)
        if users.counted:
            last = last.index_copy(0, users.who, users.rows)
        return parts.server_last(state, fed, users, last=last)

    def helpers_of(self, last: Tensor, fed: Fed) -> Tensor:
        """Who helps each user of the cohort, [n, H]: the nearest of those seen before, -1 for nobody.

        `last` [K, P] are the models that users sent last, zeros of users that were never seen.
        """
        seen = last.any(1).nonzero().flatten()
        answers = fed.answers(last[seen], noise(fed.key("noise", by_round=False), fed.shape))[:, 0]
        return nearest(answers, seen, fed.cohort.users, self.helpers)


def _vote(logits: Tensor) -> Tensor:
    """1 for the largest of the logits, 0 for the others."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return (logits.argmax(-1)[..., None] == classes).long()  # F.one_hot would wait for a GPU


class Decomposed(nn.Module):
    """A network whose weights are σ + ψ; its row is σ's weights and then ψ's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.sigma, self.psi = network, copy.deepcopy(network)
        with torch.no_grad():
            for weight in self.psi.parameters():
                weight.mul_(START)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        other = dict(self.psi.named_parameters())
        whole = {name: weight + other[name] for name, weight in self.sigma.named_parameters()}
        return functional_call(self.sigma, whole, (x, key))  # type: ignore[no-any-return]


def composed(tensors: Named) -> Named:
    """θ = σ + ψ by the plain network's names."""
    sigma, psi = (_half(tensors, half) for half in ("sigma.", "psi."))
    return {
        name.removeprefix("sigma."): weight + psi["psi." + name.removeprefix("sigma.")]
        for name, weight in sigma.items()
    }


def _half(tensors: Named, half: str) -> Named:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(half)}


def nearest(answers: Tensor, seen: Tensor, users: Sequence[int], count: int) -> Tensor:
    """The users whose answers [m, classes] are nearest to a user's own, [n, count]; of equals the first."""
    chosen = torch.full((len(users), count), -1, device=seen.device)
    place = {user: i for i, user in enumerate(seen.tolist())}
    for row, user in enumerate(users):
        if user in place:
            apart = torch.linalg.vector_norm(answers - answers[place[user]], dim=1)
            apart[place[user]] = torch.inf
            found = seen[apart.sort(stable=True).indices[: min(count, len(seen) - 1)]]
            chosen[row, : len(found)] = found
    return chosen


def noise(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The image that models are told apart by, uint8 [1, C, H, W]: Gaussian, mean and deviation 125, cut to
    0 to 255."""
    count = torch.Size(shape).numel()
    drawn = draws.uniform(draws.bits(key.cpu(), count)).double()
    low, high = (torch.special.ndtr(torch.tensor((end - 125) / 125).double()) for end in (0, 255))
    values = 125 + 125 * torch.special.ndtri(low + drawn * (high - low))
    return values.round().clamp(0, 255).to(torch.uint8).reshape(1, *shape)  # type: ignore[no-any-return]
