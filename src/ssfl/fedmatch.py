"""FedMatch (Jeong et al., ICLR 2021), a rival: every weight is a sum θ = σ + ψ; labels move σ, and
unlabelled images move ψ, each while the other stands still.

With labels at the server, users move ψ, their mean replaces it, and the server then moves σ: FedMatch's
round, cut after the server's turn instead of after the users'. With labels at the users, every step moves
σ on a labelled batch and then ψ on an unlabelled one, and both halves are averaged.

In every tenth round a user that was seen before has helpers: the two users whose last models answer most
like its own last one to a fixed image of noise. A helper is the received σ with that user's last ψ. What
users sent last is kept in State.momentum, a row each, as the method has no momentum.

Left out of the original: the learning rate divided by 3 on a plateau (the schedule of [train] stands in),
and sending and evaluating without small weights and small changes; the bytes told are whole rows both ways,
and half a row for each helper.
Its labelled and clean images are not augmented, where ours are weak views; its strong views have no Cutout.
It sets a weight decay but never adds it to a loss; here the half that moves decays by train.weight_decay.
With labels at the users it cuts an epoch of both kinds of images into as many batches of 10 labelled ones;
here both kinds come in batches of train.batch_size. Networks and initial weights are those of every method.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ssfl import draws
from ssfl.errors import ConfigError
from ssfl.objectives import Losses, pseudo_label, supervised
from ssfl.rows import layout_of, trained
from ssfl.work import Batch, Objective, Optimizer, Pool, Trained, Work, each_batch, positions

HELPERS = 2
"""H, the helpers of a user."""
INTERVAL = 10
"""Rounds from one with helpers to the next."""
START = 0.2
"""ψ begins as this much of σ."""
SUPERVISED = 10.0
"""λ_s, the weight of cross-entropy with true labels."""
CONSISTENCY = 0.01
"""λ_i, of the distance to the helpers' answers."""
AGREEMENT = 0.01
"""λ_a, of the strong view's cross-entropy with the label voted for."""
L2 = 10.0
"""λ_L2, of ‖σ - ψ‖², a sum over all weights: a step draws ψ to σ by 20 times the learning rate."""
L1 = {"server": 1e-5, "users": 1e-4, "both": 1e-4}
"""λ_L1, of ‖ψ‖₁, by who holds labels."""


class Decomposed(nn.Module):
    """A network whose weights are σ + ψ; its row is σ's weights and then ψ's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.sigma, self.psi = network, copy.deepcopy(network)
        self.names = list(trained(network))
        with torch.no_grad():
            for weight in trained(self.psi).values():
                weight.mul_(START)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        sigma, psi = dict(self.sigma.named_parameters()), dict(self.psi.named_parameters())
        whole = {name: sigma[name] + psi[name] for name in self.names}
        return functional_call(self.sigma, whole, (x, key))  # type: ignore[no-any-return]


def composed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """θ = σ + ψ by the plain network's names."""
    halves = [
        {n.removeprefix(h): t for n, t in tensors.items() if n.startswith(h)} for h in ("sigma.", "psi.")
    ]
    return {name: weight + halves[1][name] for name, weight in halves[0].items()}


def unlabelled(own: Tensor, strong: Tensor, helpers: Sequence[Tensor], threshold: float) -> Losses:
    """The users' loss of each image from logits of its weak view (own and helpers') and its strong view.

    λ_i · mean over helpers of KL(p_h ‖ p) + λ_a · cross-entropy of the strong view with the label that most
    of them vote for (of equals the first), zero where the own answer is less sure than the threshold.
    """
    _, mask = pseudo_label(own, threshold)
    votes = torch.stack([F.one_hot(answer.argmax(-1), own.shape[-1]) for answer in (own, *helpers)]).sum(0)
    label = votes.argmax(-1)
    loss = AGREEMENT * F.cross_entropy(strong, label, reduction="none")
    if helpers:
        mine = own.log_softmax(-1)
        apart = [
            F.kl_div(mine, h.log_softmax(-1), reduction="none", log_target=True).sum(-1) for h in helpers
        ]
        loss = loss + CONSISTENCY * torch.stack(apart).mean(0)
    return Losses(loss * mask, mask, label)


