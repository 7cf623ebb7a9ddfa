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


def _playing(rest: RestOfRun, tracked: Report) -> Playing:
    """Does the work of `playing`. Calls `tracked` with each event, to log it to the experiment tracker."""
    sim, path, report, evaluate = rest.sim, rest.path, rest.report, rest.evaluate
    state, line = rest.start.state, resuming.command(sim.config, path)
    totals = {"seconds": 0.0, "bytes_up": 0, "bytes_down": 0} | rest.start.totals
    every, now, leads = sim.config.run, conditions(sim), is_leader(sim.config)
    saving, saved = 0.0, time.monotonic()  # `saving`: seconds of a checkpoint that no event reports yet
    saved_round = state.round
    history = list(folder.read_events(path)) if leads else []
    stop = 0  # the signal that asks the run to stop
    if report is not None:
        report({"event": "start", "round": state.round, "rounds": sim.rounds, "what": rest.what})
    clock = Clock(sim.config, state.round, sim.pool.features)

    def tell(event: Event) -> None:
        if leads:
            folder.append_event(path, event)
        tracked(event)
        history.append(event)
        if report is not None:
            report(event)

    def save() -> None:
        nonlocal saving, saved, saved_round
        began = time.perf_counter()
        checkpoints.write(path, Checkpoint(state, totals, now))
        if state.round < sim.rounds:  # so that `ssfl predict` works with a stopped run
            known = [event for event in history if event["event"] == "eval"]
            card = model_card(sim, known[-1] if known else {}) | {"round": state.round}
            folder.write_model(path / folder.UNFINISHED, sim.final_tensors(state), card)
        saving, saved, saved_round = time.perf_counter() - began, time.monotonic(), state.round

    private = sim.config.privacy.clip is not None
    if private:
        plan = privacy.planned(sim.config)
        if not history:
            tell(plan)
        elif report is not None:
            report(plan)
    try:
        while state.round < sim.rounds:
            began = time.perf_counter()
            state, events = sim.play(state)
            last = state.round == sim.rounds
            events[0]["seconds"] = time.perf_counter() - began
            if saving:
                events[0]["phases"]["checkpoint"], saving = saving, 0.0
            events[0]["left"] = clock.left(events[0])
            if last or state.round % (every.eval_every or 1) == 0:
                began = time.perf_counter()
                events.append(evaluate(state))
                events[-1]["seconds"] = time.perf_counter() - began
            for event in events:
                for key in totals:
                    totals[key] += event.get(key, 0)
                tell(event)
            stop = rest.interrupted() if sim.ranks is None else sim.ranks.agree(rest.interrupted())
            late = time.monotonic() - saved >= SAVED
            if leads and (last or stop or late or state.round % (every.checkpoint_every or 1) == 0):
                save()
            if stop and not last:
                raise Interrupted(path, state.round, line, stop)
            try:
                yield Done(state.round, events, state)
            except GeneratorExit:
                if leads and saved_round < state.round:
                    save()
                raise
        if not any(event["event"] == "eval" and event["round"] == state.round for event in history):
            tell(evaluate(state))  # the run was stopped after its last checkpoint and before this event
        over = {event["event"] for event in history if event["round"] == state.round}
        if private and "privacy" not in over:
            tell(privacy.spent(sim.config, history))
        if not leads:
            return Result(last_event(history, "eval").get("accuracy", math.nan), history, path)
        play = partial(_inside, report=report, interrupted=rest.interrupted)
        try:
            compared = baseline.compare(sim, path, state, play)
        except Interrupted as stopped:
            raise Interrupted(path, state.round, line, stopped.by) from None
        if compared.verdict is not None and "verdict" not in over:
            tell({"event": "verdict", "round": state.round, **compared.verdict})
        result = finish(sim, path, state, totals, history, compared)
        return replace(result, stopped=state.round, stopped_by=stop) if stop else result
    except RunError as error:
        if rest.what or isinstance(error, DamagedRun):
            raise  # the main run adds how to continue, or the run cannot be continued
        raise RunError(
            f"{error}; then continue with `{line}`", key=error.key, value=error.value, fix=error.fix
        ) from error


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
