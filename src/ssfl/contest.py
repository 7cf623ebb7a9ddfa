"""Methods side by side under one protocol: the same split, network, views and user work.

Every method starts from the same config and takes its own row of settings from `methods.py`; what the config
says about [method] does not count, and its network, normalisation and images hold for all. Rounds are chosen
so that users pass equally many images forward and backward. Choices are made on validation images, which
are set aside before the split and trained on by nobody; test accuracy is what the last round has.
"""

import difflib
import hashlib
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ssfl import assemble, progress, runs, train
from ssfl import config as configs
from ssfl.errors import ConfigError, DivergedError
from ssfl.methods import METHODS
from ssfl.report import text
from ssfl.settings import Config

VALIDATION = 0.05
"""The part of the training images that choices are made by, where the config sets none aside."""
CHOOSING = 0
"""The seed of the runs that choices are made by; the contest's own are 1, 2, ..."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One run of the contest."""

    method: str
    options: tuple[str, ...]
    """The choices tried or taken, `section.key=value`."""
    config: Config
    path: Path


@dataclass(frozen=True)
class Standing:
    """What became of a method."""

    method: str
    options: tuple[str, ...]
    accuracies: list[float]
    """On test images after the last round, a number for each seed that did not break down."""
    diverged: int
    images: int
    """Forward and backward passes of user images in one run."""
    megabytes: float
    """Sent to and from users in one run."""
    rounds: int
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    """(images, megabytes, validation accuracy), the mean over seeds."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Of each run that did not break down: test accuracy, seconds, device, commit."""

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def passes(config: Config) -> int:
    """Forward and backward passes that a user's step makes of each of its images."""
    method = config.method
    if method.objective == "none":
        return 0
    return 1 + bool(method.mix) + 2 * bool(method.sharpness)


def entry(
    source: str, method: str, seed: int, sets: Sequence[str], options: tuple[str, ...], out: Path
) -> Entry:
    """A method's run: the config's own settings, the method's row, and equal user work."""
    if method not in METHODS:
        close = difflib.get_close_matches(method, METHODS, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METHODS)}"
        raise ConfigError(f"no method {method!r}: {hint}")
    bad = [one for one in sets if one.startswith(("method.", "run.seed"))]
    if bad:
        raise ConfigError(f"--set {bad[0]}: methods bring their own settings; try values with --choose")
    base = configs.load_config(source, sets)
    shared = {
        name: {key: value for key, value in values.items() if value is not None}
        for name, values in asdict(base).items()
        if name != "method"
    }
    shared["data"]["validation"] = base.data.validation or VALIDATION
    shared["run"]["seed"] = seed
    shared["method"] = {"name": method}
    configs.apply(shared, options)
    config = configs.from_dict(shared)
    work = passes(config)
    if work > 1:
        federation = config.federation
        fewer = replace(federation, rounds=max(1, round(assemble.rounds(config) / work)), epochs=None)
        config = replace(config, federation=fewer)
    name = "-".join([method, *(one.partition(".")[2].replace("=", "") for one in options), f"seed{seed}"])
    return Entry(method, options, config, out / name)


def play(
    source: str,
    methods: Sequence[str],
    seeds: int,
    *,
    sets: Sequence[str] = (),
    choose: Sequence[str] = (),
    out: Path,
    tell: Tell,
    quiet: bool = False,
) -> list[Standing]:
    """Every method with every seed, best first; finished runs are not run again."""
    grid = [_values(one) for one in choose]
    tries = [tuple(options) for options in itertools.product(*grid)]
    wanted = [entry(source, method, CHOOSING, sets, options, out) for method in methods for options in tries]
    _same_protocol(out, source, sets)
    found = []
    for method in methods:
        mine = [one for one in wanted if one.method == method]
        taken = mine[0].options
        if len(mine) > 1:
            scores = [(_validation(_played(one, tell, quiet)), one.options) for one in mine]
            taken = max(scores, key=lambda score: score[0])[1]
            tell(f"{method}: {' '.join(taken)}, by validation images")
        entries = [entry(source, method, seed, sets, taken, out) for seed in range(1, seeds + 1)]
        found.append(_standing(method, taken, [_played(one, tell, quiet) for one in entries]))
    return sorted(found, key=lambda one: -(one.mean or 0.0))


def _values(choice: str) -> list[str]:
    key, equals, values = choice.partition("=")
    if not equals or "." not in key:
        raise ConfigError(
            f"--choose {choice!r}: write section.key=one,two, such as method.threshold=0.8,0.95"
        )
    return [f"{key}={value.strip()}" for value in values.split(",")]


