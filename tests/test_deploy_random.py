"""A real federation under random faults, which ends as if there had been none.

`SSFL_FAULT_SECONDS` says for how long there are faults, `SSFL_FAULT_SEED` which ones.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from proxy import Proxy
from ssfl.runs import folder as runs
from stage import NAMES, Stage, arrivals, checkpoint, config_of, free_port, same, sets, simulated
from waiting import wait_until

SECONDS = float(os.environ.get("SSFL_FAULT_SECONDS", "60"))
SEED = int(os.environ.get("SSFL_FAULT_SEED", "26"))
GAP = 3.0
"""Seconds at most between two faults."""
QUIET = 0.7
"""How often a round is played between two faults."""
PAUSE = 6.0
"""Seconds at most that something is stopped, held up or away; a site has 4 for a round."""
PATIENCE = 300
KINDS = 9
"""Each kind of fault comes at least once, however slow the machine is."""


@dataclass
class Storm:
    """A federation and what happens to it."""

    stage: Stage
    folders: Path
    ring: Path
    draws: random.Random
    rounds: int
    port: int = field(default_factory=free_port)
    began: float = field(default_factory=time.monotonic)
    faults: list[str] = field(default_factory=list)
    sites: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    starts: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault came."""
    bag: list[Callable[[str], str]] = field(default_factory=list)
    """Kinds of faults that have not come yet since all of them had."""

    def __post_init__(self) -> None:
        self.centre = self.start_centre()
        for name in NAMES:
            self.proxies[name] = Proxy(self.port)
            self.start_site(name)

    @property
    def run(self) -> Path:
        return self.stage.folder / "run"

    def start_centre(self) -> subprocess.Popen[bytes]:
        """The centre, for the first time or again."""
        self.starts += 1
        name = f"centre-{self.starts}"
        more = ["--keys", self.ring, "--port", self.port, "--deadline", 4, "--patience", PATIENCE]
        if (self.run / "config.toml").is_file():
            place = ["--resume", self.run, *more]
        else:  # it was killed before there was a run folder that could be resumed
            subprocess.run(["rm", "-rf", self.run], check=True)
            data = ["--data", self.folders / "labelled", "--out", self.run]
            place = [*data, *more, *sets(f"federation.rounds={self.rounds}", "run.checkpoint_every=1")]
        return self.stage.ssfl(name, "serve", *place)

    def start_site(self, name: str) -> None:
        place = [f"127.0.0.1:{self.proxies[name].port}", "--data", self.folders / name, "--device", "cpu"]
        key = ["--key", self.ring / f"{name}.site", "--threads", 1, "--patience", PATIENCE]
        before = sum(one.startswith(f"{name}-") for one in self.stage.names.values())
        self.sites[name] = self.stage.ssfl(f"{name}-{before + 1}", "join", *place, *key)

    def until_round(self, number: int) -> None:
        """Wait until so many rounds are played."""

        wait_until(
            lambda: self.last_round() >= number or self.centre.poll() is not None,
            self.tell,
            PATIENCE,
            self.stage.logs,
            every=0.2,
        )

    def last_round(self) -> int:
        """How many rounds are played."""
        if not (self.run / "events.jsonl").is_file():
            return 0
        return max((event["round"] for event in runs.read_events(self.run)), default=0)

    def finished(self) -> bool:
        """Whether all rounds are played."""
        return self.centre.poll() == 0

    def wait(self, most: float) -> None:
        """Let some time pass, less than `most` seconds."""
        time.sleep(self.draws.uniform(0, most))

    def fault(self) -> None:
        """One fault, from its beginning to its end."""
        if not self.bag:
            self.bag = [
                self.kill_site, self.stop_site, self.hold, self.halve, self.cut, self.cut_all,
                self.kill_centre, self.stop_centre, self.end_centre,
            ]  # fmt: skip
            self.draws.shuffle(self.bag)
        at, what = time.monotonic() - self.began, self.bag.pop()
        self.faults.append(f"{at:6.1f} s  {what(self.draws.choice(NAMES))}")
        self.counts[what.__name__] += 1
        print(self.faults[-1], flush=True)

    def kill_site(self, name: str) -> str:
        self.sites[name].kill()
        self.sites[name].wait()
        self.wait(PAUSE)
        self.start_site(name)
        return f"{name} was killed and started again"

    def stop_site(self, name: str) -> str:
        self.sites[name].send_signal(signal.SIGSTOP)
        self.wait(PAUSE)
        self.sites[name].send_signal(signal.SIGCONT)
        return f"{name} was stopped and continued"

    def hold(self, name: str) -> str:
        self.proxies[name].free.clear()
        self.wait(PAUSE)
        self.proxies[name].free.set()
        return f"the traffic of {name} was held up"

    def cut(self, name: str) -> str:
        return f"{self.proxies[name].cut()} connections of {name} were cut"

    def halve(self, name: str) -> str:
        """Cut a connection in the middle of a message, in either direction."""
        self.proxies[name].halving = True
        self.wait(PAUSE)
        self.proxies[name].halving = False
        return f"what {name} sent and got broke off"

    def cut_all(self, name: str) -> str:
        return f"all {sum(proxy.cut() for proxy in self.proxies.values())} connections were cut"

    def kill_centre(self, name: str) -> str:
        self.centre.kill()
        self.centre.wait()
        self.wait(PAUSE)
        self.centre = self.start_centre()
        return "the centre was killed and started again"

    def stop_centre(self, name: str) -> str:
        self.centre.send_signal(signal.SIGSTOP)
        self.wait(PAUSE)
        self.centre.send_signal(signal.SIGCONT)
        return "the centre was stopped and continued"

    def end_centre(self, name: str) -> str:
        if self.centre.poll() is None:
            self.centre.terminate()
            self.stage.ended(self.centre)
        if self.finished():
            return "the centre had finished"
        assert self.centre.returncode in (143, -signal.SIGTERM), self.tell()
        self.centre = self.start_centre()
        return "the centre was asked to end and started again"

    def tell(self) -> str:
        """What happened, for whoever looks for the cause of a failure."""
        logs = list(self.stage.folder.glob("*.log"))
        ends = [f"--- {file.name}\n{file.read_text()[-1500:]}" for file in sorted(logs)[-12:]]
        faults = "\n".join(self.faults)
        return f"SSFL_FAULT_SEED={SEED} SSFL_FAULT_SECONDS={SECONDS:g}\n{faults}\n" + "\n".join(ends)


