"""SIGTERM to a whole process group, as systemd, Slurm and `timeout` send it: the round is saved and the run
goes on later to the same bytes. Real processes, really signalled."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssfl.runs import folder
from stage import NAMES, Stage, checkpoint, free_port, sets
from test_dist import torchrun
from test_kill_and_resume import content
from waiting import descendants, ended, finished, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="users are spread over processes on Linux")
ROUNDS = 12
SETTINGS = [
    f"federation.rounds={ROUNDS}", "federation.period=2", "train.batch_size=8", "run.checkpoint_every=3",
    "run.eval_every=4", "run.threads=3", "run.device=cpu", "method.name=grouping",
    "federation.participants=6",
]  # fmt: skip


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "ssfl", *map(str, words)]


def run_command(out: Path, *more: str) -> list[str]:
    return command("run", *(word for s in [*SETTINGS, *more] for word in ("--set", s)), "--out", out)


STARTED: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """Whatever a test does, what it started ends with it."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def alone(call: list[str]) -> "subprocess.Popen[str]":
    """A command in a session, and so in a process group, of its own. Ctrl-C works there, also if the shell
    that started the tests ignores it."""
    STARTED.append(
        subprocess.Popen(
            call, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    )  # fmt: skip
    return STARTED[-1]


def begun(call: list[str], out: Path, round: int = 2) -> "subprocess.Popen[str]":
    """A command that has played a round of a run."""
    process, events = alone(call), out / "events.jsonl"

    def played() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return events.is_file() and f'"round": {round},' in events.read_text()

    wait_until(played, "the run made no progress", files=[events], every=0.01)
    return process


def gone(processes: set[int]) -> bool:
    """Whether none of them runs any more."""
    return not any(
        status.exists() and "State:\tZ" not in status.read_text()
        for status in (Path(f"/proc/{process}/status") for process in processes)
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    subprocess.run(run_command(out), check=True, capture_output=True)
    return out


def test_sigterm_to_the_group_saves_the_round_and_resume_gives_the_same_bytes(
    straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    process = begun(run_command(out), out)
    workers = descendants(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    _, told = finished(process)
    assert process.returncode == 143, told
    assert f"continue with `ssfl resume {out}`" in told
    assert "Traceback" not in told
    assert not (out / folder.FAILURE).exists()
    assert len(workers) == 3
    wait_until(lambda: gone(workers), f"{workers} were left behind")
    assert f"stopped after round {checkpoint(out).round} " in told
    assert subprocess.run(command("resume", out, "--quiet")).returncode == 0
    assert content(out) == content(straight)


def test_a_second_sigterm_ends_every_process_at_once(tmp_path: Path) -> None:
    out = tmp_path / "ended"
    # in the first round, the server trains alone, which is quick; the second one is long
    long = ("federation.rounds=50", "federation.period=400", "federation.head_start=0.02")
    process = begun(run_command(out, *long), out, 1)
    workers = descendants(process.pid)
    assert len(workers) == 3
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(1)  # what `timeout` sends twice at once counts as one
    assert process.poll() is None, "a long round was not given time to end"
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process, quiet=10) == -signal.SIGTERM
    wait_until(lambda: gone(workers), f"{workers} were left behind", quiet=10)
    assert max(event["round"] for event in folder.read_events(out)) == 1  # the long round was not finished
    assert not (out / folder.FAILURE).exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("timeout") is None, reason="there is no `timeout` here")
def test_coreutils_timeout_signals_twice_and_the_round_is_saved(straight: Path, tmp_path: Path) -> None:
    """`timeout` sends SIGTERM to its child and again to the group, microseconds apart."""
    out = tmp_path / "timed"
    process = begun(["timeout", "--preserve-status", "1000", *run_command(out)], out)
    process.send_signal(signal.SIGTERM)  # which it passes on in both ways
    _, told = finished(process)
    assert process.returncode == 143, told
    assert "continue with `ssfl resume" in told
    assert subprocess.run(command("resume", out, "--quiet")).returncode == 0
    assert content(out) == content(straight)


@pytest.mark.slow
def test_sigterm_while_a_run_is_prepared_ends_it_without_a_traceback(tmp_path: Path) -> None:
    process = alone(command("contest", "--methods", "server-only", "--out", tmp_path / "contest", "--quiet"))
    wait_until(lambda: (tmp_path / "contest").exists(), "the contest never began")
    os.killpg(process.pid, signal.SIGTERM)
    _, told = finished(process)
    assert process.returncode == 143, told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["contest", "paper"])
def test_sigterm_stops_a_series_of_runs_and_the_same_command_goes_on(verb: str, tmp_path: Path) -> None:
    settings = (
        "federation.rounds=12", "federation.period=2", "train.batch_size=8", "run.threads=2",
        "run.device=cpu", "run.checkpoint_every=1",
    )  # fmt: skip
    short = [word for setting in settings for word in ("--set", setting)]
    if verb == "contest":
        call = command(
            "contest", "--no-tune", "--methods", "grouping", "--seeds", 2, *short, "--out", tmp_path
        )
        first = tmp_path / "grouping-seed1"
    else:
        call = command(
            "paper", "run", 21, "--data", "digits", *short, "--only", "grouping", "--out", tmp_path
        )
        first = tmp_path
    process = alone(call)
    wait_until(lambda: list(first.rglob("round-*2.safetensors")), "no round was saved", files=[first])
    os.killpg(process.pid, signal.SIGTERM)
    _, told = finished(process)
    assert process.returncode == 143, told
    assert "and saved; run the same command" in told
    assert not list(tmp_path.rglob(folder.FAILURE))
    again = subprocess.run(call, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_sigterm_to_every_rank_of_torchrun_saves_the_round(tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    words = [word for s in [*SETTINGS, "run.engine=dist", "run.threads=1"] for word in ("--set", s)]
    process = begun(
        torchrun(2, "run", *words, "--set", f"federation.rounds={20 * ROUNDS}", "--out", str(out)), out
    )
    os.killpg(process.pid, signal.SIGTERM)
    _, told = finished(process)
    assert f"continue with `torchrun --nproc-per-node 2 -m ssfl resume {out}`" in told
    assert "cannot reach" not in told
    assert not (out / folder.FAILURE).exists()
    assert f"stopped after round {checkpoint(out).round} " in told


@pytest.mark.slow
def test_sigterm_to_every_process_of_a_centre_saves_the_round(
    folders: Path, ring: Path, stage: Stage
) -> None:
    """systemd and Slurm signal every process, Flower's too, which has a session of its own."""
    port, out = free_port(), stage.folder / "run"
    serve = stage.serve(folders, ring, port, *sets("federation.rounds=8", "federation.period=20"))
    joins = {name: stage.join(name, port, folders, ring) for name in NAMES}
    stage.until("serve", "round 2/8  accuracy")
    below = descendants(serve.pid)
    assert below
    for process in (*below, serve.pid):
        os.kill(process, signal.SIGTERM)
    assert ended(serve, lambda: stage.said("serve")) == 143, stage.said("serve")
    assert f"`ssfl serve --resume {out}" in stage.said("serve")
    assert "Traceback" not in stage.said("serve")
    assert not (out / folder.FAILURE).exists()
    wait_until(lambda: gone(below), f"{below} were left behind")
    assert f"stopped after round {checkpoint(out).round} " in stage.said("serve")
    joins["bonn"].terminate()
    assert ended(joins["bonn"], lambda: stage.said("bonn")) == 143
    assert "this site has left" in stage.said("bonn")
    assert "Traceback" not in stage.said("bonn")


@pytest.mark.slow
def test_sigterm_to_a_centre_that_waits_for_sites_ends_it_and_flowers_process(
    folders: Path, ring: Path, stage: Stage
) -> None:
    serve = stage.serve(folders, ring, free_port(), *sets())
    stage.until("serve", "waiting: 0 of 3")
    below = descendants(serve.pid)
    serve.terminate()
    assert ended(serve, lambda: stage.said("serve")) == 143
    assert "Traceback" not in stage.said("serve")
    wait_until(lambda: gone(below), f"{below} were left behind")
    words = shlex.split(stage.said("serve").splitlines()[-1].partition("`")[2].rstrip("`"))
    assert words[:3] == ["ssfl", "serve", "--resume"]
    again = stage.ssfl("again", *words[1:])  # as it is printed
    stage.until("again", "waiting: 0 of 3")
    again.terminate()  # a script may have started the tests with SIGINT ignored
    assert ended(again, lambda: stage.said("again")) == 143
    assert shlex.join(words) in stage.said("again").splitlines()[-1]
