"""The rivals, each rule by numbers computed by hand."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from hand_rounds import Adding, column, played, toy
from hand_rounds import start as starting
from ssfl.config.loading import from_dict
from ssfl.config.settings import Config
from ssfl.core import draws, schedule, thresholds
from ssfl.core.cohort import Cohort
from ssfl.core.rows import write_row
from ssfl.engines import local
from ssfl.engines.work import Work, make_batch
from ssfl.errors import ConfigError
from ssfl.federation import Labels, Look, State
from ssfl.methods import METHODS, find, fl2, parts
from ssfl.methods.anchored import lr_scales
from ssfl.methods.rscfed import RscFed
from ssfl.runs import assemble
from ssfl.simulate.simulation import Simulation

Make = Callable[..., Config]
ALONE = ["split.users=1", "split.server_labels=0", "train.precision=float64", "run.engine=loop",
         "train.momentum=0", "train.nesterov=false", "train.weight_decay=0",
         "federation.head_start=0"]  # fmt: skip
LOW = "method.threshold=0.105"


def answers(*rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


SAID = answers([[0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.8, 0.1, 0.1]])


def test_free_thresholds_follow_confidence_and_expectation() -> None:
    # mean confidence (.9 + .7 + .6 + .8) / 4 = .75; expected classes .65, .25, .1
    found = thresholds.free(SAID)
    assert found[0].tolist() == pytest.approx([0.75, 0.75 * 0.25 / 0.65, 0.75 * 0.1 / 0.65])


def test_flex_thresholds_fall_for_classes_that_lag() -> None:
    # at τ = .6 three images are sure of class 0 and one of class 1: β = 1, 1/3, 0
    found = thresholds.flexible(SAID, 0.6)
    assert found[0].tolist() == pytest.approx([0.6, 0.6 * (1 / 3) / (2 - 1 / 3), 0])
    # at τ = .85 one is sure and three are not: warm up, β = 1/3, 0, 0
    found = thresholds.flexible(SAID, 0.85)
    assert found[0].tolist() == pytest.approx([0.85 * (1 / 3) / (2 - 1 / 3), 0, 0])


def test_balanced_thresholds_rise_with_a_classs_share() -> None:
    counts = torch.tensor([[6.0, 3.0, 1.0]], dtype=torch.float64)
    part = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64) * 3 / 10  # three classes, as if of ten
    found = thresholds.balanced(SAID, 0.84, counts, 0.95)
    assert found[0].tolist() == pytest.approx((part + 0.84 - part.std()).tolist())
    assert thresholds.balanced(SAID, 0.94, counts, 0.95)[0, 0] == 0.95
    assert thresholds.balanced(SAID, 0.94, counts, 0.9)[0, 0] == 0.9
    many = torch.full((1, 1, 47), 1 / 47, dtype=torch.float64)
    even = thresholds.balanced(many, 0.84, torch.ones(1, 47), 0.95)
    assert even.tolist() == [pytest.approx([0.94] * 47)]
    fixed = thresholds.fixed(SAID, 0.84)
    assert torch.equal(thresholds.balanced(SAID, 0.84, counts * 0, 0.95), fixed)


def look(said: torch.Tensor, images: torch.Tensor | None = None) -> Look:
    users = len(said)
    if images is None:
        images = torch.arange(100, 100 + 4 * users).reshape(users, 2, 2)
    return Look(said, images, torch.arange(users), {}, False)


def test_given_labels_are_those_of_the_received_model() -> None:
    sure = parts.confident(look(SAID), torch.full((1, 3), 0.75, dtype=torch.float64))
    made = parts.labelled(look(SAID), sure)
    assert made.tensors["labels"].tolist() == [[[0, 0], [1, 0]]]
    assert made.tensors["mask"].tolist() == [[[1, 0], [0, 1]]]
    assert sure.tolist() == [[True, False, False, True]]
    assert torch.equal(sure, parts.confident(look(SAID), 0.75))
    assert made.images.tolist() == [[[100, 101], [102, 103]]]
    assert (made.weight, made.lr_scale, made.update_scale, made.report, made.metrics) == (
        None,
        None,
        None,
        {},
        {},
    )


def test_an_image_that_got_a_label_twice_counts_once() -> None:
    images = torch.tensor([[7, 7, 8, 9], [3, 4, 5, 6]])
    sure = torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert parts.distinct(images, sure).tolist() == [2, 4]


def test_full_batches_hold_sure_images_alone_over_again() -> None:
    seen = look(torch.cat([SAID, SAID * 0.5]))
    sure = parts.confident(seen, 0.75)
    numbers = torch.arange(8).reshape(2, 4)
    made = parts.labelled(seen, sure, fill=True, number=numbers)
    assert made.images[0].tolist() == [[100, 103], [100, 103]]
    assert made.tensors["labels"][0].tolist() == [[0, 0], [0, 0]]
    assert made.tensors["mask"][0].tolist() == [[1, 1], [1, 1]]
    assert made.tensors["number"][0].tolist() == [[0, 3], [0, 3]]  # what belongs to an image goes with it
    assert not made.tensors["mask"][1].any()  # the other user is sure of nothing
    assert sure.any(1).tolist() == [True, False]
    assert made.weight is not None
    assert made.weight.tolist() == [1, 0]
    assert made.metrics["mask_rate"].tolist() == [0.5, 0]


def test_mixtures_take_any_image_with_its_own_label() -> None:
    many = torch.rand(3, 40, 5, dtype=torch.float64).softmax(-1)
    batches = torch.arange(120).reshape(3, 4, 10)
    seen = look(many, batches)
    made = parts.mixed(parts.labelled(seen, parts.confident(seen, 0.9)), seen, 0.75)
    label = dict(zip(batches.flatten().tolist(), many.argmax(-1).flatten().tolist(), strict=True))
    for user in range(3):
        for image, said in zip(
            made.extra_images["partner"][user].flatten(),
            made.tensors["partner_labels"][user].flatten(),
            strict=True,
        ):
            assert 40 * user <= int(image) < 40 * (user + 1)
            assert label[int(image)] == int(said)
    assert made.tensors["share"].shape == (3, 4)
    assert len(set(made.tensors["share"].flatten().tolist())) > 8


def test_mixing_shares_are_of_the_beta_distribution() -> None:
    table = torch.from_numpy(parts._quantiles(0.75))
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1))
    assert table.mean().item() == pytest.approx(0.5)
    assert table.var().item() == pytest.approx(1 / (4 * 2.5), rel=1e-2)


def labels_of(sim: Simulation, rows: torch.Tensor, work: Work) -> Labels:
    return local.made_labels(sim.engine, sim.method, rows, work)


def one_step(quick: Make, *more: str) -> tuple[Simulation, State, State, Work]:
    """A user alone: the simulation, before, after one round, and the labelled work."""
    sim = assemble.make(quick(*ALONE, *more))
    start = sim.initial()
    new, _ = sim.play(start)
    work = sim.plan.users_work(0, sim.plan.cohort(0))
    if sim.method.label is not None:
        work = work.with_labels(labels_of(sim, start.average[None], work))
    return sim, start, new, work


def moved(sim: Simulation, start: State, rate: float) -> torch.Tensor:
    """Where one step of plain SGD leads, from the model's gradients."""
    found = torch.cat([p.grad.flatten() for p in sim.model.parameters() if p.grad is not None])
    return start.average[: sim.layout.weights] - rate * cut(found)


