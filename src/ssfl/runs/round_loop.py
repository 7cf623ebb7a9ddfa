"""The loop over the rounds of a run: train, evaluate, write events and checkpoints, and finally write the
result."""

import math
import shutil
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ssfl.config.settings import Config
from ssfl.core.events import Event
from ssfl.data import inventory
from ssfl.engines import dist
from ssfl.errors import DamagedRun, RunError, Stopped
from ssfl.federation import State
from ssfl.runs import baseline, checkpoints, folder, resuming, track
from ssfl.runs.checkpoints import Checkpoint
from ssfl.runs.remaining import Clock
from ssfl.runs.result import Result, device_name, finish, last_event, model_card
from ssfl.signals import interruptible
from ssfl.simulate import privacy
from ssfl.simulate.simulation import Simulation

SAVED = 120.0
"""A checkpoint is written at least every this many seconds, whatever `run.checkpoint_every` says."""
Report = Callable[[Event], None]


@dataclass(frozen=True)
class Done:
    """What `ssfl.Federation` yields after each round: the number of the round, its events and the state after
    it."""

    round: int
    """The number of rounds played so far, including this one."""
    events: list[Event]
    """The events of this round, each a dict: one of kind "round", and possibly an evaluation and others."""
    state: State = field(repr=False)
    """The state after this round: the groups' models, the averaged model, the momentum, and tensors that the
    method keeps between rounds. The next round starts from this state."""


Playing = Generator[Done, None, "Result"]


@dataclass(frozen=True)
class RestOfRun:
    """The rounds of a run that are still to be played, and everything that is needed to play them."""

    sim: Simulation
    path: Path
    """The run folder."""
    start: Checkpoint
    """The checkpoint from which the run continues: the state after the last round that was played."""
    report: Report | None
    """A function that is called with each event, to show it to the user; None to show nothing."""
    interrupted: Callable[[], int]
    """A function that returns the number of the signal that asked the run to stop, or 0 if none did."""
    evaluate: Callable[[State], Event]
    what: str = ""
    """The name, in messages, of a run inside the folder of the main run, such as the server-only run. It is
    "" for the main run."""


class Interrupted(Stopped):
    """Raised when Ctrl-C or SIGTERM stopped a run, after it was saved."""

    def __init__(self, path: Path, round: int, command: str, by: int = signal.SIGINT) -> None:
        super().__init__(f"stopped after round {round} and saved; continue with `{command}`", by)
        self.path, self.round = path, round


class SweepInterrupted(Stopped):
    """Raised when Ctrl-C or SIGTERM stopped a command that does several runs, after the current run was
    saved."""

    def __init__(self, round: int, by: int = signal.SIGINT) -> None:
        super().__init__(f"stopped after round {round} and saved; run the same command to continue", by)
        self.round = round


def is_leader(config: Config) -> bool:
    """Returns whether this process writes the run folder. With torchrun, only the first process does."""
    return config.run.engine != "dist" or dist.rank() == 0


def conditions(sim: Simulation) -> dict[str, str]:
    """Returns the conditions of a run that can change the last digits of its results. They are versions, the
    device, and settings of [run] such as engine and threads. If the run records a fingerprint of frozen
    weights, it is included.

    Checkpoints record the conditions. A resumed run warns if they have changed, and raises if the frozen
    weights have.
    """
    settings = {name: str(getattr(sim.config.run, name)) for name in folder.CONDITIONS}
    ranks = {} if sim.ranks is None else {"ranks": str(sim.ranks.size)}
    frozen = {"frozen": str(sim.brought["model"]["frozen"])} if "model" in sim.brought else {}
    return {**folder.versions(), **settings, **ranks, **frozen, "device": device_name(sim.device)}


