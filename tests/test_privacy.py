"""Differential privacy: what is clipped, what is noised, what it costs, and where it is refused."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import integrate, optimize, stats

import ssfl
from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.deploy.images import ImageFiles
from ssfl.errors import ConfigError, RunError, SsflError
from ssfl.runs import assemble, folder
from ssfl.simulate import privacy

Make = Callable[..., Config]
ON = ["privacy.clip=0.5", "privacy.noise=0.1"]


@given(st.floats(1e-3, 1e3), st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=20))
def test_an_update_is_cut_to_its_length_and_keeps_its_direction(clip: float, numbers: list[float]) -> None:
    update = torch.tensor([numbers], dtype=torch.float64)
    sent = torch.ones_like(update)
    out = privacy.released(sent, sent + update, clip, 1.0, torch.zeros_like(update)) - sent
    length = update.norm()
    assert float(out.norm()) <= clip * (1 + 1e-9) + 1e-9
    assert torch.allclose(out, update * min(1.0, clip / float(length)) if length else update, atol=1e-9)


def test_statistics_are_cut_with_the_weights_and_what_is_not_finite_counts_as_nothing(quick: Make) -> None:
    sim = assemble.make(quick("method.name=crl-bn", *ON))
    assert sim.layout.length > sim.layout.weights
    sent = sim.initial().average[None]
    for bad in (1000.0, math.nan, math.inf):
        row = sent.clone()
        row[0, -1] += bad  # a running variance, which tells of the images
        out = privacy.released(sent, row, 0.5, 0.1, torch.zeros_like(sent))
        assert float((out - sent).norm()) == pytest.approx(0.5 if bad == 1000 else 0.0, rel=1e-5)


def test_a_variance_that_noise_brings_below_nothing_counts_as_nothing(quick: Make) -> None:
    """Batch normalisation's statistics are noised like the weights, and no learning rate would mend that."""
    sim = assemble.make(quick("method.name=crl-bn", "privacy.clip=1", "privacy.noise=2", "split.users=2"))
    state, _ = sim.play(sim.initial())
    variances = [v for name, v in sim.layout.unflatten(state.average).items() if "running_var" in name]
    assert float(torch.cat(variances).min()) < 0
    assert math.isfinite(sim.evaluate(state)["loss"])


def test_the_draws_are_normal_and_the_noise_is_as_large_as_said() -> None:
    named = draws.normal(draws.bits(torch.tensor(draws.key(1, "privacy", 3, 7)), 40_000))
    other = draws.normal(draws.bits(torch.tensor(draws.key(1, "privacy", 3, 8)), 40_000))
    for numbers in (named, privacy.secret(20_000)):
        assert numbers.shape == (20_000,)
        assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-6
    assert abs(float(np.corrcoef(named, other)[0, 1])) < 0.04
    sent = torch.zeros(1, 20_000, dtype=torch.float64)
    noise = privacy.released(sent, sent, 3.0, 0.7, named) - sent
    assert float(noise.std()) == pytest.approx(3.0 * 0.7, rel=0.03)


def exact(noise: float, delta: float) -> float:
    """ε of one Gaussian of unit sensitivity (Balle and Wang 2018, Theorem 8)."""
    mean = 1 / noise

    def missing(epsilon: float) -> float:
        tail = stats.norm.logcdf(-mean / 2 - epsilon / mean)
        return float(stats.norm.cdf(mean / 2 - epsilon / mean) - np.exp(epsilon + tail)) - delta

    return float(optimize.brentq(missing, 0, 1e4))


def test_epsilon_is_the_published_one() -> None:
    # chosen in dp-accounting's own tests to give exactly (1, 1e-6); ours is of twice the sensitivity
    assert privacy.epsilon([(2 * 4.530877117, 1)], 1e-6) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 20.0])
