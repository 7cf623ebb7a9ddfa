"""A federation round by round: paused, stopped and taken up again, it gives the bytes of a run in one go."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ssfl
from ssfl import methods
from ssfl.config import loading
from ssfl.config.loading import Config
from ssfl.errors import ConfigError, FolderInUse, RunError
from ssfl.runs import checkpoints, folder

Quick = Callable[..., Config]


def content(path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    lines = (path / "events.jsonl").read_text().splitlines()
    events = [{k: v for k, v in json.loads(line).items() if k not in folder.WALL_CLOCK} for line in lines]
    return (path / "model.safetensors").read_bytes(), events


@pytest.mark.parametrize("how", ["run.engine=loop", "run.engine=vmap", "run.threads=2"])
def test_rounds_one_by_one_are_a_run(quick: Quick, tmp_path: Path, how: str) -> None:
    config = quick(how, "run.eval_every=2", "run.checkpoint_every=3", "method.threshold=0.2")
    ssfl.run(config, tmp_path / "run")
    federation = ssfl.Federation(config, out=tmp_path / "steps")
    seen = []
    for done in federation:  # leaving the loop pauses
        seen.append(done.round)
        if done.round == 1:
            break
    assert federation.summary is None
    for done in federation:
        seen.append(done.round)
        assert done.state.round == done.round
        assert [event["event"] for event in done.events] == ["round", "eval"][: 1 + (done.round % 2 == 0)]
        assert done.state.average.shape == done.state.streams[0].shape
        if done.round == 2:
            federation.stop()
    assert (seen, federation.round) == ([1, 2], 2)
    assert not list(federation)
    again = ssfl.Federation(config, out=tmp_path / "steps")
    assert [done.round for done in again] == [3, 4]
    assert content(tmp_path / "run") == content(tmp_path / "steps")
    assert again.result is not None
    assert again.summary is not None
    assert again.result.accuracy == again.summary["accuracy"] == again.history[-1]["accuracy"]


def test_a_program_that_leaves_the_loop_loses_no_round(tmp_path: Path) -> None:
    script = """
import ssfl
config = ssfl.load_config("quickstart", ["federation.rounds=4", "federation.period=1", "run.threads=1"])
federation = ssfl.Federation(config, out="run")
for done in federation:
    if done.round == 2:
        raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert not (tmp_path / "run" / "failed.json").exists()
    saved = checkpoints.newest(tmp_path / "run", torch.device("cpu"))
    assert saved is not None
    assert saved.state.round == 2


def test_a_run_is_finished_after_its_last_round(quick: Quick, tmp_path: Path) -> None:
    config = quick()
    with ssfl.Federation(config, out=tmp_path / "run") as federation:
        next(federation)
        with pytest.raises(FolderInUse, match="this process"):
            ssfl.Federation(config, out=tmp_path / "run")
    with ssfl.Federation(config, out=tmp_path / "run") as federation:
        assert federation.round == 1
        while federation.round < 4:
            next(federation)
        assert federation.result is not None
        assert federation.result.accuracy == federation.history[-1]["accuracy"]
        assert not list(federation)


def test_an_object_gets_the_defaults_that_its_class_has(quick: Quick, tmp_path: Path) -> None:
    """`method=` gives the same settings in `ssfl.load_config` and in `ssfl.run`."""
    config = quick("method.name=anchored")
    assert config.federation.slow_average == 0.99
    semifl = methods.find("semifl")()
    assert loading.with_method(config, semifl) == quick("method.name=semifl")
    assert loading.with_method(quick("federation.slow_average=0.99"), semifl).federation.slow_average == 0.99
    changed = replace(config, federation=replace(config.federation, slow_average=0.5))
    assert loading.with_method(changed, semifl).federation.slow_average == 0.5


def test_another_seed_is_another_run(quick: Quick, tmp_path: Path) -> None:
    ssfl.run(quick(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run\.seed"):
        ssfl.Federation(quick("run.seed=2"), out=tmp_path / "run")


def test_a_run_is_taken_up_by_either(quick: Quick, tmp_path: Path) -> None:
    config = quick()
    ssfl.run(config, tmp_path / "run")
    federation = ssfl.Federation(config, out=tmp_path / "steps")
    next(federation)
    federation.stop()
    ssfl.resume(tmp_path / "steps")
    assert content(tmp_path / "run") == content(tmp_path / "steps")
    finished = ssfl.Federation(config, out=tmp_path / "steps")
    assert list(finished) == []
    assert finished.round == 4
    assert finished.evaluate()["accuracy"] == finished.history[-1]["accuracy"]
    assert content(tmp_path / "run") == content(tmp_path / "steps")


def test_the_model_and_its_evaluation(quick: Quick, tmp_path: Path) -> None:
    federation = ssfl.Federation(quick("run.eval_every=1"), out=tmp_path / "run")
    before = federation.model()
    for done in federation:
        assert federation.evaluate()["accuracy"] == done.events[-1]["accuracy"]
        with torch.no_grad():
            for weight in federation.model().parameters():
                weight.zero_()  # a copy: the run goes on as it was
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert torch.equal(federation.model()(images), ssfl.load_model(tmp_path / "run")(images))
    assert not torch.equal(before(images), federation.model()(images))
    ssfl.run(quick("run.eval_every=1"), tmp_path / "plain")
    assert content(tmp_path / "run") == content(tmp_path / "plain")


def test_metrics_are_in_the_evaluations_and_change_nothing(quick: Quick, tmp_path: Path) -> None:
    config = quick("run.eval_every=2")

    def length(model: torch.nn.Module) -> float:
        return sum(float(weight.detach().square().sum()) for weight in model.parameters())

    federation = ssfl.Federation(config, out=tmp_path / "run", metrics={"length": length})
    events = [event for done in federation for event in done.events if event["event"] == "eval"]
    assert len(events) == 2
    assert events[-1]["length"] == pytest.approx(length(ssfl.load_model(tmp_path / "run")))
    assert events[-1]["length"] == federation.history[-1]["length"] == federation.evaluate()["length"]
    ssfl.run(config, tmp_path / "plain")
    assert content(tmp_path / "run")[0] == content(tmp_path / "plain")[0]


def constant(value: Any, model: torch.nn.Module) -> Any:
    return value


def test_bad_metrics_are_one_line(quick: Quick, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ssfl.Federation(quick(), out=tmp_path / "run", metrics={"accuracy": lambda model: 1.0})
    assert (caught.value.key, caught.value.value) == ("metrics", "accuracy")
    values: list[Any] = [float("nan"), "high"]
    for value in values:
        metrics = {"mine": partial(constant, value)}
        broken = ssfl.Federation(quick("run.eval_every=1"), out=tmp_path / f"{value}", metrics=metrics)
        with pytest.raises(ConfigError) as caught:
            next(broken)
        assert caught.value.key == "mine"


def test_a_folder_is_one_federations_and_of_one_config(quick: Quick, tmp_path: Path) -> None:
    federation = ssfl.Federation(quick(), out=tmp_path / "run")
    next(federation)
    with pytest.raises(FolderInUse):
        ssfl.Federation(quick(), out=tmp_path / "run")
    federation.stop()
    with pytest.raises(ConfigError) as caught:
        ssfl.Federation(quick("split.users=5"), out=tmp_path / "run")
    assert (caught.value.key, caught.value.value, caught.value.fix) == ("split.users", 5, "split.users=10")
    with pytest.raises(RunError) as taken:
        ssfl.run(quick(), tmp_path / "run")
    assert (taken.value.key, taken.value.value) == ("--out", str(tmp_path / "run"))
