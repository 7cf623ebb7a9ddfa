"""run(config) -> Result: rounds, evaluations, events, checkpoints; and the same again after a crash."""

import math
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssfl.config.settings import Config, DataSettings
from ssfl.core import outside, plain_files
from ssfl.core.events import Event
from ssfl.core.outside import IN_MEMORY
from ssfl.core.statistics import wilson
from ssfl.data import inventory
from ssfl.data.arrays import Data
from ssfl.engines import dist
from ssfl.errors import ConfigError, RunError, Stopped
from ssfl.federation import Method, State
from ssfl.models import backbones
from ssfl.models.external import Factory
from ssfl.runs import assemble, checkpoints, comparing, folder, provenance, same, text, track
from ssfl.runs import forecast as costs
from ssfl.runs.checkpoints import Checkpoint
from ssfl.runs.choose import load_config
from ssfl.runs.comparing import Compared
from ssfl.runs.remaining import Clock
from ssfl.runs.surroundings import enough_memory, reproducible
from ssfl.signals import interruptible
from ssfl.simulate import privacy
from ssfl.simulate.simulation import Simulation, is_saved_whole

SCORES = (
    "accuracy", "correct", "count", "interval", "balanced_accuracy", "loss", "judged_by",
    "validation_accuracy", "validation_correct", "validation_count", "validation_interval",
)  # fmt: skip
"""What summary.json says of how good the model is."""
SAVED = 120.0
"""Seconds after which a round is saved whatever `run.checkpoint_every` says."""
MODEL = "model.safetensors"
Report = Callable[[Event], None]
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    accuracy: float
    """Of the averaged model on the test images, after the last round; nan where they are never looked at."""
    history: list[Event] = field(repr=False)
    """The events in order: "round", "eval" and "diversity" objects."""
    path: Path
    """The run folder."""
    stopped: int | None = None
    """The last round, where Ctrl-C came in it: the run is finished, but whoever plays several stops here."""
    stopped_by: int = signal.SIGINT
    """The signal that came in the last round: Ctrl-C or SIGTERM."""
    summary: dict[str, Any] = field(default_factory=dict, repr=False)
    """summary.json: the accuracy with its count and interval, the verdict, the costs."""

    @property
    def verdict(self) -> str | None:
        """Whether the unlabelled images helped, in words; None where nothing was compared."""
        judged = self.summary.get("verdict")
        return judged["text"] if isinstance(judged, dict) else None

    @property
    def told(self) -> str:
        """The accuracy in words, with its count and interval; on validation images where there is no
        other."""
        return text.ending(self.summary or _last(self.history, "eval"))


@dataclass(frozen=True)
class Done:
    """A round that was played."""

    round: int
    """How many rounds are done."""
    events: list[Event]
    """What it tells: a "round" object, and others."""
    state: State = field(repr=False)
    """What passes to the next round: streams, average, memory."""


Playing = Generator[Done, None, "Result"]


class Interrupted(Stopped):
    """The run was stopped by Ctrl-C or SIGTERM and saved."""

    def __init__(self, path: Path, round: int, again: str, by: int = signal.SIGINT) -> None:
        super().__init__(f"stopped after round {round}; go on with `{again}`", by)
        self.path, self.round = path, round


class SweepInterrupted(Stopped):
    """One of many runs was stopped by Ctrl-C or SIGTERM and saved."""

    def __init__(self, round: int, by: int = signal.SIGINT) -> None:
        super().__init__(f"stopped after round {round} and saved; the same command goes on from here", by)


def run(
    config: Config | str | Path,
    out: str | Path | None = None,
    report: Report | None = None,
    *,
    model: Factory | str | None = None,
    data: Data | str | None = None,
    method: Method | None = None,
    forecast: bool = False,
) -> Result:
    """Train from the start into a new run folder (default: the next free runs/METHOD).

    A preset's name, a TOML file or a folder of images will do for a config. `model` is a function without
    arguments that makes the network, any `nn.Module`, and `data` is an `ssfl.Data`; for both, an import path
    "FILE.py:name" will do. `method` is an object of an `ssfl.Method` class. With `forecast`, `report` first
    gets what the run is expected to cost, as an event with "lines".
    """
    config = with_method(config, method)
    path = Path(out) if out is not None else folder.next_free(Path("runs") / plain_name(config))
    with reproducible(), enough_memory(), begun(config, path, model, data) as (sim, start):
        if forecast and report is not None:
            told = costs.lines(sim, costs.measure(sim, start.state))
            report({"event": "forecast", "round": 0, "lines": told})
        return rounds(sim, path, start, report)


