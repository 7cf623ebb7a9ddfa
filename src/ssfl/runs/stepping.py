"""`ssfl.Federation`: trains a run round by round from Python."""

import atexit
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import torch

from ssfl.config.settings import Config
from ssfl.core.events import Event
from ssfl.data.arrays import Data
from ssfl.errors import ConfigError
from ssfl.federation import Method, State
from ssfl.models.external import Factory
from ssfl.runs import folder, predict, resolve, round_loop, same, train
from ssfl.runs.result import Result, model_card
from ssfl.runs.round_loop import Done
from ssfl.runs.surroundings import enough_memory, reproducible
from ssfl.signals import Stop, interruptible

Metric = Callable[[predict.Classifier], float]
RESERVED = (
    "event", "round", "seconds", "memory", "accuracy", "loss", "class_accuracy", "stream_accuracy",
    "balanced_accuracy", "correct", "count", "validation_accuracy", "validation_correct", "validation_count",
)  # fmt: skip
"""The fields that evaluation events already have. The `metrics` of a `Federation` must have other names."""


class Federation:
    """A run that trains one round at a time: `for done in federation`.

    Each `done` has `round`, `events` and `state`. Leaving the loop pauses the run, and a new loop continues
    it. `stop()` saves the run and ends it, and so do the end of a `with` block and of the program. If the
    folder `out` exists, the run in it is continued. Results are byte-identical to those of `ssfl.run`.

    `metrics` maps names to functions. Each function takes the current model (see `model`) and returns a
    number, which is added to the "eval" events under that name.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        model: Factory | str | None = None,
        data: Data | str | None = None,
        method: Method | None = None,
        out: str | Path | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        config = train.with_method(config, method)
        self.path = (
            Path(out) if out is not None else folder.next_free(Path("runs") / train.plain_name(config))
        )
        self.metrics = dict(metrics or {})
        for name in self.metrics:
            if name in RESERVED:
                raise ConfigError(
                    f"metrics: every evaluation already has a value with the name {name!r}: choose another "
                    "name",
                    key="metrics",
                    value=name,
                )
        self.result: Result | None = None
        """The result of the run after its last round; None before."""
        self._asked = Stop()
        self._open = ExitStack()
        with reproducible(), enough_memory():
            try:
                self._begin(config, model, data, method)
            except BaseException:
                self._open.close()
                raise
            self._threads = torch.get_num_threads()
        _OPEN.add(self)

    def _begin(
        self,
        config: Config,
        model: Factory | str | None,
        data: Data | str | None,
        method: Method | None,
    ) -> None:
        """Creates the run folder, or opens the existing one to continue the run in it. Raises if that run has
        other settings than `config`. `model`, `data` and `method` are as in `ssfl.run`."""
        there = (self.path / "config.toml").is_file()
        if there:
            same.require(resolve.with_data(config, data), self.path)
            config = folder.read_config(self.path)
            self._open.enter_context(folder.locked(self.path))
            begun = train.reopened(config, self.path, model, data, lambda message: None, method)
        else:
            begun = train.begun(config, self.path, model, data)
        self._sim, start = self._open.enter_context(begun)
        self.state: State = start.state
        """The state after the last round that was played: the groups' models, the averaged model, the
        momentum, and tensors that the method keeps between rounds."""
        rest = round_loop.RestOfRun(self._sim, self.path, start, None, lambda: self._asked.by, self._evaluate)
        self._left: round_loop.Playing | None = round_loop.playing(rest)
        summary = folder.read_summary(self.path)
        if there and summary is not None and train.finished(self.path):
            self._end(Result(summary.get("accuracy", math.nan), self.history, self.path))

    def __iter__(self) -> Iterator[Done]:
        return self

    def __next__(self) -> Done:
        """Trains the next round, and returns its number, its events and the state after it."""
        if self._left is None:
            raise StopIteration
        with reproducible(), enough_memory(), interruptible(False) as self._asked:
            torch.set_num_threads(self._threads)
            done = self._advance(self._left)
            if done is None:
                raise StopIteration
            self.state = done.state
            if done.round == self._sim.rounds:  # save the model now: nobody may ask for another round
                self._advance(self._left)
        return done

    def _advance(self, left: round_loop.Playing) -> Done | None:
        """Trains the next of the rounds that are left, and returns it. After the last round, finishes the run
        and returns None."""
        try:
            return next(left)
        except StopIteration as end:
            self._end(end.value)
            return None
        except BaseException:
            self._end(None)
            raise

    def stop(self) -> None:
        """Saves the last round and ends the run. To continue the run later, make a new `ssfl.Federation` with
        the same folder, or call `ssfl.resume`. It is called at the end of a `with` block and of the
        program."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def evaluate(self) -> Event:
        """Evaluates the current model now. Returns the event with its accuracy and your metrics, as in "eval"
        events. Nothing is written to the run folder."""
        with reproducible():
            torch.set_num_threads(self._threads)
            return self._evaluate(self.state)

    def model(self) -> predict.Classifier:
        """Returns a copy of the current averaged model. Like the model of `ssfl.load_model`, it takes images
        and returns logits."""
        return self._model(self.state)

    @property
    def config(self) -> Config:
        """The resolved config: all settings that the user left open have their final values."""
        return self._sim.config

    @property
    def round(self) -> int:
        """The number of rounds played so far."""
        return self.state.round

    @property
    def history(self) -> list[Event]:
        """All events of the run so far, in order, each a dict."""
        return list(folder.read_events(self.path))

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json after the last round; None before the run is finished."""
        return folder.read_summary(self.path)

    def _end(self, result: Result | None) -> None:
        left, self._left = self._left, None
        self.result = result or self.result
        try:
            if left is not None:
                left.close()
        finally:
            self._open.close()

    def _model(self, state: State) -> predict.Classifier:
        card = model_card(self._sim, {})
        tensors = {name: tensor.detach().clone() for name, tensor in self._sim.final_tensors(state).items()}
        return predict.classifier(tensors, card, self.path, self._sim.make).to(self._sim.device)

    def _evaluate(self, state: State) -> Event:
        event = self._sim.evaluate(state)
        for name, metric in self.metrics.items():
            value = metric(self._model(state))
            try:
                event[name] = float(value)
            except (TypeError, ValueError):
                event[name] = math.nan
            if not math.isfinite(event[name]):
                raise ConfigError(
                    f"metrics: the function {name!r} returned {value!r}, but it must return a finite number",
                    key=name,
                    value=value,
                )
        return event


_OPEN: WeakSet[Federation] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Saves all runs that the program has left open. Later, while Python shuts down, nothing can be saved."""
    for federation in list(_OPEN):
        federation.stop()
