"""Real processes, really killed: what was saved goes on to the same bytes."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ssfl.runs import folder
from waiting import ended, finished, wait_until

ROUNDS = 12
SETTINGS = [
    f"federation.rounds={ROUNDS}", "federation.period=2", "train.batch_size=8", "run.checkpoint_every=3",
    "run.eval_every=4", "run.threads=1", "method.name=grouping", "federation.participants=6",
]  # fmt: skip


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ssfl", *map(str, words)]


def begin(out: Path, engine: str, *more: str) -> subprocess.Popen[str]:
    sets = [word for s in [*SETTINGS, f"run.engine={engine}", *more] for word in ("--set", s)]
    return subprocess.Popen(command("run", *sets, "--out", out), stderr=subprocess.PIPE, text=True)


def wait_for_round(out: Path, round: int, process: subprocess.Popen[str]) -> None:
    events = out / "events.jsonl"

    def played() -> bool:
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {process.communicate()[1]}")
        return events.is_file() and f'"round": {round},' in events.read_text()

    wait_until(played, "the run made no progress", files=[events], every=0.01)


def stopped_at(round: int, out: Path, engine: str, by: signal.Signals) -> subprocess.Popen[str]:
    """A run that was sent a signal once the round was done."""
    process = begin(out, engine)
    wait_for_round(out, round, process)
    process.send_signal(by)
    return process


def content(path: Path) -> tuple[bytes, list[dict[str, object]]]:
    lines = (path / "events.jsonl").read_text().splitlines()
    events = [{k: v for k, v in json.loads(line).items() if k not in folder.WALL_CLOCK} for line in lines]
    return (path / "model.safetensors").read_bytes(), events


@pytest.fixture(scope="module", params=["vmap", pytest.param("loop", marks=pytest.mark.slow)])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("runs") / "straight"
    process = begin(out, request.param)
    assert ended(process) == 0, process.communicate()[1]
    return request.param, out


def test_kill_9_and_resume_to_the_same_bytes(straight: tuple[str, Path], tmp_path: Path) -> None:
    engine, reference = straight
    out = tmp_path / "killed"
    ended(stopped_at(5, out, engine, signal.SIGKILL))
    assert not (out / "summary.json").exists()
    resumed = subprocess.run(command("resume", out, "--quiet"), capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr == ""
    assert content(out) == content(reference)


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_saves_and_says_how_to_go_on(
    straight: tuple[str, Path], tmp_path: Path, kind: signal.Signals
) -> None:
    engine, reference = straight
    out = tmp_path / "stopped"
    process = stopped_at(4, out, engine, kind)
    _, told = finished(process)
    assert process.returncode == 128 + kind, told
    assert f"continue with `ssfl resume {out}`" in told
    assert "Traceback" not in told
    done = max(int(p.stem.split("-")[1]) for p in (out / "checkpoints").iterdir())
    assert f"stopped after round {done} " in told
    assert subprocess.run(command("resume", out, "--quiet")).returncode == 0
    assert content(out) == content(reference)


@pytest.mark.slow
def test_a_full_disk_loses_no_checkpoint(straight: tuple[str, Path], tmp_path: Path) -> None:
    engine, reference = straight
    if engine == "loop":
        pytest.skip("saving does not depend on the engine")
    out = tmp_path / "full"
    ended(stopped_at(4, out, engine, signal.SIGKILL))
    before = {p.name: p.read_bytes() for p in (out / "checkpoints").iterdir() if not p.name.startswith(".")}

    def no_room() -> None:  # no file may grow past this, as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    failed = subprocess.run(
        command("resume", out, "--quiet"), capture_output=True, text=True, preexec_fn=no_room
    )
    assert failed.returncode == 2, failed.stderr
    assert failed.stderr.count("\n") == 1
    assert f"cannot write {out}" in failed.stderr
    assert f"`ssfl resume {out}`" in failed.stderr
    after = {p.name: p.read_bytes() for p in (out / "checkpoints").iterdir()}
    assert after == before
    assert subprocess.run(command("resume", out, "--quiet")).returncode == 0
    assert content(out) == content(reference)