def cut(gradient: torch.Tensor) -> torch.Tensor:
    """At most of length 1, as SemiFL's and (FL)²'s are; PyTorch divides by a little more."""
    length = float(gradient.norm())
    assert length > 1
    return gradient / (length + 1e-6)


def test_semifl_step(quick: Make) -> None:
    sim, start, new, looked = one_step(quick, "method.name=semifl", LOW, "federation.period=1")
    batch = make_batch(sim.pool, looked, 0)
    assert batch.weak is not None
    assert batch.strong is not None
    write_row(sim.model, sim.layout, start.average)
    model, share = sim.model.train(), float(batch.tensors["share"][0])
    label, other = batch.tensors["labels"][0], batch.tensors["partner_labels"][0]
    mixed = model(share * batch.weak[0] + (1 - share) * batch.tensors["partner"][0])
    loss = functional.cross_entropy(model(batch.strong[0]), label)
    loss = loss + share * functional.cross_entropy(mixed, label)
    loss = loss + (1 - share) * functional.cross_entropy(mixed, other)
    model.zero_grad()
    loss.backward()
    assert torch.allclose(new.average[: sim.layout.weights], moved(sim, start, looked.rates[0]), atol=1e-12)


def test_fl2_step(quick: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ["method.name=fl2", "federation.period=1"]
    sim, start, _, looked = one_step(quick, *name)
    said = sim.engine.predict(start.average[None], looked)
    monkeypatch.setattr(fl2, "CERTAIN", said.amax(-1).median().item())
    sim, start, new, looked = one_step(quick, *name)
    batch = make_batch(sim.pool, looked, 0)
    assert batch.strong is not None
    label, sure = batch.tensors["labels"][0], batch.tensors["certain"][0]
    assert 0 < sure.sum() < len(sure)
    write_row(sim.model, sim.layout, start.average)
    model = sim.model.train()
    weights = list(model.parameters())
    each = functional.cross_entropy(model(batch.strong[0]), label, reduction="none")
    slopes = torch.autograd.grad((each * sure).mean(), weights, retain_graph=True)
    plain = torch.autograd.grad(each.mean(), weights)
    said = model(batch.strong[0]).log_softmax(1).detach()
    reach = [
        w.detach().abs() + 0.01 if "weight" in n else w.new_ones(()) for n, w in model.named_parameters()
    ]
    length = sum((r * g).square().sum() for r, g in zip(reach, slopes, strict=True)) ** 0.5
    with torch.no_grad():
        for weight, r, slope in zip(weights, reach, slopes, strict=True):
            weight.add_(r.square() * slope, alpha=0.1 / float(length))
    says = model(batch.strong[0]).log_softmax(1)
    apart = functional.kl_div(says, said, reduction="none", log_target=True).sum(1)
    around = torch.autograd.grad((apart * sure).mean(), weights)
    total = torch.cat([(a + b).flatten() for a, b in zip(plain, around, strict=True)])
    expected = start.average[: sim.layout.weights] - looked.rates[0] * cut(total)
    assert torch.allclose(new.average[: sim.layout.weights], expected, atol=1e-12)


def test_looking_around_the_weights_leaves_running_statistics_alone(
    quick: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fl2, "CERTAIN", 0.0)
    name = ["method.name=fl2", "federation.period=1", "model.norm=batch"]
    sim, start, new, _ = one_step(quick, *name)
    flat = one_step(quick, *name, "method.sharpness=0")[2]
    count = sim.layout.weights
    assert not torch.equal(new.average[:count], flat.average[:count])
    assert not torch.equal(new.average[count:], start.average[count:])
    assert torch.equal(new.average[count:], flat.average[count:])


def test_fedprox_step(quick: Make) -> None:
    name = ["method.name=fedprox", LOW, "method.proximal=2", "federation.period=2"]
    sim, start, new, _ = one_step(quick, *name)
    free, _, other, _ = one_step(quick, *name, "method.proximal=0")
    assert not torch.equal(new.average, other.average)
    # the first step is free of the pull; the second is drawn back by μ times what the first one went
    one, _, first, _ = one_step(quick, *name, "federation.period=1")
    gone = first.average - start.average
    assert free.plan.rates(0)[0] == one.plan.rates(0)[0]
    pulled = other.average - sim.plan.rates(0)[1] * 2 * gone
    assert torch.allclose(new.average, pulled, atol=1e-9)


def test_distance_reweighted_average_by_hand() -> None:
    # two users of 100 images at 0 and one of 200 at 4, in two layers: the plain average is 2, everybody is
    # 2 + 2 away, and weights are n · exp(-β · d / n)
    rows = torch.tensor([[0.0, 0.0], [0.0, 0.0], [4.0, 4.0]], dtype=torch.float64) / 1000
    counts = torch.tensor([100, 100, 200])
    small, large = (n * torch.tensor(-1e4 * 0.004 / n).exp().item() for n in (100, 200))
    expected = large * 0.004 / (2 * small + large)
    assert RscFed().by_distance(rows, counts, [1, 1]).tolist() == pytest.approx([expected] * 2)


def test_the_server_has_most_of_the_weight_in_its_half_by_hand() -> None:
    # a user of 100 images at 0 and the server with 50 at 0.7, in one tensor: the server counts six times in
    # the mean model, 0.7 * 300 / 400, and once more six times in the average
    rows = torch.tensor([[0.0], [0.7]], dtype=torch.float64)
    middle = 0.7 * 300 / 400
    user = 100 * math.exp(-100 * middle / 100)
    server = 36 * 50 * math.exp(-100 * (0.7 - middle) / 50)
    found = RscFed().by_distance(rows, torch.tensor([100, 50]), [1], with_server=True)
    assert found.item() == pytest.approx(0.7 * server / (user + server))


def test_the_server_is_drawn_into_halves_like_a_user() -> None:
    rows, counts = torch.eye(10, dtype=torch.float64), torch.full((10,), 10**9)
    method = RscFed(consensus=1, server_factor=2.0)
    drawn = 0
    for key in range(60):
        shares = method.sub_consensus(rows, counts, [10], torch.tensor(key), with_server=True)
        assert (shares > 1e-6).sum() == 5
        # with the server there are four users of weight 1 and the server with 2 times 2
        expected = [0.125] * 4 + [0.5] if shares[-1] > 0.3 else [0.2] * 5
        assert sorted(shares.tolist())[-5:] == pytest.approx(expected, rel=1e-4)
        drawn += bool(shares[-1] > 0.3)
    assert 15 < drawn < 45


def test_rscfeds_server_trains_beside_the_users() -> None:
    sim = toy("rscfed", "split.users=2", "method.scale=0", "method.server_scale=0", server=True)
    workers = Adding([2, 5], [30])
    new, fed = played(sim, starting([10], 11.0), PAIR, workers)
    assert workers.served == [[11]]
    # users are at 12 and 15 with 100 images each; the server is at 41, and its two images count 36 times
    rows, counts = torch.tensor([[12.0], [15.0], [41.0]]), torch.tensor([100, 100, 72])
    averages = []
    for turn in range(3):
        order = draws.fold(draws.fold(fed.key("consensus"), turn), torch.arange(3)).argsort()
        half = order[:2]  # two of three
        averages.append(float((counts[half, None] * rows[half]).sum() / counts[half].sum()))
    assert new.average.item() == pytest.approx(sum(averages) / 3)
    assert new.streams.tolist() == [new.average.tolist()]
    nobody = Cohort((0, 1), (), ((),), (), ())
    new, _ = played(sim, starting([10], 11.0), nobody, workers)
    assert new.average.item() == 41


def test_rscfed_step(quick: Make) -> None:
    """The loss of the authors' code: the squared distance to the teacher's sharpened prediction."""
    settings = ["method.name=rscfed", "federation.period=1", "method.consistency=3"]
    sim, start, new, looked = one_step(quick, *settings)
    batch = make_batch(sim.pool, looked, 0)
    taught = make_batch(sim.pool, replace(looked, views=("weak",)), 0).weak
    assert taught is not None
    student = batch.tensors["view"][0]
    assert not torch.equal(student, taught[0])
    write_row(sim.model, sim.layout, start.average)
    with torch.no_grad():
        target = sim.model.eval()(taught[0]).softmax(1) ** 2
        target = target / target.sum(1, keepdim=True)
    squared = (sim.model.train()(student).softmax(1) - target) ** 2
    loss = 3 * squared.sum() / len(student)
    sim.model.zero_grad()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in sim.model.parameters() if p.grad is not None])
    assert gradient.norm() < 5  # so it is not clipped
    expected = start.average[: sim.layout.weights] - looked.rates[0] * gradient
    assert torch.allclose(new.average[: sim.layout.weights], expected, atol=1e-12)


