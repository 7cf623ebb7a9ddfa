"""Whole rounds of two users in float32, computed once more in plain PyTorch: what the engine "loop" gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ssfl.config.settings import Config
from ssfl.core.rows import write_row
from ssfl.engines.work import Work, make_batch
from ssfl.federation import Batch
from ssfl.runs import assemble
from ssfl.simulate.simulation import Simulation

Make = Callable[..., Config]
Loss = Callable[[nn.Module, Batch, int], Tensor]
TWO = ["split.users=2", "federation.participants=2", "federation.period=2", "run.engine=loop",
       "train.precision=float32", "model.norm=group", "train.warmup=0", "train.lr=0.05",
       "train.momentum=0.9", "train.nesterov=true", "train.weight_decay=1e-4",
       "train.momentum_policy=reset"]  # fmt: skip


def known(model: nn.Module, batch: Batch, who: int) -> Tensor:
    """Cross-entropy with the true labels, of weak views."""
    assert batch.weak is not None
    return functional.cross_entropy(model(batch.weak[who]), batch.labels[who])


def trained(sim: Simulation, start: Tensor, work: Work, who: int, loss: Loss) -> tuple[Tensor, list[float]]:
    """Where a trainer's steps of SGD lead, by Nesterov's momentum from zero, and the losses on the way."""
    write_row(sim.model, sim.layout, start)
    model = sim.model.train()
    weights, told = list(model.parameters()), []
    velocity = [torch.zeros_like(weight) for weight in weights]
    for step, rate in enumerate(work.rates):
        value = loss(model, make_batch(sim.pool, work, step), who)
        told.append(value.item())
        slopes = torch.autograd.grad(value, weights)
        with torch.no_grad():
            for weight, slope, v in zip(weights, slopes, velocity, strict=True):
                slope = slope + 1e-4 * weight
                v.copy_(0.9 * v + slope)
                weight.sub_(rate * (slope + 0.9 * v))
    return torch.cat([weight.detach().flatten() for weight in weights]), told


def close(one: Tensor, other: Tensor) -> bool:
    """Equal but for the last digits of float32, which are much less than what was learned."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_round_of_data_sharing(quick: Make) -> None:
    sim = assemble.make(quick("method.name=data-sharing", "split.server_labels=600", *TWO))
    plain = assemble.make(quick("method.name=supervised", "split.server_labels=600", *TWO))
    start = sim.initial()
    state, (event, *_) = sim.play(start)
    cohort = sim.plan.cohort(0)
    work = sim.plan.users_work(0, cohort)
    # a step sees the user's own images and the shared ones alike: each once before any comes again
    shared = set(plain.parts.server.tolist())
    for who, user in enumerate(cohort.users):
        hers = shared | set(plain.parts.users[user].tolist())
        seen: list[int] = []
        for round in range(-(-len(hers) // 32)):  # two batches of 16 in a round
            seen += sim.plan.users_work(round, sim.plan.cohort(round)).batches[who].flatten().tolist()
        assert set(seen[: len(hers)]) == hers
        first = set(work.batches[who].flatten().tolist())
        assert first & shared
        assert first - shared
        assert torch.equal(make_batch(sim.pool, work, 0).labels[who], sim.pool.labels[work.batches[who, 0]])
    ends, losses = zip(*(trained(sim, start.average, work, who, known) for who in (0, 1)), strict=True)
    assert not close(ends[0], ends[1])
    # the server has no model of its own in the average: the mean of the two
    assert close(state.average, (ends[0] + ends[1]) / 2)
    assert close(state.streams[0], state.average)
    assert event["user_loss"] == pytest.approx([sum(one) / 2 for one in losses], rel=1e-4)
    assert "server_loss" not in event


def test_rounds_of_supervised_grouping(quick: Make) -> None:
    """Appendix F: equation (7) with users that know their labels."""
    grouped = ["federation.groups=2", "split.server_labels=50"]
    sim = assemble.make(quick("method.name=supervised", *grouped, *TWO))
    state = sim.initial()
    streams, average = [state.streams[0], state.streams[1]], state.average
    for round in range(3):
        cohort = sim.plan.cohort(round)
        work, own = sim.plan.users_work(round, cohort), sim.plan.server_work(round)
        # a user starts from the stream of the group it is dealt to, the server from the average of all
        users = [trained(sim, streams[cohort.streams[who]], work, who, known) for who in (0, 1)]
        server, losses = trained(sim, average, own, 0, known)
        dealt = {cohort.streams[who]: users[who][0] for who in (0, 1)}
        streams = [(server + dealt[group]) / 2 for group in (0, 1)]
        average = (streams[0] + streams[1]) / 2
        state, (event, *_) = sim.play(state)
        assert close(state.streams, torch.stack(streams))
        assert close(state.average, average)
        assert not close(streams[0], streams[1])
        assert event["server_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
        assert event["user_loss"] == pytest.approx([sum(told) / 2 for _, told in users], rel=1e-4)
        assert set(own.batches.flatten().tolist()) <= set(sim.parts.server.tolist())
    # who is in which group changes, and with it who starts from which stream
    assert len({sim.plan.cohort(round).streams for round in range(3)}) == 2


def test_a_round_with_labels_at_the_users(quick: Make) -> None:
    """Appendix H: each user adds the server's loss on labels of its own to its consistency loss."""
    at_users = [
        "split.labels_at=users",
        "split.user_labels=60",
        "method.threshold=0.15",
    ]
    sim = assemble.make(quick("method.name=crl-gn", *at_users, *TWO))
    start = sim.initial()
    state, (event, *_) = sim.play(start)
    work = sim.plan.users_work(0, sim.plan.cohort(0))
    shares: list[float] = []

    def both(model: nn.Module, batch: Batch, who: int) -> Tensor:
        assert batch.weak is not None
        assert batch.strong is not None
        assert batch.own is not None
        assert batch.own_labels is not None
        with torch.no_grad():
            sure, label = model(batch.weak[who]).softmax(1).max(1)
        mask = (sure >= 0.15).float()
        shares.append(mask.mean().item())
        unlabelled = functional.cross_entropy(model(batch.strong[who]), label, reduction="none")
        labelled = functional.cross_entropy(model(batch.own[who]), batch.own_labels[who])
        loss: Tensor = (unlabelled * mask).sum() / 16 + labelled  # those that are not sure count as zeros
        return loss

    ends, losses = zip(*(trained(sim, start.average, work, who, both) for who in (0, 1)), strict=True)
    assert close(state.average, (ends[0] + ends[1]) / 2)
    assert not close(ends[0], ends[1])
    assert event["user_loss"] == pytest.approx([sum(one) / 2 for one in losses], rel=1e-4)
    assert event["mask_rate"] == pytest.approx(sum(shares) / 4)
    assert any(0 < share < 1 for share in shares)
    assert "server_loss" not in event
    # labelled images are the user's own, with their true labels, and not another's
    assert work.labelled is not None
    assert sim.parts.labelled is not None
    marked = [set(work.labelled[who].flatten().tolist()) for who in (0, 1)]
    for who in (0, 1):
        assert marked[who] <= set(sim.parts.labelled[who].tolist())
        own_labels = make_batch(sim.pool, work, 1).own_labels
        assert own_labels is not None
        assert torch.equal(own_labels[who], sim.pool.labels[work.labelled[who, 1]])
    assert not marked[0] & marked[1]
    assert sum(map(len, sim.parts.labelled)) == 60
