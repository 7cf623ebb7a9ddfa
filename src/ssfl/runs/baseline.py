"""The runs that a run is compared with: a server-only model, and cross-validation folds of the labelled
images.

Both are inside the folder of the run and have their own checkpoints. So if the run is killed during them, it
continues there.
"""

import json
import shutil
import warnings
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ssfl import methods
from ssfl.config.settings import Config, PrivacySettings
from ssfl.core import plain_files, statistics
from ssfl.data import folds, split
from ssfl.data.hands import Hands, Index
from ssfl.errors import DivergedError, SsflWarning
from ssfl.federation import State
from ssfl.runs import assemble, folder, verdict
from ssfl.simulate.simulation import Simulation

BASELINE, FOLDS = "baseline", "folds"
"""The names of two folders inside the run folder: for the server-only run, and for the runs of the folds."""
FOLDS_FILE = "folds.json"
LEAST = 20
"""The runs of a cross-validation fold have at least this many rounds, unless the run itself has fewer."""


class Play(Protocol):
    """A function that trains a run inside the folder of another, from its last checkpoint, and returns its
    last state."""

    def __call__(self, sim: Simulation, path: Path, what: str) -> State: ...


@dataclass(frozen=True)
class Compared:
    """The outcome of the comparison with a server-only model."""

    verdict: dict[str, Any] | None = None
    """What `verdict.judge` returned; None if there was nothing to compare."""
    folds: dict[str, Any] | None = None
    """The accuracy over the cross-validation folds, as in summary.json, for the kind of model that the run
    keeps (federated or server-only). None without folds."""
    alone: tuple[Simulation, State] | None = None
    """The simulation and the last state of the server-only run; None if there was none."""

    @property
    def kept_alone(self) -> bool:
        """Whether the server-only model is better than the federated one, so that the run saves it as its
        result."""
        return self.verdict is not None and self.verdict["kept"] == verdict.SERVER_ONLY


def compare(sim: Simulation, path: Path, state: State, play: Play) -> Compared:
    """Trains the models that the run is compared with, and returns the outcome."""
    config = sim.config
    if not config.run.baseline and not config.run.folds:
        return Compared()
    try:
        alone = None
        if config.run.baseline:
            alone = _played(sim, server_only(config), sim.parts, sim.validation, path / BASELINE, play,
                            "server-only model")  # fmt: skip
        folded = cross_validate(sim, path, play) if config.run.folds else None
    except DivergedError as error:
        reason = str(error).partition(". ")[0]  # without its advice, which is for a run of its own
        warnings.warn(
            "this model cannot be compared with one that learns only from the labelled images, because a "
            f"training for the comparison diverged; the run itself is not affected ({reason})",
            SsflWarning,
            stacklevel=2,
        )
        return Compared()
    comparisons = [] if alone is None else _comparisons(sim, state, *alone)
    if folded is not None and folded.alone is not None:
        comparisons.append(
            verdict.compare("folds", folded.labels, folded.federated, folded.alone, folded.classes)
        )
    judged = verdict.judge(comparisons, _users(config)) if comparisons else None
    compared = Compared(judged, None, alone)
    return compared if folded is None else replace(compared, folds=folded.described(compared.kept_alone))


def server_only(config: Config) -> Config:
    """Returns the config of the same run without users. The server's initial weights, images, steps and
    learning rates stay the same."""
    federation = replace(
        config.federation, participants=1, groups=1, group_sizes="even", attackers=0.0, head_start=0.0,
        gate=False, combine="mean", median_fallback=False, dropout=0.0,
    )  # fmt: skip
    policy = "slot" if config.train.momentum_policy == "user" else config.train.momentum_policy
    engine = "loop" if config.run.engine == "sites" else config.run.engine
    run = replace(_inside(config), engine=engine, users_at_once=1)
    return replace(
        config, method=methods.find(methods.BASELINE)(), federation=federation, privacy=PrivacySettings(),
        run=run, train=replace(config.train, momentum_policy=policy),
    )  # fmt: skip


def _inside(config: Config) -> Any:
    """Returns the section [run] of the config for a run inside the folder of another. It is not compared with
    anything, not cross-validated and not tracked."""
    return replace(config.run, baseline=False, folds=0, diversity_every=0, track="none")


def _users(config: Config) -> str:
    """Returns in words what the users contribute, for the verdict."""
    unlabelled = config.split.labels_at == "server" and "labels" not in config.method.needs()
    return "unlabelled images" if unlabelled else "users' images"


def _played(
    sim: Simulation, config: Config, parts: split.Parts, validation: Index, path: Path, play: Play, what: str
) -> tuple[Simulation, State]:
    """Plays a run inside the folder of this one, with this config and these owners of images. Returns its
    simulation and last state. `what` names it in messages."""
    inner = assemble.build(
        config, sim.dataset, parts, validation, sim.device, sim.make, sim.pool.features
    )  # fmt: skip
    with closing(inner.engine):
        return inner, play(inner, path, what)


def _comparisons(sim: Simulation, state: State, other: Simulation, alone: State) -> list[verdict.Comparison]:
    """Returns the comparisons of the federated model with the server-only one, on test and on validation
    images."""
    data, rows = sim.dataset, (sim.final_row(state), other.final_row(alone))
    sets: list[tuple[str, Tensor, Tensor]] = []
    if sim.config.run.test != "never" and len(data.test_labels):
        sets.append(("test", data.test_images.to(sim.device), data.test_labels))
    if len(sim.validation):
        held = torch.from_numpy(sim.validation)
        sets.append(("validation", sim.pool.images[held.to(sim.device)], data.labels[held]))
    return [
        verdict.compare(
            on, labels, sim.classified(rows[0], images), other.classified(rows[1], images), len(data.classes)
        )
        for on, images, labels in sets
    ]