class FedMatch:
    """The engine of both scenarios: one trainer after another in plain PyTorch."""

    def __init__(self, model: Decomposed, pool: Pool, optimizer: Optimizer, labels_at: str) -> None:
        self.network, self.layout = model.sigma, layout_of(model.sigma)
        self.pool, self.decay, self.sparsity = pool, optimizer.weight_decay, L1[labels_at]

    def train(self, rows: Tensor, momentum: Tensor, work: Work) -> Trained:
        """Each trainer's T steps; in place of momentum users leave the rows they end with."""
        results = [self._train_one(rows[i], work.of(slice(i, i + 1))) for i in range(len(rows))]
        ended = torch.stack([row for row, _ in results])
        stats = {name: torch.stack([told[name] for _, told in results]) for name in results[0][1]}
        return Trained(ended, momentum if work.objective.name == "supervised" else ended, stats)

    def _train_one(self, row: Tensor, work: Work) -> tuple[Tensor, dict[str, Tensor]]:
        sigma, psi = row.chunk(2)
        # a row of zeros is nobody's
        helpers = [] if work.helpers is None else [sigma + other for other in work.helpers[0] if other.any()]
        labelled = work.labelled is not None and bool((work.labelled >= 0).all())
        told: list[dict[str, Tensor]] = []
        for rate, batch in zip(work.rates, each_batch(self.pool, work), strict=True):
            if work.objective.name == "supervised":
                sigma, loss = self._move_sigma(sigma, psi, batch.weak[0], batch.labels[0], batch, rate)
                known = torch.ones_like(batch.weights[0])
                found = Losses(known, known, batch.labels[0])
            else:
                loss = sigma.new_zeros(())
                if labelled and batch.own is not None and batch.own_labels is not None:
                    sigma, loss = self._move_sigma(sigma, psi, batch.own[0], batch.own_labels[0], batch, rate)
                psi, more, found = self._move_psi(sigma, psi, batch, work.objective, helpers, rate)
                loss = loss + more
            told.append(_told(loss, found, batch.labels[0]))
        means = {name: torch.stack([step[name] for step in told]).mean(0) for name in told[0]}
        return torch.cat([sigma, psi]), means

    def _move_sigma(
        self, sigma: Tensor, psi: Tensor, images: Tensor, labels: Tensor, batch: Batch, rate: float
    ) -> tuple[Tensor, Tensor]:
        """σ after a step on labelled images, and the loss."""
        moving = sigma.detach().requires_grad_()
        logits = self._logits(moving + psi, images, True, draws.fold(batch.keys, 2))
        loss = SUPERVISED * supervised(logits, labels).loss.mean()
        return self._stepped(moving, loss, rate), loss.detach()

    def _move_psi(
        self,
        sigma: Tensor,
        psi: Tensor,
        batch: Batch,
        objective: Objective,
        helpers: Sequence[Tensor],
        rate: float,
    ) -> tuple[Tensor, Tensor, Losses]:
        """ψ after a step on unlabelled images, the loss, and what it says of each image."""
        if batch.strong is None:
            raise ValueError("FedMatch needs strong views")
        moving = psi.detach().requires_grad_()
        whole, weak, key = sigma + moving, batch.weak[0], draws.fold(batch.keys, 0)
        with torch.no_grad():
            answers = [self._logits(helper, weak, False, key) for helper in helpers]
        with torch.set_grad_enabled(bool(helpers)):  # alone, the own answer is a label and no more
            own = self._logits(whole, weak, objective.teacher_mode == "train", key)
        strong = self._logits(whole, batch.strong[0], True, draws.fold(batch.keys, 1))
        found = unlabelled(own, strong, answers, objective.threshold)
        loss = found.loss.sum() / found.mask.sum().clamp(min=1)
        loss = loss + L2 * (sigma - moving).square().sum() + self.sparsity * moving.abs().sum()
        return self._stepped(moving, loss, rate), loss.detach(), found

    def _stepped(self, moving: Tensor, loss: Tensor, rate: float) -> Tensor:
        (slope,) = torch.autograd.grad(loss, moving)
        now = moving.detach()
        return now - rate * (slope + self.decay * now)

    def _logits(self, weights: Tensor, images: Tensor, training: bool, keys: Tensor) -> Tensor:
        """Of a plain network with these weights, [P]."""
        self.network.train(training)
        tensors = self.layout.unflatten(weights.to(self.pool.dtype))
        return functional_call(self.network, tensors, (images, keys[0])).to(self.pool.wide)  # type: ignore[no-any-return]

    def answers(self, rows: Tensor, work: Work) -> Tensor:
        """FedMatch makes its labels in every step."""
        raise ConfigError("method.objective = 'fedmatch' does not go with method.labels = 'round'")

    def gradients(self, rows: Tensor, work: Work, sizes: Tensor) -> Tensor:
        """σ and ψ have different losses: there is no one gradient."""
        raise ConfigError(
            "method.objective = 'fedmatch' has no gradient diversity: set run.diversity_every=0"
        )

    def close(self) -> None:
        """Nothing is held."""

    def memory(self, objective: Objective, batch_size: int) -> int:
        """What a round keeps of a trainer: its row and the kept one, as they go and as they come, and ψ of
        its helpers."""
        return (12 + HELPERS) * self.layout.length * self.pool.wide.itemsize

    def positions(self, base: int, trainers: Tensor, sizes: Tensor, first: int, count: int) -> Tensor:
        """`work.positions`."""
        return positions(base, trainers, sizes, first, count)


