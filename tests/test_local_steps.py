"""Users that take different numbers of steps, and a server with a work of its own."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core.schedule import learning_rate
from ssfl.data import split
from ssfl.engines.work import Work
from ssfl.runs import assemble
from ssfl.simulate.plan import Owners
from ssfl.simulate.simulation import Simulation

Make = Callable[..., Config]
ENGINES = ("loop", "vmap")


def made(quick: Make, *settings: str) -> Simulation:
    return assemble.make(quick("method.name=alternate", "method.threshold=0.15", *settings))


def test_users_take_steps_by_their_images(quick: Make) -> None:
    sim = made(quick, "federation.local_epochs=1.5")
    steps = sim.plan.local_steps
    assert steps is not None
    assert steps.tolist() == [-(-3 * int(size) // 32) for size in sim.plan.users.sizes]
    work = sim.plan.users_work(1, sim.plan.cohort(1))
    assert work.steps == len(work.rates) == int(steps.max())
    assert work.taken is not None
    assert work.longest == int(work.taken.max())
    assert len(set(work.rates)) == 1  # one learning rate in a round
    assert sim.plan.rates(2)[0] != sim.plan.rates(0)[0]
    # passes follow each other: all images once before any comes again
    user = 0
    rounds = [sim.plan.users_work(round, sim.plan.cohort(round)) for round in range(2)]
    seen = torch.cat([one.batches[user, : int(steps[user])].flatten() for one in rounds])
    size = int(sim.plan.users.sizes[user])
    assert len(set(seen[:size].tolist())) == size
    assert len(set(seen[size : 2 * size].tolist())) == size


def test_a_users_images_do_not_depend_on_who_else_there_is(quick: Make) -> None:
    """A real site knows of its own images alone."""
    sim = made(quick, "federation.local_epochs=1")
    cohort, user = sim.plan.cohort(0), 3
    alone = [part if number == user else part[:0] for number, part in enumerate(sim.parts.users)]
    site = replace(sim.plan, users=Owners.of(alone, sim.device))
    at = cohort.users.index(user)
    here, there = site.users_work(2, cohort), sim.plan.users_work(2, cohort)
    assert here.taken is not None
    assert there.taken is not None
    count = int(there.taken[at])
    assert int(here.taken[at]) == count
    assert torch.equal(here.batches[at, :count], there.batches[at, :count])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_who_is_done_keeps_its_model(quick: Make, engine: str, norm: str) -> None:
    sim = made(quick, f"run.engine={engine}", "train.precision=float64", f"model.norm={norm}")
    work = sim.plan.users_work(0, sim.plan.cohort(0)).of(slice(0, 4))
    rows = sim.initial().average.repeat(4, 1)
    still = torch.zeros_like(rows[:, : sim.layout.weights])
    taken = torch.tensor([0, 1, 3, 2])
    trained = sim.engine.train(rows, still, replace(work, taken=taken, longest=3))
    for user, steps in enumerate(taken.tolist()):
        one = cut(work.of(slice(user, user + 1)), steps)
        if not steps:
            assert torch.equal(trained.rows[user], rows[user])
            assert not trained.momentum[user].any()
            assert trained.metrics["loss"][user] == 0
            continue
        alone = sim.engine.train(rows[:1], still[:1], one)
        assert torch.allclose(trained.rows[user], alone.rows[0], rtol=1e-10, atol=1e-12)
        assert torch.allclose(trained.momentum[user], alone.momentum[0], rtol=1e-8, atol=1e-12)
        for name, value in alone.metrics.items():
            assert float(trained.metrics[name][user]) == pytest.approx(float(value))
    assert trained.metrics["steps"].tolist() == taken.tolist()


def cut(work: Work, steps: int) -> Work:
    """The first steps of a user's work, as if there were no others."""
    return replace(work, batches=work.batches[:, :steps], rates=work.rates[:steps])


def test_the_server_may_have_its_own_batches_steps_and_rate(quick: Make) -> None:
    own = ["train.server_batch_size=7", "train.server_steps=5", "train.server_lr=0.5", "train.lr=0.1"]
    sim = made(quick, *own, "train.momentum_policy=server", "train.warmup=0")
    work = sim.plan.server_work(1)
    assert work.batches.shape == (1, 5, 7)
    assert work.rates == pytest.approx((5 * sim.plan.rates(1)[0],) * 5)
    # its order of images goes on from round to round
    seen = torch.cat([sim.plan.server_work(round).batches.flatten() for round in range(2)])
    assert len(set(seen[:50].tolist())) == 50
    state, (event, *_) = sim.play(sim.initial())
    assert state.momentum.shape == (1, sim.layout.weights)
    assert state.momentum.any()
    assert event["server_images"] == 35
    assert event["images"] == 10 * 3 * 16
    again, _ = sim.play(state)
    assert not torch.equal(again.momentum, state.momentum)


def test_annealing_is_pytorchs(quick: Make) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=0.03)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=8)
    for step in range(8):
        ours = learning_rate(step, base=0.03, steps=8, floor=0, annealing=True)
        assert ours == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    sim = made(quick, "train.schedule=annealing", "train.warmup=0")
    assert sim.plan.rates(2)[0] == pytest.approx(sim.config.train.lr / 2)


def test_semifl_as_published_in_miniature() -> None:
    small = ["data.name=digits", "split.users=10", "split.server_labels=50", "split.alpha=1",
             "model.name=small", "federation.participants=3", "federation.rounds=2",
             "federation.local_epochs=0.5", "train.server_batch_size=25", "train.server_steps=4",
             "method.threshold=0.1", "run.threads=1", "run.device=cpu", "run.engine=vmap"]  # fmt: skip
    whole = load_config("semifl-published")
    assert whole.federation.local_epochs == 5
    assert whole.train.server_steps == 5 * (whole.split.server_labels or 0) / 250
    sim = assemble.make(load_config("semifl-published", small))
    state, events = sim.initial(), []
    for _ in range(2):
        state, (event, *_) = sim.play(state)
        events.append(event)
    assert [event["server_images"] for event in events] == [100, 100]
    assert all(event["images"] % 10 == 0 for event in events)
    assert sum(event["images"] for event in events) > 0
    assert state.momentum.shape[0] == 11  # of every user and of the server
    assert sim.plan.rates(1)[0] == pytest.approx(0.015)


def test_a_capped_dirichlet_split_has_users_of_more_equal_sizes() -> None:
    labels = np.repeat(np.arange(10), 500)
    plain = split.dirichlet(labels, 20, 0.1, 100)
    capped = split.dirichlet(labels, 20, 0.1, 100, capped=True)
    assert sorted(np.concatenate([capped.server, *capped.users]).tolist()) == list(range(5000))
    assert max(map(len, capped.users)) < max(map(len, plain.users))
    # who had a fair share before a class has none of it
    for user in capped.users:
        counts = np.bincount(labels[np.asarray(user)], minlength=10)
        before = np.concatenate([[0], counts.cumsum()[:-1]])
        assert not counts[before >= 4900 / 20].any()