def with_method(config: Config | str | Path, method: Method | None) -> Config:
    """A config from its name or file, with a method that was passed as an object."""
    if not isinstance(config, Config):
        return load_config(config, method=method)
    return config if method is None else replace(config, method=method)


def plain_name(config: Config) -> str:
    """The method's name as a folder is called."""
    return Path(config.method.name).name.replace(":", "-").replace(" ", "-")


def resume(
    path: str | Path,
    report: Report | None = None,
    warn: Warn | None = None,
    *,
    model: Factory | str | None = None,
    data: Data | str | None = None,
    method: Method | None = None,
) -> Result:
    """Go on from the last whole checkpoint, to the same bytes as if nothing had happened.

    A run whose network, data or method came from outside needs them again, as `ssfl.run` took them.
    """
    return _resume(Path(path), report, warn or (lambda message: None), None, model, data, method)


def _resume(
    path: Path,
    report: Report | None,
    warn: Warn,
    place: DataSettings | None,
    model: Factory | str | None = None,
    data: Data | str | None = None,
    method: Method | None = None,
) -> Result:
    """`place` says where the images lie now, if they may have moved."""
    config = folder.read_config(path)
    if place is not None:
        moved = replace(config.data, root=place.root, path=place.path, download=place.download)
        config = replace(config, data=moved)
    with folder.locked(path) if _leads(config) else nullcontext(), reproducible(), enough_memory():
        summary = folder.read_summary(path)
        if summary is not None and finished(path):
            accuracy, history = summary.get("accuracy", math.nan), list(folder.read_events(path))
            return Result(accuracy, history, path, summary=summary)
        with reopened(config, path, model, data, warn, method) as (sim, start):
            return rounds(sim, path, start, report)


@contextmanager
def begun(
    config: Config, path: Path, model: Factory | str | None, data: Data | str | None
) -> Iterator[tuple[Simulation, Checkpoint]]:
    """A simulation with its new run folder, before the first round."""
    leads = _leads(config)
    if leads:
        folder.require_free(path)
        track.require(config.run.track)
    sim = assemble.make(config, model, data)
    with closing(sim.engine):
        if leads:
            parts = inventory.describe_split(sim.dataset, sim.parts, sim.validation)
            folder.create(path, sim.config, parts, sim.brought)
        with folder.locked(path) if leads else nullcontext():
            yield sim, Checkpoint(sim.initial(), {}, conditions(sim))


@contextmanager
def reopened(
    config: Config,
    path: Path,
    model: Factory | str | None,
    data: Data | str | None,
    warn: Warn,
    method: Method | None = None,
) -> Iterator[tuple[Simulation, Checkpoint]]:
    """A simulation of a run folder that is there, and its last whole checkpoint."""
    if config.data.name == IN_MEMORY and data is None:
        raise RunError(
            f"{path} was trained on data that were passed from Python: go on with `{again(config, path)}`"
        )
    folder.require_resumable(path)
    config = _with_its_method(config, path, method)
    make = _supplied(config, path, model)
    sim = assemble.make(_here(config, warn), make, data)
    with closing(sim.engine):
        check_unchanged(sim, path)
        start = checkpoints.newest(path, sim.device)
        now, first = conditions(sim), sim.initial()
        if start is None:
            start = Checkpoint(first, {}, now)
        checkpoints.require_memory(path, start.state, first)
        require_frozen(start, now, config, path)
        changed = changes(start.conditions, now)
        if _leads(config):
            if changed:
                warn(f"{changed}: numbers may differ from here on")
            folder.cut_events(path, start.state.round, sim.config.privacy.clip is not None)
        yield sim, start


def again(config: Config, path: Path) -> str:
    """The line that goes on with a run: a command, or Python where something was passed from there."""
    names = {"model": config.model.name, "data": config.data.name, "method": config.method.name}
    return folder.again(path, config.run.engine == "sites", names)


