"""The paper's rows: complete, runnable one by one, interrupted and resumed, told in tables."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from paper_results import fake
from ssfl.cli import main
from ssfl.config.loading import load_config
from ssfl.config.writing import as_dict
from ssfl.errors import ConfigError, DataError, DivergedError, RunError
from ssfl.federation import State
from ssfl.methods.anchored import Anchored
from ssfl.paper import results, rows, sweep, tables
from ssfl.paper.fidelity import FIDELITIES, actual, settings
from ssfl.paper.rows import Row
from ssfl.runs import round_loop
from ssfl.simulate.simulation import Simulation
from waiting import wait_until

EVERY = [pytest.param(row, id=str(row.number)) for row in (*rows.ROWS, rows.METHODS)]


def ssfl(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ssfl", *words])
    with pytest.raises(SystemExit) as stop:
        main.main()
    return int(stop.value.code or 0)


def test_there_are_fifty_rows_and_every_value_is_spelled_out() -> None:
    assert [row.number for row in rows.ROWS] == list(range(1, 51))
    assert [run.skew for run in rows.row("1").runs] == [tenth / 10 for tenth in range(11)]
    assert [run.period for run in rows.row("6").runs] == [2, 4, 8, 16, 32]
    assert {run.groups for run in rows.row("16").runs} == {None, 2, 3, 5}
    every = [run for row in rows.ROWS for run in row.runs]
    # runs of one name are one experiment, whatever row they stand in
    for run in every:
        same = [asdict(one) for one in every if one.name == run.name]
        for one in same:
            one.pop("published"), one.pop("where")
            assert one == {k: v for k, v in asdict(run).items() if k not in ("published", "where")}


@pytest.mark.parametrize(
    ("row", "name", "published"),
    [
        ("21", "emnist-grouping-R0.4-T16-Ns4700-C47-K47-S5", 82.95),
        ("16", "emnist-crl-gn-R0.4-T16-Ns4700-C47-K47", 65.48),
        ("1", "cifar10-grouping-R1-T16-Ns1000-C10-K10-S2", 81.7),
        ("15", "svhn-grouping-R0.4-T16-Ns1000-C30-K30-S3-E120", 94.93),
        ("29", "cifar10-grouping-R0.4-T8-Ns1000-C16-K16-S2", 93.58),
        ("41", "emnist-crl-gn-R0.6-T16-Ns4700-C47-K47-labels-at-users", 81.40),
        ("48", "emnist-grouping-R0.4-T16-Ns4700-C30-K470-S2", 81.31),
        ("50", "cifar10-grouping-R1-T100-Ns5000-C5-K100-S2-labels-at-users", 69.05),
    ],
)
def test_published_figures_stand_with_their_runs(row: str, name: str, published: float) -> None:
    assert [run.published for run in rows.row(row).runs if run.name == name] == [published]


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("row", EVERY)
def test_every_run_has_settings_in_every_fidelity(row: Row, fidelity: str) -> None:
    for run in row.runs:
        config = settings(run, fidelity)
        assert config.split.skew == run.skew
        assert config.federation.participants == run.participants
        assert config.split.users == run.users
        assert settings(run, fidelity, data="digits").data.name == "digits"


def test_the_fidelities_are_what_was_printed_and_what_was_coded() -> None:
    cifar = rows.row("10").runs[0]
    printed, coded = settings(cifar, "paper"), settings(cifar, "reference")
    assert (printed.train.lr, printed.train.floor, printed.train.cycles) == (0.146, 1e-4, 2.3)
    assert printed.train.warmup == 5 * 1024
    assert (coded.train.lr, coded.train.floor) == (0.165, 1e-5)
    assert coded.train.horizon == pytest.approx(1024 / 300)
    assert coded.train.cycles == pytest.approx(2.286, abs=1e-3)
    assert as_dict(coded)["method"]["server_replicas"]
    assert coded.federation.extra_step
    assert printed.federation.rounds == coded.federation.rounds == 19_200
    emnist = settings(rows.row("21").runs[1], "reference")
    assert (emnist.train.lr, emnist.train.floor, emnist.train.horizon) == (0.03, 1e-6, 1.0)


def test_a_scale_shortens_training_and_schedule_together() -> None:
    whole, tenth = (settings(rows.row("13").runs[0], scale=scale) for scale in (1.0, 0.1))
    assert whole.federation.rounds == 40 * 64
    assert tenth.federation.rounds == 256
    assert tenth.train.warmup == whole.train.warmup // 10
    with pytest.raises(ConfigError) as caught:
        settings(rows.row("13").runs[0], scale=2)
    assert (caught.value.key, caught.value.value) == ("--scale", 2)


def test_rows_that_share_a_setting_share_the_run() -> None:
    shared = sweep.Options()
    first = {sweep.folder(run, shared, 1) for run in rows.row("1").runs}
    assert sweep.folder(rows.row("10").runs[0], shared, 1) in first
    other = {
        sweep.folder(rows.row("10").runs[0], options, 1)
        for options in (
            shared, sweep.Options(fidelity="reference"), sweep.Options(scale=0.5),
            sweep.Options(data="a.npz"), sweep.Options(sets=("train.lr=1",)),
        )
    }  # fmt: skip
    assert len(other) == 5


def test_only_what_changes_the_experiment_makes_it_another_one() -> None:
    run = rows.row("21").runs[1]
    plain = sweep.folder(run, sweep.Options(), 1)
    elsewhere = ("data.root=/files", "data.download=true", "run.engine=loop", "run.eval_every=9")
    assert sweep.folder(run, sweep.Options(sets=elsewhere), 1) == plain
    one, two = (sweep.Options(sets=sets) for sets in (("a.b=1", "c.d=2"), ("c.d=2", "a.b=1")))
    assert sweep.folder(run, one, 1) == sweep.folder(run, two, 1) != plain


def test_a_trial_is_told_by_the_data_and_labels_that_it_had(tmp_path: Path) -> None:
    """Only the first of two runs makes pseudo-labels."""
    told: list[str] = []
    paths = []
    for only, threshold in (("crl-gn", "0"), ("grouping", "0.95")):
        sets = (*TINY, f"method.threshold={threshold}")
        options = sweep.Options(data="digits", sets=sets, out=tmp_path, only=only)
        paths += sweep.play([rows.row("21")], options, told.append, quiet=True)
    assert [f"{paths[1].name}: no pseudo-label was made" in line for line in told].count(True) == 1
    assert sum("no pseudo-label was made" in line for line in told) == 1
    first, second = (json.loads((path / "result.json").read_text())["mask_rate"] for path in paths)
    assert first == 1
    assert second == 0
    lines = tables.lines([rows.row("21")], results.read([tmp_path]))
    settings = {line["setting"] for line in lines}
    assert settings == {
        "FedAvg, digits, K=47, C=47, R=0.4, T=16, Ns=50",
        "Grouping-based, digits, K=47, C=47, S=5, R=0.4, T=16, Ns=50",
    }
    shown = tables.markdown(lines)
    assert "emnist" not in shown
    assert shown.count("no pseudo-label was made. The mask rate was 0 in every round.") == 1
    assert "\n\nGrouping-based, digits" in shown


def test_a_table_says_what_the_published_accuracy_of_a_trial_is_of(tmp_path: Path) -> None:
    run = rows.row("21").runs[1]
    split = {"users": 47, "server_labels": 50, "skew": 0.4}
    for seed, rate in ((1, 0.0), (2, 0.1)):
        trial = fake(run, seed, data="digits", mask_rate=rate, config={"split": split})
        (tmp_path / f"{seed}.json").write_text(json.dumps(trial))
    shown = tables.markdown(tables.lines([rows.row("21")], results.read([tmp_path])))
    assert "82.95 (emnist)" in shown
    assert "Ns=50, scale 0.5: no pseudo-label was made with 1 of 2 seeds. The mask rate was 0" in shown
    assert "FedAvg, emnist, K=47, C=47, R=0.4, T=16, Ns=4700" in shown  # not run


def test_what_we_recommend_is_one_run_for_fedavg_and_grouping(tmp_path: Path) -> None:
    options = sweep.Options(fidelity="recommended")
    fedavg, grouping = rows.row("21").runs
    assert sweep.folder(fedavg, options, 1) == sweep.folder(grouping, options, 1)
    assert settings(grouping, "recommended").method.name == "anchored"
    (tmp_path / "ours.json").write_text(
        json.dumps(fake(actual(grouping, "recommended"), 1, fidelity="recommended"))
    )
    lines = tables.lines(rows.table("2"), results.read([tmp_path]))
    found = [line for line in lines if line["accuracy"] is not None]
    assert [line["setting"].partition(",")[0] for line in found] == ["Anchored"]
    assert sum(line["accuracy"] is None for line in lines) == 6


def test_a_run_that_breaks_down_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    sets = (*TINY, "train.lr=1000", "method.threshold=0", "model.norm=none", "train.warmup=0")
    options = sweep.Options(data="digits", sets=sets, out=tmp_path)
    told: list[str] = []
    with pytest.raises(DivergedError):
        sweep.play([rows.row("21")], options, told.append, quiet=True)
    assert sum("training diverged in round" in line for line in told) == 2
    lines = tables.lines([rows.row("21")], results.read([tmp_path]))
    assert [line["diverged"] for line in lines] == [1, 1]
    assert tables.markdown(lines).count("diverged") == 2
    again: list[str] = []
    sweep.play([rows.row("21")], options, again.append, quiet=True)
    assert sum("already finished" in line for line in again) == 2


def test_a_run_of_a_method_that_has_changed_since_is_not_taken_for_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = sweep.Options("recommended", data="digits", sets=TINY, out=tmp_path, only="grouping")
    sweep.play([rows.row("21")], options, lambda line: None, quiet=True)
    changed = Anchored.defaults | {"federation": {"slow_average": 0.5}}
    monkeypatch.setattr(Anchored, "defaults", changed)
    with pytest.raises(ConfigError) as caught:
        sweep.play([rows.row("21")], options, lambda line: None, quiet=True)
    assert (caught.value.key, caught.value.value) == ("federation.slow_average", 0.5)


def test_a_stopped_run_goes_on_with_the_images_that_are_asked_for(tmp_path: Path) -> None:
    for folder, shift in (("a", 0), ("b", 7)):
        (tmp_path / folder).mkdir()
        images = np.random.default_rng(0).integers(0, 240, (120, 8, 8), np.uint8)
        labels = np.arange(120) % 10
        file = tmp_path / folder / "mine.npz"
        np.savez(file, x_train=images + np.uint8(shift), y_train=labels, x_test=images, y_test=labels)
    shutil.copytree(tmp_path / "a", tmp_path / "c")

    def options(folder: str) -> sweep.Options:
        sets = (*TINY, "split.users=4", "federation.participants=4", "split.server_labels=10")
        data = str(tmp_path / folder / "mine.npz")
        return sweep.Options(data=data, sets=(*sets, "model.name=small"), out=tmp_path, only="C10-K47-S2")

    (path,) = sweep.play([rows.row("16")], options("a"), lambda line: None, quiet=True)
    done = (path / "model.safetensors").read_bytes()
    for name in ("result.json", "summary.json", "model.safetensors"):
        (path / name).unlink()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(RunError) as caught:
        sweep.play([rows.row("16")], options("b"), lambda line: None, quiet=True)
    assert caught.value.key == "data"
    sweep.play([rows.row("16")], options("c"), lambda line: None, quiet=True)  # moved, and the same
    assert (path / "model.safetensors").read_bytes() == done


def test_what_is_broken_or_missing_does_not_stop_the_rest(tmp_path: Path) -> None:
    sets = (*TINY, "data.root=" + str(tmp_path / "nothing"))
    told: list[str] = []
    with pytest.raises(DataError):
        sweep.play(
            [rows.row("45"), rows.row("21")], sweep.Options(sets=sets, out=tmp_path), told.append, True
        )
    assert sum("stl10" in line and "[1/3]" in line for line in told) == 2  # begun, and why it did not run
    assert any("[3/3]" in line for line in told)
    options = sweep.Options(data="digits", sets=TINY, out=tmp_path, only="grouping")
    (path,) = sweep.play([rows.row("21")], options, told.append, quiet=True)
    (path / "result.json").write_text("{")
    sweep.play([rows.row("21")], options, told.append, quiet=True)
    assert results.read([tmp_path])[0].name == rows.row("21").runs[1].name


def test_a_scale_that_leaves_no_round_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        settings(rows.row("10").runs[0], scale=1e-9)
    assert (caught.value.key, caught.value.value) == ("--scale", 1e-9)


def test_a_table_of_everything_shows_each_run_once() -> None:
    lines = tables.lines(rows.table("all"), [])
    told = [(line["run"], line["published"]) for line in lines]
    assert len(told) == len(set(told))
    assert {line["row"] for line in lines} >= {1, 16, 37, 50, "methods"}


@pytest.mark.parametrize("last", [3, 6])
def test_ctrl_c_says_how_to_go_on(last: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = sweep.Options(data="digits", sets=(*TINY, "federation.rounds=6"), out=tmp_path, only="grouping")
    played = Simulation.play

    def stopped(self: Simulation, state: State) -> tuple[State, list[dict[str, object]]]:
        if state.round == last - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return played(self, state)

    monkeypatch.setattr(Simulation, "play", stopped)
    with pytest.raises(round_loop.SweepInterrupted) as interrupted:
        sweep.play([rows.row("21")], options, lambda line: None, quiet=True)
    assert interrupted.value.round == last
    monkeypatch.setattr(Simulation, "play", played)
    (path,) = sweep.play([rows.row("21")], options, lambda line: None, quiet=True)
    assert (path / "result.json").is_file()


TINY = ("federation.rounds=3", "federation.period=2", "train.batch_size=8", "run.device=cpu", "run.threads=1")


def test_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ssfl(monkeypatch, "paper", "ls", "--json") == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)] == list(range(1, 51))
    assert ssfl(monkeypatch, "paper", "show", "21", "--fidelity", "reference") == 0
    shown = capsys.readouterr().out
    assert "published 82.95 (Table 2)" in shown
    Path("mine.toml").write_text(shown)
    assert load_config("mine.toml") == settings(rows.row("21").runs[0], "reference")
    call = ["paper", "run", "21", "--data", "digits", "--seeds", "2", "--only", "grouping", "-q"]
    call += [word for change in TINY for word in ("--set", change)]
    assert ssfl(monkeypatch, *call) == 0
    assert capsys.readouterr().out.count(", at scale 1\n") == 2
    written = {path: path.stat().st_mtime_ns for path in Path("runs/paper").rglob("*")}
    assert ssfl(monkeypatch, *call) == 0
    assert capsys.readouterr().out.count("already finished") == 2
    assert {path: path.stat().st_mtime_ns for path in Path("runs/paper").rglob("*")} == written
    assert ssfl(monkeypatch, "paper", "table", "2", "--json") == 0
    told = [line for line in json.loads(capsys.readouterr().out) if line["accuracy"] is not None]
    # with these settings it is another experiment than the one that was printed
    assert [(line["published"], line["seeds"], line["scale"]) for line in told] == [(None, 2, 1.0)]
    assert told[0]["difference"] is None
    assert ssfl(monkeypatch, "paper", "table", "2") == 0
    assert capsys.readouterr().out.count("not run") == 5
    for words, message in (
        (["paper", "show", "51"], "there is no row '51'"),
        (["paper", "table", "9"], "there is no table '9'"),
        (["paper", "run", "21", "--only", "C99"], "--only C99: "),
        (["paper", "run", "21", "--fidelity", "exact"], "--fidelity exact: use one of paper, reference"),
        (["paper", "run", "1", "2", "--data", "a.npz"], "these rows use cifar10 and svhn"),
        (["paper", "run", "21", "--set", "run.seed=4"], "use --seeds"),
        (["paper", "figure", "2"], "no finished run for figure 2"),
        (["paper", "table", "2", "--from", "nowhere"], "there is no folder nowhere"),
    ):
        assert ssfl(monkeypatch, *words) == 2
        assert message in capsys.readouterr().err


def test_a_table_keeps_seeds_together_and_scales_fidelities_and_data_apart(tmp_path: Path) -> None:
    run = rows.row("21").runs[1]
    for seed in (1, 2, 3):
        (tmp_path / f"{seed}.json").write_text(json.dumps(fake(run, seed)))
    (tmp_path / "short.json").write_text(json.dumps(fake(run, 1, scale=0.1)))
    (tmp_path / "coded.json").write_text(json.dumps(fake(run, 1, fidelity="reference")))
    (tmp_path / "other.json").write_text('{"something": "else"}')
    found = results.read([tmp_path])
    lines = [line for line in tables.lines(rows.table("2"), found) if line["accuracy"] is not None]
    assert [(line["fidelity"], line["scale"], line["seeds"]) for line in lines] == [
        ("paper", 0.5, 3), ("paper", 0.1, 1), ("reference", 0.5, 1),
    ]  # fmt: skip
    assert lines[0]["accuracy"] == pytest.approx(82)
    assert lines[0]["deviation"] == pytest.approx(1)
    assert lines[0]["difference"] == pytest.approx(82 - 82.95)
    assert "82.00 ± 1.00" in tables.markdown(lines)


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ssfl", "paper", "run", "21", "--data", "digits", "--scale", "0.1", "-q"]
    changes = ("federation.participants=5", "run.checkpoint_every=2", "federation.period=4", "run.device=cpu",
               "run.diversity_every=9")  # fmt: skip
    words += [word for change in changes for word in ("--set", change)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*words, "--out", str(whole)], check=True, capture_output=True)
    process = subprocess.Popen([*words, "--out", str(broken)], stdout=subprocess.PIPE)
    second = "*-grouping-*/checkpoints/*"
    wait_until(lambda: list(broken.glob(second)), "no checkpoint was written")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(broken.glob("*-grouping-*/result.json"))
    again = subprocess.run([*words, "--out", str(broken)], check=True, capture_output=True, text=True)
    assert again.stdout.count("already finished") == 1
    for one, two in zip(
        sorted(whole.glob("*/result.json")), sorted(broken.glob("*/result.json")), strict=True
    ):
        a, b = (json.loads(path.read_text()) for path in (one, two))
        for clock in ("seconds", "evaluation_seconds", "command"):
            a.pop(clock), b.pop(clock)
        assert a == b
        assert (one.parent / "model.safetensors").read_bytes() == (
            two.parent / "model.safetensors"
        ).read_bytes()
