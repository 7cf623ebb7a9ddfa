"""The run folder: what is in it, what survives, what is refused."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ssfl
from ssfl.config.settings import Config
from ssfl.errors import ConfigError, DivergedError, FolderInUse, RunError, SsflWarning
from ssfl.methods.anchored import Anchored
from ssfl.runs import assemble, checkpoints, compare, resolve, round_loop, same, train
from ssfl.runs import folder as runs

Make = Callable[..., Config]


@pytest.fixture
def done(quick: Make, tmp_path: Path) -> Path:
    return ssfl.run(quick("run.checkpoint_every=1", "run.eval_every=2"), tmp_path / "run").path


def events_of(path: Path) -> list[dict[str, object]]:
    return [
        {key: value for key, value in event.items() if key not in runs.WALL_CLOCK}
        for event in runs.read_events(path)
    ]


def undone(path: Path) -> None:
    """Take away what a finished run has and a killed one has not."""
    (path / "summary.json").unlink()
    (path / "model.safetensors").unlink()


FIRST_RELEASE = """[method]
name = "anchored"
objective = "consistency"
threshold = 0.8
labels = "round"
thresholds = "fixed"
fill = false
mix = 0.0
proximal = 0.0
sharpness = 0.0
server_views = "weak"
averaging = "fedavg"
server = "alternate"
gate = false
check = false
guard = true
combine = "mean"
weighting = "even"
pace = "classes"
head_start = 0.0
server_momentum = 0.25
residual = 0
slow = 0.98
server_replicas = false
views = "separate"
teacher_mode = "eval"
"""
"""[method] as the first release wrote it; the settings that moved stood nowhere else."""
MOVED = ("head_start", "slow_average", "gate", "combine", "median_fallback", "server_views")


def made_old(path: Path) -> None:
    """Give a run folder the config that the first release would have written."""
    before, _, rest = (path / "config.toml").read_text().partition("[method]\n")
    rest = rest[rest.index("[federation]") :]
    lines = [line for line in rest.splitlines() if line.split(" = ")[0] not in MOVED]
    (path / "config.toml").write_text(before + FIRST_RELEASE + "\n" + "\n".join(lines) + "\n")


def test_a_run_of_the_first_release_can_be_read_but_not_resumed(done: Path) -> None:
    from ssfl.board import describe, untrusted
    from ssfl.report import page

    made_old(done)
    config = runs.read_config(done)
    assert config.method == Anchored(threshold=0.8, momentum=0.25, guard=True, pace="classes")
    assert (config.federation.slow_average, config.train.server_views) == (0.98, "weak")
    assert (config.federation.gate, config.federation.combine) == (False, "mean")
    assert compare.settings(done, done) == []
    assert compare.first_difference(done, done) is None
    assert ssfl.load_model(done).classes == tuple("0123456789")
    page.write([done], done.with_suffix(".html"))
    assert "The method is anchored" in done.with_suffix(".html").read_text()
    with untrusted.opened(done.parent, done.name) as handle:
        assert describe.run(handle, done.name)["method"] == "anchored"
    undone(done)
    with pytest.raises(RunError, match=r"ssfl 0\.1") as caught:
        ssfl.resume(done)
    assert "\n" not in str(caught.value)


def test_a_renamed_setting_of_an_older_run_folder_is_understood(done: Path) -> None:
    config = done / "config.toml"
    assert "median_fallback = false" in config.read_text()
    config.write_text(config.read_text().replace("median_fallback = false", "check = true"))
    assert runs.read_config(done).federation.median_fallback is True


def test_a_setting_that_no_version_knows_is_refused(done: Path) -> None:
    config = done / "config.toml"
    config.write_text(config.read_text().replace("[method]\n", "[method]\nbygone = 1.0\n"))
    with pytest.raises(RunError, match=r"method\.bygone"):
        runs.read_config(done)


def test_a_run_folder_holds_what_it_should(done: Path) -> None:
    assert sorted(p.name for p in done.iterdir()) == [
        "checkpoints", "config.toml", "events.jsonl", "model.safetensors", "split.json", "summary.json",
    ]  # fmt: skip
    events = list(runs.read_events(done))
    assert [e["event"] for e in events] == ["round", "round", "eval", "round", "round", "eval"]
    for key in ("loss", "mask_rate", "pseudo_accuracy", "update_norm", "server_loss", "seconds", "lr"):
        assert key in events[0]
    summary = json.loads((done / "summary.json").read_text())
    assert summary["accuracy"] == events[-1]["accuracy"]
    assert summary["rounds"] == 4
    parameters = summary["parameters"]
    assert summary["bytes_up"] == summary["bytes_down"] == 4 * 10 * parameters * 4
    parts = json.loads((done / "split.json").read_text())
    assert abs(parts["measured_skew"] - 0.4) < 0.03
    assert parts["server"] == [5] * 10
    resolved = ssfl.load_config(done / "config.toml")
    assert resolved.federation.participants == 10
    assert resolved.model.name == "small"
    assert resolved.run.engine in ("loop", "vmap")


def test_the_model_of_a_run_predicts_what_was_evaluated(done: Path) -> None:
    from ssfl.data import sources

    model = ssfl.load_model(done)
    assert model.classes == tuple("0123456789")
    assert not model.training
    digits = sources.load("digits", root=Path("data"))
    with torch.no_grad():
        right = model(digits.test_images).argmax(1) == digits.test_labels
        whole = model(digits.test_images.float() / 255)
    assert float(right.double().mean()) == json.loads((done / "summary.json").read_text())["accuracy"]
    torch.testing.assert_close(whole, model(digits.test_images), atol=1e-4, rtol=1e-4)
    arrays = [model(digits.test_images.numpy()), model(digits.test_images[:, 0].numpy())]
    for found in arrays:
        torch.testing.assert_close(found, model(digits.test_images))
    with pytest.raises(ValueError, match=r"\[N, 1, 8, 8\]"):
        model(digits.test_images[0])
    with pytest.raises(ValueError, match=r"\[N, 1, 8, 8\].*\[360, 1, 5, 5\]"):
        model(np.zeros((360, 5, 5, 1), np.uint8))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_going_on_from_any_checkpoint_ends_in_the_same_bytes(
    quick: Make, tmp_path: Path, engine: str
) -> None:
    config = quick(
        f"run.engine={engine}", "run.checkpoint_every=1", "method.name=grouping", "run.diversity_every=2",
        "train.momentum_policy=slot", "federation.participants=5", "federation.dropout=0.2",
    )  # fmt: skip
    straight = ssfl.run(config, tmp_path / "straight").path
    model, events = (straight / "model.safetensors").read_bytes(), events_of(straight)
    assert len(list(runs.read_events(straight))[-1]["stream_accuracy"]) == 2
    checkpoints = sorted((straight / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    undone(straight)
    checkpoints[-1].unlink()
    assert ssfl.resume(straight).accuracy == events[-1]["accuracy"]
    assert (straight / "model.safetensors").read_bytes() == model
    assert events_of(straight) == events
    # and from nothing: killed before the first checkpoint
    undone(straight)
    for file in (straight / "checkpoints").iterdir():
        file.unlink()
    ssfl.resume(straight)
    assert (straight / "model.safetensors").read_bytes() == model
    assert events_of(straight) == events


def test_a_torn_checkpoint_is_passed_over(done: Path) -> None:
    model, events = (done / "model.safetensors").read_bytes(), events_of(done)
    older, newest = sorted((done / "checkpoints").iterdir())
    whole = newest.read_bytes()
    damaged = bytearray(whole)
    damaged[-20] ^= 1
    for torn in (whole[: len(whole) // 2], b"", bytes(damaged), b"x" * 100):
        undone(done)
        newest.write_bytes(torn)
        ssfl.resume(done)
        assert (done / "model.safetensors").read_bytes() == model
        assert events_of(done) == events
    undone(done)
    for file in (done / "checkpoints").iterdir():
        file.write_bytes(b"")
    with pytest.raises(RunError) as caught:
        ssfl.resume(done)
    assert (caught.value.key, caught.value.value) == ("checkpoints", str(done))
    assert older.exists()


def test_events_after_the_checkpoint_and_torn_lines_are_cut(done: Path) -> None:
    events = events_of(done)
    undone(done)
    newest = sorted((done / "checkpoints").iterdir())[-1]
    newest.unlink()
    with (done / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "round", "rou')
    ssfl.resume(done)
    assert events_of(done) == events


def test_a_finished_run_is_only_reported(done: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in done.rglob("*")}
    result = ssfl.resume(done)
    assert result.accuracy == result.history[-1]["accuracy"]
    assert {p: p.stat().st_mtime_ns for p in done.rglob("*")} == before


def test_a_finished_run_without_its_model_is_finished_again(done: Path) -> None:
    model = (done / "model.safetensors").read_bytes()
    for damage in (b"", None):
        (done / "model.safetensors").unlink()
        if damage is not None:
            (done / "model.safetensors").write_bytes(damage)
        ssfl.resume(done)
        assert (done / "model.safetensors").read_bytes() == model
    (done / "summary.json").write_text("[]")
    (done / "events.jsonl").write_text("3\n")
    assert ssfl.resume(done).accuracy > 0
    assert (done / "model.safetensors").read_bytes() == model


def test_two_processes_cannot_train_one_run(done: Path) -> None:
    undone(done)
    with runs.locked(done), pytest.raises(FolderInUse):
        ssfl.resume(done)


def test_epochs_become_rounds_and_the_run_can_be_read_back(quick: Make, tmp_path: Path) -> None:
    config = quick("federation.epochs=2", "federation.epoch_images=96")
    path = ssfl.run(config, tmp_path / "run").path
    assert runs.read_config(path).federation.rounds == 4
    undone(path)
    assert ssfl.resume(path).path == path


def test_a_run_finds_its_images_from_any_folder(
    quick: Make, patterns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(patterns.parent)
    settings = ["split.users=3", "split.server_labels=16", "model.name=small", "federation.rounds=1"]
    path = ssfl.run(quick(f"data.path={patterns.name}", *settings), tmp_path / "run").path
    undone(path)
    monkeypatch.chdir(tmp_path)
    ssfl.resume(path)


@pytest.mark.parametrize("labels", [0, 10])
def test_users_without_any_label_train_beside_those_with(quick: Make, tmp_path: Path, labels: int) -> None:
    config = quick(
        "split.labels_at=both", f"split.user_labels={labels}", "split.users=20", "federation.rounds=1"
    )
    assert ssfl.run(config, tmp_path / "run").accuracy > 0


def test_a_folder_that_exists_is_never_overwritten(quick: Make, done: Path) -> None:
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    with pytest.raises(RunError) as caught:
        ssfl.run(quick(), done)
    assert (caught.value.key, caught.value.value) == ("--out", str(done))
    assert {p: p.read_bytes() for p in done.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_split_is_one_line_wherever_it_is_read(
    content: bytes | None, quick: Make, tmp_path: Path
) -> None:
    runs.create(tmp_path / "run", quick(), {"fingerprint": "abc"})
    same.require_same_parts(quick(), tmp_path / "run", "abc")
    file = tmp_path / "run/split.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(RunError, match=r"split\.json") as caught:
        same.require_same_parts(quick(), tmp_path / "run", "abc")
    assert "\n" not in str(caught.value)


def test_another_config_another_format_and_other_images_are_refused(done: Path, tmp_path: Path) -> None:
    undone(done)
    config = (done / "config.toml").read_text()
    (done / "config.toml").write_text(config.replace("lr = 0.03", "lr = 0.06"))
    with pytest.raises(RunError) as caught:
        ssfl.resume(done)
    assert caught.value.key == "config.toml"
    (done / "config.toml").write_text(config)
    parts = json.loads((done / "split.json").read_text())
    (done / "split.json").write_text(json.dumps(parts | {"fingerprint": "0"}))
    with pytest.raises(RunError) as caught:
        ssfl.resume(done)
    assert (caught.value.key, caught.value.value) == ("data", "digits")
    (done / "split.json").write_text(json.dumps(parts))
    newest = sorted((done / "checkpoints").iterdir())[-1]
    raw = newest.read_bytes()
    assert b'"format":"1"' in raw
    newest.write_bytes(raw.replace(b'"format":"1"', b'"format":"9"'))
    with pytest.raises(RunError) as caught:
        ssfl.resume(done)
    assert (caught.value.key, caught.value.value) == ("format", "9")


def test_other_versions_are_told(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undone(done)
    sorted((done / "checkpoints").iterdir())[-1].unlink()
    monkeypatch.setattr(runs, "versions", lambda: {"ssfl": "99"})
    config = (done / "config.toml").read_text()
    (done / "config.toml").write_text(config.replace("users_at_once = 10", "users_at_once = 4"))
    told: list[str] = []
    ssfl.resume(done, warn=told.append)
    assert "is now 99" in told[0]
    assert "users_at_once was 10 and is now 4" in told[0]


def test_a_run_from_a_machine_with_another_device_goes_on_and_that_is_told(
    quick: Make, tmp_path: Path
) -> None:
    path = ssfl.run(quick("run.checkpoint_every=1"), tmp_path / "run").path
    undone(path)
    elsewhere = (path / "config.toml").read_text().replace('device = "cpu"', 'device = "cuda:77"')
    (path / "config.toml").write_text(elsewhere)
    for file in (path / "checkpoints").iterdir():
        file.unlink()
    told: list[str] = []
    ssfl.resume(path, warn=told.append)
    assert "cuda:77" in told[0]
    assert checkpoints.newest(path, torch.device("cpu")) is not None


@pytest.mark.parametrize("place", ["missing", "empty"])
def test_what_is_not_a_run_folder_is_named(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    if place == "empty":
        path.mkdir()
    for verb in (ssfl.resume, ssfl.load_model, lambda p: list(runs.read_events(p))):
        with pytest.raises(RunError) as caught:
            verb(path)
        assert caught.value.value == str(path)


def test_bad_input_leaves_no_folder_behind(quick: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ssfl.run(quick("split.server_labels=100000"), tmp_path / "new")
    assert (caught.value.key, caught.value.value) == ("split.server_labels", 100000)
    with pytest.raises(ConfigError) as caught:
        ssfl.run(quick("run.device=cuda:99"), tmp_path / "new")
    assert (caught.value.key, caught.value.value, caught.value.fix) == (
        "run.device",
        "cuda:99",
        "run.device=auto",
    )
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    quick: Make, tmp_path: Path
) -> None:
    config = quick("train.lr=1000", "model.norm=none", "train.warmup=9", "train.cycles=0",
                   "run.checkpoint_every=1", "federation.rounds=30")  # fmt: skip
    with pytest.raises(DivergedError) as caught:
        ssfl.run(config, tmp_path / "run")
    assert (caught.value.key, caught.value.value) == ("train.lr", 1000)
    found = checkpoints.newest(tmp_path / "run", torch.device("cpu"))
    if found is not None:
        assert found.state.average.isfinite().all()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_compare_names_the_first_difference(quick: Make, done: Path, tmp_path: Path) -> None:
    same = ssfl.run(quick("run.checkpoint_every=1", "run.eval_every=2"), tmp_path / "same").path
    assert compare.first_difference(done, same) is None
    other = ssfl.run(quick("run.eval_every=2", "train.lr=0.04"), tmp_path / "other").path
    assert "train.lr: 0.03 | 0.04" in compare.settings(done, other)
    assert compare.first_difference(done, other) == "round 1, lr: 0.03 | 0.04"
    lines = (same / "events.jsonl").read_text().splitlines()
    event = json.loads(lines[3])
    event["user_loss"][4] += 1
    lines[3] = json.dumps(event)
    (same / "events.jsonl").write_text("\n".join(lines) + "\n")
    difference = compare.first_difference(done, same)
    assert difference is not None
    assert difference.startswith("round 3, user 4, loss: ")


@pytest.mark.parametrize("statistics", ["average", "server", "recompute"])
def test_batch_norm_statistics_are_a_choice(quick: Make, tmp_path: Path, statistics: str) -> None:
    config = quick("method.name=crl-bn", f"model.norm_statistics={statistics}", "federation.rounds=6",
                   "federation.period=8", "train.lr=0.02")  # fmt: skip
    result = ssfl.run(config, tmp_path / "run")
    assert result.accuracy > 0.3
    tensors, _ = runs.read_model(tmp_path / "run" / "model.safetensors")
    assert (tensors["norm1.running_var"] > 0).all()


def test_test_images_come_last_only_where_there_are_others(quick: Make, tmp_path: Path) -> None:
    for when in ("last", "never"):
        with pytest.raises(ConfigError) as caught:
            ssfl.run(quick(f"run.test={when}"), tmp_path / "run")
        assert (caught.value.key, caught.value.fix) == ("run.test", "data.validation=0.1")
        assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError) as caught:
        ssfl.run(quick("run.test=last", "data.validation=0.0001"), tmp_path / "run")
    assert (caught.value.key, caught.value.value) == ("data.validation", 0.0001)
    assert not (tmp_path / "run").exists()


def test_test_images_that_are_never_looked_at(quick: Make, tmp_path: Path) -> None:
    """Nothing of them is in what a run leaves, and it is finished all the same."""
    settings = ["run.test=never", "data.validation=0.2", "run.eval_every=2"]
    result = ssfl.run(quick(*settings), tmp_path / "run")
    assert math.isnan(result.accuracy)
    *_, last = (event for event in result.history if event["event"] == "eval")
    assert f"{last['validation_correct']} of {last['validation_count']}" in result.score_text
    summary = runs.read_summary(tmp_path / "run")
    assert summary is not None
    assert summary["validation_accuracy"] == last["validation_accuracy"]
    told = (tmp_path / "run" / "events.jsonl").read_text() + json.dumps(summary)
    assert not any(f'"{key}"' in told for key in ("accuracy", "class_accuracy", "stream_accuracy"))
    assert train.finished(tmp_path / "run")
    assert math.isnan(ssfl.resume(tmp_path / "run").accuracy)
    (tmp_path / "run" / "events.jsonl").write_text("")
    assert ssfl.resume(tmp_path / "run").score_text == result.score_text
    every = ssfl.run(quick(*settings[1:]), tmp_path / "every")  # and training does not notice
    assert f"{every.summary['correct']} of {every.summary['count']}" in every.score_text
    assert every.accuracy == every.summary["correct"] / every.summary["count"]
    mine, others = (runs.read_model(tmp_path / name / "model.safetensors")[0] for name in ("run", "every"))
    assert all(torch.equal(value, others[name]) for name, value in mine.items())


def test_validation_images_are_apart_and_told(quick: Make, tmp_path: Path) -> None:
    result = ssfl.run(quick("data.validation=0.2"), tmp_path / "run")
    assert 0 <= result.history[-1]["validation_accuracy"] <= 1
    parts = json.loads((tmp_path / "run" / "split.json").read_text())
    assert parts["validation"] + sum(parts["sizes"]) + sum(parts["server"]) == 1797 - 360


def test_an_npz_with_unlabelled_images_trains(tmp_path: Path, patterns: Path) -> None:
    arrays = dict(np.load(patterns))
    arrays["x_unlabelled"] = arrays["x_train"][120:]
    arrays |= {"x_train": arrays["x_train"][:40], "y_train": arrays["y_train"][:40]}
    np.savez(tmp_path / "mine.npz", **arrays)
    config = ssfl.load_config(
        "quickstart",
        [f"data.path={tmp_path / 'mine.npz'}", "split.users=3", "federation.rounds=2", "model.name=small",
         "federation.period=2"],
    )  # fmt: skip
    config = replace(config, split=replace(config.split, server_labels=None))
    path = ssfl.run(config, tmp_path / "run").path
    parts = json.loads((path / "split.json").read_text())
    assert parts["server"] == [10] * 4
    assert parts["sizes"] == [40, 40, 40]
    # however uneven the classes are: 25, 10, 10 and 10 labels, and none goes to the users without its label
    more = np.concatenate([np.arange(40), np.arange(40, 100, 4)])
    whole = dict(np.load(patterns))
    np.savez(
        tmp_path / "uneven.npz",
        **arrays | {"x_train": whole["x_train"][more], "y_train": whole["y_train"][more]},
    )
    uneven = replace(config, data=replace(config.data, path=str(tmp_path / "uneven.npz")))
    sim = assemble.make(uneven)
    assert sim.config.split.server_labels == 55
    assert [len(user) for user in sim.parts.users] == [40, 40, 40]
    assert (sim.dataset.labels[torch.from_numpy(sim.parts.server)] >= 0).all()
    events = list(runs.read_events(path))
    assert events[0]["mask_rate"] >= 0


def test_a_preset_will_do_for_a_config_and_what_is_hardly_meant_is_told(quick: Make, tmp_path: Path) -> None:
    for name, fix in (("quickstrat", "quickstart"), ("own/scans", None)):
        with pytest.raises(ConfigError) as caught:
            ssfl.run(name, tmp_path / "run")
        assert (caught.value.value, caught.value.fix) == (name, fix)
    assert ssfl.load_config("quickstart", "federation.rounds=5").federation.rounds == 5
    config = quick("split.server_labels=7", "train.warmup=1000")
    with pytest.warns(SsflWarning) as told:
        assemble.make(config)
    first, second = (str(warning.message) for warning in told)
    assert "3 of 10 classes (7, 8, 9)" in first
    assert second.startswith("train.warmup = 1000 is longer than the run")


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ("split.alpha=0.5", "split.scheme=dirichlet"),
        ("split.classes_per_user=3", "split.scheme=shards"),
        ("split.user_labels=20", "split.labels_at=both"),
        ("federation.attack=noise", "federation.attackers=0.1"),
        ("federation.attack_scale=5", "federation.attackers=0.1"),
    ],
)
def test_a_setting_that_nothing_reads_is_told_with_what_would_read_it(
    quick: Make, given: str, more: str
) -> None:
    with pytest.warns(SsflWarning) as told:
        assemble.make(quick(given))
    key = given.partition("=")[0]
    (line,) = (str(warning.message) for warning in told)
    assert line.startswith(f"{key} ")
    assert line.endswith(f" {more}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SsflWarning)
        assemble.make(quick(given, more))


def test_without_a_gpu_the_network_is_small_told_and_kept(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=pixels[8:], y_train=labels[8:], x_test=pixels[:8], y_test=labels[:8])
    short = [f"data.path={tmp_path / 'a.npz'}", "split.users=2", "federation.rounds=8", "train.warmup=0"]
    cpu = ssfl.load_config(None, [*short, "run.device=cpu"])
    with pytest.warns(SsflWarning, match=r"cnn .*resnet18.*--set model\.name=NAME") as told:
        sim = assemble.make(cpu)
    assert sum("GPU" in str(one.message) for one in told) == 1
    assert sim.config.model.name == "cnn"
    gpu = ssfl.load_config(None, [*short, "run.device=cuda"])
    assert resolve.resolve(gpu, sim.dataset).model.name == "resnet18"
    for before, device in ((sim.config, "cuda"), (resolve.resolve(gpu, sim.dataset), "cpu")):
        moved = replace(before, run=replace(before.run, device=device))
        assert resolve.resolve(moved, sim.dataset).model == before.model
    with warnings.catch_warnings(action="error"):  # nothing to tell where somebody chose
        warnings.filterwarnings("ignore", "8 test images are few")
        chosen = assemble.make(ssfl.load_config(None, [*short, "run.device=cpu", "model.name=small"]))
    assert chosen.config.model.name == "small"


def test_a_long_round_is_saved_whatever_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_loop, "SAVED", 0.0)
    short = ["federation.rounds=3", "federation.period=1", "run.checkpoint_every=50"]
    ssfl.run(ssfl.load_config("quickstart", short), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "round-0000002.safetensors").is_file()


def test_a_folder_of_runs_is_no_run_and_names_those_inside(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "contest" / name).mkdir(parents=True)
        (tmp_path / "contest" / name / "config.toml").touch()
    with pytest.raises(RunError, match=r"\S+/contest/a, \S+/contest/b$"):
        runs.read_config(tmp_path / "contest")


def test_the_public_names_are_listed_for_completion() -> None:
    assert dir(ssfl) == sorted(ssfl.__all__)