def play(sim: Simulation, path: Path, start: Checkpoint, report: Report | None) -> Result:
    """Plays the remaining rounds of a run in the folder `path`, from the checkpoint `start`, and returns the
    result. `report` is called with each event, unless it is None."""
    crowded = sim.ranks is not None and sim.ranks.size > 1
    with interruptible(report is not None, crowded) as interrupted:
        left = playing(RestOfRun(sim, path, start, report, lambda: interrupted.by, sim.evaluate))
        while True:
            try:
                next(left)
            except StopIteration as end:
                result: Result = end.value
                by = interrupted.by or (result.stopped_by if result.stopped else 0)
                return replace(result, stopped=sim.rounds, stopped_by=by) if by else result


def playing(rest: RestOfRun) -> Playing:
    """A generator that plays the remaining rounds: it yields after each round and finally returns the result.
    If an error ends the main run, it is also recorded in the run folder.

    If the generator is closed early, a checkpoint is written, unless the last round already has one.
    """
    if rest.what or not is_leader(rest.sim.config):
        return (yield from _playing(rest, lambda event: None))
    with folder.recorded_failures(rest.path), track.tracking(rest.path, rest.sim.config) as tracked:
        return (yield from _playing(rest, tracked))


class _Record:
    """Writes what a run records while it is played: events, checkpoints and the unfinished model."""

    def __init__(self, rest: RestOfRun, tracked: Report) -> None:
        """`tracked` logs an event to the experiment tracker."""
        self.sim, self.path, self.report, self.tracked = rest.sim, rest.path, rest.report, tracked
        self.conditions = conditions(rest.sim)
        self.writes = is_leader(rest.sim.config)
        self.totals = {"seconds": 0.0, "bytes_up": 0, "bytes_down": 0} | rest.start.totals
        self.history = list(folder.read_events(rest.path)) if self.writes else []
        self.saving = 0.0
        """The seconds that a checkpoint took and that no event reports yet."""
        self.saved_round = rest.start.state.round
        self._saved = time.monotonic()

    @property
    def late(self) -> bool:
        """Whether the last checkpoint was written long ago."""
        return time.monotonic() - self._saved >= SAVED

    def tell(self, event: Event) -> None:
        """Records an event, and shows it to the user."""
        if self.writes:
            folder.append_event(self.path, event)
        self.tracked(event)
        self.history.append(event)
        if self.report is not None:
            self.report(event)

    def tell_round(self, events: list[Event]) -> None:
        """Records the events of a round, and adds its costs to the totals."""
        for event in events:
            for key in self.totals:
                self.totals[key] += event.get(key, 0)
            self.tell(event)

    def has(self, kind: str, round: int) -> bool:
        """Returns whether an event of this kind was recorded for this round."""
        return any(event["event"] == kind and event["round"] == round for event in self.history)

    def save(self, state: State) -> None:
        """Writes a checkpoint, and a model with which `ssfl predict` works while the run is unfinished."""
        began = time.perf_counter()
        checkpoints.write(self.path, Checkpoint(state, self.totals, self.conditions))
        if state.round < self.sim.rounds:
            evaluation = next((event for event in reversed(self.history) if event["event"] == "eval"), {})
            card = model_card(self.sim, evaluation) | {"round": state.round}
            folder.write_model(self.path / folder.UNFINISHED, self.sim.final_tensors(state), card)
        self.saving, self.saved_round = time.perf_counter() - began, state.round
        self._saved = time.monotonic()


