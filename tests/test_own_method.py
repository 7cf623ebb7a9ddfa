"""The method in examples/own/, written with public names alone: engines agree, a contest plays it, and a run
that was stopped ends in the same bytes."""

import ast
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import ssfl as public
from conftest import Call
from documents import ROOT
from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.federation import Look
from ssfl.methods import find
from ssfl.runs import assemble, folder

FILE = ROOT / "examples/own/adamatch.py"
NAME = f"{FILE}:AdaMatch"
SHORT = [
    "federation.rounds=6", "federation.period=2", "train.batch_size=16", "run.checkpoint_every=2",
    "run.threads=1", "run.device=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts as a new process would."""
    monkeypatch.setattr(outside, "_trusted", set())


def sets(*more: str) -> list[str]:
    return [word for one in [*SHORT, *more] for word in ("--set", one)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_it_takes_from_ssfl_only_public_names() -> None:
    for node in ast.walk(ast.parse(FILE.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.module.startswith("ssfl")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ssfl":
            assert node.attr in public.__all__


def test_labels_by_hand() -> None:
    """Two users of two classes; nine tenths of the mean confidence, and none of the alignment."""
    outside.trust(NAME)
    method = find(NAME)(share=0.9, align=0.0)  # type: ignore[call-arg]
    answers = torch.tensor([[[0.9, 0.1], [0.7, 0.3]], [[0.6, 0.4], [0.5, 0.5]]], dtype=torch.float64)
    images = torch.arange(2).expand(2, 1, 2)
    look = Look(answers, images, torch.zeros(2, dtype=torch.int64), {}, False)
    labels = method.label(look)
    assert labels.tensors["labels"].tolist() == [[[0, 0]], [[0, 0]]]
    assert labels.tensors["mask"].tolist() == [[[1, 0]], [[1, 1]]]  # at least 0.72, at least 0.495
    aligned = replace(method, align=1.0).label(look)  # type: ignore[call-arg]
    # 0.7 / 0.8 against 0.3 / 0.2: the class that is predicted less often wins
    assert aligned.tensors["labels"].tolist() == [[[0, 1]], [[0, 1]]]


def test_engines_agree_in_float64(quick: Callable[..., Config]) -> None:
    config = quick(f"method.name={NAME}", "train.precision=float64", "federation.rounds=30")
    sims = [
        assemble.make(replace(config, run=replace(config.run, engine=engine))) for engine in ("loop", "vmap")
    ]
    states, masks = [sim.initial() for sim in sims], []
    for _ in range(5):
        events = []
        for i, sim in enumerate(sims):
            states[i], found = sim.play(states[i])
            events.append(found[0])
        assert events[0]["user_mask_rate"] == events[1]["user_mask_rate"]
        assert relative(states[1].average, states[0].average) < 1e-6
        masks.append(events[0]["mask_rate"])
    assert 0.2 < sum(masks) / 5 < 0.95


def test_a_contest_plays_it(ssfl: Call) -> None:
    methods = f"alternate,{NAME}"
    choose = ["--choose", "method.share=0.8", "--quiet"]
    code, out, err = ssfl("contest", "--methods", methods, "--seeds", "1", *sets(), *choose, "--out", "both")
    assert code == 0, err
    assert "alternate" in out
    assert "adamatch.py:AdaMatch" in out
    standings = json.loads(Path("both/contest.json").read_text("utf-8"))["standings"]
    played = {one["method"]: one for one in standings}
    assert played.keys() == {"alternate", NAME}
    assert list(played[NAME]["options"]) == ["method.share=0.8"]
    assert list(played["alternate"]["options"]) == []  # it has no such field


def test_a_stopped_run_ends_in_the_same_bytes(ssfl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    own = sets(f"method.name={NAME}")
    assert ssfl("run", *own, "--out", "whole")[0] == 0
    federation = public.Federation(
        public.load_config("quickstart", [*SHORT, f"method.name={NAME}"]), out="stopped"
    )
    for done in federation:
        if done.round == 3:
            federation.stop()
    monkeypatch.setattr(outside, "_trusted", set())
    code, _, err = ssfl("resume", "stopped")
    assert code == 2
    assert "--with" in err
    assert "adamatch.py" in err
    code, _, err = ssfl("resume", "stopped", "--with", str(FILE))
    assert code == 0, err
    models = [Path(run, "model.safetensors").read_bytes() for run in ("whole", "stopped")]
    assert models[0] == models[1]
    assert folder.read_config(Path("stopped")).method.name == NAME


def test_a_changed_file_is_refused(ssfl: Call) -> None:
    mine = Path("adamatch.py")
    mine.write_text(FILE.read_text("utf-8"), "utf-8")
    federation = public.Federation(
        public.load_config("quickstart", [*SHORT, "method.name=adamatch.py:AdaMatch"]), out="run"
    )
    next(iter(federation))
    federation.stop()
    mine.write_text(mine.read_text("utf-8").replace("aligned.amax(-1) >= threshold", "aligned.amax(-1) > 0"))
    code, _, err = ssfl("resume", "run", "--with", "adamatch.py")
    assert code == 2
    assert "adamatch.py" in err


def test_the_example_for_contests_is_the_method_of_the_preset_pictures() -> None:
    name = f"{ROOT / 'examples/own/relative.py'}:Relative"
    outside.trust(name)
    mine, of_preset = find(name)(), load_config("pictures").method
    assert {field.name: getattr(mine, field.name) for field in fields(mine)} == {
        field.name: getattr(of_preset, field.name) for field in fields(of_preset)
    }
