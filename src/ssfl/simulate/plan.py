"""The plan of all rounds of a run: who takes part in each round, and which images they train on. It follows
from the config and the split alone."""

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.cohort import Cohort, draw_cohort
from ssfl.core.rows import placed
from ssfl.core.schedule import head_start, learning_rate
from ssfl.data.hands import Hands, Index
from ssfl.engines.work import Work, round_keys

Positions = Callable[[int, Tensor, Tensor, int | Tensor, int], Tensor]


@dataclass(frozen=True)
class Owners:
    """Which images each owner (a user, or the server) has, as indices into the pool of all images. One tensor
    holds the indices of all owners, one owner after another, so that batches of many owners are looked up at
    once."""

    images: Tensor
    starts: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, lists: Sequence[Index], device: torch.device) -> "Owners":
        hands = Hands.of(lists)
        return cls(*(torch.from_numpy(a).to(device) for a in (hands.flat, hands.edges[:-1], hands.sizes)))

    def at(self, owners: Tensor, places: Tensor) -> Tensor:
        """Returns indices into the pool of all images [n, m], for n `owners` and m images each. `places` [n,
        m] says which of an owner's images is meant: 0 is its first."""
        index = self.starts[owners][:, None] + places
        # the clamp is for a last owner without images
        return self.images[index.clamp(max=len(self.images) - 1)]


