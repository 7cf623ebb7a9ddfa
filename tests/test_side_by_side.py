"""Contests with --jobs: the same results as one run after another, and nothing is lost if the command or a
part of it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Call
from ssfl.config.loading import from_dict
from ssfl.config.writing import to_toml
from ssfl.contest import play
from ssfl.core import plain_files
from ssfl.runs import folder
from test_signals import alone, command, nobody_left  # noqa: F401 (a fixture)
from waiting import command_of, descendants, finished, wait_until

OWN = """from dataclasses import dataclass

from ssfl.methods.alternate import Alternate


@dataclass(frozen=True)
class Mine(Alternate):
    def round(self, state, fed):
        {code}
        return super().round(state, fed)
"""
SETS = ["federation.period=2", "train.batch_size=8", "run.threads=1", "run.device=cpu"]


def words(out: Path, *more: str, rounds: int = 4) -> list[str]:
    sets = [*SETS, f"federation.rounds={rounds}"]
    return ["--seeds", "1", "--no-tune", "--quiet", "--out", str(out), *more,
            *(word for one in sets for word in ("--set", one))]  # fmt: skip


def in_their_rounds(runs: list[Path]) -> None:
    """Waits until each of the runs has played two rounds."""
    events = [run / "events.jsonl" for run in runs]
    wait_until(
        lambda: all(file.is_file() and '"round": 2,' in file.read_text() for file in events),
        "a run made no progress", files=events,
    )  # fmt: skip


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    return [worker for worker in descendants(process.pid) if b"spawn_main" in command_of(worker)]


def test_the_results_are_those_of_one_run_after_another(ssfl: Call) -> None:
    Path("mine.py").write_text(OWN.format(code="pass"))
    more = ("--methods", "server-only,mine.py:Mine")
    assert ssfl("contest", *words(Path("one"), *more))[0] == 0
    code, _, err = ssfl("contest", *words(Path("two"), *more), "--jobs", "2")
    assert code == 0, err
    runs = sorted(path.parent.name for path in Path("one").glob("*/config.toml"))
    assert len(runs) == 2
    for name in runs:
        assert name in err.splitlines()
        for file in ("model.safetensors", "config.toml"):
            assert Path("two", name, file).read_bytes() == Path("one", name, file).read_bytes()
    one, two = (json.loads(Path(out, "contest.json").read_text())["standings"] for out in ("one", "two"))
    for before, now in zip(one, two, strict=True):
        assert now["accuracies"] == before["accuracies"]
    assert ssfl("contest", *words(Path("two"), *more), "--jobs", "2")[2].count("already finished") == 2


@pytest.mark.slow
def test_the_first_error_of_a_run_is_the_error_of_the_command(ssfl: Call) -> None:
    Path("mine.py").write_text(OWN.format(code="users = fed.train_users(state)"))
    code, out, err = ssfl("contest", *words(Path("out"), "--methods", "mine.py:Mine"), "--jobs", "2")
    assert code == 2, err
    assert "Mine" in err.splitlines()[-1]
    assert not out


@pytest.mark.parametrize("name", ["semifl", "fl2", "server-only"])
def test_a_worker_gets_the_same_config(name: str, tmp_path: Path) -> None:
    for source in ("quickstart", "cifar10-100"):
        config = play.entry(source, name, 3, ["run.threads=2"], ("train.lr=0.02",), tmp_path).config
        assert from_dict(plain_files.parse_toml(to_toml(config).encode())) == config


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_saves_all_runs_and_the_same_command_goes_on(
    kind: signal.Signals, tmp_path: Path
) -> None:
    call = ["contest", *words(tmp_path / "cut", "--methods", "anchored,semifl", "--jobs", "2", rounds=40)]
    process, runs = (
        alone(command(*call)),
        [tmp_path / "cut" / f"{name}-seed1" for name in ("anchored", "semifl")],
    )
    in_their_rounds(runs)
    workers = descendants(process.pid)
    os.killpg(process.pid, kind)
    _, told = finished(process)
    assert process.returncode == 128 + kind, told
    assert "Traceback" not in told
    assert not workers & descendants(os.getpid())
    for run in runs:
        assert not (run / folder.FAILURE).exists()
        assert folder.read_summary(run) is not None or list((run / "checkpoints").iterdir())
    assert subprocess.run([sys.executable, "-m", "ssfl", *call], capture_output=True).returncode == 0
    assert all(folder.read_summary(run) is not None for run in runs)


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_a_killed_command_leaves_nobody(tmp_path: Path) -> None:
    call = ["contest", *words(tmp_path / "cut", "--methods", "anchored,semifl", "--jobs", "2", rounds=400)]
    process, runs = (
        alone(command(*call)),
        [tmp_path / "cut" / f"{name}-seed1" for name in ("anchored", "semifl")],
    )
    in_their_rounds(runs)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, told = finished(process)
    assert process.returncode == 2, told
    assert any(str(run) in told.splitlines()[-1] for run in runs)
    process = alone(command(*call))
    wait_until(lambda: len(workers_of(process)) == 2, "the command did not go on")
    workers = descendants(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), "workers are left")
