"""A federation on one machine: runs rounds, evaluates models, and returns events.

`runs/assemble.py` makes a simulation from a config, and `runs/round_loop.py` runs its rounds. Nothing here
writes a file. A model is a row [P + Q] of P weights and Q running statistics (`core/rows.py`).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.clock import Phases
from ssfl.core.cohort import Cohort
from ssfl.core.events import Event
from ssfl.core.rows import Layout, row_of, statistics, write_row
from ssfl.core.statistics import balanced
from ssfl.data import split
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Hands, Index
from ssfl.engines import choice
from ssfl.engines.dist import Dist
from ssfl.engines.memory import peak
from ssfl.engines.work import Pool, Work
from ssfl.errors import MethodError, in_words
from ssfl.federation import Method, State
from ssfl.models import external
from ssfl.models.building import is_saved_whole, network_of, plain_network_of
from ssfl.simulate import measuring, scoring
from ssfl.simulate.aggregation import TRUST, USUAL
from ssfl.simulate.gate import ROUNDS, VIEWS, remembered
from ssfl.simulate.plan import Plan
from ssfl.simulate.rounds import Round
from ssfl.simulate.workers import Simulated

SLOW = "slow"
"""The key in `State.memory` of the slow average, an exponential moving average of the model over rounds
(federation.slow_average)."""
OWN = (SLOW, USUAL, TRUST)
"""The names in `State.memory` that ssfl itself uses. A method's tensors must have other names."""