def helpers_of(model: Decomposed, pool: Pool, kept: Tensor, users: Sequence[int], seed: int) -> Tensor:
    """Who helps each of these users, [n, H]: the nearest of those whose rows are kept, -1 for nobody.

    `kept` [K + 1, P] are users' last rows, zero of users that were never seen; the last is the server's.
    """
    layout = layout_of(model.sigma)
    seen = kept[:-1].any(1).nonzero().flatten()
    image = pool.normalised(noise(seed, tuple(pool.images.shape[1:])).to(kept.device), pool.wide)
    model.eval()
    answers = []
    with torch.no_grad():
        for user in seen.tolist():
            sigma, psi = kept[user].chunk(2)
            answers.append(
                functional_call(model.sigma, layout.unflatten(sigma + psi), (image,))[0].softmax(-1)
            )
    return nearest(torch.stack(answers) if answers else kept.new_zeros(0, 1), seen, users)


def nearest(answers: Tensor, seen: Tensor, users: Sequence[int]) -> Tensor:
    """The H users whose answers [m, classes] are nearest to each user's own; of equals the first."""
    chosen = torch.full((len(users), HELPERS), -1, device=seen.device)
    place = {user: i for i, user in enumerate(seen.tolist())}
    for row, user in enumerate(users):
        if user in place:
            apart = torch.linalg.vector_norm(answers - answers[place[user]], dim=1)
            apart[place[user]] = torch.inf
            found = seen[apart.sort(stable=True).indices[: min(HELPERS, len(seen) - 1)]]
            chosen[row, : len(found)] = found
    return chosen


def noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    """The image that models are told apart by, uint8 [1, C, H, W]: Gaussian, mean and deviation 125, cut to
    0 to 255."""
    count = torch.Size(shape).numel()
    drawn = draws.uniform(draws.bits(torch.tensor(draws.key(seed, "noise")), count)).double()
    low, high = (torch.special.ndtr(torch.tensor((end - 125) / 125).double()) for end in (0, 255))
    values = 125 + 125 * torch.special.ndtri(low + drawn * (high - low))
    return values.round().clamp(0, 255).to(torch.uint8).reshape(1, *shape)  # type: ignore[no-any-return]


def _told(loss: Tensor, found: Losses, labels: Tensor) -> dict[str, Tensor]:
    """What is told of a step, a number each."""
    mask = found.mask
    right = (found.label == labels).to(mask.dtype) * mask
    return {
        "loss": loss,
        "masked": mask.mean(),
        "told": (mask * (labels >= 0)).mean(),
        "right": right.mean(),
    }
