"""Logs a run to an experiment tracker: TensorBoard, MLflow or Weights & Biases (`run.track`).

The run folder has all results; the tracker gets a copy of the numbers in events.jsonl. If the tracker fails,
the run continues without it. When a run is resumed, MLflow and Weights & Biases add to the record that they
already have, and no number is logged twice. The files of TensorBoard are written anew.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ssfl.config.settings import Config
from ssfl.config.writing import as_dict, to_toml
from ssfl.core import plain_files
from ssfl.core.events import Event
from ssfl.errors import ConfigError, one_line, warn_user
from ssfl.runs.folder import read_events

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""The Python package that each value of run.track needs."""
Numbers = dict[str, float]


class Backend(NamedTuple):
    """An open connection to an experiment tracker (TensorBoard, MLflow or Weights & Biases) for one run."""

    log: Callable[[int, Numbers], object]
    """A function that logs the numbers of one event. Its arguments are the round and the numbers by name."""
    close: Callable[[bool], object]
    """A function that closes the connection. Its argument is whether the run is finished."""


def require(name: str) -> None:
    """Raises if the package of the tracker `name` (a value of run.track) is not installed."""
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        raise ConfigError(
            f"run.track = {name!r}: this package is not installed; run `pip install {PACKAGES[name]}`",
            key="run.track",
            value=name,
            fix=f"pip install {PACKAGES[name]}",
        )


@contextmanager
def tracking(path: Path, config: Config) -> Iterator[Callable[[Event], None]]:
    """Yields a function that logs an event to the tracker of run.track. Events that are already in the run
    folder `path`, but were not logged, are logged first. With run.track = "none", the function does
    nothing."""
    name = config.run.track
    if name == "none":
        yield lambda event: None
        return
    backend: Backend | None = None
    memory = Memory(path / "track.json", name)

    def attempt(what: Callable[[], Any]) -> Any:
        """Calls a function of the tracker and returns its result. If it fails, warns the user, returns None,
        and the tracker is no longer used."""
        nonlocal backend
        try:
            return what()
        except Exception as error:  # trackers may raise any exception
            backend = None
            reason = one_line(error, 200)
            warn_user(
                f"run.track = {name!r} failed ({reason}): the run continues without it; {path} has all "
                "numbers"
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
    """Records in a file of the run folder what has been logged. The file has the tracker's id of the run, and
    the last logged round of each kind of event.

    It is written before a number is sent. So a crash can lose a number, but no number is logged twice.
    """

    def __init__(self, file: Path, tracker: str) -> None:
        self.file, self.tracker = file, tracker
        self.logged: dict[str, int] = {}
        self.id: str | None = None
        try:
            saved = plain_files.parse_json(plain_files.read(file, plain_files.CONFIG))
            if saved["tracker"] == tracker:
                self.logged, self.id = dict(saved["told"]), str(saved["id"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def name(self, id: str) -> None:
        """Saves the tracker's id of this run. If the run is resumed, its further events are logged under the
        same id."""
        self.id = id
        self._save()

    def note(self, event: Event) -> bool:
        """Records that an event is about to be logged, and returns True. Returns False if the event was
        logged before."""
        if event["round"] <= self.logged.get(event["event"], -1):
            return False
        self.logged[event["event"]] = event["round"]
        if self.id is not None:
            self._save()
        return True

    def _save(self) -> None:
        temporary = self.file.with_name(f".{self.file.name}.tmp")
        temporary.write_text(json.dumps({"tracker": self.tracker, "id": self.id, "told": self.logged}))
        temporary.replace(self.file)


def numbers(event: Event) -> Numbers:
    """Returns all single numbers of an event, with names such as `eval/accuracy` or
    `diversity/gradient_l2/definition`. Lists and texts are left out."""
    values: Numbers = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{name}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            values[name] = float(value)

    collect(event["event"], {key: value for key, value in event.items() if key not in ("event", "round")})
    return values


def _tensorboard(path: Path, config: Config, memory: Memory) -> Backend:
    """Returns a connection to TensorBoard, which writes event files in RUN/tensorboard. When a run is
    resumed, these files are deleted and written again from the run's events."""
    from torch.utils.tensorboard import SummaryWriter

    folder = path / "tensorboard"
    again = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    memory.logged.clear()
    # a TensorBoard that is open must drop what it has read from the old files
    writer = SummaryWriter(str(folder), purge_step=0 if again else None, flush_secs=10)
    writer.add_text("config", "```toml\n" + to_toml(config) + "```")

    def log(step: int, values: Numbers) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Backend(log, lambda finished: writer.close())


def _mlflow(path: Path, config: Config, memory: Memory) -> Backend:
    """Returns a connection to MLflow, which logs to the experiment "ssfl". The environment variable
    MLFLOW_TRACKING_URI says to which server."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    if memory.id is None:
        experiment = client.get_experiment_by_name("ssfl")
        number = experiment.experiment_id if experiment else client.create_experiment("ssfl")
        opened = client.create_run(number, run_name=path.name).info.run_id
        settings = [Param(f"{s}.{k}", str(v)) for s, kind in as_dict(config).items() for k, v in kind.items()]
        for start in range(0, len(settings), 100):  # MLflow's limit for one request
            client.log_batch(opened, params=settings[start : start + 100])
        memory.name(opened)
    else:
        client.update_run(memory.id, status="RUNNING")
    run = str(memory.id)

    def log(step: int, values: Numbers) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    return Backend(log, lambda done: client.set_terminated(run, "FINISHED" if done else "KILLED"))


def _wandb(path: Path, config: Config, memory: Memory) -> Backend:
    """Returns a connection to Weights & Biases, which logs to the project "ssfl". The environment variable
    WANDB_PROJECT can name another project, and WANDB_MODE can turn off the upload."""
    import wandb

    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "ssfl"), name=path.name, id=memory.id, resume="allow",
        dir=str(path), config=as_dict(config),
    )  # fmt: skip
    memory.name(opened.id)
    opened.define_metric("*", step_metric="round_number")

    def log(step: int, values: Numbers) -> None:
        opened.log({**values, "round_number": step})

    return Backend(log, lambda finished: opened.finish(0 if finished else 1))


BACKENDS: dict[str, Callable[[Path, Config, Memory], Backend]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
