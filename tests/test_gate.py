"""What is refused before averaging, robust averages, and users that send garbage."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ssfl
from ssfl import assemble, attacks, averaging, gate, runs
from ssfl.cohort import Cohort
from ssfl.errors import ConfigError
from ssfl.federation import State, play_round
from ssfl.rows import write_row
from ssfl.settings import Config
from ssfl.work import Trained

Make = Callable[..., Config]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_the_gate_names_what_is_wrong_and_lets_the_others_pass() -> None:
    sent = torch.zeros(6, 2, dtype=torch.float64)
    rows = torch.tensor([[1, 0], [0, 1.5], [float("nan"), 0], [9, 0], [1.2, 0], [1, 0]], dtype=torch.float64)
    strikes = torch.tensor([0, 2, 0, 0, 0, 3])
    assert gate.judge(sent, rows, strikes) == [
        "", "", "not finite", "its update is 7.5 times as long as the others'", "",
        "left out after three refusals",
    ]  # fmt: skip
    still = gate.judge(sent, sent, torch.zeros(6))  # a round in which nobody moved
    assert still == [""] * 6


@pytest.mark.parametrize(
    ("rule", "rows", "expected"),
    [
        ("mean", (1, 2, 9), 4), ("median", (9, 1, 2), 2), ("median", (1, 2, 4, 9), 3),
        ("trimmed", (-90, 1, 2, 3, 100), 2), ("trimmed", (1, 3), 2), ("median", (5,), 5),
    ],
)  # fmt: skip
def test_robust_averages_by_hand(rule: str, rows: tuple[float, ...], expected: float) -> None:
    assert averaging.combined(rule, column(*rows)).item() == expected


COHORT = Cohort((0, 1, 2, 3), (0, 1, 2, 3), ((0, 2), (1, 3)), (0, 1, 0, 1))


def train(*amounts: float):  # type: ignore[no-untyped-def]
    def moved(rows: torch.Tensor, momentum: torch.Tensor, part: slice) -> Trained:
        return Trained(rows + column(*amounts)[part], momentum, {"loss": column(*amounts)[part, 0]})

    return moved


def test_refused_models_are_left_out_and_counted() -> None:
    strikes = torch.tensor([0, 1, 0, 0])
    start = State(0, column(10, 20), column(15)[0], torch.zeros(0, 1), strikes)
    new, outcome = play_round(
        start, COHORT, train_users=train(1, 2, 3, 400), train_server=train(5), server="parallel",
        gate=lambda sent, rows: gate.judge(sent, rows, strikes),
    )  # fmt: skip
    # w_s = 20; group 1 = (20 + 11 + 13) / 3; group 2 has lost user 3: (20 + 22) / 2
    assert new.streams.flatten().tolist() == pytest.approx([44 / 3, 21])
    assert list(outcome.refused) == [3]
    assert new.strikes.tolist() == [0, 1, 0, 1]
    assert strikes.tolist() == [0, 1, 0, 0]


def test_when_everybody_is_refused_the_server_goes_on_alone() -> None:
    start = State(0, column(10, 20), column(15)[0], torch.zeros(0, 1), torch.zeros(4, dtype=torch.int64))
    new, _ = play_round(
        start, COHORT, train_users=train(1, 2, 3, 4), train_server=train(5), server="parallel",
        gate=lambda sent, rows: ["no"] * 4,
    )  # fmt: skip
    assert new.streams.flatten().tolist() == [20, 20]


@pytest.mark.parametrize("server", ["parallel", "alternate", "none"])
def test_a_gate_that_refuses_nobody_changes_nothing(server: str) -> None:
    start = State(0, column(10, 20), column(15)[0], torch.zeros(0, 1))
    plain, guarded = (
        play_round(
            start, COHORT, train_users=train(1, 2, 3, 4), train_server=train(5), server=server, gate=given,
            at_once=3,
        )[0]
        for given in (None, lambda sent, rows: [""] * 4)
    )  # fmt: skip
    assert torch.allclose(plain.streams, guarded.streams)
    assert torch.allclose(plain.average, guarded.average)


def test_attackers_send_what_they_are_said_to(quick: Make) -> None:
    sim = assemble.make(quick("federation.attackers=0.2"))
    assert len(attacks.who(10, 0.2, 1)) == 2
    sent = sim.initial().average
    row = sent + 1
    assert torch.allclose(attacks.corrupt("sign", sent, row, sim.layout, 5), sent - 1)
    noisy = attacks.corrupt("noise", sent, row, sim.layout, 5)
    assert torch.equal(noisy, attacks.corrupt("noise", sent, row, sim.layout, 5))
    assert 0.3 < float((noisy - row).std() / row.abs().mean()) < 3
    images = sim.pool.normalised(sim.pool.images[:20], torch.float32)
    answers = []
    for weights in (sent, attacks.corrupt("shift", sent, sent, sim.layout, 5)):
        write_row(sim.model.eval(), sim.layout, weights)
        answers.append(sim.model(images).argmax(1))
    assert torch.equal((answers[0] + 1) % 10, answers[1])


def test_noise_is_refused_told_and_left_out_after_three_times(quick: Make, tmp_path: Path) -> None:
    guard = [
        "method.gate=true",
        "method.combine=trimmed",
        "federation.attackers=0.2",
        "federation.attack=noise",
    ]
    config = quick(*guard, "federation.rounds=6", "method.threshold=0.3", "run.checkpoint_every=1")
    result = ssfl.run(config, tmp_path / "run")
    attackers = {str(user) for user in attacks.who(10, 0.2, 1)}
    rounds = [event for event in result.history if event["event"] == "round"]
    assert all(set(event["refused"]) == attackers for event in rounds)
    assert set(rounds[-1]["refused"].values()) == {"left out after three refusals"}
    # and the count survives a crash
    for lost in ("summary.json", "model.safetensors", "checkpoints/round-0000006.safetensors"):
        (tmp_path / "run" / lost).unlink()
    again = ssfl.resume(tmp_path / "run")
    told = [{k: v for k, v in event.items() if k not in runs.WALL_CLOCK} for event in again.history]
    assert told == [{k: v for k, v in event.items() if k not in runs.WALL_CLOCK} for event in result.history]
    checkpoint = runs.load_checkpoint(tmp_path / "run", torch.device("cpu"))
    assert checkpoint is not None
    assert int(checkpoint.state.strikes.sum()) == 12


def test_what_does_not_go_together_is_refused(quick: Make) -> None:
    with pytest.raises(ConfigError, match=r"do not go with run.engine = 'dist'"):
        quick("method.gate=true", "run.engine=dist")