@dataclass(frozen=True)
class Held:
    """Predictions for the labelled images by cross-validation: each image is predicted by a model that was
    not trained on it."""

    labels: Tensor
    federated: Tensor
    alone: Tensor | None
    classes: int
    folds: int
    rounds: int
    groups: int | None
    """The number of patients, or other groups, whose images stayed together; None if none are known."""

    def described(self, kept_alone: bool) -> dict[str, Any]:
        """Returns the accuracy over all folds with its interval and confusion matrix, as in summary.json. It
        is that of the server-only models if `kept_alone` and there are any, otherwise of the federated
        ones."""
        predicted = self.alone if kept_alone and self.alone is not None else self.federated
        truth = self.labels.tolist()
        matrix = statistics.confusion(truth, predicted.tolist(), self.classes)
        each = [row[k] / sum(row) if sum(row) else None for k, row in enumerate(matrix)]
        correct = sum(row[k] for k, row in enumerate(matrix))
        return {
            "folds": self.folds, "rounds": self.rounds, "groups": self.groups, "correct": correct,
            "count": len(truth), "accuracy": correct / len(truth), "class_accuracy": each,
            "interval": list(statistics.wilson(correct, len(truth))),
            "balanced_accuracy": statistics.balanced(each), "confusion": matrix,
        }  # fmt: skip


def cross_validate(sim: Simulation, path: Path, play: Play) -> Held:
    """Trains the runs of all folds, each of which holds out some labelled images, and returns the predictions
    for them. The file folds.json saves the progress."""
    config, data, server = sim.config, sim.dataset, sim.parts.server
    count, rounds = config.run.folds, fold_rounds(config)
    labels = data.labels.numpy()[server]
    groups = None
    if data.groups is not None and len(server) and server.max() < len(data.groups):
        groups = data.groups[server]
    fold_of = folds.assign(labels, groups, count, config.split.seed)
    kinds = ("federated", "alone") if config.run.baseline else ("federated",)
    plan = {"folds": count, "rounds": rounds, "images": server.tolist(), "fold": fold_of.tolist()}
    new = plan | {"done": 0, **{kind: [-1] * len(server) for kind in kinds}}
    progress = _read(path / FOLDS_FILE, plan) or new
    for fold in range(progress["done"], count):
        held = fold_of == fold
        parts = _without(sim, server[held])
        for kind, fold_config in _fold_configs(config, rounds).items():
            if kind not in kinds:
                continue
            what = f"fold {fold + 1} of {count}" + (", server only" if kind == "alone" else "")
            home = path / FOLDS / f"{fold + 1}-{kind}"
            inner, state = _played(sim, fold_config, parts, server[held], home, play, what)
            images = sim.pool.images[torch.from_numpy(server[held]).to(sim.device)]
            predicted = inner.classified(inner.final_row(state), images).tolist()
            for place, label in zip(np.flatnonzero(held).tolist(), predicted, strict=True):
                progress[kind][place] = label
        progress["done"] = fold + 1
        folder.write_atomic(path / FOLDS_FILE, json.dumps(progress).encode() + b"\n")
        shutil.rmtree(path / FOLDS, ignore_errors=True)
    shutil.rmtree(path / FOLDS, ignore_errors=True)
    return Held(
        torch.from_numpy(labels), torch.tensor(progress["federated"]),
        torch.tensor(progress["alone"]) if config.run.baseline else None, len(data.classes), count, rounds,
        None if groups is None else len(set(groups.tolist())),
    )  # fmt: skip


def fold_rounds(config: Config) -> int:
    """Returns the number of rounds of a fold's runs, such that all folds together cost about as much as the
    run itself.

    Rounds on cached features are cheap, so with these every fold has as many rounds as the run.
    """
    rounds = config.federation.rounds or 1
    if config.model.cached_views:
        return rounds
    return max(1, rounds // config.run.folds, min(rounds, LEAST))


def _fold_configs(config: Config, rounds: int) -> dict[str, Config]:
    """Returns the configs of a fold's two runs. They are shorter, and evaluated only on the images of the
    fold."""
    run = replace(_inside(config), test="never", eval_every=rounds)
    short = replace(config, federation=replace(config.federation, rounds=rounds), run=run)
    return {"federated": short, "alone": server_only(short)}


def _without(sim: Simulation, held: Index) -> split.Parts:
    """Returns who owns which images, without the labelled images `held` that a fold holds out. They are also
    taken from users, who have them if the server shares its images."""
    parts = sim.parts
    users = parts.users
    if sim.config.split.shared:
        left = np.ones(len(sim.dataset.labels), bool)
        left[held] = False
        users = Hands.of(users).where(left)
    return replace(parts, server=np.setdiff1d(parts.server, held), users=users)


def _read(file: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the content of folds.json, the progress of a cross-validation. Returns None if it cannot be
    read or belongs to other folds or settings than `plan`."""
    try:
        saved = plain_files.parse_json(plain_files.read(file))
        return saved if all(saved[key] == value for key, value in plan.items()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def expected(config: Config, pace: float, server: float) -> float:
    """Returns about how many seconds it takes to train the server-only model and the folds. `pace` is the
    seconds of a round, and `server` those of the server's part of a round."""
    rounds = config.federation.rounds or 1
    seconds = rounds * server if config.run.baseline else 0.0
    if config.run.folds:
        each = pace + server if config.run.baseline else pace
        seconds += config.run.folds * fold_rounds(config) * each
    return seconds