@dataclass(frozen=True)
class Simulation:
    """One experiment, ready to run its rounds: the images and who owns them, the network, the engine that
    trains it, and the plan of all rounds."""

    dataset: Dataset
    parts: split.Parts
    validation: Index
    pool: Pool
    model: nn.Module
    layout: Layout
    engine: choice.Engine
    plan: Plan
    device: torch.device
    make: external.Factory | None = None
    """The function that makes the network, if the caller passed one from Python; None if the config names the
    network."""
    brought: dict[str, Any] = field(default_factory=dict)
    """What identifies a network and a method from outside the package, if the run uses them: import paths,
    hashes and others. A resumed run is compared with this record, see `assemble.brought`."""
    _ahead: dict[int, tuple[Cohort, Work, Work | None]] = field(default_factory=dict, repr=False)
    """Rounds that were prepared in advance, while the GPU was busy. Maps the number of a round to its cohort,
    the users' work and the server's work."""

    @property
    def config(self) -> Config:
        """The resolved config: every setting has a value."""
        return self.plan.config

    @property
    def method(self) -> Method:
        return self.config.method

    @property
    def ranks(self) -> Dist | None:
        """The engine "dist", through which the processes of torchrun exchange results; None if one process
        trains all users."""
        return self.engine if isinstance(self.engine, Dist) else None

    @property
    def rounds(self) -> int:
        return self.config.federation.rounds or 0

    @property
    def has_server(self) -> bool:
        """Whether the server has labelled images to train on."""
        return len(self.parts.server) > 0

    @property
    def holds_models(self) -> bool:
        """Whether all models that users return in a round are kept in memory until they are averaged. Robust
        averages and some methods need this. Otherwise each model is added to a sum and then dropped, which
        needs less memory."""
        federation = self.config.federation
        robust = federation.gate or federation.median_fallback or federation.combine != "mean"
        robust = robust or federation.skip_unlabelled
        return bool(robust) or bool({"models", "reports", "sizes"} & set(self.method.needs()))

    @cached_property
    def server_counts(self) -> Tensor:
        """[classes]: the number of the server's labelled training images in each class."""
        labels = self.pool.labels[self.plan.server.images]
        return torch.bincount(labels, minlength=len(self.dataset.classes)).to(self.pool.wide)

    def initial(self) -> State:
        """Returns the state before round 0. All groups and the server start from the same weights, which are
        drawn with run.seed or read from model.weights."""
        network = network_of(self.config, self.dataset, self.make)
        row = row_of(network, self.layout).to(self.device, self.pool.wide)
        slots = {
            "reset": 0,
            "server": self.plan.replicas,
            "slot": self.plan.participants + self.plan.replicas,
            "user": self.config.split.users + self.plan.replicas,
        }[self.config.train.momentum_policy]
        momentum = row.new_zeros(slots, self.layout.weights)
        gate = self.config.federation.gate
        strikes = torch.zeros(self.config.split.users if gate else 0, dtype=torch.int64)
        state = State(0, row.repeat(self.plan.streams, 1), row, momentum, strikes)
        nobody = Cohort((), (), ((),) * self.plan.streams, (), ())
        workers = self._workers(0, nobody, self.plan.users_work(0, nobody), None, Phases(self.device))
        memory = self.method.initial(state, Round(self, state, nobody, workers, keep=False))
        _require_tensors(memory, {}, f"{type(self.method).__name__}.initial")
        if self.config.federation.slow_average:
            memory[SLOW] = row.clone()
        if gate:
            memory[USUAL] = row.new_zeros(ROUNDS)
            memory[TRUST] = row.new_zeros(self.config.split.users)
        return replace(state, memory=memory)

    def play(self, state: State) -> tuple[State, list[Event]]:
        """Runs one round. Returns the next state and the round's events. Raises DivergedError if a loss or an
        update is not finite."""
        ready = self._ahead.get(state.round)
        cohort, users_work, server_work = self.plan.prepare(state.round) if ready is None else ready
        every = self.config.run.diversity_every
        is_last = state.round + 1 == self.rounds
        measures_diversity = bool(every and (state.round % every == 0 or is_last) and cohort.users)
        phases = Phases(self.device)
        if self.config.model.norm_statistics == "everyone" and cohort.users:
            with phases.during("statistics"):
                streams = [self._with_statistics(row, self._everyones) for row in state.streams]
                state = replace(state, streams=torch.stack(streams))
        self.make_views(state.round, phases)
        workers = self._workers(state.round, cohort, users_work, server_work, phases)
        fed = Round(self, state, cohort, workers, measures_diversity)
        new = self.played(state, fed)
        self.prepare(new.round)
        events = [measuring.round_event(self.plan, self.message_bytes(), new.round, fed)]
        if measures_diversity:
            with phases.during("diversity"):
                event = measuring.diversity_event(
                    self.engine, self.ranks, self.method, self.plan, state, fed.cohort, fed.log
                )
                events.append(event)
        events[0]["phases"] = phases.seconds()
        return new, events

    def _workers(
        self, round: int, cohort: Cohort, users: Work, server: Work | None, phases: Phases
    ) -> Simulated:
        classes = len(self.dataset.classes)
        return Simulated(self.config, self.layout, classes, self.engine, round, cohort, users, server, phases)

    def make_views(self, round: int, phases: Phases) -> None:
        """Prepares the stored features of a round, if the network has a frozen first part. Features are the
        output of that part for the views of images. The time is recorded in `phases`."""
        if self.pool.features is not None:
            with phases.during("features"):
                self.pool.use(round)

    def played(self, state: State, fed: Round) -> State:
        """Runs the method's round through `fed`. Then applies the settings that exist for all methods: the
        server's running statistics, the slow average, and what the gate remembers. Returns the state after
        these changes."""
        new, log, federation = self._next(state, fed), fed.log, self.config.federation
        if self.config.model.norm_statistics == "server" and log.server_row is not None:
            streams, average, count = new.streams.clone(), new.average.clone(), self.layout.weights
            streams[:, count:] = average[count:] = log.server_row[count:]
            new = replace(new, streams=streams, average=average)
        if federation.slow_average:
            # warm-up: the average starts with a short window, so that the first rounds fade quickly
            decay = min(federation.slow_average, new.round / (new.round + 9))
            slow = decay * new.memory[SLOW] + (1 - decay) * new.average
            new = replace(new, memory=new.memory | {SLOW: slow})
        if USUAL in new.memory:
            usual = new.streams.new_zeros(()) if log.usual is None else log.usual
            server = 0.0 if log.server is None else log.server.norms.max()
            new = replace(new, memory=new.memory | {USUAL: remembered(new.memory[USUAL], usual, server)})
        if log.trust is not None:
            trust = new.memory[TRUST].clone()
            trust[list(fed.cohort.users)] = log.trust
            new = replace(new, memory=new.memory | {TRUST: trust})
        if log.refused:
            strikes = new.strikes.clone()
            strikes[[fed.cohort.users[place] for place in log.refused]] += 1
            new = replace(new, strikes=strikes)
        return new

    def _next(self, state: State, fed: Round) -> State:
        """Returns the result of the method's function `round`. Raises MethodError if it is not the state
        after one more round, with models of the right shape."""
        new, name = self.method.round(state, fed), f"{type(self.method).__name__}.round"
        if not isinstance(new, State):
            raise MethodError(
                f"{name} returned {in_words(new)}: return state.next(...)",
                key="round",
            )
        if new.round != state.round + 1:
            raise MethodError(
                f"{name} returned the state of round {new.round}, but the next round is {state.round + 1}: "
                "return state.next(...), which counts the rounds",
                key="round",
            )
        for key, rows, before in (
            ("streams", new.streams, state.streams), ("average", new.average, state.average),
        ):  # fmt: skip
            if rows.shape != before.shape:
                raise MethodError(
                    f"{name} returned a state whose {key} has shape {list(rows.shape)}: pass a tensor of "
                    f"shape {list(before.shape)} to state.next()",
                    key=key,
                )
        _require_tensors(new.memory, state.memory, name)
        return new

    def prepare(self, round: int) -> None:
        """Draws the cohort and the batches of the given round in advance, on the CPU while a GPU is busy. The
        round can then start at once. Without a GPU, it does nothing."""
        if self.device.type == "cuda" and round < self.rounds and round not in self._ahead:
            self._ahead.clear()
            self._ahead[round] = self.plan.prepare(round)

    def evaluate(self, state: State) -> Event:
        """Returns the evaluation event of the model that `final_row` returns, with its accuracy and loss.
        Test images are used if run.test asks for them in this round, and validation images if there are
        any."""
        row = self.final_row(state)
        event: Event = {"event": "eval", "round": state.round, "memory": peak(self.device)}
        when = self.config.run.test
        tested = len(self.dataset.test_labels)
        if tested and (when == "every" or (when == "last" and state.round == self.rounds)):
            test = self.dataset.test_images.to(self.device), self.dataset.test_labels
            accuracy, loss, per_class = self.score(row, *test)
            measuring.require_finite(
                self.config, state.round, "the averaged model on the test images", [loss]
            )
            event |= {"accuracy": accuracy, "loss": loss, "class_accuracy": per_class}
            event |= {"correct": round(accuracy * tested), "count": tested}
            event["balanced_accuracy"] = balanced(per_class)
            # a good averaged model can hide that the models of some groups have collapsed
            if len(state.streams) > 1 and self.method.start == "group":
                event["stream_accuracy"] = [self.score(stream, *test)[0] for stream in state.streams]
        if len(self.validation):
            indices = torch.from_numpy(self.validation)
            images = self.pool.images[indices.to(self.device)]
            accuracy, loss, _ = self.score(row, images, self.dataset.labels[indices])
            measuring.require_finite(
                self.config, state.round, "the averaged model on the validation images", [loss]
            )
            event["validation_accuracy"] = accuracy
            event |= {"validation_correct": round(accuracy * len(indices)), "validation_count": len(indices)}
        return event

    def final_row(self, state: State) -> Tensor:
        """Returns the model to evaluate and save, as a row [P + Q] of P weights and Q running statistics. It
        is the averaged model, or its slow average over rounds (federation.slow_average).

        With model.norm_statistics = "recompute" or "everyone", the running statistics are computed anew.
        """
        row, kind = evaluated_row(state), self.config.model.norm_statistics
        if kind not in ("recompute", "everyone"):
            return row
        return self._with_statistics(row, self.plan.server.images if kind == "recompute" else self._everyones)

    @cached_property
    def _everyones(self) -> Tensor:
        """The positions in the pool of the images of the server and of all users."""
        owned = np.concatenate([self.parts.server, Hands.of(self.parts.users).flat])
        return torch.from_numpy(owned).to(self.device)

    def _with_statistics(self, row: Tensor, places: Tensor) -> Tensor:
        """Returns the model `row` [P + Q] with running statistics that are the mean over batches of images,
        without augmentation. `places` are the positions of the images in the pool. The batches have the size
        of the server's."""
        write_row(self.model, self.layout, row)
        self.model.train()
        names = {name.rpartition(".")[0] for name in statistics(self.model)}
        norms: list[Any] = [self.model.get_submodule(name) for name in sorted(names)]
        momenta = [layer.momentum for layer in norms]
        with torch.no_grad(), scoring.tensor_cores(self.pool.dtype != self.pool.wide):
            for count, chosen in enumerate(places.split(self.config.train.batch_of("server"))):
                for layer in norms:  # so that the statistics become the plain mean over batches
                    layer.momentum = 1 / (count + 1)
                key = torch.tensor(draws.key(self.config.run.seed, "dropout", count))
                self.model(
                    self.pool.normalised(self.pool.images[chosen], self.pool.wide), key.to(self.device)
                )
        for layer, momentum in zip(norms, momenta, strict=True):
            layer.momentum = momentum
        return row_of(self.model, self.layout)

    def final_tensors(self, state: State) -> dict[str, Tensor]:
        """Returns the tensors of the model to save, by the names that they have in the plain PyTorch network.
        Frozen tensors are included if the network started from pretrained weights, so that the saved file can
        be used without other files."""
        trained = self.method.plain(self.layout.unflatten(self.final_row(state)))
        if not is_saved_whole(self.config):
            return trained
        whole = external.plain(plain_network_of(self.config, self.dataset, self.make))
        whole.load_state_dict(trained, strict=False)  # sets a tied weight under its second name too
        return whole.state_dict()

    def score(self, row: Tensor, images: Tensor, labels: Tensor) -> scoring.ModelScore:
        """Returns the accuracy and loss of the model `row` [P + Q] on uint8 images [N, C, H, W] with these
        labels [N]."""
        write_row(self.model, self.layout, row)
        return scoring.score(self.model, self.pool, images, labels, len(self.dataset.classes))

    def server_score(self, row: Tensor, most: int | None = None) -> scoring.ModelScore:
        """Returns the accuracy and loss of the model `row` [P + Q] on about `most` of the server's labelled
        images (see `server_images`). It does not average over test views (data.test_views), because rounds
        call it often. For the same reason, the engine computes it if a GPU trains in low precision."""
        classes = len(self.dataset.classes)
        if self.device.type == "cuda" and self.pool.features is None and self.pool.dtype != self.pool.wide:
            places, labels = self._server_places(most)
            probabilities = self.engine_probabilities(row, places)
            least = torch.finfo(probabilities.dtype).tiny  # so that no loss is infinite
            return scoring.score_of_logits(probabilities.clamp(min=least).log().cpu(), labels, classes)
        write_row(self.model, self.layout, row)
        pool, (images, labels) = replace(self.pool, test_views=0), self.server_images(most)
        return scoring.score(self.model, pool, images, labels, classes)

    def engine_probabilities(self, row: Tensor, places: Tensor) -> Tensor:
        """Returns the class probabilities [N, classes] that the model `row` [P + Q] predicts for N images
        without augmentation. `places` [N] are their positions in the pool. The engine computes them in the
        precision of training, which is faster on a GPU than `predicted`."""
        size = min(len(places), scoring.at_once(self.pool.images.shape[1:]))
        batches = -(-len(places) // size)
        filled = places.repeat(2)[: batches * size]  # the last batch is filled with images of the first
        keys = places.new_zeros(4, 1)
        work = Work("server", ("plain",), keys, filled.view(1, batches, size), None, ())
        return self.engine.predict(row[None], work)[0, : len(places)]

    def classified(self, row: Tensor, images: Tensor) -> Tensor:
        """Returns the class number [N] that the model `row` [P + Q] predicts for each of N uint8 images. The
        result is on the CPU."""
        write_row(self.model, self.layout, row)
        return scoring.logits(self.model, self.pool, images).argmax(1)

    def predicted(self, row: Tensor, images: Tensor) -> Tensor:
        """Returns the class probabilities [N, classes] that the model `row` [P + Q] predicts for N uint8
        images. Unlike `classified`, it uses no test views."""
        write_row(self.model, self.layout, row)
        self.model.eval()
        with torch.no_grad():
            logits = self.model(self.pool.normalised(images.to(self.device), self.pool.wide))
        return logits.softmax(-1)  # type: ignore[no-any-return]

    def server_images(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns about `most` of the server's labelled images, spread over all classes, and their labels.
        Methods and the gate evaluate models on them. `most` = None returns all.

        With train.server_held_out, only images that the server does not train on are returned.
        """
        places, labels = self._server_places(most)
        if self.pool.features is None:
            return self.pool.images[places], labels
        if most not in self._server_pixels:
            self._server_pixels[most] = self.pool.images[places]
            self.pool.features.remember(self._server_pixels[most])
        return self._server_pixels[most], labels

    def _server_places(self, most: int | None) -> tuple[Tensor, Tensor]:
        """Returns the positions in the pool of the images that `server_images` returns, and their labels on
        the CPU."""
        if most not in self._server_images:
            images = self.plan.server.images if self.plan.judges is None else self.plan.judges
            if most is not None:
                images = images[self.pool.labels[images].argsort(stable=True)]
                images = images[:: -(-len(images) // most)]
            self._server_images[most] = images, self.pool.labels[images].cpu()
        return self._server_images[most]

    def descent(self, row: Tensor, round: int) -> Tensor | None:
        """Returns the direction [P] in which the P weights must change so that the server's loss falls
        fastest, at the model `row` [P + Q]. The gate compares users' updates with this direction. Returns
        None if the server has no labels.

        The loss is on strong views of the server's labelled images, which are drawn anew for each `round`.
        """
        if not self.has_server:
            return None
        places = self._server_places(VIEWS)[0]
        places = places.repeat(max(1, VIEWS // len(places)))
        key = torch.tensor(draws.key(self.config.run.seed, "gate", round))
        keys = draws.fold(key, torch.arange(len(places))).to(places.device)
        return scoring.descent(self.model, self.layout, self.pool, row, places, keys)

    @cached_property
    def _server_images(self) -> dict[int | None, tuple[Tensor, Tensor]]:
        """A cache of the results of `_server_places`, by its argument `most`."""
        return {}

    @cached_property
    def _server_pixels(self) -> dict[int | None, Tensor]:
        """A cache of the images that `server_images` returned, by its argument `most`. It is used only if the
        network has a frozen part, so that the images' features are found again without reading the images
        again."""
        return {}

    def message_bytes(self) -> int:
        """Returns the size in bytes of one model when it is sent."""
        return self.layout.length * self.pool.wide.itemsize


def evaluated_row(state: State) -> Tensor:
    """Returns the model [P + Q] that is evaluated and saved: the slow average over rounds if the run keeps
    one (federation.slow_average), otherwise the averaged model."""
    return state.memory.get(SLOW, state.average)


def _require_tensors(memory: Any, before: dict[str, Tensor], function: str) -> None:
    """Raises MethodError unless a method's memory is a dict of tensors by name, and those of ssfl (`OWN`) are
    still the same as `before`. `function` is the method's function that returned the memory."""
    wrong = memory
    if isinstance(memory, dict):
        others = [value for value in memory.values() if not isinstance(value, Tensor)]
        others += [name for name in memory if not isinstance(name, str)]
        if not others:
            for name in OWN:
                if memory.get(name) is not before.get(name):
                    raise MethodError(
                        f"{function} changed {name!r} in the memory, which ssfl uses itself: choose another "
                        "name for the method's tensor",
                        key=name,
                    )
            return
        wrong = others[0]
    raise MethodError(
        f"{function} put {in_words(wrong)} into the memory: it must be a dict of tensors by name, such as "
        "{'level': state.average.new_zeros(1)}",
        key="memory",
    )
