"""The rules of a contest: how a method is run, and which settings it may choose.

The config and --set apply to all methods, except the section [method]. Some general settings (`COMMON`) are
the same for all methods; if nobody sets them, they have the values of the recommended method. So no method
can win because of a normalisation, an augmentation or a moving average of the model that the other methods
could use too. For all other settings, each method has its own defaults.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ssfl import methods
from ssfl.config import loading as configs
from ssfl.config.settings import Config
from ssfl.contest.refused import REFUSED
from ssfl.core.schedule import head_start
from ssfl.errors import ConfigError
from ssfl.runs import resolve

VALIDATION = 0.05
"""The fraction of the training images that is set aside for validation, if the config does not set it."""
CHOOSING = 0
"""The first seed of the runs that choose settings. The contest's own seeds are 1, 2, ..., so these runs have
another split."""
APART = 1_000_000
"""The distance between the seeds of the runs that choose settings."""
ENOUGH = 1000
"""With fewer validation images than this, learning rates and thresholds are chosen on several splits, until
there are so many in all. Otherwise chance would often decide."""
MOST = 5
"""The largest number of splits on which they are chosen."""
COMMON = (("model", "norm"), ("train", "server_views"), ("federation", "slow_average"))
"""The general settings (section, key) that have the same value for every method."""
FACTOR = 3.0
"""The factor between neighbouring learning rates that a method tries."""
FIRST = (0, -1, 1)
"""The learning rates that every method tries: powers of `FACTOR`, times the config's learning rate. If
several are equally good, the first of them is chosen."""
FURTHER = 2
"""How many more learning rates a method may try. It tries the next one as long as its best learning rate is
the smallest or largest of those tried, because a value outside might be better."""
THRESHOLDS = (0.8, 0.95)
"""The confidence thresholds for pseudo-labels that a method tries in addition to its default."""


@dataclass(frozen=True)
class Entry:
    """One run of the contest: a method, a seed (in the config) and settings."""

    method: str
    options: tuple[str, ...]
    """The settings that this run tries or that were chosen for it, each as `section.key=value`."""
    config: Config
    path: Path


@dataclass(frozen=True)
class Rules:
    """What is the same for every run of a contest: the config (`source` and `sets`), the output folder and
    what counts as equal work."""

    source: str
    sets: tuple[str, ...]
    out: Path
    equal: str = "images"
    """What is equal for all methods: the number of images that users draw ("images"), or the number of their
    forward and backward passes ("passes")."""

    def entry(self, method: str, seed: int, options: tuple[str, ...] = (), *, half: bool = False) -> Entry:
        """Returns the run of this method with this seed and these settings. With `half`, the run has half the
        length."""
        return entry(self.source, method, seed, self.sets, options, self.out, equal=self.equal, half=half)


def passes(config: Config) -> int:
    """Returns how many forward and backward passes a user makes for each image in a step; 0 if the method
    does not train users."""
    return config.method.passes() if config.method.trains_users else 0


def entry(
    source: str,
    method: str,
    seed: int,
    sets: Sequence[str],
    options: tuple[str, ...],
    out: Path,
    *,
    equal: str = "images",
    half: bool = False,
) -> Entry:
    """Returns one run of a method in a contest, with its config and its folder below `out`.

    The settings come from the config (`source` and `sets`), the method's own defaults, and `options`. The
    number of rounds is chosen so that users do the same work in all methods. With `half`, users do half of
    that work.
    """
    methods.check_name(method)
    for override in sets:
        key, _, value = (part.strip() for part in override.partition("="))
        if key.startswith("method."):
            why = "every method has its own settings; use --choose to try values"
        elif key in REFUSED and key != "run.folds":  # see below; 0 folds are allowed
            why = REFUSED[key]
        else:
            continue
        raise ConfigError(f"--set {override}: {why}", key=key, value=value)
    shared = configs.read(source, sets)
    base = configs.unchecked(shared)  # the method in the config is not used
    if base.run.folds:
        raise ConfigError(
            f"run.folds = {base.run.folds}: {REFUSED['run.folds']}",
            key="run.folds",
            value=base.run.folds,
            fix="run.folds=0",
        )
    shared["method"] = {"name": method}
    shared.setdefault("data", {})["validation"] = base.data.validation or VALIDATION
    when = "never" if half or seed == CHOOSING else "last"
    shared.setdefault("run", {}).update(seed=seed, test=when, baseline=False, folds=0)
    shared.setdefault("split", {})["seed"] = base.split.seed + seed
    for (section, key), value in common().items():
        shared.setdefault(section, {}).setdefault(key, value)
    configs.apply(shared, options)
    try:
        config = configs.from_dict(shared)
    except ConfigError as error:
        raise ConfigError(
            f"{method} cannot run under this protocol: {error}",
            key=error.key,
            value=error.value,
            fix=error.fix,
        ) from error
    config = _with_rounds(config, equal, half)
    tried = [override.partition(".")[2].replace("=", "") for override in options]
    name = "-".join([label(method), *tried, *(["half"] if half else []), f"seed{seed}"])
    return Entry(method, options, config, out / name)


def label(method: str) -> str:
    """Returns how the names of a method's run folders begin."""
    return method.replace("/", "_").replace(":", "_").lstrip(".")


