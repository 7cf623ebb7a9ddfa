"""Methods side by side under one protocol: the same split, network, views and user work.

A seed is a start, its draws and a split: where labels are few, which images have them matters most.
`protocol.py` has the rules. Choices are made on validation images, which are set aside before the split and
trained on by nobody; test images are looked at once, in the last round, and never by runs that choose.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ssfl import methods
from ssfl.config import loading as configs
from ssfl.config.settings import Config
from ssfl.contest.protocol import CHOOSING, Entry, Rules, entry, passes, rates, thresholds
from ssfl.contest.standings import Standing
from ssfl.core import plain_files
from ssfl.errors import ConfigError, DivergedError, RunError
from ssfl.runs import assemble, folder, progress, same, train
from ssfl.runs.text import percent

COLLAPSE = 0.1
"""A run has collapsed if it ends this far below its own best validation accuracy."""
Tell = Callable[[str], None]
__all__ = ["CHOOSING", "Entry", "Rules", "entry", "passes", "play", "ranked"]


def play(
    source: str,
    names: Sequence[str],
    seeds: int,
    *,
    sets: Sequence[str] = (),
    choose: Sequence[str] = (),
    tune: bool = False,
    equal: str = "images",
    out: Path,
    tell: Tell,
    quiet: bool = False,
) -> list[Standing]:
    """Every method with every seed, best first; finished runs are not run again.

    With `tune` every method first chooses its learning rate, and then its threshold if it has one, by runs of
    half the length. `choose` names further values to choose from, by runs of full length.
    """
    rules = Rules(source, tuple(sets), out, equal)
    if tune and choose:
        raise ConfigError("--choose has its own values: add --no-tune")
    grid = [_values(one) for one in choose]
    keys = [values[0].partition("=")[0] for values in grid]
    twice = [key for number, key in enumerate(keys) if key in keys[:number]]
    if twice:
        raise ConfigError(f"--choose {twice[0]} is there twice: put all its values into one")
    known = {
        f"method.{field.name}" for name in {*methods.METHODS, *names} for field in fields(methods.find(name))
    }
    strange = [key for key in keys if key.startswith("method.") and key not in known]
    if strange:
        raise ConfigError(f"--choose {strange[0]}: no method has this setting", key=strange[0])
    wanted = {method: _tries(rules, method, grid) for method in dict.fromkeys(names)}
    playing = [one for mine in wanted.values() if len(mine) > 1 for one in mine]
    if tune:
        playing += [rules.entry(method, CHOOSING, half=True) for method in wanted]
    for seed, mine in itertools.product(range(1, seeds + 1), wanted.values()):
        playing.append(rules.entry(mine[0].method, seed, mine[0].options))
    first = _require_playable(playing)
    _same_protocol(out, source, sets, first.model.name)
    found = []
    for method, mine in wanted.items():
        if tune:
            scores = _tuned(rules, method, tell, quiet)
        elif len(mine) > 1:
            scores = [(_validation(_played(one, tell, quiet)), one.options) for one in mine]
        else:
            scores = []
        taken = mine[0].options
        if scores:
            best, taken = max(scores, key=lambda score: score[0])
            others = ", ".join(_percent(score) for score, options in scores if options != taken)
            tell(f"{method}: {' '.join(taken)}, by validation images {_percent(best)}, else {others}")
        entries = [rules.entry(method, seed, taken) for seed in range(1, seeds + 1)]
        standing = _standing(method, taken, [_played(one, tell, quiet) for one in entries])
        tried = [
            {"options": options, "validation_accuracy": None if score < 0 else score}
            for score, options in scores
        ]
        found.append(replace(standing, tries=tried))
    return ranked(found)


def _tuned(rules: Rules, method: str, tell: Tell, quiet: bool) -> list[tuple[float, tuple[str, ...]]]:
    """What each learning rate scored and then, with the best, each threshold, in runs of half the length."""
    config = rules.entry(method, CHOOSING, half=True).config

    def scored(options: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
        one = rules.entry(method, CHOOSING, options, half=True)
        return _validation(_played(one, tell, quiet)), options

    scores = [scored((rate,)) for rate in rates(config)]
    _, best = max(scores, key=lambda score: score[0])
    return scores + [scored((*best, threshold)) for threshold in thresholds(config)]


def ranked(found: Sequence[Standing]) -> list[Standing]:
    """Best first; a mean over the seeds that survived is no place among those that lost none."""
    return sorted(found, key=lambda one: (one.diverged > 0, -(one.mean or 0.0)))


def _tries(rules: Rules, method: str, grid: Sequence[list[str]]) -> list[Entry]:
    """What a method chooses from: values of [method] only where it has that field."""
    own = {f"method.{field.name}" for field in fields(methods.find(method))}
    keys = [values[0].partition("=")[0] for values in grid]
    mine = [v for key, v in zip(keys, grid, strict=True) if not key.startswith("method.") or key in own]
    return [rules.entry(method, CHOOSING, tuple(options)) for options in itertools.product(*mine)]


def _percent(score: float) -> str:
    return "it broke down" if score < 0 else percent(score)


def _values(choice: str) -> list[str]:
    key, equals, values = (part.strip() for part in choice.partition("="))
    if not equals or "." not in key:
        raise ConfigError(
            f"--choose {choice!r}: write section.key=one,two, such as method.threshold=0.8,0.95"
        )
    if key in ("method.name", "train.batch_size") or not key.startswith(("method.", "train.")):
        raise ConfigError(
            f"--choose {key}: that is part of the protocol, which is the same for all; methods may choose "
            "among values of method.* and train.*, but for method.name and train.batch_size"
        )
    return list(dict.fromkeys(f"{key}={value.strip()}" for value in values.split(",")))


def _require_playable(entries: Sequence[Entry]) -> Config:
    """Mistakes show before anything runs, those too that only the data tell; the first config, resolved."""
    data = assemble.load_data(entries[0].config)
    resolved, dealt = [], set()
    for one in entries:
        where = f"{one.method} cannot be played under this protocol"
        try:
            config = assemble.resolve(one.config, data)
            resolved.append(config)
            if config.split in dealt:
                continue
            dealt.add(config.split)
            where = f"the split of seed {one.config.run.seed}"
            held = assemble.make_parts(config, data)[1]
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not len(held):  # choices need images; where there are hardly any, a part of them is none
            raise ConfigError(
                f"data.validation = {one.config.data.validation} of so few labelled images is none: raise it"
            )
    return resolved[0]


def _same_protocol(out: Path, source: str, sets: Sequence[str], network: str | None) -> None:
    """Runs under other settings must not be taken for this contest's; how a run is carried out, and where
    files lie, is none. Which network is chosen where nobody names one depends on the machine."""
    said = {
        f"{section}.{key}": value
        for section, values in configs.read(source, sets).items()
        if section not in ("method", "run")
        for key, value in values.items()
        if f"{section}.{key}" not in ("data.root", "data.download")
    }
    told = {"model.name": network} | json.loads(json.dumps(said))
    file = out / "protocol.json"
    if (out / "config.toml").exists():
        raise ConfigError(f"{out} is the folder of a run: choose another --out")
    if file.is_file():
        try:
            before = {"model.name": network} | dict(
                plain_files.parse_json(plain_files.read(file, plain_files.CONFIG))["settings"]
            )
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} cannot be read: choose another --out") from None
        changed = [key for key in sorted(told | before) if told.get(key) != before.get(key)]
        if changed:
            was, now = (settings.get(changed[0], "left open") for settings in (before, told))
            raise ConfigError(
                f"{out} holds a contest with {changed[0]} = {was}, now {now}: choose another --out"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    folder.write_atomic(file, json.dumps({"source": source, "settings": told}, indent=1).encode())


def _played(one: Entry, tell: Tell, quiet: bool) -> Path | None:
    """The run's folder, or nothing where training broke down."""
    same.require(one.config, one.path)
    if folder.read_summary(one.path) is not None:
        tell(f"{one.path.name}: done before")
        return one.path
    why = folder.broke_down(one.path)
    if why is not None:
        tell(f"{one.path.name}: done before: {why}")
        return None
    tell(one.path.name)
    try:
        result = progress.watched(partial(train.begin_or_resume, one.config, one.path), quiet)
    except train.Interrupted as stopped:
        raise train.SweepInterrupted(stopped.round, stopped.by) from None
    except DivergedError as error:
        tell(f"{one.path.name}: {error}")
        return None
    except RunError as error:
        if not folder.is_busy(one.path):
            raise
        raise RunError(
            f"{one.path} is being played by another process; when it is done, the same command goes on"
        ) from error
    if result.stopped is not None:
        raise train.SweepInterrupted(result.stopped, result.stopped_by)
    return one.path