def _leads(config: Config) -> bool:
    """Whether this process writes the run folder: of several ranks, the first."""
    return config.run.engine != "dist" or dist.rank() == 0


def conditions(sim: Simulation) -> dict[str, str]:
    """What the last digits of a run depend on besides its config."""
    settings = {name: str(getattr(sim.config.run, name)) for name in folder.CONDITIONS}
    ranks = {} if sim.ranks is None else {"ranks": str(sim.ranks.size)}
    frozen = {"frozen": str(sim.brought["model"]["frozen"])} if "model" in sim.brought else {}
    return {**folder.versions(), **settings, **ranks, **frozen, "device": device_name(sim.device)}


def require_frozen(start: Checkpoint, now: dict[str, str], config: Config, path: Path) -> None:
    """Refuse to go on if what a network from outside has frozen is not what it was at the checkpoint."""
    if start.conditions.get("frozen") != now.get("frozen"):
        raise RunError(
            f"the layers or frozen weights of {config.model.name} are not those that {path} was started "
            "with: supply them as they were, or start a new run"
        )


def begin_or_resume(config: Config, path: Path, report: Report | None = None) -> Result:
    """A new run, or the one that was begun in this folder, gone on with."""
    same.require(config, path)
    if (path / "config.toml").is_file():
        return _resume(path, report, lambda message: None, config.data)
    return run(config, path, report)


def changes(before: dict[str, str], now: dict[str, str]) -> str:
    """In which conditions a run goes on that are not those of its last checkpoint."""
    found = [(key, value) for key, value in before.items() if key in now and value != now[key]]
    return ", ".join(f"{key} {value} is now {now[key]}" for key, value in found)


def rounds(sim: Simulation, path: Path, start: Checkpoint, report: Report | None) -> Result:
    """Play what is left of the rounds, into the run folder."""
    crowded = sim.ranks is not None and sim.ranks.size > 1
    with interruptible(report is not None, crowded) as interrupted:
        left = playing(sim, path, start, report, lambda: interrupted.by, sim.evaluate)
        while True:
            try:
                next(left)
            except StopIteration as end:
                result: Result = end.value
                by = interrupted.by or (result.stopped_by if result.stopped else 0)
                return replace(result, stopped=sim.rounds, stopped_by=by) if by else result


def playing(
    sim: Simulation,
    path: Path,
    start: Checkpoint,
    report: Report | None,
    interrupted: Callable[[], int],
    evaluate: Callable[[State], Event],
) -> Playing:
    """What is left of the rounds, one at a time, into the run folder; a failure is kept there too.

    Closing it early saves the last round.
    """
    given = (sim, path, start, report, interrupted, evaluate)
    if not _leads(sim.config):
        return (yield from _playing(*given, lambda event: None))
    with folder.told_failures(path), track.tracking(path, sim.config) as tracked:
        return (yield from _playing(*given, tracked))


