"""What the programs of all other simulators ("peers") share: data, split, network, augmentation and loss, in
plain PyTorch.

Users of these simulators would write nn.Modules and use torch's random numbers, so this code does too. Only
the augmentation comes from ssfl, because training on augmented images is part of the job.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import jobs
from ssfl.config.settings import Config
from ssfl.core import losses as objectives
from ssfl.data import augment
from ssfl.models import networks
from ssfl.runs import assemble


@dataclass
class Task:
    """A job as the program of another simulator needs it: data, network and counters, on its device."""

    config: Config
    images: Tensor
    """[N, C, H, W]: all training images as uint8, or normalised floats if the job uses no augmentation."""
    labels: Tensor
    users: list[Tensor]
    """For each user, the positions of its images, in the same split as in ssfl."""
    mean: Tensor
    std: Tensor
    network: nn.Module
    threshold: float = 0.0
    """A pseudo-label is used if its confidence is at least this."""
    steps: int = 0
    """The number of training steps so far, counted in `loss`."""
    seen: int = 0
    """The number of images in these steps."""
    total: float | Tensor = 0.0
    """The sum of the losses of these steps."""

    def draw(self, user: int) -> tuple[Tensor, Tensor]:
        """Returns the T · B images, and their labels, that a user trains on in a round. They are taken from
        random permutations of the user's images."""
        mine = self.users[user]
        count = self.config.federation.period * self.config.train.batch_size
        turns = -(-count // len(mine))
        order = torch.cat([torch.randperm(len(mine), device=mine.device) for _ in range(turns)])
        chosen = mine[order[:count]]
        return self.images[chosen], self.labels[chosen]

    def loss(self, network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of one training step on these images, and counts the step. For a supervised job it
        is the cross-entropy with the labels, otherwise the consistency loss."""
        if self.config.method.name == "supervised":
            network.train()
            losses = objectives.supervised(network(images), labels)
        else:
            weak, strong = (self._views(images, name) for name in ("weak", "strong"))
            network.eval()
            with torch.no_grad():
                teacher = network(weak)
            network.train()
            losses = objectives.consistency(teacher, network(strong), self.threshold)
        loss = losses.loss.mean()
        self.steps += 1
        self.seen += len(images)
        self.total = self.total + loss.detach()
        return loss

    def _views(self, images: Tensor, name: str) -> Tensor:
        """Returns weak or strong views of the images, normalised. `name` is "weak" or "strong"."""
        count = augment.WEAK_DRAWS if name == "weak" else augment.STRONG_DRAWS
        make = augment.weak_views if name == "weak" else augment.strong_views
        drawn = torch.randint(-(2**63), 2**63 - 1, (len(images), count), device=images.device)
        return augment.normalise(make(images, drawn, False), self.mean, self.std, torch.float32)

    def sgd(self, parameters: object, lr: float) -> torch.optim.SGD:
        """Returns the job's SGD optimizer for these parameters."""
        train = self.config.train
        return torch.optim.SGD(
            parameters,  # type: ignore[arg-type]
            lr=lr, momentum=train.momentum, nesterov=train.nesterov, weight_decay=train.weight_decay,
        )  # fmt: skip


def prepare(spec: jobs.Spec) -> Task:
    """Returns the job's data as ssfl loads and splits them, and its network in plain PyTorch with ssfl's
    initial weights."""
    made = assemble.make(jobs.config(spec))
    data, config, device = made.dataset, made.config, made.device
    assert not config.data.flip or config.method.name == "supervised"
    network = plain(config.model.name or "", len(data.classes), data.shape)
    ours = networks.build(
        config.model.name or "", len(data.classes), data.shape, config.model.norm, config.run.seed
    )
    with torch.no_grad():
        for mine, theirs in zip(network.parameters(), ours.parameters(), strict=True):
            mine.copy_(theirs)
    images = made.pool.images
    mean, std = (torch.tensor(x, device=device) for x in (data.mean, data.std))
    if config.method.name == "supervised":
        images = augment.normalise(images, mean, std, torch.float32)
    users = [torch.from_numpy(user).to(device) for user in made.parts.users]
    threshold = getattr(config.method, "threshold", 0.0)
    return Task(config, images, made.pool.labels, users, mean, std, network.to(device), threshold)


def plain(name: str, classes: int, shape: tuple[int, int, int]) -> nn.Sequential:
    """Returns the network `name` in plain PyTorch. Its parameters are in the same order as in ssfl's network,
    so that weights can be copied."""
    channels, height, width = shape
    if name == "small":
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.GroupNorm(8, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(16, 32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * -(-height // 2) * -(-width // 2), classes),
        )  # fmt: skip
    flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.Dropout2d(0.25), nn.ReLU(),
        nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip
