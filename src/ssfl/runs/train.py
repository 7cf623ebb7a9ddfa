"""`ssfl.run` and `ssfl.resume`: open a new or an existing run folder and play its rounds
(`round_loop.py`)."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from ssfl.config import loading
from ssfl.config.settings import Config, DataSettings
from ssfl.core import outside
from ssfl.core.outside import IN_MEMORY
from ssfl.data import inventory
from ssfl.data.arrays import Data
from ssfl.errors import ConfigError, RunError
from ssfl.federation import Method
from ssfl.models import backbones
from ssfl.models.external import Factory
from ssfl.runs import assemble, checkpoints, folder, resuming, same, track
from ssfl.runs import forecast as costs
from ssfl.runs.checkpoints import Checkpoint
from ssfl.runs.choose import load_config
from ssfl.runs.result import Result
from ssfl.runs.round_loop import Report, conditions, is_leader, play
from ssfl.runs.surroundings import enough_memory, reproducible
from ssfl.simulate.simulation import Simulation

Warn = Callable[[str], None]


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
    """Trains a run from the start, in the new folder `out` (default: the next free runs/METHOD), and returns
    its result.

    `config` is a Config, the name of a preset, a TOML file or a folder of images. `model` is a function
    without arguments that makes the network, any `nn.Module`. `data` is an `ssfl.Data`. Both may also be an
    import path "FILE.py:name". `method` is an object of an `ssfl.Method` class.

    `report` is called with each event. With `forecast`, the first of these events is of kind "forecast". Its
    field "lines" says, as lines of text, what the run is expected to cost.
    """
    config = with_method(config, method)
    path = Path(out) if out is not None else folder.next_free(Path("runs") / plain_name(config))
    with reproducible(), enough_memory(), begun(config, path, model, data) as (sim, start):
        if forecast and report is not None:
            lines = costs.lines(sim, costs.measure(sim, start.state))
            report({"event": "forecast", "round": 0, "lines": lines})
        return play(sim, path, start, report)


def with_method(config: Config | str | Path, method: Method | None) -> Config:
    """Returns the config, with `method` in place of its section [method] if `method` is not None. If `config`
    is the name of a preset or a path, the config is loaded from there first."""
    if not isinstance(config, Config):
        return load_config(config, method=method)
    return config if method is None else loading.with_method(config, method)


def plain_name(config: Config) -> str:
    """Returns the name of the config's method, changed so that it can be the name of a folder."""
    return Path(config.method.name).name.replace(":", "-").replace(" ", "-")


def resume(
    path: str | os.PathLike[str],
    report: Report | None = None,
    warn: Warn | None = None,
    *,
    model: Factory | str | None = None,
    data: Data | str | None = None,
    method: Method | None = None,
) -> Result:
    """Continues the run in the folder `path` from its last valid checkpoint, and returns its result. The
    result is byte-identical to that of an uninterrupted run.

    If the network, the data or the method were passed to `ssfl.run` as objects, pass them again. `report` is
    called with each event, and `warn` with each warning.
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
    """Does the work of `resume`. `place` has the location of the images now, if they may have moved since the
    run was started; otherwise it is None."""
    config = folder.read_config(path)
    if place is not None:
        moved = replace(config.data, root=place.root, path=place.path, download=place.download)
        config = replace(config, data=moved)
    with folder.locked(path) if is_leader(config) else nullcontext(), reproducible(), enough_memory():
        summary = folder.read_summary(path)
        if summary is not None and finished(path):
            accuracy, history = summary.get("accuracy", math.nan), list(folder.read_events(path))
            return Result(accuracy, history, path, summary=summary)
        with reopened(config, path, model, data, warn, method) as (sim, start):
            return play(sim, path, start, report)


@contextmanager
def begun(
    config: Config, path: Path, model: Factory | str | None, data: Data | str | None
) -> Iterator[tuple[Simulation, Checkpoint]]:
    """Creates and locks a new run folder. Yields the simulation of the run, and a checkpoint with the state
    before the first round. `model` and `data` are as in `run`."""
    leads = is_leader(config)
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
    """Prepares the run in the existing folder `path` to be continued. Yields its simulation and its last
    valid checkpoint. If there is no checkpoint, one with the initial state is yielded.

    Raises if the data, the code or the frozen weights have changed. Calls `warn` if versions, the device or
    similar conditions have changed.
    """
    if config.data.name == IN_MEMORY and data is None:
        raise RunError(
            f"the data of {path} were passed from Python: continue with `{resuming.command(config, path)}`",
            key="data",
            fix=resuming.command(config, path),
        )
    folder.require_resumable(path)
    config = _with_its_method(config, path, method)
    factory = _supplied(config, path, model)
    sim = assemble.make(_here(config, warn), factory, data)
    with closing(sim.engine):
        check_unchanged(sim, path)
        start = checkpoints.newest(path, sim.device)
        now, first = conditions(sim), sim.initial()
        if start is None:
            start = Checkpoint(first, {}, now)
        checkpoints.require_memory(path, start.state, first)
        require_frozen(start, now, config, path)
        changed = changes(start.conditions, now)
        if is_leader(config):
            if changed:
                warn(f"{changed}: the last digits of the results may differ from here on")
            folder.cut_events(path, start.state.round, sim.config.privacy.clip is not None)
        yield sim, start


def require_frozen(start: Checkpoint, now: dict[str, str], config: Config, path: Path) -> None:
    """Raises if the network's frozen weights have changed since the checkpoint `start` was written. `now` are
    the present conditions of the run, as `conditions` returns them. They contain a fingerprint of the frozen
    weights."""
    if start.conditions.get("frozen") != now.get("frozen"):
        ours = config.model.name in backbones.NAMES and config.model.weights is None
        restore = "use the version of ssfl that started it" if ours else "restore them"
        raise RunError(
            f"the layers or frozen weights of {config.model.name} have changed since {path} was started: "
            f"{restore}, or start a new run",
            key="model.name",
            value=config.model.name,
        )


def begin_or_resume(config: Config, path: Path, report: Report | None = None) -> Result:
    """Starts a run in the folder `path`, or continues the run that is already there, and returns its result.
    Raises if that run has other settings."""
    same.require(config, path)
    if (path / "config.toml").is_file():
        return _resume(path, report, lambda message: None, config.data)
    return run(config, path, report)


def changes(before: dict[str, str], now: dict[str, str]) -> str:
    """Returns in words which conditions (such as versions, device or threads) changed between `before` and
    `now`; "" if none did."""
    changed = [(key, value) for key, value in before.items() if key in now and value != now[key]]
    return ", ".join(f"{key} was {value} and is now {now[key]}" for key, value in changed)


def finished(path: Path) -> bool:
    """Returns whether the run in this folder has played all its rounds and written a readable model."""
    if folder.read_summary(path) is None:
        return False
    try:
        folder.read_model(path / "model.safetensors")
    except RunError:
        return False
    return True


def check_unchanged(sim: Simulation, path: Path) -> None:
    """Raises if the images, owners, normalisation or augmentations differ from those with which the run in
    the folder `path` was started."""
    if folder.read_fingerprint(path) != inventory.fingerprint(sim.dataset):
        raise RunError(
            f"the images, owners, normalisation or augmentations of {sim.dataset.name} have changed since "
            f"{path} was started: restore them, or start a new run",
            key="data",
            value=sim.dataset.name,
        )


def _here(config: Config, warn: Warn) -> Config:
    """Returns the config for this machine: if the machine does not have the config's device, run.device
    becomes "auto", with a warning."""
    try:
        assemble.choose_device(config.run.device)
        return config
    except ConfigError:
        warn(f"run.device = {config.run.device} cannot be used on this machine: run.device=auto is used")
        return replace(config, run=replace(config.run, device="auto"))


def _supplied(config: Config, path: Path, model: Factory | str | None) -> Factory | None:
    """Returns the function that makes the network (`model`), if the run was started with such a function;
    None if the config names the network. Raises if the function is missing, or is passed although the config
    names the network. Also raises if code from a file has changed."""
    name = config.model.name
    if isinstance(model, str):
        outside.trust(model)
        model = None
    if model is not None and name != outside.IN_MEMORY:
        instead = f"pass model={name!r}" if outside.is_path(name) else "leave model= out"
        raise RunError(
            f"{path} was started with model.name = {name!r}: {instead}", key="model.name", value=name
        )
    if model is None and name == outside.IN_MEMORY:
        line = resuming.command(config, path)
        raise RunError(
            f"the network of {path} was passed as a Python object; pass it again: {line}",
            key="model",
            fix=line,
        )
    folder.require_same_code(path, "model", name)
    return model


def _with_its_method(config: Config, path: Path, method: Method | None) -> Config:
    """Returns the config with the method with which the run was started. Raises if that was an object and
    `method` is None, or if `method` has other settings than at the start. Also raises if code from a file has
    changed."""
    name = config.method.name
    if method is not None:
        method = loading.checked_method(method)
    if name == outside.IN_MEMORY:
        if method is None:
            line = resuming.command(config, path)
            raise RunError(
                f"the method of {path} was passed as a Python object; pass it again: {line}",
                key="method",
                fix=line,
            )
        if asdict(method) != asdict(config.method):
            raise RunError(
                f"{path} was started with other settings of its method: pass a method with "
                f"{asdict(config.method)}",
                key="method",
                value=asdict(method),
            )
        return replace(config, method=method)
    if method is not None and asdict(method) != asdict(config.method):
        raise RunError(
            f"{path} was started with method.name = {name!r}: leave method= out",
            key="method.name",
            value=name,
        )
    folder.require_same_code(path, "method", name)
    return config