def _playing(
    sim: Simulation,
    path: Path,
    start: Checkpoint,
    report: Report | None,
    interrupted: Callable[[], int],
    evaluate: Callable[[State], Event],
    tracked: Report,
    what: str = "",
) -> Playing:
    """`what` names a run inside another; "" is the run itself."""
    state, line = start.state, again(sim.config, path)
    totals = {"seconds": 0.0, "bytes_up": 0, "bytes_down": 0} | start.totals
    every, now, leads = sim.config.run, conditions(sim), _leads(sim.config)
    saving, saved = 0.0, time.monotonic()  # seconds of checkpoints that no event has told yet
    kept = state.round  # the last round that was saved
    history = list(folder.read_events(path)) if leads else []
    stop = 0  # the signal that asked for it
    if report is not None:
        report({"event": "start", "round": state.round, "rounds": sim.rounds, "what": what})
    clock = Clock(sim.config, state.round)

    def tell(event: Event) -> None:
        if leads:
            folder.append_event(path, event)
        tracked(event)
        history.append(event)
        if report is not None:
            report(event)

    def save() -> None:
        nonlocal saving, saved, kept
        began = time.perf_counter()
        checkpoints.write(path, Checkpoint(state, totals, now))
        if state.round < sim.rounds:  # a run that is stopped here can predict
            known = [event for event in history if event["event"] == "eval"]
            card = model_card(sim, known[-1] if known else {}) | {"round": state.round}
            folder.write_model(path / folder.UNFINISHED, sim.final_tensors(state), card)
        saving, saved, kept = time.perf_counter() - began, time.monotonic(), state.round

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
            stop = interrupted() if sim.ranks is None else sim.ranks.agree(interrupted())
            late = time.monotonic() - saved >= SAVED
            if leads and (last or stop or late or state.round % (every.checkpoint_every or 1) == 0):
                save()
            if stop and not last:
                raise Interrupted(path, state.round, line, stop)
            try:
                yield Done(state.round, events, state)
            except GeneratorExit:
                if leads and kept < state.round:
                    save()
                raise
        if not any(event["event"] == "eval" and event["round"] == state.round for event in history):
            tell(evaluate(state))  # the last events were lost
        over = {event["event"] for event in history if event["round"] == state.round}
        if private and "privacy" not in over:
            tell(privacy.spent(sim.config, history))
        if not leads:
            return Result(_last(history, "eval").get("accuracy", math.nan), history, path)
        play = partial(_inside, report=report, interrupted=interrupted)
        try:
            compared = comparing.compare(sim, path, state, play)
        except Interrupted as stopped:
            raise Interrupted(path, state.round, line, stopped.by) from None
        if compared.verdict is not None and "verdict" not in over:
            tell({"event": "verdict", "round": state.round, **compared.verdict})
        result = _finish(sim, path, state, totals, history, compared)
        return replace(result, stopped=state.round, stopped_by=stop) if stop else result
    except RunError as error:
        raise RunError(f"{error}; then go on with `{line}`") from error


def _inside(
    made: Simulation, path: Path, what: str, report: Report | None, interrupted: Callable[[], int]
) -> State:
    """Play a run inside another's folder, from where it was left, and return its last state."""
    now = conditions(made)
    start = Checkpoint(made.initial(), {}, now)
    if (path / "config.toml").is_file():
        start = checkpoints.newest(path, made.device) or start
        folder.cut_events(path, start.state.round, made.config.privacy.clip is not None)
    else:
        shutil.rmtree(path, ignore_errors=True)  # it was stopped before it began
        parts = inventory.describe_split(made.dataset, made.parts, made.validation)
        folder.create(path, made.config, parts, made.brought)
    state = start.state
    for done in _playing(made, path, start, report, interrupted, made.evaluate, lambda event: None, what):
        state = done.state
    return state