def _same_protocol(out: Path, source: str, sets: Sequence[str]) -> None:
    """Runs under other settings must not be taken for this contest's."""
    told = configs.to_toml(configs.load_config(source, sets))
    digest = hashlib.sha256(told.encode()).hexdigest()
    file = out / "protocol.json"
    if file.is_file():
        if json.loads(file.read_text("utf-8")).get("config") != digest:
            raise ConfigError(f"{out} holds a contest under other settings: choose another --out")
        return
    out.mkdir(parents=True, exist_ok=True)
    runs.write_atomic(file, json.dumps({"source": source, "sets": list(sets), "config": digest}).encode())


def _played(one: Entry, tell: Tell, quiet: bool) -> Path | None:
    """The run's folder, or nothing where training broke down."""
    if runs.read_summary(one.path) is not None:
        tell(f"{one.path.name}: done before")
        return one.path
    tell(one.path.name)
    try:
        progress.watched(partial(train.begin_or_resume, one.config, one.path), quiet)
    except DivergedError as error:
        tell(f"{one.path.name}: {error}")
        return None
    return one.path


def _validation(path: Path | None) -> float:
    summary = None if path is None else runs.read_summary(path)
    return float(summary["validation_accuracy"]) if summary else -1.0


def _standing(method: str, options: tuple[str, ...], played: list[Path | None]) -> Standing:
    accuracies, curves, told = [], [], []
    images, megabytes, rounds = 0, 0.0, 0
    for path in filter(None, played):
        summary, config = runs.read_summary(path), runs.read_config(path)
        assert summary is not None
        accuracies.append(100 * summary["accuracy"])
        told.append({key: summary[key] for key in ("accuracy", "seconds", "device", "commit")})
        rounds = summary["rounds"]
        seen, sent, curve = 0, 0, []
        each = passes(config) * config.federation.period * config.train.batch_size
        for event in runs.read_events(path):
            if event["event"] == "round":
                seen += each * len(event["returned"])
                sent += event["bytes_up"] + event["bytes_down"]
            elif event["event"] == "eval":
                curve.append((float(seen), sent / 1e6, 100 * event["validation_accuracy"]))
        images, megabytes = seen, sent / 1e6
        curves.append(curve)
    means = [
        (points[0][0], points[0][1], statistics.mean(p[2] for p in points))
        for points in zip(*curves, strict=True)
    ]
    return Standing(
        method, options, accuracies, len(played) - len(accuracies), images, megabytes, rounds, means, told
    )


def table(standings: Sequence[Standing]) -> str:
    """Best first, with what it cost."""
    head = ["method", "test accuracy, %", "seeds", "rounds", "user images, million", "sent, MB",
            "% per million images", "% per MB", "chosen"]  # fmt: skip
    rows = [head]
    for one in standings:
        mean, deviation = one.mean, one.deviation
        told = "broke down" if mean is None else f"{mean:.2f}"
        told += "" if deviation is None else f" ± {deviation:.2f}"
        told += f" ({one.diverged} broke down)" if one.diverged and mean is not None else ""
        millions = one.images / 1e6
        per = [
            "–" if mean is None or not cost else f"{mean / cost:.3g}" for cost in (millions, one.megabytes)
        ]
        counts = [str(len(one.accuracies) + one.diverged), str(one.rounds), f"{millions:.3g}"]
        chosen = " ".join(one.options) or "–"
        rows.append([one.method, told, *counts, f"{one.megabytes:.4g}", *per, chosen])
    return text.table(rows)


def write(standings: Sequence[Standing], out: Path, told: dict[str, Any]) -> Path:
    """contest.json: the standings and how they came about."""
    entries = [
        {
            "method": one.method, "mean": one.mean, "deviation": one.deviation, "accuracies": one.accuracies,
            "diverged": one.diverged, "options": one.options, "rounds": one.rounds, "images": one.images,
            "megabytes": one.megabytes, "runs": one.runs, "validation_curve": one.curve,
        }
        for one in standings
    ]  # fmt: skip
    file = out / "contest.json"
    runs.write_atomic(file, (json.dumps(told | {"standings": entries}, indent=1) + "\n").encode())
    return file


def draw(standings: Sequence[Standing], out: Path) -> list[Path]:
    """Validation accuracy against user images and against megabytes, PNG and SVG."""
    from ssfl.report import plots

    plt = plots.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for number, one in enumerate(standings):
        style = {"linestyle": plots.STYLES[number % len(plots.STYLES)], "marker": "osD^vP*X"[number % 8]}
        for axis, cost, unit in zip(axes, (0, 1), (1e6, 1.0), strict=True):
            points = [(point[cost] / unit, point[2]) for point in one.curve]
            if points and points[-1][0]:
                axis.plot(*zip(*points, strict=True), label=one.method, markevery=0.2, markersize=4, **style)
    axes[0].set(xlabel="user images, million", ylabel="validation accuracy, %")
    axes[1].set(xlabel="megabytes sent")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    files = [out / "contest.png", out / "contest.svg"]
    for file in files:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return files
