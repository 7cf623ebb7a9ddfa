"""What is refused before averaging, robust averages, and users that send garbage."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssfl
from hand_rounds import Trainer, make_round, play
from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core import averaging
from ssfl.core.cohort import Cohort
from ssfl.core.rows import write_row
from ssfl.engines.work import TrainedRows, Work
from ssfl.errors import ConfigError, DivergedError
from ssfl.federation import Method, State
from ssfl.methods.alternate import Alternate
from ssfl.methods.grouping import Grouping
from ssfl.runs import assemble, checkpoints
from ssfl.runs import folder as runs
from ssfl.simulate import attacks, gate
from ssfl.simulate.scoring import ModelScore
from ssfl.simulate.simulation import Simulation

Make = Callable[..., Config]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_the_gate_names_what_is_wrong_and_lets_the_others_pass() -> None:
    sent = torch.zeros(6, 2, dtype=torch.float64)
    rows = torch.tensor([[1, 0], [0, 1.5], [float("nan"), 0], [9, 0], [1.2, 0], [1, 0]], dtype=torch.float64)
    strikes = torch.tensor([0, 2, 0, 0, 0, 3])
    reasons = gate.judge(sent, rows, strikes).reasons
    assert [bool(reason) for reason in reasons] == [False, False, True, True, False, True]
    assert "not finite" in reasons[2]
    assert " 7.5 times " in reasons[3]
    still = gate.judge(sent, sent, torch.zeros(6))  # a round in which nobody moved
    assert still.reasons == [""] * 6
    assert torch.equal(still.rows, sent)
    # who learns while the others hardly move is not refused; who replaces the model is
    model, early = torch.full((4, 2), 10.0), torch.tensor([[0.0, 0], [0.01, 0], [0, 3], [9, 0]])
    refused = [bool(why) for why in gate.judge(model, model + early, torch.zeros(4)).reasons]
    assert refused == [False, False, False, True]


def test_the_gate_cuts_what_is_longer_than_is_usual() -> None:
    sent = torch.full((4, 2), 100.0, dtype=torch.float64)
    updates = torch.tensor([[1, 0], [0, -2], [1.5, 0], [0, 30]], dtype=torch.float64)
    found = gate.judge(sent, sent + updates, torch.zeros(4))
    assert found.reasons == [""] * 4
    assert float(found.usual) == 1.5
    assert found.times == pytest.approx([1 / 1.5, 2 / 1.5, 1, 20])
    longest = gate.REACH * 1.5
    assert torch.allclose(
        found.rows - sent, torch.tensor([[1, 0], [0, -longest], [1.5, 0], [0, longest]]).double()
    )
    # one bad user in two, or alone: earlier rounds are known
    before = torch.tensor([0.0, 0.1, 0.4])
    alone = gate.judge(sent[:1], sent[:1] + updates[3:], torch.zeros(1), before)
    assert float(alone.usual) == pytest.approx(gate.GROWTH * 0.4)
    assert float((alone.rows - sent[:1]).norm()) == pytest.approx(gate.REACH * gate.GROWTH * 0.4)
    unknown = gate.judge(sent[:1], sent[:1] + updates[3:], torch.zeros(1), torch.zeros(3))
    assert torch.allclose(unknown.rows, sent[:1] + updates[3:])
    assert torch.equal(gate.remembered(before, torch.tensor(0.2), 0.3), torch.tensor([0.1, 0.4, 0.3]))


def test_idle_users_do_not_stop_the_others_even_if_they_are_half_of_them() -> None:
    sent = torch.full((4, 4), 10.0, dtype=torch.float64)
    updates = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [3, 4, 0, 0], [0, 0, 3, 4]], dtype=torch.float64)
    before = torch.tensor([4.0, 2.0])
    for users in ([0, 2], [0, 1, 2, 3]):
        found = gate.judge(
            sent[users], (sent + updates)[users], torch.zeros(len(users)), before, sizes=(2, 2)
        )
        lengths = (found.rows - sent[users]).norm(dim=1)
        assert lengths.tolist() == pytest.approx([0 if user < 2 else gate.LEAST * 4 for user in users])


def test_no_tensors_part_of_an_update_is_longer_than_is_usual_for_this_tensor() -> None:
    generator = torch.Generator().manual_seed(1)
    sent = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    updates = torch.tensor([[3, 4, 0, 0, 0.3, 0, 0.4]] * 5, dtype=torch.float64)
    updates[1] *= 0.5
    updates[4] = torch.tensor([0, 0, 0, 0, 0, 5, 0])  # all of it where honest updates are short
    found = gate.judge(sent, sent + updates, torch.zeros(5), sizes=(4, 3))
    assert found.reasons == [""] * 5
    parts = (found.rows - sent).split([4, 3], 1)
    assert parts[0].norm(dim=1).tolist() == pytest.approx([5, 2.5, 5, 5, 0])
    assert parts[1].norm(dim=1).tolist() == pytest.approx([0.5, 0.25, 0.5, 0.5, 0.5 * gate.PART])
    assert torch.allclose(found.rows[:4], (sent + updates)[:4])
    assert found.times == pytest.approx([1, 1, 1, 1, 10 / gate.PART])
    assert torch.equal(found.rows[:4], (sent + updates)[:4])  # to the last bit
    # of two users, one must not stop any layer of the other
    two = gate.judge(sent[[0, 4]], (sent + updates)[[0, 4]], torch.zeros(2), sizes=(4, 3))
    assert torch.equal(two.rows[1], (sent + updates)[4])
    assert (two.rows - sent[[0, 4]])[0].tolist() == pytest.approx((updates[0] * 5 / 25.25**0.5).tolist())
    whole = gate.judge(sent, sent + updates, torch.zeros(5))
    assert float((whole.rows - sent)[4].norm()) == pytest.approx(5)  # its length alone is not suspicious


def test_trust_is_the_mean_cosine_with_the_servers_direction() -> None:
    updates = torch.tensor([[3.0, 4], [0, -2], [0, 0], [math.nan, 1], [math.inf, 1]])
    trust = gate.trusted(torch.tensor([0, 0.5, -0.1, 0.1, 0.2]), updates, torch.tensor([0.0, 7]))
    assert trust.tolist() == pytest.approx([0.16, 0.2, -0.08, 0.08, 0.16])


def test_who_is_not_trusted_has_less_weight_unless_most_are_not() -> None:
    def weights(*trust: float) -> list[float]:
        return gate.weighted(torch.tensor(trust)).tolist()

    assert weights(0.4, 0, 0.1, 0) == [1, 1, 1, 1]
    assert weights(0.4, -0.05, 0.1, -0.4) == pytest.approx([1, 0.75, 1, 0])
    assert weights(-0.4, -0.5, -0.4, -0.4, -0.7) == pytest.approx([1, 0.5, 1, 1, 0], abs=1e-5)
    assert weights(0.3, -0.3) == [1, 0]
    assert weights() == []
    sent = torch.full((4, 2), 100.0, dtype=torch.float64)
    updates = torch.tensor([[1, 0], [0, -2], [1.5, 0], [0, 30]], dtype=torch.float64)
    trust = torch.tensor([0.3, 0, 0, -0.3], dtype=torch.float64)
    found = gate.judge(sent, sent + updates, torch.zeros(4), None, trust)
    assert found.reasons == [""] * 4  # nobody is left out for good: an honest user may be opposed for a time
    assert found.weights.tolist() == [1, 1, 1, 0]
    assert float(found.usual) == 1.5  # lengths are judged whoever is trusted


def test_a_dropped_user_does_not_count_and_its_trust_is_kept() -> None:
    memory = {"trust": torch.tensor([0.0, 0.0, 0.0, -0.1], dtype=torch.float64)}
    start = State(
        0, column(10, 20), column(15)[0], torch.zeros(0, 1), torch.zeros(4, dtype=torch.int64), memory
    )
    settings: dict[str, Any] = {"gate": True, "direction": column(1)[0]}
    new, fed = play(Grouping(), start, COHORT, train(2, 2, 2, -2), train(5), **settings)
    assert fed.log.against == {3: 0}
    assert not fed.log.refused
    assert new.strikes.tolist() == [0, 0, 0, 0]
    assert new.streams.flatten().tolist() == pytest.approx([(20 + 12 + 12) / 3, (20 + 22) / 2])
    assert new.memory["trust"].tolist() == pytest.approx([0.2, 0.2, 0.2, -0.28])


def test_the_servers_direction_lowers_the_loss_of_its_labels_alone(quick: Make) -> None:
    sim = assemble.make(quick("federation.gate=true", "train.precision=float64", "run.engine=loop"))
    row = sim.initial().average
    direction = sim.descent(row, 0)
    assert direction is not None
    step = row.clone()
    step[: sim.layout.weights] += 1e-3 * direction / direction.norm()
    images = sim.server_images()
    assert sim.score(step, *images).loss < sim.score(row, *images).loss
    assert torch.equal(direction, sim.descent(row, 0))  # type: ignore[arg-type]
    assert not torch.equal(direction, sim.descent(row, 1))  # type: ignore[arg-type]
    hidden = torch.ones(len(sim.pool.labels), dtype=torch.bool)
    hidden[sim.plan.server.images] = False
    blind = replace(sim, pool=replace(sim.pool, labels=sim.pool.labels.masked_fill(hidden, 0)))
    assert torch.equal(direction, blind.descent(row, 0))  # type: ignore[arg-type]


def test_who_works_against_the_labels_is_told_and_loses_its_weight(quick: Make) -> None:
    sets = ["federation.attackers=0.25", "federation.attack=sign", "method.threshold=0.5"]
    sim = assemble.make(quick("federation.gate=true", "split.users=4", "federation.rounds=18", *sets))
    [bad] = attacks.attacking_users(4, 0.25, 1)
    state, weights = sim.initial(), []
    for _ in range(18):
        state, [event, *_] = sim.play(state)
        weights.append(gate.weighted(state.memory["trust"]).tolist())
        assert event.get("against", {}).keys() <= {str(bad)}
        assert event["refused"] == {}
    assert event["against"][str(bad)] == pytest.approx(weights[-1][bad], abs=0.01)
    assert weights[-1][bad] < gate.NAMED < min(one for user, one in enumerate(weights[-1]) if user != bad)


def test_a_long_update_is_cut_told_and_remembered(quick: Make) -> None:
    sim = assemble.make(
        quick(
            "federation.gate=true", "federation.attackers=0.1", "federation.attack=ascent", "run.engine=loop"
        )
    )
    [bad] = attacks.attacking_users(10, 0.1, 1)
    state = sim.initial()
    assert state.memory["usual"].tolist() == [0] * gate.ROUNDS
    state, [event, *_] = sim.play(state)
    state, [event, *_] = sim.play(state)
    assert list(event["cut"]) == [str(bad)]
    assert event["cut"][str(bad)] > gate.LENGTH
    assert event["refused"] == {}
    others = [one for user, one in enumerate(event["user_update_norm"]) if user != bad]
    assert event["user_update_norm"][bad] > 3 * max(others)
    assert state.memory["usual"][-1] >= sorted(others)[4] * 0.99


@pytest.mark.parametrize(
    ("rule", "rows", "expected"),
    [
        ("mean", (1, 2, 9), 4), ("median", (9, 1, 2), 2), ("median", (1, 2, 4, 9), 3),
        ("trimmed", (-90, 1, 2, 3, 100), 2), ("trimmed", (1, 3), 2), ("median", (5,), 5),
    ],
)  # fmt: skip
def test_robust_averages_by_hand(rule: str, rows: tuple[float, ...], expected: float) -> None:
    assert averaging.combined(rule, column(*rows)).item() == expected


COHORT = Cohort((0, 1, 2, 3), (0, 1, 2, 3), ((0, 2), (1, 3)), (0, 1, 0, 1), (3, 2, 1, 0))


def train(*amounts: float):  # type: ignore[no-untyped-def]
    def moved(rows: torch.Tensor, momentum: torch.Tensor, part: slice) -> TrainedRows:
        return TrainedRows(rows + column(*amounts)[part], momentum, {"loss": column(*amounts)[part, 0]})

    return moved


def test_refused_models_are_left_out_and_counted() -> None:
    strikes = torch.tensor([0, 1, 0, 0])
    start = State(0, column(10, 20), column(15)[0], torch.zeros(0, 1), strikes)
    new, fed = play(Grouping(), start, COHORT, train(1, 2, 3, 400), train(5), gate=True)
    # w_s = 20; group 1 = (20 + 11 + 12) / 3, for 3 is cut to 2; group 2 has lost user 3: (20 + 22) / 2
    assert new.streams.flatten().tolist() == pytest.approx([43 / 3, 21])
    assert list(fed.log.refused) == [3]
    assert new.strikes.tolist() == [0, 1, 0, 1]
    assert strikes.tolist() == [0, 1, 0, 0]


def test_when_everybody_is_refused_the_server_goes_on_alone() -> None:
    start = State(0, column(10, 20), column(15)[0], torch.zeros(0, 1), torch.full((4,), gate.STRIKES))
    new, fed = play(Grouping(), start, COHORT, train(1, 2, 3, 4), train(5), gate=True)
    assert list(fed.log.refused) == [0, 1, 2, 3]
    assert new.streams.flatten().tolist() == [20, 20]


def test_the_momentum_of_who_was_refused_is_what_it_was() -> None:
    def spoilt(rows: torch.Tensor, momentum: torch.Tensor, part: slice) -> TrainedRows:
        moved = momentum + column(1, 2, math.nan, 4)
        return TrainedRows(rows + moved, moved, {"loss": moved[:, 0]})

    start = State(0, column(10, 20), column(15)[0], column(5, 6, 7, 8, 9), torch.zeros(4, dtype=torch.int64))
    new, fed = play(Grouping(), start, COHORT, spoilt, gate=True)
    assert list(fed.log.refused) == [2]
    assert new.momentum.flatten().tolist() == [9, 6, 9, 9, 9]  # slot 1 is as it was


def test_a_user_that_breaks_down_is_refused_and_the_run_goes_on(
    quick: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = assemble.make

    def with_one_broken(config: Config, *more: Any) -> Simulation:
        sim = made(config, *more)
        plain = sim.engine.train

        def broken(rows: torch.Tensor, momentum: torch.Tensor, work: Work) -> TrainedRows:
            trained = plain(rows, momentum, work)
            if len(rows) > 1:
                for numbers in (trained.rows, trained.momentum, trained.metrics["loss"]):
                    numbers[1] = math.nan
            return trained

        sim.engine.train = broken  # type: ignore[method-assign]
        return sim

    monkeypatch.setattr(assemble, "make", with_one_broken)
    ssfl.run(quick("federation.gate=true", "method.name=alternate", "run.engine=loop"), tmp_path / "run")
    events = [event for event in runs.read_events(tmp_path / "run") if event["event"] == "round"]
    for event in events:
        assert event["refused"].keys() == {"1"}
        assert ("not finite" in event["refused"]["1"]) == (event["round"] <= gate.STRIKES)
        assert event["user_loss"][1] is None
        assert event["loss"] == pytest.approx(
            sum(loss for loss in event["user_loss"] if loss is not None) / 9
        )


@pytest.mark.parametrize(
    ("method", "server"), [(Grouping(), train(5)), (Alternate(), train(5)), (Grouping(), None)]
)
def test_a_gate_that_refuses_nobody_changes_nothing(method: Method, server: Trainer | None) -> None:
    start = State(0, column(10, 20), column(15)[0], torch.zeros(0, 1), torch.zeros(4, dtype=torch.int64))
    (plain, _), (guarded, fed) = (
        play(method, start, COHORT, train(2, 2, 2, 2), server, gate=gated, at_once=3)
        for gated in (False, True)
    )
    assert not fed.log.refused
    assert torch.allclose(plain.streams, guarded.streams)
    assert torch.allclose(plain.average, guarded.average)


@pytest.mark.parametrize(("wanted", "streams"), [(11.5, [12, 11]), (23, [12, 23]), (17, [12, 23])])
def test_the_check_takes_what_does_better_on_the_servers_labels(wanted: float, streams: list[float]) -> None:
    """One group of one user, one of three: their mean is 23 and their median 11."""
    cohort = Cohort((0, 1, 2, 3), (0, 1, 2, 3), ((0,), (1, 2, 3)), (0, 1, 1, 1))
    start = State(0, column(10, 10), column(10)[0], torch.zeros(0, 1), torch.zeros(4, dtype=torch.int64))

    def judged(row: torch.Tensor) -> ModelScore:
        return ModelScore(0.0, abs(float(row) - wanted), [])

    _, fed = make_round(
        Grouping(), start, cohort, train(2, 1, 0, 38), train(5), median_fallback=True, judged=judged
    )
    users = fed.train_users(start.streams)
    assert users.means.flatten().tolist() == pytest.approx(streams)
    assert not fed.log.refused  # nobody is blamed: honest users' models may do badly alone


def test_the_check_reads_the_servers_labels_alone(quick: Make) -> None:
    plain, guarded = (
        assemble.make(quick("federation.combine=trimmed", f"federation.median_fallback={on}"))
        for on in ("false", "true")
    )
    state = plain.initial()
    for sim in (plain, plain, plain):
        state, _ = sim.play(state)
    # the labels of everything but the server's images may be anything
    hidden = torch.ones(len(guarded.pool.labels), dtype=torch.bool)
    hidden[guarded.plan.server.images] = False
    blind = replace(guarded, pool=replace(guarded.pool, labels=guarded.pool.labels.masked_fill(hidden, 0)))
    assert torch.equal(blind.play(state)[0].average, guarded.play(state)[0].average)


def test_attackers_send_what_they_are_said_to(quick: Make) -> None:
    sim = assemble.make(quick("federation.attackers=0.2"))
    assert len(attacks.attacking_users(10, 0.2, 1)) == 2
    sent = sim.initial().average
    row = sent + 1
    assert torch.allclose(attacks.corrupt("sign", sent, row, sim.layout, 10, 5), sent - 1)
    assert torch.allclose(attacks.corrupt("sign", sent, row, sim.layout, 10, 5, 2.5), sent - 2.5)
    ascent = attacks.corrupt("ascent", sent, row, sim.layout, 10, 5) - sent
    assert float(ascent.norm()) == pytest.approx(attacks.ASCENT * float(sent.norm()), rel=1e-5)
    assert float(torch.cosine_similarity(ascent, sent - row, 0)) == pytest.approx(1, abs=1e-5)
    slow = attacks.corrupt("slow", sent, row, sim.layout, 10, 5) - sent
    assert float(slow.norm()) == pytest.approx(float((row - sent).norm()), rel=1e-5)
    shifted = attacks.corrupt("shift", sent, sent, sim.layout, 10, 5) - sent
    assert float(torch.cosine_similarity(slow, shifted, 0)) == pytest.approx(1, abs=1e-5)
    kinds = [attacks.kind_in("alternating", round) for round in range(4)]
    assert kinds == [None, "sign", None, "sign"]
    assert attacks.kind_in("shift", 2) == "shift"
    noisy = attacks.corrupt("noise", sent, row, sim.layout, 10, 5)
    assert torch.equal(noisy, attacks.corrupt("noise", sent, row, sim.layout, 10, 5))
    assert 0.3 < float((noisy - row).std() / row.abs().mean()) < 3
    images = sim.pool.normalised(sim.pool.images[:20], torch.float32)
    answers = []
    for weights in (sent, attacks.corrupt("shift", sent, sent, sim.layout, 10, 5)):
        write_row(sim.model.eval(), sim.layout, weights)
        answers.append(sim.model(images).argmax(1))
    assert torch.equal((answers[0] + 1) % 10, answers[1])


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10, bias=False))


@pytest.mark.parametrize("kind", ["a last layer without bias", "fedmatch"])
def test_shifted_outputs_are_those_of_the_next_class(quick: Make, kind: str) -> None:
    sim = (
        assemble.make(quick("method.name=fedmatch"))
        if kind == "fedmatch"
        else assemble.make(quick(), without_bias)
    )
    sent = sim.initial().average
    images = sim.pool.normalised(sim.pool.images[:20], torch.float32)
    outputs = []
    for weights in (sent, attacks.corrupt("shift", sent, sent, sim.layout, 10, 5)):
        write_row(sim.model.eval(), sim.layout, weights)
        outputs.append(sim.model(images))
    assert torch.allclose(outputs[0].roll(1, 1), outputs[1], atol=1e-5)
    with pytest.raises(ConfigError):
        attacks.corrupt("shift", sent, sent, sim.layout, 11, 5)


def test_a_breakdown_by_attackers_names_their_scale(quick: Make, tmp_path: Path) -> None:
    config = quick(
        "method.name=crl-gn", "federation.attackers=0.5", "federation.attack=noise", "federation.rounds=20",
        "federation.attack_scale=1000000", "run.eval_every=1",
    )  # fmt: skip
    with pytest.raises(DivergedError) as caught:
        ssfl.run(config, tmp_path / "run")
    assert (caught.value.key, caught.value.value) == ("federation.attack_scale", 1e6)


def test_noise_is_refused_told_and_left_out_after_three_times(quick: Make, tmp_path: Path) -> None:
    guard = [
        "federation.gate=true",
        "federation.combine=trimmed",
        "federation.attackers=0.2",
        "federation.attack=noise",
    ]
    config = quick(*guard, "federation.rounds=6", "method.threshold=0.3", "run.checkpoint_every=1")
    result = ssfl.run(config, tmp_path / "run")
    attackers = {str(user) for user in attacks.attacking_users(10, 0.2, 1)}
    rounds = [event for event in result.history if event["event"] == "round"]
    assert all(set(event["refused"]) == attackers for event in rounds)
    assert len(set(rounds[-1]["refused"].values())) == 1  # they are excluded by now
    # and the count survives a crash
    for lost in ("summary.json", "model.safetensors", "checkpoints/round-0000006.safetensors"):
        (tmp_path / "run" / lost).unlink()
    again = ssfl.resume(tmp_path / "run")
    told = [{k: v for k, v in event.items() if k not in runs.WALL_CLOCK} for event in again.history]
    assert told == [{k: v for k, v in event.items() if k not in runs.WALL_CLOCK} for event in result.history]
    checkpoint = checkpoints.newest(tmp_path / "run", torch.device("cpu"))
    assert checkpoint is not None
    assert int(checkpoint.state.strikes.sum()) == 12


def test_what_does_not_go_together_is_refused(quick: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        quick("federation.gate=true", "run.engine=dist")
    assert (caught.value.key, caught.value.fix) == ("federation.gate", "federation.gate=false")
    for no_labels in ("split.server_labels=0", "split.labels_at=users"):
        with pytest.raises(ConfigError) as caught:
            quick("method.name=alternate", "federation.median_fallback=true", no_labels)
        assert (caught.value.key, caught.value.fix) == (
            "federation.median_fallback",
            "federation.median_fallback=false",
        )


FLIPPED = ["federation.attackers=0.2", "federation.attack=sign", "federation.attack_scale=2"]


def accuracy(folder: Path, *sets: str) -> float:
    """The quickstart in two groups, the mean of three seeds."""
    found = []
    for seed in (1, 2, 3):
        given = [
            "method.name=alternate",
            "method.threshold=0.6",
            "federation.groups=2",
            "federation.rounds=20",
            *sets,
        ]
        config = load_config("quickstart", [*given, f"run.seed={seed}", f"split.seed={seed}"])
        found.append(ssfl.run(config, runs.next_free(folder / "run")).accuracy)
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Nobody attacks, and nothing defends."""
    return accuracy(tmp_path_factory.mktemp("clean"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [FLIPPED, *([FLIPPED[0], f"federation.attack={kind}"] for kind in ("sign", "noise", "shift"))],
    ids=["longer sign", "sign", "noise", "shift"],
)
def test_a_fifth_of_the_users_sending_garbage_costs_less_than_two_points(
    attack: list[str], clean: float, tmp_path: Path
) -> None:
    guard = ["federation.gate=true", "federation.combine=trimmed", "federation.median_fallback=true"]
    assert accuracy(tmp_path, *attack, *guard) > clean - 0.02


@pytest.mark.slow
def test_without_a_defence_there_would_be_something_to_defend_against(clean: float, tmp_path: Path) -> None:
    assert accuracy(tmp_path, *FLIPPED) < clean - 0.02


def test_how_much_too_long_an_update_is_stays_a_finite_number() -> None:
    """Where the usual length is 0, or nothing is left of an update: events must be valid JSON."""
    sent = torch.full((3, 4), 100.0)
    updates = torch.zeros(3, 4)
    updates[0, 0] = 5.0
    for users in (2, 3):
        found = gate.judge(sent[:users], (sent + updates)[:users], torch.zeros(users), sizes=(1, 3))
        assert found.times[0] == gate.MOST
        assert torch.isfinite(found.rows).all()
