"""Telling a run's numbers to TensorBoard, MLflow or Weights & Biases as well (`run.track`).

The run folder stays the source of truth: a tracker hears the numbers of events.jsonl, once each, and whatever
happens to it the run goes on. A resumed run goes on in the same run of its tracker.
"""

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ssfl.config.loading import as_dict, to_toml
from ssfl.config.settings import Config
from ssfl.core import plain_files
from ssfl.core.events import Event
from ssfl.errors import ConfigError, SsflWarning
from ssfl.runs.folder import read_events

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""What each choice of run.track needs."""
Numbers = dict[str, float]


class Backend(NamedTuple):
    """One tracker, opened for one run."""

    log: Callable[[int, Numbers], object]
    """Told the round and its numbers by name."""
    close: Callable[[bool], object]
    """Told whether the run is finished."""


def require(name: str) -> None:
    """Refuse a tracker that is not installed, before anything is trained."""
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        raise ConfigError(f"run.track = {name!r} needs another package: `pip install {PACKAGES[name]}`")


@contextmanager
def tracking(path: Path, config: Config) -> Iterator[Callable[[Event], None]]:
    """A function to tell each new event of a run to; what it missed of the past it hears first."""
    name = config.run.track
    if name == "none":
        yield lambda event: None
        return
    backend: Backend | None = None
    memory = Memory(path / "track.json", name)

    def attempt(what: Callable[[], Any]) -> Any:
        """A tracker that fails is told of once and left out from then on."""
        nonlocal backend
        try:
            return what()
        except Exception as error:  # the clients of others raise almost anything
            backend = None
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            warnings.warn(
                f"run.track = {name!r} failed ({reason}): the run goes on without it; {path} has all numbers",
                SsflWarning,
                stacklevel=2,
            )
            return None

    def tell(event: Event) -> None:
        if (opened := backend) is not None:
            attempt(lambda: memory.note(event) and opened.log(event["round"], numbers(event)))

    backend = attempt(lambda: BACKENDS[name](path, config, memory))
    for event in read_events(path):
        tell(event)
    finished = False
    try:
        yield tell
        finished = True
    finally:
        if (opened := backend) is not None:
            attempt(lambda: opened.close(finished))


class Memory:
    """What a tracker has been told, kept in the run folder: the run's name there, and the last round of each
    kind of event.

    It is written before a number is sent: after a crash at the worst moment one may be missing, but none is
    there twice.
    """

    def __init__(self, file: Path, tracker: str) -> None:
        self.file, self.tracker = file, tracker
        self.told: dict[str, int] = {}
        self.id: str | None = None
        try:
            kept = plain_files.parse_json(plain_files.read(file, plain_files.CONFIG))
            if kept["tracker"] == tracker:
                self.told, self.id = dict(kept["told"]), str(kept["id"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def name(self, id: str) -> None:
        """Keep the name that the tracker knows this run by."""
        self.id = id
        self._save()

    def note(self, event: Event) -> bool:
        """Whether an event is news."""
        if event["round"] <= self.told.get(event["event"], -1):
            return False
        self.told[event["event"]] = event["round"]
        if self.id is not None:
            self._save()
        return True

    def _save(self) -> None:
        temporary = self.file.with_name(f".{self.file.name}.tmp")
        temporary.write_text(json.dumps({"tracker": self.tracker, "id": self.id, "told": self.told}))
        temporary.replace(self.file)


def numbers(event: Event) -> Numbers:
    """The plain numbers of an event: `eval/accuracy`, `diversity/gradient_l2/definition`."""
    found: Numbers = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{name}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = float(value)

    collect(event["event"], {key: value for key, value in event.items() if key not in ("event", "round")})
    return found


def _tensorboard(path: Path, config: Config, memory: Memory) -> Backend:
    """Event files in RUN/tensorboard, written anew from the run's history when it is resumed."""
    from torch.utils.tensorboard import SummaryWriter

    folder = path / "tensorboard"
    again = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    memory.told.clear()
    # what a TensorBoard that is looking on has read of the old files is void
    writer = SummaryWriter(str(folder), purge_step=0 if again else None, flush_secs=10)
    writer.add_text("config", "```toml\n" + to_toml(config) + "```")

    def log(step: int, found: Numbers) -> None:
        for name, value in found.items():
            writer.add_scalar(name, value, step)

    return Backend(log, lambda finished: writer.close())


def _mlflow(path: Path, config: Config, memory: Memory) -> Backend:
    """A run of the experiment "ssfl", where MLflow's own settings (MLFLOW_TRACKING_URI) say."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    if memory.id is None:
        experiment = client.get_experiment_by_name("ssfl")
        number = experiment.experiment_id if experiment else client.create_experiment("ssfl")
        opened = client.create_run(number, run_name=path.name).info.run_id
        settings = [Param(f"{s}.{k}", str(v)) for s, kind in as_dict(config).items() for k, v in kind.items()]
        for start in range(0, len(settings), 100):  # as many as one request may carry
            client.log_batch(opened, params=settings[start : start + 100])
        memory.name(opened)
    else:
        client.update_run(memory.id, status="RUNNING")
    run = str(memory.id)

    def log(step: int, found: Numbers) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in found.items()])

    return Backend(log, lambda done: client.set_terminated(run, "FINISHED" if done else "KILLED"))


def _wandb(path: Path, config: Config, memory: Memory) -> Backend:
    """A run of the project "ssfl", or where W&B's own settings (WANDB_PROJECT, WANDB_MODE) say."""
    import wandb

    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "ssfl"), name=path.name, id=memory.id, resume="allow",
        dir=str(path), config=as_dict(config),
    )  # fmt: skip
    memory.name(opened.id)
    opened.define_metric("*", step_metric="round_number")

    def log(step: int, found: Numbers) -> None:
        opened.log({**found, "round_number": step})

    return Backend(log, lambda finished: opened.finish(0 if finished else 1))


BACKENDS: dict[str, Callable[[Path, Config, Memory], Backend]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