def test_every_image_counts_in_rscfed(quick: Make) -> None:
    sim = assemble.make(quick("method.name=rscfed", "federation.head_start=0"))
    _, (event, *_) = sim.play(sim.initial())
    assert event["mask_rate"] == 1
    assert event["pseudo_accuracy"] < 1


def test_sub_consensus_is_a_mean_of_halves() -> None:
    rows = torch.rand(10, 6, dtype=torch.float64)
    counts = torch.full((10,), 10**9)  # so many images that distance does not count: plain means of five
    found = RscFed().sub_consensus(rows, counts, [2, 4], torch.tensor(5))
    assert rows.min() < found.min()
    assert not torch.allclose(found, rows.mean(0))
    shares = RscFed().sub_consensus(torch.eye(10).double(), counts, [10], torch.tensor(5))
    drawn = (15 * shares).round()  # three times five of ten
    assert torch.allclose(15 * shares, drawn)
    assert drawn.sum() == 15
    assert drawn.max() <= 3
    assert torch.allclose(RscFed().sub_consensus(rows[:1], counts[:1], [6], torch.tensor(5)), rows[0])


PAIR = Cohort((0, 1), (0, 1), ((0, 1),), (0, 0), (0, 1))


@pytest.mark.parametrize("name", ["anchored", "semifl", "fl2"])
def test_server_momentum_goes_on(name: str) -> None:
    sim = toy(name, "method.momentum=0.5", "split.server_labels=0", "split.users=2")
    state = starting([10], velocity=column(0), best=torch.zeros(1))
    one, _ = played(sim, state, PAIR, Adding([1, 3]))
    two, _ = played(sim, one, PAIR, Adding([4, 4]))
    # moves by 2, then by 4 and half of the 2
    assert [one.average.item(), two.average.item()] == [12, 17]
    assert two.memory["velocity"].item() == 5


