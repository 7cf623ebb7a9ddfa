"""Compares methods under one protocol: the same split, network and augmentation, and the same amount of
training by users.

A seed sets the initial weights, the random draws and the split. The split depends on the seed because, with
few labels, it matters most which images are labelled. `protocol.py` has the rules. Settings are chosen on
validation images, which are set aside before the split and never trained on. Test images are used once, in
the last round, and never in runs that choose settings.
"""

import glob
import hashlib
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ssfl import methods
from ssfl.config import loading as configs
from ssfl.config.settings import Config
from ssfl.config.writing import portable
from ssfl.contest.protocol import CHOOSING, Entry, Rules, choosing_seeds, entry, label, passes
from ssfl.contest.standings import Standing
from ssfl.contest.texts import Try, choice
from ssfl.contest.tuning import tuned
from ssfl.core import plain_files
from ssfl.core.events import mean_mask_rate
from ssfl.data import inventory
from ssfl.data.hands import Hands
from ssfl.errors import ConfigError, DivergedError, FolderInUse, SsflWarning
from ssfl.runs import assemble, folder, resolve, same, side_by_side
from ssfl.runs.side_by_side import Runner

COLLAPSE = 0.1
"""A run has collapsed if its last validation accuracy is more than this below its best. Accuracies are from 0
to 1, so 0.1 is ten percentage points."""
Tell = Callable[[str], None]
__all__ = ["CHOOSING", "Entry", "Rules", "entry", "passes", "play", "ranked"]