@dataclass(frozen=True)
class Plan:
    """The plan of all rounds of a run: who takes part, which images they train on, and with which learning
    rates."""

    config: Config
    """The resolved config, in which every setting has a value."""
    users: Owners
    labelled: Owners | None
    server: Owners
    """The server's labelled images, as `Owners` with a single owner."""
    positions: Positions
    """A function of the engine that returns in which order users, or the server, train on their own images.
    See `positions` in `engines/work.py`."""
    device: torch.device
    judges: Tensor | None = None
    """The server's labelled images on which it does not train, as indices into the pool of all images
    (train.server_held_out). Models are evaluated on them. None if there are none."""

    @property
    def participants(self) -> int:
        return self.config.federation.participants or 0

    @property
    def at_once(self) -> int:
        return self.config.run.users_at_once or 1

    @property
    def own_streams(self) -> bool:
        """Whether every user keeps a model of its own from round to round, instead of starting from the model
        of its group."""
        return self.config.method.start == "user"

    @property
    def streams(self) -> int:
        return self.config.split.users if self.own_streams else self.config.federation.groups or 1

    @property
    def replicas(self) -> int:
        """How many copies of the server's model are trained in a round: usually 1. If the method's setting
        server_replicas is true, there is one copy for each group."""
        return self.streams if getattr(self.config.method, "server_replicas", False) else 1

    @property
    def views(self) -> tuple[str, ...]:
        """The kinds of views ("weak", "strong") that the method uses in users' training steps."""
        return tuple(view for view in ("weak", "strong") if view in self.config.method.uses())

    def prepare(self, round: int) -> tuple[Cohort, Work, Work | None]:
        """Returns the cohort of a round (the users that take part), the users' work and the server's work.
        Work says which images to train on, with which learning rates and random keys. The server's work is
        None if the server has no labelled images."""
        cohort = self.cohort(round)
        server_work = self.server_work(round) if len(self.server.images) else None
        return cohort, self.users_work(round, cohort), server_work

    def cohort(self, round: int) -> Cohort:
        """Returns the users that take part in a round, with their groups. The cohort is empty in rounds in
        which only the server trains."""
        federation, rounds = self.config.federation, self.config.federation.rounds or 0
        if not self.config.method.trains_users or round < head_start(federation.head_start, rounds):
            return Cohort((), (), ((),) * self.streams, (), ())
        return draw_cohort(
            round,
            seed=self.config.run.seed,
            users=self.config.split.users,
            participants=self.participants,
            groups=self.streams,
            dropout=federation.dropout,
            filled=federation.group_sizes == "filled",
            own_streams=self.own_streams,
        )

    def steps_before(self, round: int) -> int:
        """Returns the total number of training steps in all rounds before this one, which determines the
        learning rate. Each round counts as federation.period steps. With federation.extra_step, the first
        round of each epoch counts as one step more."""
        federation = self.config.federation
        steps = round * federation.period
        if not federation.extra_step:
            return steps
        epoch = max(1, federation.epoch_images // self.config.train.batch_size // federation.period)
        return steps + -(-round // epoch)

    def batch_size(self, role: str) -> int:
        """Returns the number of images in a training step, for the role "user" or "server"."""
        return self.config.train.batch_of(role)

    @cached_property
    def local_steps(self) -> Tensor | None:
        """[K]: how many training steps each of the K users takes in a round, if federation.local_epochs is
        set. None if it is not set; all users then take the same number of steps."""
        epochs = self.config.federation.local_epochs
        if epochs is None:
            return None
        return torch.ceil(epochs * self.users.sizes / self.config.train.batch_size).long()

    @cached_property
    def most_steps(self) -> int:
        """The largest number of training steps that any user takes in a round, if federation.local_epochs is
        set; 0 if it is not set."""
        return 0 if self.local_steps is None else int(self.local_steps.max())

    def own_steps(self, role: str) -> int | None:
        """Returns the number of training steps in a round, if a special setting determines it. For the role
        "user", the setting is federation.local_epochs, and the largest number of any user is returned. For
        the role "server", the setting is train.server_steps.

        Returns None if the setting is not used. The number of steps is then determined by federation.period.
        If the setting is used, the learning rate is constant within a round.
        """
        return (self.most_steps or None) if role == "user" else self.config.train.server_steps

    def rates(self, round: int, role: str = "user") -> tuple[float, ...]:
        """Returns the learning rate of each training step of a round, for the role "user" or "server"."""
        train = self.config.train
        rate = partial(
            learning_rate,
            base=train.lr if role == "user" or train.server_lr is None else train.server_lr,
            steps=builtins.round(train.horizon * self.steps_before(self.config.federation.rounds or 0)),
            warmup=train.warmup,
            cycles=train.cycles,
            floor=train.floor,
            annealing=train.schedule == "annealing",
        )
        first, steps = self.steps_before(round), self.own_steps(role)
        if steps is not None:
            return (rate(first),) * steps
        return tuple(rate(step) for step in range(first, self.steps_before(round + 1)))

    def _work(self, round: int, role: str, trainers: Tensor, owners: Owners, members: Tensor) -> Work:
        """Returns what n trainers (users, or copies of the server's model) do in a round: the batches,
        learning rates and random keys of their steps. `trainers` [n] are numbers from which their random keys
        are made. `members` [n] says which owner in `owners` has the images of each trainer."""
        seed, size, user = self.config.run.seed, self.batch_size(role), role == "user"
        rates, own_steps = self.rates(round, role), self.own_steps(role)
        taken = self.local_steps[members] if user and self.local_steps is not None else None
        first: int | Tensor = size * (self.steps_before(round) if own_steps is None else round * own_steps)
        if taken is not None:
            first = size * round * taken[:, None]
        restart = self.config.train.batches == "restart"

        def batches(owners: Owners, purpose: str) -> Tensor:
            sizes = owners.sizes[members]
            base = draws.key(seed, purpose, round) if restart else draws.key(seed, purpose)
            start, count = 0 if restart else first, size * len(rates)
            places = self.positions(base, trainers, sizes.clamp(min=1), start, count)
            chosen = owners.at(members, places)
            return torch.where(sizes[:, None] > 0, chosen, -1).reshape(-1, len(rates), size)

        labelled = batches(self.labelled, "labelled") if user and self.labelled is not None else None
        keys = round_keys(seed, round, trainers)
        seats = self.at_once if user else len(trainers)
        views = self.views if user else ("mixed" if self.config.train.server_views == "both" else "weak",)
        longest = None if taken is None or not len(taken) else int(taken.max())
        return Work(
            role,
            views,
            keys,
            batches(owners, "batches"),
            labelled,
            rates,
            seats,
            taken=taken,
            longest=longest,
        )

    def users_work(self, round: int, cohort: Cohort) -> Work:
        members = placed(torch.tensor(cohort.users, dtype=torch.int64), self.device)
        return self._work(round, "user", members, self.users, members)

    def server_work(self, round: int) -> Work:
        trainers = placed([draws.SERVER - copy for copy in range(self.replicas)], self.device)
        return self._work(round, "server", trainers, self.server, trainers * 0)