RIVALS = ["semifl", "fl2", "rscfed", "cbafed", "fedprox", "flexmatch", "freematch"]


BESIDE = ("rscfed", "cbafed")
"""Rivals whose server trains at the same time as the users."""


@pytest.mark.parametrize("name", [*(name for name in RIVALS if name not in BESIDE), "alternate", "fedmatch"])
def test_the_server_has_the_last_word(name: str) -> None:
    sim = toy(name, "split.users=2", server=True)
    memory = {"velocity": column(0), "counts": torch.ones(2), "stored": torch.zeros(0), "last": column(0, 0)}
    workers = Adding([2, 2], [30], report={"counts": torch.ones(2, 2)})
    new, _ = played(sim, starting([10], 10.0, **memory), PAIR, workers)
    assert workers.served == [[12]]
    assert new.average.tolist() == [42]
    assert new.streams.tolist() == [[42]]


def test_stretching_moves_weights_further_and_leaves_statistics() -> None:
    sent, rows = torch.tensor([[1.0, 2.0, 7.0]]), torch.tensor([[1.5, 1.0, 9.0]])
    assert local.scaled(sent, rows, 2, torch.tensor([4.0])).tolist() == [[3.0, -2.0, 9.0]]
    assert local.scaled(sent, rows, 2, None) is rows


def test_who_has_few_classes_takes_short_steps() -> None:
    rows = [[5] * 10, [7] * 2 + [0] * 8, [9] + [0] * 9, [0] * 10, [9, 3] + [0] * 8, [0] * 7 + [6] * 3]
    images = torch.tensor([50, 14, 9, 0, 4, 3])
    mixed = 4 / 3**0.75  # e to the entropy of (3/4, 1/4)
    expected = [1, 0.2**1.5, (1 / 9) ** 1.5, 1, (mixed / 4) ** 1.5, 1]  # four images could be of four classes
    assert lr_scales(torch.tensor(rows).double(), images).tolist() == pytest.approx(expected, abs=1 / 8192)
    one = lr_scales(torch.tensor([[60.0] + [0.0] * 9]), torch.tensor([60]))
    assert one.item() == pytest.approx(1 / 30, abs=1 / 8192)