@contextmanager
def storm(stage: Stage, folders: Path, ring: Path, rounds: int) -> Iterator[Storm]:
    made = Storm(stage, folders, ring, random.Random(SEED), rounds)
    try:
        yield made
    finally:
        for process in (made.centre, *made.sites.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        for proxy in made.proxies.values():
            proxy.close()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 10 + 2400)
def test_random_faults_change_nothing_but_who_answers(folders: Path, ring: Path, stage: Stage) -> None:
    rounds = max(25, round(SECONDS / 4))  # more than are played while there are faults
    config = config_of(folders, [f"federation.rounds={rounds}"])
    with storm(stage, folders, ring, rounds) as made:
        made.until_round(1)
        made.began = time.monotonic()
        while not made.finished() and (time.monotonic() - made.began < SECONDS or len(made.faults) < KINDS):
            if made.draws.random() < QUIET:
                made.until_round(made.last_round() + 1)
            made.wait(GAP)
            assert made.centre.poll() in (None, 0), made.tell()
            made.fault()
        lasted, by_then = time.monotonic() - made.began, made.last_round()
        wait_until(lambda: made.centre.poll() is not None, made.tell, PATIENCE, stage.logs)
        assert made.finished(), made.tell()
        for name, process in made.sites.items():
            assert stage.ended(process, PATIENCE) == 0, f"{name}: {made.tell()}"
    print(
        f"{len(made.faults)} faults in {lasted:.0f} s and {by_then} of {rounds} rounds: {dict(made.counts)}"
    )
    events = list(runs.read_events(made.run))
    played = [event for event in events if event["event"] == "round"]
    came = arrivals(made.run)  # each round once, and in order
    assert len(came) == rounds, made.tell()
    for event, (sent, back) in zip(played, came, strict=True):
        assert set(back) <= set(sent) <= {0, 1, 2}, event
        assert len(back) >= 2 or "refused" in event, event
    assert not [event for event in events if event["event"] == "refused" and event["site"]], made.tell()
    assert same(checkpoint(made.run), simulated(config, folders, came)), made.tell()
    assert "Traceback" not in "".join(file.read_text() for file in stage.folder.glob("*.log")), made.tell()
