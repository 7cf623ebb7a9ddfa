"""Reads and writes result.json, the result of one finished run of the paper's experiments. Tables and figures
are made from these files."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssfl.config.writing import as_dict
from ssfl.core.events import mean_mask_rate
from ssfl.errors import RunError
from ssfl.paper.rows import PaperRun
from ssfl.runs import folder

FILE = "result.json"
_CURVE = ("accuracy", "loss", "stream_accuracy")
_BESIDE = ("lr", "loss", "server_loss", "mask_rate", "pseudo_accuracy", "update_norm")


@dataclass(frozen=True)
class PaperResult:
    """The result of one finished run of an experiment in the paper, with one seed."""

    name: str
    """The name of the run, as in `rows.py`."""
    data: str
    """The data set that was used: the one in the paper, or another that was given with --data."""
    fidelity: str
    scale: float
    seed: int
    accuracy: float | None
    """The test accuracy, from 0 to 1; None if training diverged."""
    changes: tuple[str, ...]
    """Settings that were changed with --set and so differ from the paper's."""
    whole: dict[str, Any]
    """The whole content of the file: config, curve, diversity, seconds, device, commit and more."""

    @property
    def without_pseudo_labels(self) -> bool:
        """Whether the users made no pseudo-label in any round, because the mask rate was always 0. It is
        also False if the file does not have the mask rate, as in older versions."""
        return self.whole.get("mask_rate") == 0

    def setting(self, section: str, key: str, default: Any) -> Any:
        """Returns a setting of the run from its config, or `default` if the file does not have it."""
        return self.whole.get("config", {}).get(section, {}).get(key, default)

    def labels(self, run: PaperRun) -> int:
        """Returns the number of labelled images, at the server or at the users, with which this result of
        `run` was trained; 0 if no number is set."""
        at_users = run.labels_at == "users" or run.method == "fixmatch"
        return self.setting("split", "user_labels" if at_users else "server_labels", run.server_labels) or 0


@dataclass(frozen=True)
class Mean:
    """The mean result over several seeds of the same run."""

    accuracy: float | None
    """The mean test accuracy in percent; None if every seed diverged."""
    deviation: float | None
    """The standard deviation over the seeds in percentage points. None if fewer than two seeds have an
    accuracy; a seed that diverged has none."""
    seeds: int
    diverged: int
    """How many of the seeds diverged."""
    scale: float
    data: str
    fidelity: str
    changes: tuple[str, ...]
    without_pseudo_labels: int
    """How many of the seeds made no pseudo-label in any round."""


def write(path: Path, run: PaperRun, origin: dict[str, Any]) -> Path:
    """Writes the result of a run that is finished or has diverged to result.json in its run folder `path`.
    Returns the path of this file. `origin` has the command that started the run, with its options."""
    summary = folder.read_summary(path) or {}
    if not summary and "diverged" not in origin:
        command = folder.continuing(path)
        hint = f"continue with `{command}`" if command else "start a new run"
        raise RunError(f"{path} is not finished: {hint}", fix=command)
    config = as_dict(folder.read_config(path))
    config["data"].pop("root")
    if config["data"]["path"]:
        config["data"]["path"] = Path(config["data"]["path"]).name
    events = list(folder.read_events(path))
    rounds = {event["round"]: event for event in events if event["event"] == "round"}
    curve = []
    for event in (event for event in events if "accuracy" in event):
        point = {"round": event["round"]} | {key: event[key] for key in _CURVE if key in event}
        beside = rounds.get(event["round"], {})
        curve.append(point | {f"round_{key}": beside[key] for key in _BESIDE if key in beside})
    summary_keys = (
        "accuracy",
        "loss",
        "rounds",
        "seconds",
        "device",
        "precision",
        "engine",
        "commit",
        "versions",
    )
    evaluating = sum(event.get("seconds", 0.0) for event in events if event["event"] == "eval")
    whole = {
        "run": run.name,
        **origin,
        "published": run.published,
        "data": summary.get("data") or Path(config["data"]["path"] or config["data"]["name"]).stem,
        **{key: summary.get(key) for key in summary_keys},
        "evaluation_seconds": evaluating,
        "curve": curve,
        "mask_rate": mean_mask_rate(rounds.values()),
        "diversity": [event for event in events if event["event"] == "diversity"],
        "config": config,
    }
    file = path / FILE
    folder.write_atomic(file, _compact(whole).encode())
    return file


def _compact(whole: dict[str, Any]) -> str:
    """Returns the result as JSON text that is easy to read: one line for each point of a curve, and numbers
    rounded to six digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        return [rounded(item) for item in value] if isinstance(value, list | tuple) else value

    lines = []
    for key, value in rounded(whole).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inside = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {inside}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(places: Sequence[Path]) -> list[PaperResult]:
    """Returns all results in these folders. Each folder may contain run folders, or result files that were
    copied into it."""
    results = []
    for place in places:
        if not place.is_dir():
            raise RunError(
                f"there is no folder {place}: run a row with `ssfl paper run`, or name another folder with "
                "--from",
                key="--from",
                value=str(place),
            )
        for file in sorted(place.rglob("*.json")):
            if file.name == FILE or file.parent == place:
                results += _read_one(file)
    return results


def is_written(path: Path) -> bool:
    """Returns whether a run folder has a valid result.json, which means that the run need not be repeated."""
    return bool(_read_one(path / FILE))


def made_no_pseudo_labels(path: Path) -> bool:
    """Returns whether the run in this folder made no pseudo-label in any round."""
    return any(one.without_pseudo_labels for one in _read_one(path / FILE))


def _read_one(file: Path) -> list[PaperResult]:
    """Returns a list with the result in a file, or an empty list if the file is not a result."""
    try:
        whole = json.loads(file.read_text("utf-8"))
        return [
            PaperResult(
                whole["run"], whole["data"], whole["fidelity"], whole["scale"], whole["seed"],
                whole["accuracy"], tuple(whole["changes"]), whole,
            )
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return []  # some other JSON file


def means(results: Iterable[PaperResult]) -> list[Mean]:
    """Returns mean results of one run, each over all seeds that were trained in the same way. There is one
    mean for each combination of data, changed settings, fidelity and scale. Fidelity says whether settings
    follow the paper's text, its authors' code or our recommendation. Scale is the fraction of the training
    that was run. `results` must all be of the same run."""
    kinds: dict[tuple[Any, ...], dict[int, PaperResult]] = {}
    for result in results:
        kind = (result.fidelity, result.data, -result.scale, result.changes)
        kinds.setdefault(kind, {})[result.seed] = result
    rows = []
    for (fidelity, data, scale, changes), seeds in sorted(kinds.items(), key=lambda item: item[0]):
        accuracies = [100 * one.accuracy for one in seeds.values() if one.accuracy is not None]
        mean = statistics.mean(accuracies) if accuracies else None
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else None
        broken = len(seeds) - len(accuracies)
        empty = sum(one.without_pseudo_labels for one in seeds.values())
        rows.append(Mean(mean, deviation, len(seeds), broken, -scale, data, fidelity, changes, empty))
    return rows
