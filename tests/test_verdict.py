"""Whether the unlabelled images helped: the server-only model, folds, and what a run says at its end."""

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import ssfl
from ssfl.config.loading import Config, load_config
from ssfl.config.writing import to_toml
from ssfl.core.statistics import Paired
from ssfl.data import folds
from ssfl.errors import ConfigError
from ssfl.runs import assemble, baseline, folder, resolve, verdict
from ssfl.runs.predict import load_model
from ssfl.runs.result import Result
from waiting import ended, wait_until

Quick = Callable[..., Config]
DIGITS = load_digits()
X = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8)
Y = DIGITS.target


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Few test images, or images that belong to nobody, are told as a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def data() -> ssfl.Data:
    """Digits of a server and two users, with 150 test images."""
    users = [np.arange(80, 200), np.arange(200, 320)]
    return ssfl.Data(X[:320], Y[:320], X[1600:1750], Y[1600:1750], server=np.arange(80), users=users)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of digits without test/: six of each class, two of one writer, and two sites."""
    root = tmp_path_factory.mktemp("images")
    for number in range(300):
        digit = Y[number]
        done = sum(Y[:number] == digit)
        home = root / f"{digit}" if done < 6 else root / "unlabelled" / f"site-{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        name = f"{1000 + 10 * digit + done // 2}_{done}" if done < 6 else f"{number}"
        Image.fromarray(X[number]).save(home / f"{name}.png")
    return root


def own(path: Path, *more: str) -> Config:
    short = ["federation.rounds=4", "federation.period=3", "train.batch_size=16", "run.threads=1",
             "run.device=cpu", "model.name=small", "run.checkpoint_every=1"]  # fmt: skip
    return load_config("own", [f"data.path={path}", *short, *more])


def judged(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = result.summary["verdict"]
    return found


def same_tensors(one: Path, other: Path) -> bool:
    a, b = (folder.read_model(path / "model.safetensors")[0] for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What is said


@pytest.mark.parametrize(
    ("pair", "conclusion"),
    [
        (Paired(237, 203, 180, 30, 7), "helped"),
        (Paired(237, 180, 203, 7, 30), "hurt"),
        (Paired(237, 203, 200, 10, 7), "unclear"),
        (Paired(12, 10, 9, 2, 1), "too few"),
    ],
)
def test_the_interval_decides(pair: Paired, conclusion: str) -> None:
    one = verdict.Comparison("test", pair)
    assert one.conclusion == conclusion
    said = verdict.judge([one])
    assert said["conclusion"] == conclusion
    for number in (pair.count, pair.correct, pair.other_correct):
        assert str(number) in said["text"]
    assert said["kept"] == "federated"  # test images choose nothing


def test_only_held_out_labels_choose_the_model() -> None:
    hurt, unclear = Paired(237, 180, 203, 7, 30), Paired(237, 203, 200, 10, 7)
    for kind in ("validation", "folds"):
        test, held = verdict.Comparison("test", unclear), verdict.Comparison(kind, hurt)
        assert verdict.judge([test, held])["kept"] == "server-only"
        assert verdict.judge([held])["kept"] == "server-only"
        test, held = verdict.Comparison("test", hurt), verdict.Comparison(kind, unclear)
        assert verdict.judge([test, held])["kept"] == "federated"


def test_a_comparison_counts_pairs_and_classes() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    one = verdict.compare("test", labels, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 0]), 2)
    assert one.pair == Paired(4, 3, 2, 2, 1)
    assert one.balanced[0] == pytest.approx((2 / 3 + 1) / 2)
    assert one.balanced[1] == pytest.approx((2 / 3) / 2)
    assert one.uneven
    assert "balanced accuracy" in verdict.sentence(one)


# Runs with a server-only model beside


def test_own_images_get_a_verdict_from_a_real_server_only_run(
    quick: Quick, data: ssfl.Data, tmp_path: Path
) -> None:
    result = ssfl.run(quick(), tmp_path / "run", data=data)
    alone = quick("method.name=server-only")
    by_hand = ssfl.run(alone, tmp_path / "alone", data=data)
    [one] = judged(result)["comparisons"]
    assert one["on"] == "test"
    assert (one["correct"], one["count"]) == (result.summary["correct"], 150)
    assert result.verdict == judged(result)["text"]
    assert result.history[-1]["event"] == "verdict"
    # the same start, images and steps; the slow average too
    config, baseline = (folder.read_config(tmp_path / "run" / name) for name in (".", "baseline"))
    assert baseline.method.name == "server-only"
    assert baseline.federation.slow_average == config.federation.slow_average
    assert replace(baseline.train, momentum_policy=config.train.momentum_policy) == config.train
    assert folder.read_summary(tmp_path / "run" / "baseline") is not None
    assert "verdict" not in by_hand.summary
    assert not (tmp_path / "alone" / "baseline").exists()


def test_the_server_only_model_is_what_the_method_gives(
    quick: Quick, data: ssfl.Data, tmp_path: Path
) -> None:
    """A method with the defaults of server-only: the model beside it is the one that server-only trains."""
    ssfl.run(quick("method.name=alternate"), tmp_path / "run", data=data)
    ssfl.run(quick("method.name=server-only"), tmp_path / "alone", data=data)
    assert same_tensors(tmp_path / "run" / "baseline", tmp_path / "alone")


def test_the_comparison_changes_nothing_and_can_be_left_out(
    quick: Quick, data: ssfl.Data, tmp_path: Path
) -> None:
    ssfl.run(quick(), tmp_path / "with", data=data)
    without = ssfl.run(quick("run.baseline=false"), tmp_path / "without", data=data)
    assert without.verdict is None
    assert (without.stopped, without.stopped_by) == (None, None)  # no signal came
    assert not (tmp_path / "without" / "baseline").exists()
    assert same_tensors(tmp_path / "with", tmp_path / "without")
    known = resolve.resolve(quick(), resolve.load_data(quick()))
    assert known.run.baseline is False  # a known data set


def test_users_that_hurt_are_left_out_of_the_model(quick: Quick, data: ssfl.Data, tmp_path: Path) -> None:
    """All users attack: the validation images show it, and the server-only model is kept."""
    settings = ["data.validation=0.3", "method.name=crl-gn", "federation.attackers=1", "federation.rounds=12",
                "federation.attack=shift", "train.lr=0.1", "federation.period=8"]  # fmt: skip
    users = [np.arange(400, 560), np.arange(560, 720)]
    owners: dict[str, Any] = {"server": np.arange(300), "users": users, "validation": np.arange(300, 400)}
    held = ssfl.Data(X[:720], Y[:720], X[1600:1750], Y[1600:1750], **owners)
    result = ssfl.run(quick(*settings), tmp_path / "run", data=held)
    said = judged(result)
    assert said["kept"] == "server-only"
    assert [one["on"] for one in said["comparisons"]] == ["test", "validation"]
    assert said["comparisons"][1]["interval"][1] < 0
    assert same_tensors(tmp_path / "run", tmp_path / "run" / "baseline")
    assert result.summary["correct"] == said["comparisons"][0]["correct_without"]
    model = load_model(tmp_path / "run")
    right = model(torch.tensor(X[1600:1750])[:, None]).argmax(-1) == torch.tensor(Y[1600:1750])
    assert int(right.sum()) == result.summary["correct"]
    assert model.card["method"] == "server-only"


def test_settings_that_leave_nothing_to_compare(quick: Quick, images: Path) -> None:
    for sets, key in (
        (["run.folds=1"], "run.folds"),
        (["run.folds=5", "run.engine=dist"], "run.folds"),
        (["run.baseline=true", "run.engine=dist"], "run.baseline"),
        (["run.folds=5", "split.labels_at=users"], "run.folds"),
        (["run.folds=5", "privacy.clip=1.0", "privacy.noise=1.0"], "run.folds"),
    ):
        with pytest.raises(ConfigError) as caught:
            quick(*sets)
        assert caught.value.key == key
        assert caught.value.fix is not None


# Folds


def test_files_of_one_patient_are_told_by_name_or_folder() -> None:
    names = {
        "16745_4_2.png": "16745", "patient7-left.jpg": "patient7", "a-1042 (2).png": "a-1042",
        "2020-02-19_287214-day8.png": "2020-02-19_287214", "20200219_3.png": None, "scan_1.png": None,
    }  # fmt: skip
    assert {name: folds.subject(name) for name in names} == names
    home = Path("x/cat")
    flat = [(home / name, home) for name in ("1001_1.png", "1001_2.png", "1002_1.png", "lone.png")]
    groups = folds.subjects(flat)
    assert groups is not None
    assert groups.tolist() == [0, 0, 1, 2]
    nested = [
        (home / "anna" / "1.png", home),
        (Path("x/dog/anna/2.png"), Path("x/dog")),
        (home / "b.png", home),
    ]
    assert folds.subjects(nested) is None  # a group of more than half says nothing
    nested += [(home / "ben" / "1.png", home)]
    assert folds.subjects(nested) is not None
    assert folds.subjects([(home / f"{k}.png", home) for k in range(4)]) is None


def test_folds_are_even_and_keep_groups_together() -> None:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 15)
    each = folds.assign(labels, None, 5, 1)
    assert np.bincount(each).tolist() == [12] * 5
    assert all(np.bincount(each[labels == k]).tolist() == [3] * 5 for k in range(4))
    assert (each == folds.assign(labels, None, 5, 1)).all()
    assert (each != folds.assign(labels, None, 5, 2)).any()
    groups = draw.integers(0, 25, 60)
    together = folds.assign(labels, groups, 5, 1)
    assert all(len(set(together[groups == g])) == 1 for g in set(groups))
    assert min(np.bincount(together, minlength=5)) > 0
    with pytest.raises(ConfigError) as caught:
        folds.assign(labels[:3], None, 5, 1)
    assert (caught.value.key, caught.value.fix) == ("run.folds", "run.folds=3")


def test_with_folds_every_label_trains_and_tests(images: Path, tmp_path: Path) -> None:
    result = ssfl.run(own(images, "run.folds=3"), tmp_path / "run")
    held = json.loads((tmp_path / "run" / "folds.json").read_text())
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert sum(split["server"]) == 60  # nothing is held out of the final model
    assert split["test"] == 0
    assert result.summary["judged_by"] == "folds"
    assert result.summary["count"] == len(held["images"]) == 60
    truth = resolve.load_data(own(images, "run.folds=3")).labels.numpy()[held["images"]]
    assert result.summary["correct"] == int((np.array(held["federated"]) == truth).sum())
    assert result.summary["folds"]["groups"] == 30
    for first, second in zip(held["fold"][::2], held["fold"][1::2], strict=True):
        assert first == second  # pairs of one writer
    assert not (tmp_path / "run" / "folds").exists()
    assert judged(result)["comparisons"][0]["on"] == "folds"
    alone = ssfl.run(own(images, "run.folds=3", "run.baseline=false"), tmp_path / "alone")
    assert alone.verdict is None
    assert alone.summary["correct"] == result.summary["correct"]


def test_a_fold_never_trains_on_what_it_holds_out(images: Path, tmp_path: Path) -> None:
    seen: list[tuple[set[int], set[int], int]] = []
    sim = assemble.make(own(images, "run.folds=3"))

    def play(sim: Any, path: Path, what: str) -> Any:
        seen.append((set(sim.parts.server), set(sim.validation), sim.rounds))
        return sim.initial()

    (tmp_path / "run").mkdir()
    baseline.cross_validate(sim, tmp_path / "run", play)
    sim.engine.close()
    everything = set(sim.parts.server)
    assert len(seen) == 6
    assert all(not train & held and train | held == everything for train, held, _ in seen)
    assert set().union(*(held for _, held, _ in seen)) == everything
    assert {rounds for _, _, rounds in seen} == {4}


# Killed and resumed


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ssfl", *map(str, words)]


def killed(images: Path, out: Path, watched: str, *more: str) -> None:
    """A run that is killed once a file inside its folder tells of a second round."""
    config = out.with_suffix(".toml")
    config.write_text(to_toml(own(images, *more)))
    process = subprocess.Popen(command("run", config, "--out", out, "--quiet"))

    def reached() -> bool:
        assert process.poll() is None, "the run ended early"
        file = out / watched
        return file.is_file() and '"round": 2,' in file.read_text()

    wait_until(reached, "no progress", files=[out / "events.jsonl"], every=0.005)
    process.send_signal(signal.SIGKILL)
    ended(process)
    assert not (out / "summary.json").exists()


LONG = ("run.folds=3", "federation.rounds=12")


@pytest.fixture(scope="module")
def straight(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    return ssfl.run(own(images, *LONG), tmp_path_factory.mktemp("runs") / "straight").path


@pytest.mark.slow
@pytest.mark.parametrize("watched", ["baseline/events.jsonl", "folds/2-alone/events.jsonl"])
def test_a_run_killed_in_its_comparison_goes_on_to_the_same_bytes(
    images: Path, straight: Path, tmp_path: Path, watched: str
) -> None:
    out = tmp_path / "killed"
    killed(images, out, watched, *LONG)
    subprocess.run(command("resume", out, "--quiet"), check=True)
    again, before = (json.loads((path / "summary.json").read_text()) for path in (out, straight))
    for key in ("verdict", "folds", "accuracy", "correct"):
        assert again[key] == before[key]
    for name in (".", "baseline"):
        assert same_tensors(out / name, straight / name)
    kept = [[event for event in folder.read_events(path) if event["event"] == "verdict"]
            for path in (out, straight)]  # fmt: skip
    assert kept[0] == kept[1]
    assert len(kept[0]) == 1
