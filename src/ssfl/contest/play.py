"""Methods side by side under one protocol: the same split, network, views and user work.

A seed is a start, its draws and a split: where labels are few, which images have them matters most.
What the config and --set say holds for all, [method] aside; what they leave open is as in each method's
defaults. Rounds are chosen so that users pass equally many images forward and backward; those that the
server plays alone, where a method begins so, come on top. Choices are made on validation images, which are
set aside before the split and trained on by nobody; test images are looked at once, in the last round,
and never by runs that choose.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from ssfl import methods
from ssfl.config import loading as configs
from ssfl.config.settings import Config
from ssfl.contest.standings import Standing
from ssfl.core import plain_files
from ssfl.core.schedule import head_start
from ssfl.errors import ConfigError, DivergedError, RunError
from ssfl.runs import assemble, folder, progress, same, train
from ssfl.runs.text import percent

VALIDATION = 0.05
"""The part of the training images that choices are made by, where the config sets none aside."""
CHOOSING = 0
"""The seed of the runs that choices are made by, with a split of their own; the contest's are 1, 2, ..."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One run of the contest."""

    method: str
    options: tuple[str, ...]
    """The choices tried or taken, `section.key=value`."""
    config: Config
    path: Path


def passes(config: Config) -> int:
    """Forward and backward passes that a user's step makes of each of its images."""
    return config.method.passes() if config.method.trains_users else 0


def entry(
    source: str, method: str, seed: int, sets: Sequence[str], options: tuple[str, ...], out: Path
) -> Entry:
    """A method's run: the config's own settings, the method's row, and equal user work."""
    methods.check_name(method)
    keys = [one.partition("=")[0].strip() for one in sets]
    if "run.seed" in keys:
        raise ConfigError("--set run.seed: a contest's seeds are 1, 2, ...; --seeds says how many")
    bad = [one for one, key in zip(sets, keys, strict=True) if key.startswith("method.")]
    if bad:
        raise ConfigError(f"--set {bad[0]}: methods bring their own settings; try values with --choose")
    if "run.test" in keys:
        raise ConfigError("--set run.test: a contest looks at test images in the last round alone")
    shared = configs.read(source, sets)
    base = configs.unchecked(shared)  # its own method does not play
    shared["method"] = {"name": method}
    shared.setdefault("data", {})["validation"] = base.data.validation or VALIDATION
    when = "never" if seed == CHOOSING else "last"
    shared.setdefault("run", {}).update(seed=seed, test=when, baseline=False, folds=0)
    shared.setdefault("split", {})["seed"] = base.split.seed + seed
    configs.apply(shared, options)
    try:
        config = configs.from_dict(shared)
    except ConfigError as error:
        raise ConfigError(f"{method} cannot be played under this protocol: {error}") from error
    work, head = passes(config), config.federation.head_start
    if work > 1 or head:
        whole = assemble.rounds(config)
        count = max(1, round(whole / max(work, 1)))
        if work and abs(count * work - whole) > 0.1 * whole:
            raise ConfigError(
                f"{method} does {work} times the work in a step, and {whole:g} rounds cannot be cut to as "
                f"much within a tenth: play a multiple of {work}, or at least {5 * work}"
            )
        count = next(n for n in itertools.count(count) if n - head_start(head, n) >= count)
        config = replace(config, federation=replace(config.federation, rounds=count, epochs=None))
    called = method.replace("/", "_").replace(":", "_")
    name = "-".join([called, *(one.partition(".")[2].replace("=", "") for one in options), f"seed{seed}"])
    return Entry(method, options, config, out / name)


def play(
    source: str,
    names: Sequence[str],
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
    wanted = {method: _tries(source, method, sets, grid, out) for method in dict.fromkeys(names)}
    playing = [one for mine in wanted.values() if len(mine) > 1 for one in mine]
    for seed, mine in itertools.product(range(1, seeds + 1), wanted.values()):
        playing.append(entry(source, mine[0].method, seed, sets, mine[0].options, out))
    first = _require_playable(playing)
    _same_protocol(out, source, sets, first.model.name)
    found = []
    for method, mine in wanted.items():
        taken, scores = mine[0].options, []
        if len(mine) > 1:
            scores = [(_validation(_played(one, tell, quiet)), one.options) for one in mine]
            best, taken = max(scores, key=lambda score: score[0])
            others = ", ".join(_percent(score) for score, options in scores if options != taken)
            images = f"by {_images(mine[0].path)['validation_images']:,} validation images"
            tell(f"{method}: {' '.join(taken)}, {images} {_percent(best)}, else {others}")
        entries = [entry(source, method, seed, sets, taken, out) for seed in range(1, seeds + 1)]
        standing = _standing(method, taken, [_played(one, tell, quiet) for one in entries])
        tried = [
            {"options": options, "validation_accuracy": None if score < 0 else score}
            for score, options in scores
        ]
        found.append(replace(standing, tries=tried))
    return ranked(found)


def ranked(found: Sequence[Standing]) -> list[Standing]:
    """Best first; a mean over the seeds that survived is no place among those that lost none."""
    return sorted(found, key=lambda one: (one.diverged > 0, -(one.mean or 0.0)))


def _tries(
    source: str, method: str, sets: Sequence[str], grid: Sequence[list[str]], out: Path
) -> list[Entry]:
    """What a method chooses from: values of [method] only where it has that field."""
    own = {f"method.{field.name}" for field in fields(methods.find(method))}
    keys = [values[0].partition("=")[0] for values in grid]
    mine = [v for key, v in zip(keys, grid, strict=True) if not key.startswith("method.") or key in own]
    tries = itertools.product(*mine)
    return [entry(source, method, CHOOSING, sets, tuple(options), out) for options in tries]


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
    accuracies, curves, told, spent = [], [], [], []
    rounds = 0
    for path in filter(None, played):
        summary, config = folder.read_summary(path), folder.read_config(path)
        assert summary is not None
        accuracies.append(100 * summary["accuracy"])
        told.append({key: summary[key] for key in ("accuracy", "seconds", "device", "commit")})
        told[-1] |= {"seed": config.run.seed, **_images(path)}
        rounds = summary["rounds"]
        step = config.federation.period * config.train.batch_size
        seen, sent, own, curve = 0, 0, 0, {}
        for event in folder.read_events(path):
            if event["event"] == "round":
                seen += passes(config) * step * len(event["returned"])
                sent += event["bytes_up"] + event["bytes_down"]
                own += step * event.get("server_models", 1 + event.get("alone", 0)) * ("server_loss" in event)
            elif event["event"] == "eval":
                curve[event["round"]] = (float(seen), sent / 1e6, 100 * event["validation_accuracy"])
        spent.append((float(seen), sent / 1e6, float(own)))
        curves.append(curve)
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    means = [_mean([curve[round] for curve in curves]) for round in sorted(common)]
    images, megabytes, server = _mean(spent) if spent else (0.0, 0.0, 0.0)
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
    )


def _mean(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Of each of the three numbers over seeds: where users drop out, seeds differ in what they cost."""
    first, second, third = (statistics.mean(numbers) for numbers in zip(*points, strict=True))
    return first, second, third
