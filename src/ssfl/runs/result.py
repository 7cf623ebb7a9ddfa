"""Finishes a run: writes its model file with a model card, and summary.json, and returns its result."""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ssfl.config.settings import DataSettings
from ssfl.core.events import Event
from ssfl.core.statistics import wilson
from ssfl.federation import State
from ssfl.models import backbones
from ssfl.models.building import is_saved_whole
from ssfl.runs import folder, provenance, text
from ssfl.runs.baseline import Compared
from ssfl.simulate import privacy
from ssfl.simulate.simulation import Simulation

SCORES = (
    "accuracy", "correct", "count", "interval", "balanced_accuracy", "loss", "judged_by",
    "validation_accuracy", "validation_correct", "validation_count", "validation_interval",
)  # fmt: skip
"""The keys of summary.json and of the model card that say how accurate the model is, and on which images."""
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Result:
    """The result of a run: its accuracy, its events and its folder. It can be used wherever a run folder is
    expected, for example in `ssfl.predict`."""

    accuracy: float
    """The accuracy of the run's final model on the test images, or over the folds of a cross-validation; nan
    if neither is used."""
    history: list[Event] = field(repr=False)
    """All events of the run in order, each a dict: kinds "round", "eval", "diversity" and others."""
    path: Path
    """The run folder."""
    stopped: int | None = None
    """The number of the last round, if Ctrl-C or SIGTERM came during it; otherwise None. The run itself is
    finished, but a command that does several runs must stop now."""
    stopped_by: int | None = None
    """The number of the signal that came during the last round: SIGINT (Ctrl-C) or SIGTERM; None if `stopped`
    is None."""
    summary: dict[str, Any] = field(default_factory=dict, repr=False)
    """The content of summary.json. Among others, it has the accuracy with its confidence interval and number
    of images, the time and the bytes sent. It also has the verdict: whether the unlabelled images helped."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def verdict(self) -> str | None:
        """A sentence that says whether the unlabelled images helped; None if there was no comparison with a
        server-only model."""
        judged = self.summary.get("verdict")
        return judged["text"] if isinstance(judged, dict) else None

    @property
    def score_text(self) -> str:
        """The final accuracy as text, with the number of images and the confidence interval. It is the
        accuracy on test images or cross-validation folds, otherwise that on validation images. Without any
        accuracy, the text is "finished"."""
        return text.ending(self.summary or last_event(self.history, "eval"))


def finish(
    sim: Simulation,
    path: Path,
    state: State,
    totals: dict[str, float],
    events: list[Event],
    compared: Compared,
) -> Result:
    """Writes the model and summary.json of a run that has played all its rounds, and returns the result.
    `totals` has the seconds and bytes of all rounds together, and `events` are all events of the run.

    `compared` is the outcome of the comparison with a server-only model. If it says to keep the server-only
    model, that model is written instead of the federated one.
    """
    evaluation = last_event(events, "eval")
    chosen, final_state = sim, state
    if compared.alone is not None and compared.kept_alone:
        chosen, final_state = compared.alone
        evaluation = chosen.evaluate(final_state)
    judged = judged_by(evaluation, compared)
    tensors = chosen.final_tensors(final_state)
    folder.write_model(path / MODEL, tensors, model_card(chosen, evaluation | judged))
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
        spent = last_event(events, "privacy")
        summary["privacy"] = {key: spent[key] for key in ("clip", "noise", "delta", *privacy.EPSILONS)}
    folder.write_summary(path, summary)
    return Result(summary.get("accuracy", math.nan), events, path, summary=summary)


def judged_by(evaluation: Event, compared: Compared) -> dict[str, Any]:
    """Returns entries of summary.json about the final accuracy: its confidence interval, and on which images
    it was measured ("judged_by"). These images are the test images, if the last `evaluation` used them.
    Otherwise they are the held-out images of the cross-validation folds, otherwise the validation images. For
    folds, the accuracy itself is also returned. The dict is empty if there are no such images."""
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


def last_event(events: list[Event], kind: str) -> Event:
    return [event for event in events if event["event"] == kind][-1]


def test_views(data: DataSettings) -> dict[str, Any]:
    """Returns the entries of a model card about test-time augmentation (data.test_views): the number of views
    and whether they may be mirrored. The dict is empty if data.test_views is 0."""
    return {"test_views": data.test_views, "flip": bool(data.flip)} if data.test_views else {}


def model_card(sim: Simulation, evaluation: Event) -> dict[str, Any]:
    """Returns the model card, which is stored in a model file. It says how to build the network and how to
    prepare images for it, and it names the classes. It also has the accuracy of `evaluation`, the event of
    the last evaluation, with the number of images."""
    return {
        "model": sim.config.model.name,
        "norm": sim.config.model.norm,
        "classes": list(sim.dataset.classes),
        "shape": list(sim.dataset.shape),
        **({"white": sim.dataset.white} if sim.dataset.deep else {}),
        "mean": list(sim.dataset.mean),
        "std": list(sim.dataset.std),
        **test_views(sim.config.data),
        "data": sim.dataset.name,
        "method": sim.config.method.name,
        "accuracy": None,
        **{key: evaluation[key] for key in SCORES if key in evaluation},
        "versions": folder.versions(),
        **({"train": sim.config.model.train} if sim.config.model.name in backbones.NAMES else {}),
        **({"whole": True} if is_saved_whole(sim.config) else {}),
        **({"outside": sim.brought["model"]} if "model" in sim.brought else {}),
    }


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU as its driver reports it, or the type of another device, such as "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