def common() -> dict[tuple[str, str], Any]:
    """Returns the values of the `COMMON` settings, by (section, key). They are those of the recommended
    method, and apply to all methods unless the config sets them."""
    defaults = methods.find(methods.DEFAULT).defaults
    return {(section, key): defaults[section][key] for section, key in COMMON if key in defaults[section]}


def _with_rounds(config: Config, equal: str, half: bool) -> Config:
    """Returns the config with another number of rounds, so that users do the same amount of work in every
    method. With `half`, users do half of that work. Rounds in which only the server trains (the head start)
    come in addition.

    Work is counted in forward and backward passes if `equal` is "passes", otherwise in images.
    """
    work, head = passes(config), config.federation.head_start
    divisor = work if equal == "passes" else 1
    if divisor <= 1 and not head and not half:
        return config
    whole = resolve.planned_rounds(config) / (2 if half else 1)
    count = max(1, round(whole / max(divisor, 1)))
    if divisor > 1 and abs(count * divisor - whole) > 0.1 * whole:
        unit = work * (2 if half else 1)
        tuned, shorter = (" while it is tuned", ", or add --no-tune") if half else ("", "")
        raise ConfigError(
            f"--equal passes: {config.method.name} makes {work} passes in a step, so it must train for "
            f"{whole:g}/{work} rounds{tuned}, and no whole number is within 10 % of that: set "
            f"federation.rounds to a multiple of {unit}, or to at least {5 * unit}{shorter}",
            key="federation.rounds",
            value=resolve.planned_rounds(config),
        )
    count = next(n for n in itertools.count(count) if n - head_start(head, n) >= count)
    return replace(config, federation=replace(config.federation, rounds=count, epochs=None))


def choosing_seeds(images: int) -> tuple[int, ...]:
    """Returns the seeds of the runs that choose settings, if each run has so many validation `images`."""
    return tuple(CHOOSING + APART * number for number in range(min(MOST, math.ceil(ENOUGH / images))))


def rate(config: Config, power: int) -> str:
    """Returns the config's learning rate times a power of `FACTOR`, as `train.lr=value`."""
    return f"train.lr={float(f'{config.train.lr * FACTOR**power:.2g}'):g}"


def next_power(scores: Mapping[int, float | None]) -> int | None:
    """Returns which learning rate a method tries next, as a power of `FACTOR`; None if it has tried enough.
    `scores` has the accuracy of each power that was tried: -1 if training diverged, None if the method
    refuses this learning rate."""
    for power in FIRST:
        if power not in scores:
            return power
    known = {power: score for power, score in scores.items() if score is not None}
    best = max(known, key=lambda power: known[power])
    if known[best] < 0 or len(known) >= len(FIRST) + FURTHER or min(known) < best < max(known):
        return None
    further = best - 1 if best == min(known) else best + 1
    return None if further in scores else further


def thresholds(config: Config) -> list[str]:
    """Returns the thresholds that a method tries besides its default, each as `method.threshold=value`. The
    list is empty if the method has no threshold."""
    default = {field.name: getattr(config.method, field.name) for field in fields(config.method)}.get(
        "threshold"
    )
    if not isinstance(default, float):
        return []
    return [f"method.threshold={value:g}" for value in THRESHOLDS if value != default]
