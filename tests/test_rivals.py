"""The other methods of the paper's comparisons and the authors' ways, each by a step computed by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from hand_rounds import Adding, played, start, toy
from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.cohort import Cohort, draw_cohort
from ssfl.core.rows import write_row
from ssfl.data import split
from ssfl.engines.work import make_batch
from ssfl.federation import Look
from ssfl.methods import find
from ssfl.runs import assemble

Make = Callable[..., Config]
EVERYBODY = Cohort((0, 1), (0, 1), ((0,), (1,)), (0, 1), (0, 1))


def test_easgd_users_and_centre_give_way_to_each_other() -> None:
    # x = (10, 20) train to (11, 22); z = 14, a = 0.25
    sim = toy("easgd", "method.elasticity=0.25", "split.users=2")
    new, fed = played(sim, start([10, 20], 14), EVERYBODY, Adding([1, 2]))
    assert new.streams.flatten().tolist() == [11 - 0.25 * (11 - 14), 22 - 0.25 * (22 - 14)]
    assert new.average.item() == 14 + 0.25 * (11 - 14) + 0.25 * (22 - 14)
    assert fed.log.users is not None
    assert fed.log.users.norms.tolist() == [1, 2]


def test_overlap_sgd_pulls_to_the_mean_of_the_round_before() -> None:
    sim = toy("overlap-sgd", "method.elasticity=0.6", "split.users=2")
    new, _ = played(sim, start([10, 20], 14), EVERYBODY, Adding([1, 2]))
    # the anchor 14 is old; the new one is the mean after the pull, and is used in the next round
    assert new.streams.flatten().tolist() == pytest.approx([0.4 * 11 + 0.6 * 14, 0.4 * 22 + 0.6 * 14])
    assert new.average.item() == pytest.approx((12.8 + 17.2) / 2)
    later, _ = played(sim, new, EVERYBODY, Adding([0, 0]))
    assert later.streams[0].item() == pytest.approx(0.4 * 12.8 + 0.6 * 15.0)


@pytest.mark.parametrize("method", ["easgd", "overlap-sgd"])
def test_who_did_not_take_part_keeps_their_model(method: str) -> None:
    sim = toy(method, "method.elasticity=0.5", "split.users=2")
    alone = Cohort((1,), (1,), ((), (0,)), (1,), (0,))
    new, _ = played(sim, start([10, 20], 14), alone, Adding([2]))
    assert new.streams.flatten().tolist() == [10, 18]
    nobody = Cohort((1,), (), ((), ()), (), ())
    same, _ = played(sim, start([10, 20], 14), nobody, Adding([2]))
    assert same.streams.flatten().tolist() == [10, 20]
    assert (same.average.item(), same.round) == (14, 1)


@pytest.mark.parametrize("method", ["easgd", "overlap-sgd"])
def test_models_that_agree_stay_where_they_are(method: str) -> None:
    sim = toy(method, "method.elasticity=0.3", "split.users=3")
    cohort = Cohort((0, 1, 2), (0, 1, 2), ((0,), (1,), (2,)), (0, 1, 2), (0, 1, 2))
    new, _ = played(sim, start([3, 3, 3]), cohort, Adding([0, 0, 0]))
    assert new.streams.flatten().tolist() == pytest.approx([3, 3, 3])
    assert new.average.item() == pytest.approx(3)


@pytest.mark.parametrize(("method", "elasticity"), [("easgd", 0.9 / 10), ("overlap-sgd", 0.6)])
def test_a_run_with_models_of_their_own_goes_on_from_them(
    quick: Make, method: str, elasticity: float
) -> None:
    changes = [f"method.name={method}", "split.server_labels=0", "model.norm=group", "run.engine=loop"]
    sim = assemble.make(quick(*changes))
    said = assemble.make(quick(*changes, f"method.elasticity={elasticity}"))
    state, _ = sim.play(sim.initial())
    assert len(state.streams) == 10
    assert len({tuple(row[:50].tolist()) for row in state.streams}) == 10
    # the elasticity that was left out is the one that was said
    assert torch.equal(state.streams, said.play(said.initial())[0].streams)
    state, events = sim.play(state)
    assert "server_loss" not in events[0]


def test_data_sharing_gives_everybody_the_servers_images(quick: Make) -> None:
    sim = assemble.make(quick("method.name=data-sharing", "split.server_labels=50"))
    plain = assemble.make(quick("method.name=supervised", "split.server_labels=50"))
    for shared, own in zip(sim.parts.users, plain.parts.users, strict=True):
        assert sorted(shared) == sorted([*own, *sim.parts.server])
    batches = sim.plan.users_work(0, sim.plan.cohort(0)).batches
    assert set(sim.parts.server.tolist()) & set(batches.flatten().tolist())
    assert "server_loss" not in sim.play(sim.initial())[1][0]


def test_sharing_moves_nothing() -> None:
    parts = split.share(split.Parts(np.array([7, 9]), [np.array([1]), np.array([2, 3])]))
    assert [sorted(user.tolist()) for user in parts.users] == [[1, 7, 9], [2, 3, 7, 9]]
    assert parts.server.tolist() == [7, 9]


def test_fixmatch_is_one_model_with_both_losses_in_every_step(quick: Make) -> None:
    changes = ["federation.period=1", "train.precision=float64", "run.engine=loop", "train.nesterov=false"]
    more = ["split.users=1", "split.user_labels=50", "method.threshold=0.11", "train.warmup=0"]
    sim = assemble.make(quick("method.name=fixmatch", *changes, *more))
    start = sim.initial()
    state, events = sim.play(start)
    # by hand: the mean over all of CE(strong, argmax weak) where sure, plus CE of labelled images
    work = sim.plan.users_work(0, sim.plan.cohort(0))
    batch = make_batch(sim.pool, work, 0)
    assert batch.weak is not None
    assert batch.strong is not None
    assert batch.own is not None
    assert batch.own_labels is not None
    model = sim.model.train()
    write_row(model, sim.layout, start.average)
    with torch.no_grad():
        sure, label = model(batch.weak[0]).softmax(1).max(1)
    assert 0 < (sure >= 0.11).sum() <= len(sure)
    unlabelled = functional.cross_entropy(model(batch.strong[0]), label, reduction="none")
    labelled = functional.cross_entropy(model(batch.own[0]), batch.own_labels[0])
    loss = (unlabelled * (sure >= 0.11)).mean() + labelled
    model.zero_grad()
    loss.backward()
    train, rate = sim.config.train, work.rates[0]
    moved = torch.cat(
        [
            (p - rate * (p.grad + train.weight_decay * p)).flatten()
            for p in model.parameters()
            if p.grad is not None
        ]
    )
    assert events[0]["loss"] == pytest.approx(loss.item())
    assert torch.allclose(state.average[: sim.layout.weights], moved.detach(), atol=1e-12)
    assert torch.equal(state.momentum[0] != 0, moved.detach() != start.average[: sim.layout.weights])


def test_each_group_may_have_a_server_of_its_own() -> None:
    cohort = Cohort((0, 1), (0, 1), ((0,), (1,)), (0, 1))
    sim = toy("grouping", "federation.groups=2", "method.server_replicas=true", server=True)
    state = start([10, 20], 15)
    new, fed = played(sim, state, cohort, Adding([1, 2], [30, 50]))
    # replicas start from w_avg = 15: 45 and 65; group 1 = (45 + 11) / 2, group 2 = (65 + 22) / 2
    assert new.streams.flatten().tolist() == [28, 43.5]
    assert new.average.item() == 35.75
    assert fed.log.server is not None
    assert fed.log.server.norms.tolist() == [30, 50]
    nobody = Cohort((0, 1), (), ((), ()), ())
    new, _ = played(sim, state, nobody, Adding([], [30, 50]))
    assert new.streams.flatten().tolist() == [45, 65]


def test_replicas_have_batches_and_momentum_of_their_own(quick: Make) -> None:
    settings = ["method.name=grouping", "federation.groups=2", "method.server_replicas=true"]
    sim = assemble.make(quick(*settings, "train.momentum_policy=slot"))
    work = sim.plan.server_work(0)
    assert work.batches.shape[0] == 2
    assert not torch.equal(work.batches[0], work.batches[1])
    state, events = sim.play(sim.initial())
    assert len(state.momentum) == 10 + 2
    assert not torch.equal(state.momentum[-1], state.momentum[-2])
    assert events[0]["server_loss"] > 0


@pytest.mark.parametrize(
    ("users", "groups", "sizes"), [(47, 5, [10, 10, 10, 10, 7]), (10, 2, [5, 5]), (5, 2, [3, 2])]
)
def test_groups_filled_one_after_another(users: int, groups: int, sizes: list[int]) -> None:
    drawn = [
        draw_cohort(round, seed=1, users=users, participants=users, groups=groups, dropout=0.0, filled=True)
        for round in range(2)
    ]
    assert [len(group) for group in drawn[0].groups] == sizes
    assert drawn[0].groups != drawn[1].groups


def test_an_epochs_first_round_has_one_step_more_and_the_schedule_knows(quick: Make) -> None:
    # M / B / T = 96 / 16 / 3: two rounds make an epoch
    settings = ["federation.epoch_images=96", "federation.rounds=5", "federation.extra_step=true"]
    sim = assemble.make(quick(*settings, "train.cycles=0.5", "train.floor=0"))
    assert [len(sim.plan.rates(round)) for round in range(5)] == [4, 3, 4, 3, 4]
    rates = [rate for round in range(5) for rate in sim.plan.rates(round)]
    expected = [
        sim.config.train.lr * torch.tensor(step / 18 * torch.pi / 2).cos().item() for step in range(18)
    ]
    assert rates == pytest.approx(expected, abs=1e-6)
    work = [sim.plan.users_work(round, sim.plan.cohort(round)) for round in range(2)]
    assert [w.steps for w in work] == [4, 3]
    # nothing is skipped or seen twice between the rounds: the first 7 · 16 places in order
    owner = sim.plan.cohort(0).users[0]
    places = sim.engine.positions(
        draws.key(sim.config.run.seed, "batches"),
        torch.tensor([owner]),
        sim.plan.users.sizes[[owner]],
        0,
        7 * 16,
    )
    expected_images = sim.plan.users.at(torch.tensor([owner]), places)[0]
    together = torch.cat(
        [w.batches[list(sim.plan.cohort(r).users).index(owner)].flatten() for r, w in enumerate(work)]
    )
    assert torch.equal(together, expected_images)


def test_a_longer_horizon_uses_the_beginning_of_the_schedule(quick: Make) -> None:
    settings = ["train.cycles=0.5", "train.floor=0", "federation.rounds=4"]
    short = assemble.make(quick(*settings, "train.horizon=2"))
    long = assemble.make(quick("train.cycles=0.5", "train.floor=0", "federation.rounds=8"))
    assert [short.plan.rates(r) for r in range(4)] == [long.plan.rates(r) for r in range(4)]


def test_the_order_of_images_may_begin_anew_in_every_round(quick: Make) -> None:
    sim = assemble.make(quick("train.batches=restart"))
    rounds = [sim.plan.users_work(round, sim.plan.cohort(round)).batches for round in range(2)]
    for batches in rounds:  # a fresh permutation: no image twice while there are others
        assert len(set(batches[0].flatten().tolist())) == batches[0].numel()
    assert not torch.equal(rounds[0], rounds[1])


def test_cbafeds_server_joins_the_average_by_its_number_of_images() -> None:
    cohort = Cohort((0, 1), (0, 1), ((0, 1),), (0, 0), (0, 1))
    sim = toy("cbafed", "split.users=2", server=True)
    counts = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    report = {"counts": counts, "images": torch.tensor([3.0, 1.0], dtype=torch.float64)}
    memory = {"counts": torch.ones(2).double(), "stored": torch.zeros(0).double()}
    memory["rounds"] = torch.zeros(1, dtype=torch.int64)
    workers = Adding([1, 5], [30], weight=[3, 1], report=report)
    new, _ = played(sim, start([10], 10.0, **memory), cohort, workers)
    # users 11 and 15 weigh 3 and 1; the server trains the model that they were sent, and has 2 labels: 40
    assert workers.served == [[10]]
    assert new.average.item() == pytest.approx((3 * 11 + 1 * 15 + 2 * 40) / 6)
    assert new.streams[0].item() == new.average.item()
    assert new.memory["counts"].tolist() == [1 + 3, 1 + 1]
    # one confident image of a single user is one in three, and none at all leaves the server alone
    few = Adding([1, 5], [30], weight=[0, 1], report=report)
    new, _ = played(sim, start([10], 10.0, **memory), cohort, few)
    assert new.average.item() == pytest.approx((1 * 15 + 2 * 40) / 3)
    nobody = Adding([1, 5], [30], weight=[0, 0], report=report)
    new, _ = played(sim, start([10], 10.0, **memory), cohort, nobody)
    assert new.average.item() == 40


def looked(confidence: list[list[float]], taken: list[int] | None = None) -> Look:
    """Predictions for two classes in steps of two images each; the first class is the more probable."""
    first = torch.tensor(confidence).double()
    answers = torch.stack([first, 1 - first], -1)
    users, count = first.shape
    images = torch.arange(users * count).reshape(users, count // 2, 2)
    steps = None if taken is None else torch.tensor(taken)
    return Look(answers, images, torch.arange(users), {}, False, steps)


@pytest.mark.parametrize("name", ["semifl", "cbafed"])
def test_users_take_as_many_steps_as_confident_images_fill(name: str) -> None:
    method = find(name)(threshold=0.9)  # type: ignore[call-arg]
    sure = [[0.6, 0.95, 0.6, 0.6, 0.6, 0.6], [0.95, 0.6, 0.95, 0.6, 0.95, 0.6], [0.6] * 6, [0.95] * 6]
    made = method.label(looked(sure))
    assert made.steps.tolist() == [1, 2, 0, 3]
    assert (made.weight > 0).tolist() == [True, True, False, True]
    assert made.metrics["mask_rate"].tolist() == pytest.approx([1 / 6, 1 / 2, 0, 1])
    assert made.images[0, 0].tolist() == [1, 1]
    assert made.images[1].flatten().tolist()[:3] == [6, 8, 10]
    if name == "cbafed":
        assert made.weight.tolist() == [1, 3, 0, 6]
    # images of steps that a user does not take do not count
    made = method.label(looked(sure, taken=[1, 2, 3, 1]))
    assert made.steps.tolist() == [1, 1, 0, 1]
    assert made.metrics["mask_rate"].tolist() == pytest.approx([1 / 2, 1 / 2, 0, 1])


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_one_confident_image_is_one_step_of_semifl(quick: Make, engine: str) -> None:
    settings = ["method.name=semifl", f"run.engine={engine}", "train.precision=float64", "method.momentum=0"]
    sim = assemble.make(quick(*settings))
    state = sim.initial()
    work = sim.plan.users_work(0, sim.plan.cohort(0))
    rows = state.average.repeat(10, 1)
    confidence = sim.engine.predict(rows, work).amax(-1)
    best = torch.stack([confidence.flatten().topk(2).values]).mean()  # between the surest and the next
    sim = assemble.make(quick(*settings, f"method.threshold={float(best)}"))
    new, (event, *_) = sim.play(state)
    moved = torch.tensor(event["user_update_norm"])
    assert event["steps"] == pytest.approx(1 / 10)  # of ten users one took one step
    assert (moved > 0).sum() == 1
    assert event["images"] == 16
    # one step with a gradient of length 1 at most, besides weight decay
    rate = sim.plan.rates(0)[0]
    assert moved.max() <= 1.9 * rate * (1 + 5e-4 * state.average.norm()) + 1e-9
    assert new.round == 1