def _validation(path: Path | None) -> float:
    summary = None if path is None else folder.read_summary(path)
    return float(summary["validation_accuracy"]) if summary else -1.0


def _images(path: Path) -> dict[str, int]:
    """How many a run was judged by."""
    found = plain_files.parse_json(plain_files.read(path / "split.json"))
    return {"validation_images": found["validation"], "test_images": found["test"]}


def _standing(method: str, options: tuple[str, ...], played: list[Path | None]) -> Standing:
    accuracies, curves, told, spent, collapsed = [], [], [], [], 0
    rounds, resolved = 0, dict[str, Any]()
    for path in filter(None, played):
        summary, config = folder.read_summary(path), folder.read_config(path)
        assert summary is not None
        accuracies.append(100 * summary["accuracy"])
        told.append({key: summary[key] for key in ("accuracy", "seconds", "device", "commit", "versions")})
        told[-1] |= {"seed": config.run.seed, "date": summary.get("date"), **_images(path)}
        rounds, resolved = summary["rounds"], resolved or _portable(config)
        curve, cost = _curve(path, config)
        best = max(point[2] for point in curve.values())
        told[-1]["best_validation"], told[-1]["last_validation"] = best, curve[max(curve)][2]
        told[-1]["collapsed"] = curve[max(curve)][2] < best - 100 * COLLAPSE
        collapsed += told[-1]["collapsed"]
        spent.append(cost)
        curves.append(curve)
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    means = [_mean([curve[round] for curve in curves]) for round in sorted(common)]
    images, megabytes, server, work = _mean(spent) if spent else (0.0, 0.0, 0.0, 0.0)
    return Standing(
        method,
        options,
        accuracies,
        len(played) - len(accuracies),
        round(images),
        megabytes,
        rounds,
        means,
        told,
        round(server),
        flag=methods.flag(methods.find(method)()),
        passes=round(work),
        collapsed=collapsed,
        config=resolved,
    )