def _finish(
    sim: Simulation,
    path: Path,
    state: State,
    totals: dict[str, float],
    events: list[Event],
    compared: Compared,
) -> Result:
    evaluation = _last(events, "eval")
    kept, last = sim, state
    if compared.alone is not None and compared.kept_alone:
        kept, last = compared.alone
        evaluation = kept.evaluate(last)
    judged = judged_by(evaluation, compared)
    tensors = kept.final_tensors(last)
    folder.write_model(path / MODEL, tensors, model_card(kept, evaluation | judged))
    (path / folder.UNFINISHED).unlink(missing_ok=True)
    summary: dict[str, Any] = {
        **{key: (evaluation | judged)[key] for key in SCORES if key in evaluation | judged},
        "rounds": state.round,
        "seconds": totals["seconds"],
        "bytes_up": int(totals["bytes_up"]),
        "bytes_down": int(totals["bytes_down"]),
        "parameters": sim.layout.weights,
        "method": sim.config.method.name,
        "data": sim.dataset.name,
        "engine": sim.config.run.engine,
        "device": device_name(sim.device),
        "threads": sim.config.run.threads,
        "precision": str(sim.pool.dtype).removeprefix("torch."),
        "compile": sim.config.run.compile,
        "users_at_once": sim.config.run.users_at_once,
        "versions": folder.versions(),
        "commit": provenance.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if compared.verdict is not None:
        summary["verdict"] = compared.verdict
    if compared.folds is not None:
        summary["folds"] = compared.folds
    if sim.config.privacy.clip is not None:
        told = _last(events, "privacy")
        summary["privacy"] = {key: told[key] for key in ("clip", "noise", "delta", *privacy.EPSILONS)}
    folder.write_summary(path, summary)
    return Result(summary.get("accuracy", math.nan), events, path, summary=summary)


def judged_by(evaluation: Event, compared: Compared) -> dict[str, Any]:
    """What counts as the accuracy of a run: that on test images, else over folds, else on validation
    images; with its interval."""
    if "accuracy" in evaluation:
        return {"judged_by": "test", "interval": [*wilson(evaluation["correct"], evaluation["count"])]}
    if compared.folds is not None:
        keys = ("accuracy", "correct", "count", "interval", "balanced_accuracy")
        return {"judged_by": "folds", **{key: compared.folds[key] for key in keys}}
    if "validation_accuracy" in evaluation:
        count = evaluation["validation_count"]
        interval = [*wilson(evaluation["validation_correct"], count)]
        return {"judged_by": "validation", "validation_interval": interval}
    return {}


def _last(events: list[Event], kind: str) -> Event:
    return [event for event in events if event["event"] == kind][-1]


def finished(path: Path) -> bool:
    """Whether a run has played all its rounds and left its model."""
    if folder.read_summary(path) is None:
        return False
    try:
        folder.read_model(path / "model.safetensors")
    except RunError:
        return False
    return True


def model_card(sim: Simulation, evaluation: Event) -> dict[str, Any]:
    """What a reader of the model file needs to build and use the network."""
    return {
        "model": sim.config.model.name,
        "norm": sim.config.model.norm,
        "classes": list(sim.dataset.classes),
        "shape": list(sim.dataset.shape),
        **({"white": sim.dataset.white} if sim.dataset.deep else {}),
        "mean": list(sim.dataset.mean),
        "std": list(sim.dataset.std),
        "data": sim.dataset.name,
        "method": sim.config.method.name,
        "accuracy": evaluation.get("accuracy"),
        "versions": folder.versions(),
        **({"train": sim.config.model.train} if sim.config.model.name in backbones.NAMES else {}),
        **({"whole": True} if is_saved_whole(sim.config) else {}),
        **({"outside": sim.brought["model"]} if "model" in sim.brought else {}),
    }


def device_name(device: torch.device) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def check_unchanged(sim: Simulation, path: Path) -> None:
    """A resumed run needs the same images."""
    try:
        before = plain_files.parse_json(plain_files.read(path / "split.json"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path / 'split.json'} cannot be read: put it back, or start a new run") from None
    if before != inventory.fingerprint(sim.dataset):
        raise RunError(
            f"the images, owners, normalisation or augmentations of {sim.dataset.name} are not those that "
            f"{path} was started with"
        )


def _here(config: Config, warn: Warn) -> Config:
    """The config on this machine: a device that it has not is replaced, and that is told."""
    try:
        assemble.choose_device(config.run.device)
        return config
    except ConfigError:
        warn(f"this machine has no {config.run.device}: going on with what it has")
        return replace(config, run=replace(config.run, device="auto"))


def _supplied(config: Config, path: Path, model: Factory | str | None) -> Factory | None:
    """The factory that is in memory, or None; an import path becomes trusted and must be unchanged."""
    name = config.model.name
    if isinstance(model, str):
        outside.trust(model)
        model = None
    if model is not None and name != outside.IN_MEMORY:
        instead = f"pass model={name!r}" if outside.is_path(name) else "leave model= out"
        raise RunError(f"{path} was started with model.name = {name!r}: {instead}")
    if model is None and name == outside.IN_MEMORY:
        raise RunError(
            f"the network of {path} was passed as a Python object, so pass it again: {again(config, path)}"
        )
    folder.require_same_code(path, "model", name)
    return model


def _with_its_method(config: Config, path: Path, method: Method | None) -> Config:
    """The config with the method that it was started with: one in memory must be passed again."""
    name = config.method.name
    if name == outside.IN_MEMORY:
        if method is None:
            raise RunError(
                f"the method of {path} was passed as a Python object, so pass it again: {again(config, path)}"
            )
        if asdict(method) != asdict(config.method):
            raise RunError(f"{path} was started with other settings of its method: {asdict(config.method)}")
        return replace(config, method=method)
    if method is not None and asdict(method) != asdict(config.method):
        raise RunError(f"{path} was started with method.name = {name!r}: leave method= out")
    folder.require_same_code(path, "method", name)
    return config