@dataclass(frozen=True)
class Splits:
    """What is known about the splits of a contest before anything is trained."""

    config: Config
    """The resolved config of the first run."""
    validation: int
    """How many validation images the first run has. If settings are chosen, it is a run that chooses them."""
    shared: bool
    """Whether the users' images are the same for all seeds of the contest, of which there are several."""
    fingerprint: str
    """The fingerprint of the images, their owners and augmentations."""


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Shows each warning of ssfl only once, although every run of a contest gives it again."""
    show, shown = warnings.showwarning, set[str]()

    def show_new(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, SsflWarning):
            if str(message) in shown:
                return
            shown.add(str(message))
        show(message, category, *where, **options)

    warnings.showwarning = show_new
    try:
        yield
    finally:
        warnings.showwarning = show


@_each_warning_once()
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
    jobs: int = 1,
) -> list[Standing]:
    """Runs every method in `names` with the seeds 1 to `seeds`, and returns the results of each method, best
    first. Finished runs are not repeated.

    All methods use the config `source` with the overrides `sets`, and their runs are in the folder `out`.
    With `tune`, every method first chooses its learning rate, and then its threshold if it has one, in runs
    of half the length. Instead, `choose` can list values of settings (KEY=A,B); each method then chooses from
    them in runs of full length. All choices are made on validation images. `equal` says what is the same for
    all methods. It is "images" (how many images users draw) or "passes" (how many forward and backward passes
    users make). `tell` prints a line of text. `quiet` hides the progress. `jobs` is how many runs are played
    at the same time.
    """
    rules = Rules(source, tuple(sets), out, equal)
    if tune and choose:
        raise ConfigError("choose and tune cannot be combined: pass tune=False", key="--choose")
    grid = [_values(choice) for choice in choose]
    keys = [values[0].partition("=")[0] for values in grid]
    twice = [key for number, key in enumerate(keys) if key in keys[:number]]
    if twice:
        raise ConfigError(
            f"--choose {twice[0]} is used twice: put all values into one --choose",
            key="--choose",
            value=twice[0],
        )
    known = {
        f"method.{field.name}" for name in {*methods.METHODS, *names} for field in fields(methods.find(name))
    }
    strange = [key for key in keys if key.startswith("method.") and key not in known]
    if strange:
        raise ConfigError(
            f"--choose {strange[0]}: no method has this setting; `ssfl settings NAME` shows those of a "
            "method",
            key=strange[0],
        )
    wanted = {method: _tries(rules, method, grid) for method in dict.fromkeys(names)}
    playing = [entry for tries in wanted.values() if len(tries) > 1 for entry in tries]
    if tune:
        playing += [rules.entry(method, CHOOSING, half=True) for method in wanted]
    for seed, tries in itertools.product(range(1, seeds + 1), wanted.values()):
        playing.append(rules.entry(tries[0].method, seed, tries[0].options))
    splits = _require_playable(playing)
    _same_protocol(out, source, sets, splits.config.model.name)
    choosing = choosing_seeds(splits.validation) if tune else (CHOOSING,)
    images = splits.validation * len(choosing)
    with side_by_side.runner(jobs, quiet) as runner:
        played = partial(_played, fingerprint=splits.fingerprint, tell=tell, runner=runner)

        def scores(entries: Iterable[Entry]) -> Iterator[float]:
            return map(_validation, runner.each(played, entries))

        def standing(tries: list[Entry]) -> Standing:
            method, taken = tries[0].method, tries[0].options
            scored: list[Try] = []
            if tune:
                scored = tuned(rules, method, choosing, images, scores, tell)
            elif len(tries) > 1:
                scored = list(zip(scores(tries), (entry.options for entry in tries), strict=True))
                tell(choice(method, scored, images))
            if scored:
                _, taken = max(scored, key=lambda one: one[0])
            entries = [rules.entry(method, seed, taken) for seed in range(1, seeds + 1)]
            tried = [
                {"options": options, "validation_accuracy": None if end < 0 else end, "images": images}
                for end, options in scored
            ]
            results = _standing(method, taken, list(runner.each(played, entries)))
            return replace(results, tries=tried, tuned=tune, shared_split=splits.shared)

        return ranked(list(runner.each(standing, wanted.values())))


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """Returns the results of the methods, best mean accuracy first. Methods with a diverged seed come last,
    because their mean leaves that seed out."""
    return sorted(standings, key=lambda one: (one.diverged > 0, -(one.mean or 0.0)))


def _tries(rules: Rules, method: str, grid: Sequence[list[str]]) -> list[Entry]:
    """Returns the runs among which a method chooses its settings: one for each combination of the values in
    `grid`. `grid` has one list for each setting, such as ["train.lr=0.1", "train.lr=0.3"]. A setting of the
    section [method] is left out if the method does not have it."""
    settings = {f"method.{field.name}" for field in fields(methods.find(method))}
    keys = [values[0].partition("=")[0] for values in grid]
    mine = [v for key, v in zip(keys, grid, strict=True) if not key.startswith("method.") or key in settings]
    return [rules.entry(method, CHOOSING, tuple(options)) for options in itertools.product(*mine)]


def _values(choice: str) -> list[str]:
    """Returns the settings that one --choose option lists. For example, "method.threshold=0.8,0.95" gives
    ["method.threshold=0.8", "method.threshold=0.95"]. Raises if the option cannot be used."""
    key, equals, values = (part.strip() for part in choice.partition("="))
    if not equals or "." not in key:
        raise ConfigError(
            f"--choose {choice!r}: write `section.key=one,two`, for example `method.threshold=0.8,0.95`",
            key="--choose",
            value=choice,
        )
    if key in ("method.name", "train.batch_size") or not key.startswith(("method.", "train.")):
        raise ConfigError(
            f"--choose {key}: this setting is part of the protocol and the same for all methods; choose "
            "settings of method.* and train.*, except method.name and train.batch_size",
            key=key,
            value=values,
        )
    return list(dict.fromkeys(f"{key}={value.strip()}" for value in values.split(",")))


def _require_playable(entries: Sequence[Entry]) -> Splits:
    """Checks before anything is trained that every run is possible with the data; raises if one is not."""
    data = resolve.load_data(entries[0].config)
    resolved, dealt, counts = [], set(), list[int]()
    users: dict[int, str] = {}  # a hash of the users' images, by seed
    for candidate in entries:
        where = f"{candidate.method} cannot run under this protocol"
        try:
            config = resolve.resolve(candidate.config, data)
            resolved.append(config)
            if config.split in dealt:
                continue
            dealt.add(config.split)
            where = f"the split of seed {candidate.config.run.seed}"
            parts, held = resolve.make_parts(config, data)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}", key=error.key, value=error.value, fix=error.fix) from error
        if not len(held):
            raise ConfigError(
                f"data.validation = {candidate.config.data.validation} gives no validation image, because "
                "there are too few labelled images: raise data.validation",
                key="data.validation",
                value=candidate.config.data.validation,
            )
        counts.append(len(held))
        hands = Hands.of(parts.users)
        owned = hashlib.sha256(hands.flat.tobytes() + hands.edges.tobytes()).hexdigest()
        users.setdefault(config.run.seed, owned)
    users.pop(CHOOSING, None)
    shared = len(users) > 1 and (data.users is not None or len(set(users.values())) == 1)
    fingerprint = inventory.fingerprint(assemble.scaled_for(resolved[0], data))
    # now, and not only when a method's turn comes, which may be hours later
    for candidate in {one.method: one for one in entries}.values():
        for path in candidate.path.parent.glob(f"{glob.escape(label(candidate.method))}-*"):
            same.require_same_parts(candidate.config, path, fingerprint)
    return Splits(resolved[0], counts[0], shared, fingerprint)


def _same_protocol(out: Path, source: str, sets: Sequence[str], network: str | None) -> None:
    """Writes the protocol of this contest to protocol.json in the folder `out`. If the folder already has a
    protocol.json with another protocol, raises, because the results would not be comparable.

    The protocol consists of the settings in `source` and `sets`, without the sections [method] and [run] and
    the settings data.root and data.download. The name of the `network` is always included. If no setting
    names a network, the machine decides which one is used, so that another machine could use another network.
    """
    written = {
        f"{section}.{key}": value
        for section, values in configs.read(source, sets).items()
        if section not in ("method", "run")
        for key, value in values.items()
        if f"{section}.{key}" not in ("data.root", "data.download")
    }
    settings_now = {"model.name": network} | json.loads(json.dumps(written))
    file = out / "protocol.json"
    if (out / "config.toml").exists():
        raise ConfigError(
            f"{out} holds a single run, not a contest: choose another --out", key="--out", value=str(out)
        )
    if file.is_file():
        try:
            before = {"model.name": network} | dict(
                plain_files.parse_json(plain_files.read(file, plain_files.CONFIG))["settings"]
            )
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{file} is damaged, so this contest cannot be continued: choose another --out",
                key="--out",
                value=str(out),
            ) from None
        changed = [key for key in sorted(settings_now | before) if settings_now.get(key) != before.get(key)]
        if changed:
            was, now = (settings.get(changed[0], "not set") for settings in (before, settings_now))
            raise ConfigError(
                f"{out} already holds a contest with {changed[0]} = {was}, and this contest has {now}: "
                "choose another --out, or use the same value",
                key=changed[0],
                value=now,
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    folder.write_atomic(file, json.dumps({"source": source, "settings": settings_now}, indent=1).encode())


def _played(entry: Entry, fingerprint: str, tell: Tell, runner: Runner) -> Path | None:
    """Runs one entry of the contest, unless it is finished already. Returns its run folder, or
    None if training diverged. Raises if the folder has a run with other settings, with another version of a
    person's code, or with images of another `fingerprint`."""
    same.require(entry.config, entry.path)
    same.require_same_parts(entry.config, entry.path, fingerprint)
    if folder.read_summary(entry.path) is not None:
        tell(f"{entry.path.name}: skipped, because it is already finished")
        return entry.path
    why = folder.broke_down(entry.path)
    if why is not None:
        tell(f"{entry.path.name}: skipped, because it diverged when it was run before: {why}")
        return None
    try:
        runner.play(entry.config, entry.path, lambda: tell(entry.path.name))
    except DivergedError as error:
        tell(f"{entry.path.name}: {error}")
        return None
    except FolderInUse as error:
        raise FolderInUse(
            f"{entry.path} is in use by another process: run the same command again when it has ended",
            value=str(entry.path),
        ) from error
    return entry.path