def _portable(config: Config) -> dict[str, Any]:
    """The resolved config, without folders of this machine."""
    sections = configs.as_dict(config)
    path = sections["data"]["path"]
    sections["data"] |= {"root": "data", "path": None if path is None else Path(path).name}
    return sections


def _curve(path: Path, config: Config) -> tuple[dict[int, tuple[float, ...]], tuple[float, ...]]:
    """By the round of each evaluation: user images, megabytes and validation accuracy so far. And what the
    run cost: user images, megabytes, the server's images and the users' forward and backward passes."""
    federation, train = config.federation, config.train
    step, server = federation.period * train.batch_size, train.server_batch_size or train.batch_size
    seen = sent = own = work = 0
    curve: dict[int, tuple[float, ...]] = {}
    for event in folder.read_events(path):
        if event["event"] == "round":
            trained = event.get("images", step * len(event["returned"]))
            seen += step * len(event["returned"]) if federation.local_epochs is None else trained
            work += passes(config) * trained
            sent += event["bytes_up"] + event["bytes_down"]
            models = event.get("server_models", 1) * ("server_loss" in event)
            own += event.get("server_images", server * (train.server_steps or federation.period) * models)
        elif event["event"] == "eval":
            curve[event["round"]] = (float(seen), sent / 1e6, 100 * event["validation_accuracy"])
    return curve, (float(seen), sent / 1e6, float(own), float(work))


def _mean(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Of each of the numbers over seeds: where users drop out, seeds differ in what they cost."""
    return tuple(statistics.mean(numbers) for numbers in zip(*points, strict=True))