def test_epsilon_lies_just_above_the_exact_one(noise: float) -> None:
    found = privacy.epsilon([(2 * noise, 1)], 1e-5)
    assert exact(noise, 1e-5) < found < 1.15 * exact(noise, 1e-5) + 0.02
    # so many times the same is one release with less noise, and order is nothing
    assert privacy.epsilon([(2 * noise, 16)], 1e-5) == pytest.approx(
        privacy.epsilon([(noise / 2, 1)], 1e-5), rel=1e-6
    )
    mixed = [(2 * noise, 3), (5 * noise, 4)]
    assert privacy.epsilon(mixed, 1e-5) == pytest.approx(privacy.epsilon(mixed[::-1], 1e-5), rel=1e-9)


def test_epsilon_of_drawn_users_lies_between_what_is_certain_and_everybody() -> None:
    drawn, noise, delta = (100, 1000), 1.5, 1e-5
    share = drawn[0] / drawn[1]
    found = privacy.epsilon([(2 * noise, 1)], delta, drawn)

    def density(x: float, side: float) -> float:
        """All others send nothing, this user its most or the opposite: half a unit to either side."""
        return float((1 - share) * stats.norm.pdf(x, 0, noise) + share * stats.norm.pdf(x, side / 2, noise))

    def lost(epsilon: float) -> float:
        """The least δ at this ε."""

        def excess(x: float) -> float:
            return max(density(x, 1) - math.exp(epsilon) * density(x, -1), 0.0)

        return float(integrate.quad(excess, -12 * noise, 12 * noise, limit=500)[0])

    assert lost(found) < delta < lost(found / 5)
    assert found < privacy.epsilon([(2 * noise, 1)], delta) / 2
    everybody = privacy.epsilon([(noise, 5)], delta, (10, 10))
    assert everybody == privacy.epsilon([(noise, 5)], delta)
    assert privacy.epsilon([(noise, 50)], delta, (1, 10_000)) < privacy.epsilon([(noise, 50)], delta, drawn)


def test_what_was_spent_counts_who_took_part_and_who_came_back(quick: Make, tmp_path: Path) -> None:
    config = quick(
        *ON, "federation.participants=4", "federation.groups=2",
        "federation.dropout=0.3", "federation.rounds=3",
    )  # fmt: skip
    result = ssfl.run(config, tmp_path / "run")
    first, last = (event for event in result.history if event["event"] == "privacy")
    rounds = [event for event in result.history if event["event"] == "round"]
    most = max(sum(user in event["participants"] for event in rounds) for user in range(10))
    assert first["epsilon_sent"] == privacy.epsilon([(0.1, 3)], 1e-5)
    assert last["epsilon_sent"] == privacy.epsilon([(0.1, most)], 1e-5) < first["epsilon_sent"]
    sizes = Counter(min(len(group) for group in event["groups"] if group) for event in rounds)
    releases = [(0.1 * size**0.5, count) for size, count in sizes.items()]
    whole, part = privacy.epsilon(releases, 1e-5), privacy.epsilon(releases, 1e-5, (4, 10))
    assert last["epsilon_model"] == pytest.approx(min(whole, part, last["epsilon_sent"]))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["privacy"] == {
        name: last[name] for name in ("clip", "noise", "delta", "epsilon_sent", "epsilon_model")
    }


def test_of_a_robust_average_each_model_has_its_own_noise_alone(quick: Make) -> None:
    whole, robust = (
        privacy.planned(assemble.make(quick(*ON, f"federation.combine={rule}")).config)
        for rule in ("mean", "median")
    )
    assert whole["epsilon_model"] < whole["epsilon_sent"]
    assert robust["epsilon_model"] == robust["epsilon_sent"] == whole["epsilon_sent"]


def test_the_noise_is_the_users_own_and_a_stopped_run_ends_in_the_same_bytes(
    quick: Make, tmp_path: Path
) -> None:
    config = quick(*ON, "run.checkpoint_every=1")
    result = ssfl.run(config, tmp_path / "whole")
    for path in ("run", "again"):
        ssfl.run(config, tmp_path / path)
    run = tmp_path / "run"
    for lost in ("summary.json", "model.safetensors", "checkpoints/round-0000004.safetensors"):
        (run / lost).unlink()
    again = ssfl.resume(run)
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    told = [
        [{k: v for k, v in event.items() if k not in folder.WALL_CLOCK} for event in one.history]
        for one in (result, again)
    ]
    assert told[0] == told[1]
    assert [event["event"] for event in told[0]].count("privacy") == 2
    norms = told[0][1]["user_update_norm"]
    length = result.history[1]["bytes_up"] / 4 / 10
    assert norms == pytest.approx([0.5 * 0.1 * length**0.5] * 10, rel=0.1)  # the clip is lost in the noise


