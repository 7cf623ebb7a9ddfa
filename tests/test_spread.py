"""Users spread over processes: the same bytes, whoever trains them, and nobody left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ssfl
from ssfl.config.settings import Config
from ssfl.engines.spread import Spread
from ssfl.errors import RunError
from ssfl.runs import assemble, folder
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
Make = Callable[..., Config]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_same_bytes_with_one_process_and_with_three(quick: Make, engine: str) -> None:
    config = quick(f"run.engine={engine}", "run.diversity_every=2", "federation.dropout=0.3",
                   "train.momentum_policy=slot", "method.name=grouping")  # fmt: skip
    alone = assemble.make(config)
    spread = assemble.make(replace(config, run=replace(config.run, threads=3)))
    assert isinstance(spread.engine, Spread)
    assert not isinstance(alone.engine, Spread)
    states = [alone.initial(), alone.initial()]
    for _ in range(3):
        told = []
        for i, sim in enumerate((alone, spread)):
            states[i], events = sim.play(states[i])
            told.append([{k: v for k, v in e.items() if k not in folder.WALL_CLOCK} for e in events])
        assert told[0] == told[1]
    assert torch.equal(states[0].streams, states[1].streams)
    assert torch.equal(states[0].momentum, states[1].momentum)


def test_a_process_that_is_ended_from_outside_is_told(quick: Make) -> None:
    before = set(multiprocessing.active_children())
    sim = assemble.make(quick("run.threads=2"))
    state, _ = sim.play(sim.initial())
    (first, *_) = set(multiprocessing.active_children()) - before
    os.kill(first.pid or 0, signal.SIGKILL)
    with pytest.raises(RunError) as caught:
        sim.play(state)
    assert (caught.value.key, caught.value.value) == ("run.threads", 2)


@pytest.mark.slow
def test_a_run_inside_a_daemonic_process_is_not_spread(quick: Make, tmp_path: Path) -> None:
    config = quick("run.threads=2", "federation.rounds=1")
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=ssfl.run, args=(config, tmp_path / "run"), daemon=True)
    worker.start()
    wait_until(lambda: worker.exitcode is not None, "the run goes on")
    assert worker.exitcode == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_the_processes_end_and_the_folder_is_free_after_a_run(quick: Make, tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    path = ssfl.run(quick("run.threads=2", "federation.rounds=2"), tmp_path / "run").path
    assert set(multiprocessing.active_children()) <= before  # of which one may have ended since
    with folder.locked(path):
        process = os.fork()
        if process == 0:  # a process that has inherited the open folder
            time.sleep(20)
            os._exit(0)
    try:
        with folder.locked(path):
            pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def test_nobody_is_left_behind_when_the_run_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ssfl"]
    run = subprocess.Popen(
        [*command, "run", "--set", "run.threads=2", "--set", "run.device=cpu",
         "--set", "run.checkpoint_every=1", "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("*")), "no checkpoint was written")
    workers = children(run.pid)
    run.kill()
    run.wait()
    assert len(workers) == 2
    wait_until(
        lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers),
        "processes of a killed run are still there",
        quiet=10,
    )