def _validation(path: Path | None) -> float:
    """Returns the final validation accuracy of a run, from 0 to 1, or -1 if it diverged (`path` is None)."""
    summary = None if path is None else folder.read_summary(path)
    return float(summary["validation_accuracy"]) if summary else -1.0


def _counts(path: Path) -> dict[str, int]:
    """Returns how many validation images, test images and classes a run has, from its split.json."""
    split = plain_files.parse_json(plain_files.read(path / "split.json"))
    return {
        "validation_images": split["validation"],
        "test_images": split["test"],
        "classes": len(split["classes"]),
    }


def _standing(method: str, options: tuple[str, ...], played: list[Path | None]) -> Standing:
    """Returns the results of a method. `options` are its chosen settings. `played` has the run folder of each
    seed, or None if the run with this seed diverged."""
    accuracies, curves, run_facts, spent, collapsed = [], [], [], [], 0
    rounds, resolved = 0, dict[str, Any]()
    for path in filter(None, played):
        summary, config = folder.read_summary(path), folder.read_config(path)
        assert summary is not None
        accuracies.append(100 * summary["accuracy"])
        run_facts.append(
            {key: summary[key] for key in ("accuracy", "seconds", "device", "commit", "versions")}
        )
        run_facts[-1] |= {"seed": config.run.seed, "date": summary.get("date"), **_counts(path)}
        run_facts[-1]["mask_rate"] = mean_mask_rate(folder.read_events(path))
        rounds, resolved = summary["rounds"], resolved or portable(config)
        curve, cost = _curve(path, config)
        best = max(point[2] for point in curve.values())
        run_facts[-1]["best_validation"], run_facts[-1]["last_validation"] = best, curve[max(curve)][2]
        run_facts[-1]["collapsed"] = curve[max(curve)][2] < best - 100 * COLLAPSE
        collapsed += run_facts[-1]["collapsed"]
        spent.append(cost)
        curves.append(curve)
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    means = [_mean([curve[round] for curve in curves]) for round in sorted(common)]
    seed_curves = [[curve[round][2] for round in sorted(common)] for curve in curves]
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
        run_facts,
        round(server),
        flag=methods.flag(methods.find(method)()),
        passes=round(work),
        collapsed=collapsed,
        config=resolved,
        seed_curves=seed_curves,
    )