@pytest.mark.parametrize(
    ("sets", "key", "value"),
    [
        (["privacy.clip=1"], "privacy.clip", 1),
        (["privacy.delta=1e-6"], "privacy.clip", None),
        ([*ON, "privacy.delta=0.1"], "privacy.delta", 0.1),
        ([*ON, "method.name=easgd", "split.server_labels=0"], "method.name", "easgd"),
        ([*ON, "method.name=rscfed"], "method.name", "rscfed"),
        ([*ON, "method.name=fl2"], "method.name", "fl2"),
        ([*ON, "method.name=fedmatch", "train.momentum_policy=reset"], "method.name", "fedmatch"),
        ([*ON, "method.name=server-only"], "method.name", "server-only"),
        ([*ON, "train.momentum_policy=slot"], "train.momentum_policy", "slot"),
        ([*ON, "privacy.noise=0"], "privacy.noise", 0),
    ],
)
def test_what_would_not_hold_is_refused(quick: Make, sets: list[str], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        quick(*sets)
    assert (caught.value.key, caught.value.value) == (key, value)


def test_a_real_site_noises_with_what_nobody_knows_and_keeps_its_numbers_back(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'ssfl[flower]'")
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from ssfl.deploy import centre, wire
    from ssfl.deploy.site import Site, client_app

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8)).astype(np.uint8)
        for home in (f"labelled/{number % 2}", "site"):
            (tmp_path / home).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / home / f"{number}.png")
    sets = [f"data.path={tmp_path / 'labelled'}", "federation.rounds=3", "federation.period=2",
            "train.batch_size=4", "method.threshold=0.3", "run.threads=1"]  # fmt: skip

    def answers(*more: str) -> tuple[list[torch.Tensor], dict[str, float], list[str]]:
        sim, terms = centre.prepare(load_config("own", [*sets, *more]))
        row = sim.initial().average
        lines: list[str] = []
        site = Site("a", ImageFiles(sorted((tmp_path / "site").iterdir())), "cpu", 1, lines.append)
        replies = []
        for _ in range(2):
            sent = wire.pack(row, terms=terms, user=0, round=0)
            message = Message(sent, dst_node_id=1, message_type="train")
            message.metadata.__dict__["_message_id"] = "1"
            replies.append(
                client_app(lambda context: site)(message, Context(1, 1, {}, RecordDict(), {})).content
            )
        return (
            [wire.unpack(reply, len(row)) - row for reply in replies],
            wire.read_trained(replies[0], len(row), 0)[1],
            lines,
        )

    (one, two), told, _ = answers()
    assert torch.equal(one, two)
    assert told["loss"] > 0
    (first, second), told, lines = answers("privacy.clip=0.01", "privacy.noise=2")
    assert not torch.equal(first, second)
    assert set(told.values()) == {0.0}
    assert float((first - second).std()) == pytest.approx(0.01 * 2 * 2**0.5, rel=0.05)
    assert "ε = " in lines[0]
    assert "loss" in lines[1]


def test_a_run_whose_events_are_damaged_does_not_tell_too_small_an_epsilon(
    quick: Make, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    stopped = quick(*ON, "run.checkpoint_every=1")
    ssfl.run(stopped, path)
    (path / "summary.json").unlink()
    file = path / "events.jsonl"
    first, second, *rest = file.read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, second[:20] + b"\n", *rest])
    file.write_bytes(damaged)
    with pytest.raises(RunError) as caught:
        ssfl.resume(path)
    assert caught.value.value == 1
    assert file.read_bytes() == damaged  # nothing more is lost


def test_without_the_accountant_it_says_what_to_install(quick: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    with pytest.raises(SsflError) as caught:
        assemble.make(quick(*ON))
    assert caught.value.fix == "pip install 'ssfl[privacy]'"