def test_different_images_are_counted_once() -> None:
    images = torch.tensor([[4, 0, 4, 9, 0], [1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [0, 0, 1, 1, 2]])
    chosen = torch.tensor([[1, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]) > 0
    assert parts.distinct(images, chosen).tolist() == [2, 0, 1, 3]


def test_a_paced_step_is_a_part_of_a_full_one_and_counts_more(quick: Make) -> None:
    """With one step of plain SGD a user's whole update is its pace times its reach of the full one."""
    sets = ["train.precision=float64", "train.momentum=0", "train.nesterov=false", "train.weight_decay=0",
            "run.engine=loop", "method.threshold=0.11", "federation.period=1", "split.skew=1",
            "federation.participants=1"]  # fmt: skip
    moved = {}
    for pace in ("full", "classes"):
        sim = assemble.make(quick(*sets, "split.server_labels=0", "method.guard=false",
                                  "method.momentum=0", f"method.pace={pace}"))  # fmt: skip
        start = sim.initial()
        moved[pace] = sim.play(start)[0].average - start.average
    looked = labels_of(sim, start.average[None], sim.plan.prepare(0)[1])
    assert looked.lr_scale is not None
    assert looked.update_scale is not None
    share = float(looked.lr_scale)
    assert 1 / 30 <= share < 0.5
    reach = float(looked.update_scale)
    assert reach == pytest.approx(share ** (-2 / 3), abs=1 / 8192)
    assert float(moved["full"].norm()) > 0
    assert torch.allclose(moved["classes"], share * reach * moved["full"], rtol=1e-9, atol=1e-14)


def test_a_users_pace_does_not_depend_on_who_else_trains(quick: Make) -> None:
    """A site looks at itself alone, a simulation at everybody at once, and both end in the same bytes."""
    sim = assemble.make(quick("split.users=20", "federation.participants=20", "method.threshold=0.11"))
    rows = sim.initial().average.expand(20, -1)
    work = sim.plan.prepare(0)[1]
    together = labels_of(sim, rows, work)
    assert together.lr_scale is not None
    assert together.update_scale is not None
    assert len(together.lr_scale.unique()) > 5
    for user in range(20):
        own = slice(user, user + 1)
        alone = labels_of(sim, rows[own], work.of(own))
        assert torch.equal(alone.lr_scale, together.lr_scale[own])  # type: ignore[arg-type]
        assert torch.equal(alone.update_scale, together.update_scale[own])  # type: ignore[arg-type]


def test_users_with_labels_of_their_own_keep_their_pace(quick: Make) -> None:
    sim = assemble.make(quick("split.labels_at=both", "split.user_labels=50", "method.threshold=0.11"))
    looked = labels_of(sim, sim.initial().average.expand(10, -1), sim.plan.prepare(0)[1])
    assert looked.lr_scale is None
    assert looked.update_scale is None


@pytest.mark.parametrize("name", ["semifl", "fl2"])
def test_users_weigh_what_they_are_told(name: str) -> None:
    sim = toy(name, "method.momentum=0", "split.server_labels=0", "split.users=2")

    def after(*weights: float) -> float:
        return played(sim, starting([10]), PAIR, Adding([1, 5], weight=weights))[0].average.item()

    assert after(1, 3) == 14
    assert after(0, 2) == 15
    assert after(0, 0) == 10  # where all weigh nothing, it is a round without users


def test_where_batches_are_filled_the_mask_rate_is_still_the_share_of_images(quick: Make) -> None:
    sim = assemble.make(quick("method.name=semifl", "method.threshold=0.13"))
    state = sim.initial()
    work = sim.plan.prepare(0)[1]
    rows = state.streams[:1].expand(len(work.batches), -1)
    sure = sim.engine.predict(rows, work).amax(-1) >= 0.13
    event = sim.play(state)[1][0]
    assert event["user_mask_rate"] == pytest.approx(sure.to(rows.dtype).mean(1).tolist())
    assert 0 < event["mask_rate"] < 1


def test_where_no_user_is_sure_of_an_image_the_server_trains_as_if_none_had_come(quick: Make) -> None:
    settings = ("method.name=semifl", "method.threshold=1.0", "federation.rounds=20")
    sim, alone = (assemble.make(quick(*settings, *more)) for more in ((), ("federation.head_start=0.1",)))
    state = sim.initial()
    for _ in range(2):
        new, events = sim.play(state)
        without, told = alone.play(state)
        assert events[0]["mask_rate"] == 0
        assert not told[0]["returned"]
        assert torch.equal(new.average, without.average)
        assert torch.equal(new.memory["velocity"], torch.zeros_like(new.memory["velocity"]))
        state = new


@pytest.mark.parametrize("policy", ["user", "slot"])
def test_who_is_sure_of_no_image_leaves_no_trace_in_momentum(quick: Make, policy: str) -> None:
    settings = ("method.name=cbafed", "method.threshold=1.0", "method.highest=1.0", "method.residual=2",
                "federation.head_start=0", f"train.momentum_policy={policy}")  # fmt: skip
    sim = assemble.make(quick(*settings))
    state = sim.initial()
    for _ in range(4):
        state, _ = sim.play(state)
    assert not state.momentum[:-1].any()
    assert state.momentum[-1].any()


def test_doubtful_users_weigh_more() -> None:
    said = torch.cat([SAID, torch.full_like(SAID, 1 / 3)])
    weight = fl2.Fl2().label(look(said)).weight
    assert weight is not None
    assert weight.tolist() == pytest.approx([0.25, 2 / 3])


def test_users_weigh_and_count_by_the_different_images_that_they_labelled() -> None:
    # the first user draws image 7 three times; its first view decides, for all draws
    images = torch.tensor([[[7, 8], [7, 7]], [[3, 4], [5, 6]]])
    said = torch.cat([SAID, SAID * 0.5])
    made = find("cbafed")(threshold=0.75).label(look(said, images))  # type: ignore[call-arg]
    assert made.weight.tolist() == [1, 0]
    assert made.report["counts"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert made.report["images"].tolist() == [1, 0]
    assert made.images[0].flatten().tolist()[:3] == [7, 7, 7]
    assert made.tensors["labels"][0].flatten().tolist()[:3] == [0, 0, 0]


@given(seed=st.integers(0, 10**6), concentration=st.sampled_from([0.02, 0.3]))
def test_cbafeds_labels_are_those_of_a_plain_reading(seed: int, concentration: float) -> None:
    """Image after image in numpy, as in the authors' code: confident ones get the first class, and others
    the second one if it is rare."""
    rng = np.random.default_rng(seed)
    said = rng.dirichlet([concentration] * 4, size=(2, 12))
    images = 50 * np.arange(2)[:, None] + rng.integers(0, 8, (2, 12))
    counts = np.ceil(rng.dirichlet([0.5] * 4) * 100)
    share = counts / counts.sum() * 4 / 10
    limit = np.minimum(share + 0.84 - share.std(ddof=1), 0.95)
    seen = Look(
        torch.from_numpy(said), torch.from_numpy(images.reshape(2, 3, 4)), torch.arange(2),
        {"counts": torch.from_numpy(counts).expand(2, -1)}, False,
    )  # fmt: skip
    made = find("cbafed")().label(seen)
    for user in range(2):
        first: dict[int, np.ndarray] = {}
        label: dict[int, int] = {}
        trained = []
        for image, probabilities in zip(images[user].tolist(), said[user], strict=True):
            best, second = np.argsort(-first.setdefault(image, probabilities))[:2]
            if first[image][best] >= limit[best]:
                label[image] = int(best)
            elif share[second] < 0.03:
                label[image] = int(second)
            if image in label:
                trained.append((image, label[image]))
        assert made.weight[user] == made.report["images"][user] == len(label)
        assert made.report["counts"][user].tolist() == np.bincount([*label.values()], minlength=4).tolist()
        assert made.steps[user] == -(-len(trained) // 4)
        pairs = zip(made.images[user].flatten().tolist(), made.tensors["labels"][user].flatten().tolist(),
                    strict=True)  # fmt: skip
        assert [*pairs][: len(trained)] == trained


def test_cbafed_step(quick: Make) -> None:
    """Users train on weak views."""
    settings = ["method.name=cbafed", "federation.period=1", "train.clip=1", "method.threshold=0.1"]
    sim, start, new, looked = one_step(quick, *settings)
    batch = make_batch(sim.pool, looked, 0)
    assert batch.weak is not None
    assert batch.strong is None
    write_row(sim.model, sim.layout, start.average)
    sim.model.zero_grad()
    functional.cross_entropy(sim.model.train()(batch.weak[0]), batch.tensors["labels"][0]).backward()
    assert batch.tensors["mask"].all()
    assert torch.allclose(new.average[: sim.layout.weights], moved(sim, start, looked.rates[0]), atol=1e-12)


@pytest.mark.parametrize("head_start", [0, 0.4])
def test_the_residual_begins_with_the_servers_model(quick: Make, head_start: float) -> None:
    settings = ["method.name=cbafed", "method.threshold=0.11", "method.highest=0.11", "run.engine=loop",
                f"federation.head_start={head_start}", "federation.slow_average=0.9"]  # fmt: skip
    sim = assemble.make(quick(*settings, "federation.rounds=10", "method.residual=2"))
    plain = assemble.make(quick(*settings, "federation.rounds=10", "method.residual=0"))
    states = [sim.initial()]
    for _ in range(10):
        states.append(sim.play(states[-1])[0])
    alone = int(10 * head_start)  # rounds of the server alone
    stored = states[alone].average if alone else None
    for number in range(alone, 10):
        unmixed, now = plain.play(states[number])[0].average, states[number + 1].average
        if (number - alone) in (2, 4, 6, 8):  # the third round with users, the fifth, ...
            mixed = unmixed if stored is None else (unmixed + stored) / 2
            assert torch.allclose(now, mixed, atol=1e-7)
            stored = now
        else:
            assert torch.equal(now, unmixed)
    check_slow(sim, states)


@pytest.mark.parametrize("name", ["anchored", "grouping", "easgd", "fedmatch", "server-only"])
def test_any_method_may_have_a_slow_average(quick: Make, name: str) -> None:
    sim = assemble.make(quick(f"method.name={name}", "federation.slow_average=0.9", "run.engine=loop"))
    states = [sim.initial()]
    for _ in range(4):
        states.append(sim.play(states[-1])[0])
    check_slow(sim, states)


def check_slow(sim: Simulation, states: list[State]) -> None:
    slow = states[0].average
    for number, state in enumerate(states[1:], 1):
        stays = min(0.9, number / (number + 9))
        slow = stays * slow + (1 - stays) * state.average
    assert torch.allclose(states[-1].memory["slow"], slow, atol=1e-7)
    assert torch.equal(sim.final_row(states[-1]), states[-1].memory["slow"])
    assert not torch.equal(states[-1].memory["slow"], states[-1].average)


def test_class_counts_are_of_the_labels_given(quick: Make) -> None:
    sim = assemble.make(quick("method.name=cbafed", "method.threshold=0.3"))
    state = sim.initial()
    own = state.memory["counts"]
    assert own.sum() == sim.config.split.server_labels
    for _ in range(6):
        state, events = sim.play(state)
    assert state.memory["counts"].sum() > own.sum()
    assert events[0]["mask_rate"] > 0.25


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_is_a_row_of_ordinary_settings(name: str) -> None:
    bare: dict[str, dict[str, Any]] = {
        "method": {"name": name},
        "data": {"name": "digits"},
        "federation": {"rounds": 1},
    }
    config = from_dict(bare)
    for section, values in find(name).defaults.items():
        for key, value in values.items():
            assert getattr(getattr(config, section), key) == value
    for field in fields(find(name)):
        assert getattr(config.method, field.name) == field.default


CUT = {"train.weight_decay": 5e-4, "train.clip": 1.0, "method.momentum": 0.5}
PUBLISHED: dict[str, dict[str, Any]] = {
    "semifl": CUT | {"method.threshold": 0.95, "method.mix": 1.0, "method.alpha": 0.75},
    "fl2": CUT | {"method.sharpness": 0.1, "federation.head_start": 0.1},
    "rscfed": {"method.consensus": 3, "method.scale": 1e4, "method.server_scale": 100.0}
    | {"method.server_factor": 6.0, "method.consistency": 0.02}
    | {"train.weight_decay": 5e-4, "train.clip": 5.0, "federation.head_start": 0.1},
    "cbafed": {"method.threshold": 0.84, "method.highest": 0.95, "method.residual": 5}
    | {"train.weight_decay": 5e-4, "train.clip": 5.0, "federation.head_start": 0.1},
    "fedprox": {"method.proximal": 0.01},
    "flexmatch": {"method.threshold": 0.95},
    "freematch": {},
    "fedmatch": {"method.threshold": 0.75, "train.lr": 0.001, "train.momentum": 0.0, "method.helpers": 2}
    | {"method.interval": 10, "method.supervised": 10.0, "method.consistency": 0.01}
    | {"method.agreement": 0.01, "method.l2": 10.0},
}
ONCE = ("semifl", "fl2", "rscfed", "cbafed", "flexmatch", "freematch")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_rival_has_the_settings_that_were_published(name: str) -> None:
    config = from_dict({"method": {"name": name}, "data": {"name": "digits"}, "federation": {"rounds": 1}})
    for key, value in PUBLISHED[name].items():
        section, _, field = key.partition(".")
        assert getattr(getattr(config, section), field) == value, key
    assert (config.method.label is not None) == (name in ONCE)
    assert not config.method.grouped


def test_the_thresholds_of_flexmatch_freematch_and_fl2_are_theirs() -> None:
    said = torch.rand(3, 4, 3, dtype=torch.float64).softmax(-1)
    confidence, label = said.max(-1)
    rules = {"flexmatch": thresholds.flexible(said, 0.95), "freematch": thresholds.free(said),
             "fl2": thresholds.free(said)}  # fmt: skip
    for name, by_class in rules.items():
        made = find(name)().label(look(said))
        sure = confidence >= by_class.gather(1, label)
        if name == "fl2":  # filled
            assert torch.equal(made.metrics["mask_rate"], sure.double().mean(1))
        else:
            assert torch.equal(made.tensors["mask"].flatten(1) > 0, sure)


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        (["method.mix=1"], "method.mix", None),
        (
            ["method.thresholds=free"],
            "method.thresholds",
            "choose method.name=flexmatch, freematch, fl2 or cbafed",
        ),
        (["method.name=semifl", "method.fill=false"], "method.fill", "choose method.name=semifl"),
        (["method.objective=self-training"], "method.objective", "choose another method.name"),
        (
            ["method.name=semifl", "method.server_momentum=0.3"],
            "method.server_momentum",
            "method.momentum=0.3",
        ),
        (["method.name=grouping", "method.momentum=0.5"], "method.momentum", "train.momentum=0.5"),
        (["method.name=alternate", "method.pace=classes"], "method.pace", None),
        (["method.name=overlap-sgd", "method.pace=classes"], "method.pace", None),
        (
            ["method.name=cbafed", "federation.combine=median"],
            "federation.combine",
            "federation.combine=mean",
        ),
        (
            ["method.name=semifl", "federation.combine=median"],
            "federation.combine",
            "federation.combine=mean",
        ),
        (
            ["method.name=rscfed", "federation.median_fallback=true"],
            "federation.median_fallback",
            "federation.median_fallback=false",
        ),
        (["method.name=easgd", "federation.groups=2"], "federation.groups", "federation.groups=1"),
        (["method.name=easgd", "federation.gate=true"], "federation.gate", "federation.gate=false"),
        (["method.name=fedmatch", "method.proximal=1"], "method.proximal", None),
    ],
)
def test_what_does_not_go_together(quick: Make, changes: list[str], key: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble.make(quick("method.name=alternate", *changes))
    assert (caught.value.key, caught.value.fix) == (key, fix)
    assert key in str(caught.value)


def test_no_group_is_left_without_users(quick: Make) -> None:
    sets = ["method.name=grouping", "federation.groups=6", "federation.group_sizes=filled"]
    with pytest.raises(ConfigError) as caught:
        assemble.make(quick(*sets))
    assert (caught.value.key, caught.value.fix) == ("federation.groups", "federation.groups=5")


def test_strong_views_at_the_server_where_images_are_large_enough(quick: Make, patterns: Path) -> None:
    small, large = (assemble.make(quick(*more)) for more in ([], [f"data.path={patterns}"]))
    assert (small.config.train.server_views, large.config.train.server_views) == ("weak", "both")
    work = large.plan.server_work(0)
    seen = make_batch(large.pool, work, 1).weak
    weak = make_batch(large.pool, replace(work, views=("weak",)), 1).weak
    strong = make_batch(large.pool, replace(work, views=("strong",)), 1).strong
    assert seen is not None
    assert weak is not None
    assert strong is not None
    assert torch.equal(seen[:, ::2], weak[:, ::2])
    assert torch.equal(seen[:, 1::2], strong[:, 1::2])
    assert not torch.equal(weak, strong)


def test_a_head_start_is_the_servers_alone(quick: Make) -> None:
    sim = assemble.make(quick("method.name=alternate", "federation.head_start=0.5", "federation.rounds=4"))
    alone = assemble.make(quick("method.name=server-only", "federation.rounds=4"))
    state, other = sim.initial(), alone.initial()
    for _ in range(2):
        state, (event, *_) = sim.play(state)
        other, _ = alone.play(other)
        assert (event["participants"], event["returned"], event["bytes_down"]) == ([], [], 0)
    assert torch.equal(state.average, other.average)
    state, (event, *_) = sim.play(state)
    assert event["returned"]
    assert not torch.equal(state.average, alone.play(other)[0].average)


@pytest.mark.parametrize("name", ["anchored", "grouping", "semifl", "fl2", "rscfed", "cbafed", "fedmatch"])
def test_every_method_bears_a_head_start(quick: Make, name: str) -> None:
    sim = assemble.make(quick(f"method.name={name}", "federation.head_start=0.4", "federation.rounds=3"))
    state = sim.initial()
    for _ in range(3):
        state, (event, *_) = sim.play(state)
    assert torch.isfinite(state.average).all()
    assert event["returned"]


@given(share=st.floats(0, 0.9), rounds=st.integers(1, 10**9))
def test_a_head_start_leaves_rounds_for_users(share: float, rounds: int) -> None:
    head = schedule.head_start(share, rounds)
    assert 0 <= head < rounds
    assert abs(head - share * rounds) <= 1


@pytest.mark.parametrize("nobody", ["split.labels_at=users", "split.server_labels=0"])
def test_a_head_start_needs_a_server(quick: Make, nobody: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quick("method.name=alternate", "federation.head_start=0.1", nobody)
    assert caught.value.key == "federation.head_start"
    assert caught.value.fix == "federation.head_start=0"


@pytest.mark.parametrize("name", ["data-sharing", "easgd", "overlap-sgd"])
@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("federation.head_start=0.1", "federation.head_start=0"),
        ("model.norm_statistics=server", "model.norm_statistics=average"),
    ],
)
def test_a_server_that_is_never_trained_has_no_head_start_and_no_statistics(
    quick: Make, name: str, setting: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        quick(f"method.name={name}", setting)
    assert (caught.value.key, caught.value.fix) == (setting.partition("=")[0], fix)


@pytest.mark.parametrize("name", METHODS)
def test_who_trains_the_server_says_so(quick: Make, name: str) -> None:
    alone = ["split.users=1", "split.labels_at=both"] if name == "fixmatch" else []
    sim = assemble.make(quick(f"method.name={name}", "federation.head_start=0", *alone))
    assert sim.has_server
    assert ("server_loss" in sim.play(sim.initial())[1][0]) == sim.method.trains_server