def _playing(rest: RestOfRun, tracked: Report) -> Playing:
    """Does the work of `playing`. Calls `tracked` with each event, to log it to the experiment tracker."""
    sim, path, state, every = rest.sim, rest.path, rest.start.state, rest.sim.config.run
    record, line = _Record(rest, tracked), resuming.command(sim.config, path)
    stop = 0  # the signal that asks the run to stop
    if rest.report is not None:
        rest.report({"event": "start", "round": state.round, "rounds": sim.rounds, "what": rest.what})
    clock = Clock(sim.config, state.round, sim.pool.features)
    private = sim.config.privacy.clip is not None
    if private:
        plan = privacy.planned(sim.config)
        if not record.history:
            record.tell(plan)
        elif rest.report is not None:
            rest.report(plan)
    try:
        while state.round < sim.rounds:
            began = time.perf_counter()
            state, events = sim.play(state)
            last = state.round == sim.rounds
            events[0]["seconds"] = time.perf_counter() - began
            if record.saving:
                events[0]["phases"]["checkpoint"], record.saving = record.saving, 0.0
            events[0]["left"] = clock.left(events[0])
            if last or state.round % (every.eval_every or 1) == 0:
                began = time.perf_counter()
                events.append(rest.evaluate(state))
                events[-1]["seconds"] = time.perf_counter() - began
            record.tell_round(events)
            stop = rest.interrupted() if sim.ranks is None else sim.ranks.agree(rest.interrupted())
            planned = last or state.round % (every.checkpoint_every or 1) == 0
            if record.writes and (planned or stop or record.late):
                record.save(state)
            if stop and not last:
                raise Interrupted(path, state.round, line, stop)
            try:
                yield Done(state.round, events, state)
            except GeneratorExit:
                if record.writes and record.saved_round < state.round:
                    record.save(state)
                raise
        result = _ended(rest, record, state, line)
        return replace(result, stopped=state.round, stopped_by=stop) if stop else result
    except RunError as error:
        if rest.what or isinstance(error, DamagedRun):
            raise  # the main run adds how to continue, or the run cannot be continued
        raise RunError(
            f"{error}; then continue with `{line}`", key=error.key, value=error.value, fix=error.fix
        ) from error


def _ended(rest: RestOfRun, record: _Record, state: State, line: str) -> Result:
    """Does what is left after the last round, and returns the result: evaluates the model, compares the run
    with its server-only run, and writes the summary. `line` is the command that continues the run."""
    sim, path = rest.sim, rest.path
    if not record.has("eval", state.round):
        record.tell(rest.evaluate(state))  # the run was stopped after its last checkpoint, before this event
    if sim.config.privacy.clip is not None and not record.has("privacy", state.round):
        record.tell(privacy.spent(sim.config, record.history))
    if not record.writes:
        accuracy = last_event(record.history, "eval").get("accuracy", math.nan)
        return Result(accuracy, record.history, path)
    play = partial(_inside, report=rest.report, interrupted=rest.interrupted)
    try:
        compared = baseline.compare(sim, path, state, play)
    except Interrupted as stopped:
        raise Interrupted(path, state.round, line, stopped.by) from None
    if compared.verdict is not None and not record.has("verdict", state.round):
        record.tell({"event": "verdict", "round": state.round, **compared.verdict})
    return finish(sim, path, state, record.totals, record.history, compared)


def _inside(
    sim: Simulation, path: Path, what: str, report: Report | None, interrupted: Callable[[], int]
) -> State:
    """Plays an additional run inside the folder of the main run, such as the server-only run. Returns the
    last state of the additional run. If it was interrupted before, it continues from its last checkpoint.

    `path` is the folder of the additional run, and `what` is its name in messages. `report` and `interrupted`
    are as in `RestOfRun`.
    """
    start = _reopened(sim, path)
    if start is None:
        start = Checkpoint(sim.initial(), {}, conditions(sim))
        shutil.rmtree(path, ignore_errors=True)  # remove a folder that is incomplete or damaged
        parts = inventory.describe_split(sim.dataset, sim.parts, sim.validation)
        folder.create(path, sim.config, parts, sim.brought)
    state = start.state
    for done in playing(RestOfRun(sim, path, start, report, interrupted, sim.evaluate, what)):
        state = done.state
    return state


def _reopened(sim: Simulation, path: Path) -> Checkpoint | None:
    """Returns the last checkpoint of an additional run inside the folder of the main run, such as the
    server-only run. If there is no checkpoint yet, it is made from the initial state.

    Returns None if `path`, the folder of the additional run, is missing or damaged. The additional run then
    starts anew, which takes longer but gives the same result.
    """
    if not (path / "config.toml").is_file():
        return None
    try:
        start = checkpoints.newest(path, sim.device) or Checkpoint(sim.initial(), {}, conditions(sim))
        folder.cut_events(path, start.state.round, sim.config.privacy.clip is not None)
    except DamagedRun:
        return None
    return start
