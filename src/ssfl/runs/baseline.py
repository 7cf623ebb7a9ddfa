"""Trains the models that a run is compared with: a server-only model, and the models of a cross-validation on
the labelled images.

Each of these models is trained in its own sub-folder of the run folder, with its own checkpoints. If the
command is killed during this training, the resumed run continues from these checkpoints.
"""

import json
import shutil
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
from ssfl.errors import DivergedError, warn_user
from ssfl.federation import State
from ssfl.runs import assemble, folder, verdict
from ssfl.simulate.simulation import Simulation

BASELINE, FOLDS = "baseline", "folds"
"""The names of two sub-folders of the run folder: for the server-only run, and for the runs of the
cross-validation."""
FOLDS_FILE = "folds.json"
LEAST = 20
"""A run of the cross-validation has at least this many rounds, unless the main run itself has fewer."""


class Play(Protocol):
    """A function that trains one of the runs for the comparison, such as the server-only run, and returns the
    last state of that run. `path` is the folder of that run. If it has a checkpoint, training continues from
    there. `what` is the run's name in messages."""

    def __call__(self, sim: Simulation, path: Path, what: str) -> State: ...


@dataclass(frozen=True)
class Compared:
    """The results of the server-only run and of the cross-validation that belong to a run. A field is None if
    there is no such result, for example because a training diverged."""

    verdict: dict[str, Any] | None = None
    """What `verdict.judge` returned: whether the unlabelled images helped. None if there was nothing to
    compare."""
    folds: dict[str, Any] | None = None
    """The accuracy of the cross-validation, as in summary.json; None without cross-validation. If the run
    saves the server-only model as its result, this is the accuracy of server-only models, otherwise of
    federated models."""
    alone: tuple[Simulation, State] | None = None
    """The simulation and the last state of the server-only run; None if there was none."""

    @property
    def kept_alone(self) -> bool:
        """Whether the run saves the server-only model as its result, because the federated model was worse on
        held-out labels."""
        return self.verdict is not None and self.verdict["kept"] == verdict.SERVER_ONLY


def compare(sim: Simulation, path: Path, state: State, play: Play) -> Compared:
    """Trains the server-only model and the models of the cross-validation, if the config asks for them.
    Returns the outcome of the comparison. `state` is the last state of the main run, and `play` is the
    function that trains each of the other models."""
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
        reason = str(error).partition(". ")[0]  # without the advice to start a new run
        warn_user(
            "this model cannot be compared with one that learns only from the labelled images, because a "
            f"training for the comparison diverged; the run itself is not affected ({reason})"
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
    """Returns the config of the server-only run: the same run without users. The server's initial weights,
    images, steps and learning rates stay the same."""
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
    """Returns the section [run] for a run that is trained for the comparison, such as the server-only run.
    Such a run itself has no comparison, no cross-validation, no measurement of diversity and no experiment
    tracker."""
    return replace(config.run, baseline=False, folds=0, diversity_every=0, track="none")


def _users(config: Config) -> str:
    """Returns the words for the users' data in the verdict: "unlabelled images", or "users' images" if users
    have labels."""
    unlabelled = config.split.labels_at == "server" and "labels" not in config.method.needs()
    return "unlabelled images" if unlabelled else "users' images"


def _played(
    sim: Simulation, config: Config, parts: split.Parts, validation: Index, path: Path, play: Play, what: str
) -> tuple[Simulation, State]:
    """Trains a run for the comparison, such as the server-only run, in the folder `path`. Returns its
    simulation and its last state.

    `sim` is the main run's simulation, whose data and network are used. `parts` says which images the server
    and the users own, and `validation` which images are for validation. `what` is the run's name in messages.
    """
    inner = assemble.build(
        config, sim.dataset, parts, validation, sim.device, sim.make, sim.pool.features
    )  # fmt: skip
    with closing(inner.engine):
        return inner, play(inner, path, what)


def _comparisons(sim: Simulation, state: State, other: Simulation, alone: State) -> list[verdict.Comparison]:
    """Compares the federated model (of `sim`, in `state`) with the server-only one (of `other`, in `alone`).
    Returns one comparison on the test images and one on the validation images, as far as there are any."""
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
    """The predictions of a cross-validation: each labelled image is predicted by a model that was not trained
    on it."""

    labels: Tensor
    federated: Tensor
    alone: Tensor | None
    classes: int
    folds: int
    rounds: int
    groups: int | None
    """The number of groups of images, such as the images of one patient. All images of a group are in the
    same fold. None if no groups are known."""

    def described(self, kept_alone: bool) -> dict[str, Any]:
        """Returns the accuracy of the cross-validation with its interval and confusion matrix, as in
        summary.json. They are computed from the predictions of the federated models. With `kept_alone`, those
        of the server-only models are used, if there are any."""
        predicted = self.alone if kept_alone and self.alone is not None else self.federated
        truth = self.labels.tolist()
        matrix = statistics.confusion(truth, predicted.tolist(), self.classes)
        each = statistics.class_accuracies(matrix)
        correct = sum(row[k] for k, row in enumerate(matrix))
        return {
            "folds": self.folds, "rounds": self.rounds, "groups": self.groups, "correct": correct,
            "count": len(truth), "accuracy": correct / len(truth), "class_accuracy": each,
            "interval": list(statistics.wilson(correct, len(truth))),
            "balanced_accuracy": statistics.balanced(each), "confusion": matrix,
        }  # fmt: skip


def cross_validate(sim: Simulation, path: Path, play: Play) -> Held:
    """Trains the runs of all folds, each without some of the labelled images, and returns the predictions for
    those images. The file folds.json in the run folder `path` saves the progress, so that a killed command
    continues."""
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
    """Returns the number of rounds of each run of the cross-validation.

    With cached features, rounds are cheap, and the number is that of the main run. Otherwise, it is the main
    run's number divided by the number of folds. So all folds together cost about as much as the main run. At
    least `LEAST` rounds are run, but not more than in the main run.
    """
    rounds = config.federation.rounds or 1
    if config.model.cached_views:
        return rounds
    return max(1, rounds // config.run.folds, min(rounds, LEAST))


def _fold_configs(config: Config, rounds: int) -> dict[str, Config]:
    """Returns the configs of the two runs of a fold, "federated" and "alone" (server-only). They have
    `rounds` rounds, and are evaluated only on the images that the fold holds out."""
    run = replace(_inside(config), test="never", eval_every=rounds)
    short = replace(config, federation=replace(config.federation, rounds=rounds), run=run)
    return {"federated": short, "alone": server_only(short)}


def _without(sim: Simulation, held: Index) -> split.Parts:
    """Returns which images the server and the users own, without the labelled images `held` that a fold holds
    out. The held-out images are also removed from the users if the server shares its images with them
    (split.shared)."""
    parts = sim.parts
    users = parts.users
    if sim.config.split.shared:
        left = np.ones(len(sim.dataset.labels), bool)
        left[held] = False
        users = Hands.of(users).where(left)
    return replace(parts, server=np.setdiff1d(parts.server, held), users=users)


def _read(file: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the progress of a cross-validation from folds.json. Returns None if the file cannot be read, or
    if its folds, rounds or images are not those of `plan`."""
    try:
        saved = plain_files.parse_json(plain_files.read(file))
        return saved if all(saved[key] == value for key, value in plan.items()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def expected(config: Config, pace: float, server: float) -> float:
    """Returns about how many seconds the server-only run and the cross-validation will take. `pace` is the
    time of one round in seconds, and `server` the part of it in which the server trains."""
    rounds = config.federation.rounds or 1
    seconds = rounds * server if config.run.baseline else 0.0
    if config.run.folds:
        each = pace + server if config.run.baseline else pace
        seconds += config.run.folds * fold_rounds(config) * each
    return seconds
