"""Engines differ in speed alone. What equal means is in docs/design.md."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ssfl import methods
from ssfl.config.settings import Config
from ssfl.core.losses import Losses
from ssfl.core.rows import write_row
from ssfl.data import split
from ssfl.engines import buffers, vmap
from ssfl.federation import State, Step
from ssfl.methods import parts
from ssfl.methods.overlap_sgd import OverlapSgd
from ssfl.methods.server_only import ServerOnly
from ssfl.models.external import Factory
from ssfl.runs import assemble
from ssfl.simulate import scoring
from ssfl.simulate.plan import Owners
from ssfl.simulate.simulation import Simulation

Make = Callable[..., Config]


def unequal(sim: Simulation) -> Simulation:
    """The same simulation with users of 3 to 300 images."""
    owned = torch.cat([torch.from_numpy(user) for user in sim.parts.users])
    sizes = [3, 7, 40, 64, 90, 300, 120, 20, 33, 50][: len(sim.parts.users)]
    users = [part.numpy() for part in owned[: sum(sizes)].split(sizes)]
    parts = split.Parts(sim.parts.server, users, sim.parts.labelled)
    plan = replace(sim.plan, users=Owners.of(users, sim.device))
    return replace(sim, parts=parts, plan=plan)


def both(config: Config, model: Factory | None = None) -> list[Simulation]:
    return [
        unequal(assemble.make(replace(config, run=replace(config.run, engine=engine)), model))
        for engine in ("loop", "vmap")
    ]


def warmed(sim: Simulation, rounds: int = 8) -> State:
    """A state whose model is sure of some images and not of others: masks that mean something."""
    state = sim.initial()
    alone = replace(
        sim.config,
        method=ServerOnly(),
        federation=replace(sim.config.federation, period=8),
    )
    teacher = replace(sim, plan=replace(sim.plan, config=alone))
    for _ in range(rounds):
        state, _ = teacher.play(state)
    return replace(state, streams=state.average.repeat(len(state.streams), 1))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


CASES = {
    "group": [],
    "batch": ["model.norm=batch"],
    "batch, joint views": ["model.norm=batch", "method.views=joint"],
    "batch, teacher in training mode": ["model.norm=batch", "method.teacher_mode=train"],
    "none": ["model.norm=none", "train.lr=0.1", "method.threshold=0.5"],
    "streams": ["method.name=grouping", "federation.participants=7", "federation.groups=3"],
    "self-training": ["method.name=self-training", "method.threshold=0.8"],
    "supervised, kept per user": ["method.name=supervised", "train.momentum_policy=user"],
    "kept per slot, some lost": ["train.momentum_policy=slot", "federation.dropout=0.4"],
    "plain SGD": ["train.momentum=0", "train.nesterov=false", "train.lr=0.1", "method.threshold=0.4"],
    "labels at both": ["split.labels_at=both", "split.user_labels=40"],
    "labels at the users": ["split.labels_at=users", "split.user_labels=100", "method.threshold=0.5"],
    "server's statistics": ["model.norm=batch", "model.norm_statistics=server"],
    "in slices": ["run.users_at_once=3"],
    "the authors' ways": ["method.name=grouping", "federation.groups=3", "method.server_replicas=true",
                          "federation.group_sizes=filled", "federation.extra_step=true",
                          "train.momentum_policy=slot", "train.batches=restart",
                          "method.views=joint", "federation.epoch_images=96"],
    "SemiFL": ["method.name=semifl"],
    "(FL)²": ["method.name=fl2"],
    "FreeMatch": ["method.name=freematch"],
    "FedProx": ["method.name=fedprox", "method.proximal=0.5"],
    "RSCFed": ["method.name=rscfed", "federation.slow_average=0.5"],
    "CBAFed": ["method.name=cbafed", "method.residual=2", "method.threshold=0.6"],
    "RSCFed, BatchNorm and groups": ["method.name=rscfed", "model.norm=batch", "federation.groups=2",
                                     "federation.local_epochs=0.4", "method.consistency=1"],
    "anchored": ["method.name=anchored", "method.threshold=0.6"],
    "few classes": ["method.name=anchored", "method.threshold=0.6", "split.skew=1"],
    "gradients cut": ["method.name=fedprox", "train.clip=0.5", "method.proximal=0.5"],
    "private": ["privacy.clip=0.5", "privacy.noise=0.01"],
    "local epochs": ["federation.local_epochs=0.5", "model.norm=batch"],
    "local epochs, momentum kept": ["federation.local_epochs=0.4", "train.momentum_policy=user",
                                    "train.batches=restart", "method.name=anchored", "run.users_at_once=3"],
    "local epochs, labels at users": ["federation.local_epochs=0.3", "split.labels_at=both",
                                      "split.user_labels=40"],
    "another server": ["train.server_batch_size=24", "train.server_steps=5", "train.server_lr=0.05",
                       "train.momentum_policy=server", "train.schedule=annealing"],
    "SemiFL, local epochs": ["method.name=semifl", "federation.local_epochs=0.5", "method.threshold=0.6"],
    "models of their own": ["method.name=overlap-sgd", "split.server_labels=0", "model.norm=group"],
}  # fmt: skip


@dataclass(frozen=True)
class Apart(OverlapSgd):
    """OverlapSGD of users that do not know their labels."""

    def needs(self) -> tuple[str, ...]:
        return ("models",)

    def uses(self) -> tuple[str, ...]:
        return ("weak", "strong")

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, 0.3)


@pytest.mark.parametrize("case", CASES)
def test_float64_over_five_rounds(quick: Make, case: str) -> None:
    start_from = ["train.precision=float64", "federation.rounds=30", "federation.participants=5"]
    settings = ["method.name=alternate", *CASES[case]]
    name = [setting for setting in settings if setting.startswith("method.name=")][-1]
    if hasattr(methods.find(name.partition("=")[2]), "threshold"):
        start_from.append("method.threshold=0.6")
    config = quick(*start_from, *settings)
    if case == "models of their own":
        config = replace(config, method=Apart())
    sims = both(config)
    start = warmed(sims[0]) if sims[0].has_server else sims[0].initial()
    states, masks = [start, start], []
    for _ in range(5):
        told = []
        for i, sim in enumerate(sims):
            states[i], events = sim.play(states[i])
            told.append(events[0])
        assert told[0].get("user_mask_rate") == told[1].get("user_mask_rate")
        assert told[0]["returned"] == told[1]["returned"]
        masks.append(told[0].get("mask_rate", 0.5))
        for name in ("streams", "average"):
            assert relative(getattr(states[1], name), getattr(states[0], name)) < 1e-6
    if not any(words in case for words in ("labels at the users", "supervised", "RSCFed")):
        assert 0.2 < sum(masks) / 5 < 0.95
    if len(states[0].momentum):
        assert relative(states[1].momentum, states[0].momentum) < 1e-5


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_float32_over_one_step(quick: Make, norm: str) -> None:
    config = quick(f"model.norm={norm}", "federation.period=1", "method.threshold=0.5", "train.lr=0.02",
                   "federation.rounds=60")  # fmt: skip
    sims = both(config)
    start = warmed(sims[0], 12)
    (one, told), (two, _) = (sim.play(start) for sim in sims)
    assert 0.2 < told[0]["mask_rate"] < 0.95
    assert relative(two.average, one.average) < 1e-6
    # and the step itself, whose last digits are lost in the sum with the weights
    assert relative(two.average - start.average, one.average - start.average) < 1e-4


@pytest.mark.slow
def test_dropout_masks_are_the_same(quick: Make, patterns: Path) -> None:
    config = quick(
        f"data.path={patterns}", "split.users=4", "split.server_labels=16", "train.precision=float64",
        "model.name=cnn", "federation.period=2", "method.name=alternate", "method.teacher_mode=train",
        "method.threshold=0.6", "train.lr=0.02", "run.users_at_once=4",
    )  # fmt: skip
    sims = [
        assemble.make(replace(config, run=replace(config.run, engine=engine))) for engine in ("loop", "vmap")
    ]
    start = warmed(sims[0], 3)
    states = [start, start]
    for _ in range(2):
        told = []
        for i, sim in enumerate(sims):
            states[i], events = sim.play(states[i])
            told.append(events[0]["user_mask_rate"])
        assert told[0] == told[1]
        assert relative(states[1].average, states[0].average) < 1e-6


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_full_data_gradients(quick: Make, norm: str) -> None:
    sims = both(
        quick("train.precision=float64", f"model.norm={norm}", "run.diversity_every=1",
              "method.threshold=0.7", "method.name=grouping", "federation.rounds=20")
    )  # fmt: skip
    start = warmed(sims[0])
    events = [sim.play(start)[1] for sim in sims]
    one, two = (next(e for e in told if e["event"] == "diversity") for told in events)
    assert len(one) == 16 + 2
    for name, values in one.items():
        if isinstance(values, dict):
            assert two[name] == pytest.approx(values, rel=1e-6)
            assert all(value is not None for value in values.values())


def test_the_full_data_gradient_is_autograds(quick: Make) -> None:
    """Users' gradients against one plain backward pass over all of a user's images at once."""
    sim = unequal(
        assemble.make(quick("train.precision=float64", "method.name=supervised", "model.norm=none"))
    )
    state = sim.initial()
    who = torch.tensor([2, 5])
    work = sim.plan.users_work(0, replace(sim.plan.cohort(0), users=(2, 5), streams=(0, 0)))
    sizes = sim.plan.users.sizes[who]
    steps = -(-int(sizes.max()) // 16)
    places = torch.arange(steps * 16) % sizes[:, None]
    work = replace(work, batches=sim.plan.users.at(who, places).reshape(2, steps, 16))
    found = sim.engine.gradients(state.streams[[0, 0]], work, sizes)

    from ssfl.core.rows import write_row
    from ssfl.engines.work import make_batch

    for place, size in enumerate(sizes.tolist()):
        write_row(sim.model, sim.layout, state.average)
        sim.model.zero_grad()
        weak = [make_batch(sim.pool, work, step).weak for step in range(steps)]
        views = torch.cat([view[place] for view in weak if view is not None])[:size]
        labels = sim.pool.labels[work.batches[place].flatten()[:size]]
        torch.nn.functional.cross_entropy(sim.model(views), labels).backward()
        expected = torch.cat([p.grad.flatten() for p in sim.model.parameters() if p.grad is not None])
        assert relative(found[place], expected) < 1e-9


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_same_engine_is_bit_identical(quick: Make, engine: str) -> None:
    rows = []
    for _ in range(2):
        sim = assemble.make(quick(f"run.engine={engine}"))
        state = sim.initial()
        for _ in range(3):
            state, _ = sim.play(state)
        rows.append(state.average)
    assert torch.equal(rows[0], rows[1])


def with_join(joined: bool, *arguments: Any, **options: Any) -> buffers.StepBuffers:
    return buffers.make_buffers(*arguments, **options | {"join": joined})


@pytest.mark.parametrize(
    "settings",
    [
        ["model.norm=batch", "method.name=fedprox", "federation.dropout=0.4"],  # uses what it received
        ["model.norm=group", "method.name=semifl", "federation.local_epochs=0.5", "run.users_at_once=3"],
        ["method.name=alternate", "train.clip=1"],
        ["method.name=fedmatch"],
    ],
)
def test_joined_weight_vectors_change_nothing(
    quick: Make, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the vectors of all models lie in common memory."""
    rows = []
    for joined in (False, True):
        monkeypatch.setattr(vmap, "make_buffers", partial(with_join, joined))
        sim = unequal(assemble.make(quick("run.engine=vmap", "train.precision=float64", *settings)))
        state = warmed(sim)
        for _ in range(3):
            state, _ = sim.play(state)
        rows.append(state.average)
    assert torch.equal(*rows)


def test_the_engines_evaluate_images_without_augmentation(
    quick: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU does in rounds whose method looks at the server's labels. Batches need not be full."""
    monkeypatch.setattr(scoring, "at_once", lambda shape: 10)
    for sim in both(quick("model.norm=batch")):
        row, places = warmed(sim, 1).average, torch.arange(5, 42)
        found = sim.engine_probabilities(row, places)
        write_row(sim.model, sim.layout, row)
        expected = scoring.logits(sim.model, sim.pool, sim.pool.images[places]).softmax(1)
        assert torch.allclose(found, expected, atol=1e-6)
        labels = sim.pool.labels[places]
        ours = scoring.score_of_logits(found.log(), labels, 10)
        theirs = scoring.score(sim.model, sim.pool, sim.pool.images[places], labels, 10)
        assert ours.accuracy == theirs.accuracy
        assert ours.per_class == theirs.per_class
        assert abs(ours.loss - theirs.loss) < 1e-5