def _curve(path: Path, config: Config) -> tuple[dict[int, tuple[float, ...]], tuple[float, ...]]:
    """Returns a run's learning curve and its total cost.

    The curve has three numbers for each round with an evaluation. The first is how many images users have
    drawn so far. The second is how many megabytes users have sent and received so far. The third is the
    validation accuracy in percent. The cost has four numbers for the whole run. The first two are these
    images and megabytes. The other two are how many images the server trained on, and how many forward and
    backward passes users made.
    """
    federation, train = config.federation, config.train
    step, server = federation.period * train.batch_size, train.batch_of("server")
    seen = sent = server_images = work = 0
    curve: dict[int, tuple[float, ...]] = {}
    for event in folder.read_events(path):
        if event["event"] == "round":
            trained = event.get("images", step * len(event["returned"]))
            seen += step * len(event["returned"]) if federation.local_epochs is None else trained
            work += passes(config) * trained
            sent += event["bytes_up"] + event["bytes_down"]
            models = event.get("server_models", 1) * ("server_loss" in event)
            server_images += event.get(
                "server_images", server * (train.server_steps or federation.period) * models
            )
        elif event["event"] == "eval":
            curve[event["round"]] = (float(seen), sent / 1e6, 100 * event["validation_accuracy"])
    return curve, (float(seen), sent / 1e6, float(server_images), float(work))


def _mean(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Returns the mean over the seeds of each number in a tuple. `points` has one tuple for each seed: a
    point of the learning curve, or the costs. Costs can differ between seeds, for example if users drop
    out."""
    return tuple(statistics.mean(numbers) for numbers in zip(*points, strict=True))
