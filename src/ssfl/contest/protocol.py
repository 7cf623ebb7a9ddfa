"""The rules of a contest: what a method's run is, and what it may choose.

What the config and --set say holds for all, [method] aside. General settings that they leave open (`COMMON`)
are those of the recommended method, for everybody: no method wins by a normalisation, by views of the
server's images or by a slow average that others could have too. The rest is as in each method's defaults.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ssfl import methods
from ssfl.config import loading as configs
from ssfl.config.settings import Config
from ssfl.core.schedule import head_start
from ssfl.errors import ConfigError
from ssfl.runs import assemble

VALIDATION = 0.05
"""The part of the training images that choices are made by, where the config sets none aside."""
CHOOSING = 0
"""The seed of the runs that choices are made by, with a split of their own; the contest's are 1, 2, ..."""
COMMON = (("model", "norm"), ("train", "server_views"), ("federation", "slow_average"))
"""General settings that are the same for every method."""
RATES = (1.0, 1 / 3, 3.0)
"""The learning rates that a method tries, as multiples of the config's; of equally good ones the first is
taken."""
THRESHOLDS = (0.8, 0.95)
"""The thresholds that a method tries besides its own."""


@dataclass(frozen=True)
class Entry:
    """One run of the contest."""

    method: str
    options: tuple[str, ...]
    """The choices tried or taken, `section.key=value`."""
    config: Config
    path: Path


@dataclass(frozen=True)
class Rules:
    """What holds for every run of a contest."""

    source: str
    sets: tuple[str, ...]
    out: Path
    equal: str = "images"
    """Users train on equally many "images", or make equally many "passes", forward and backward."""

    def entry(self, method: str, seed: int, options: tuple[str, ...] = (), *, half: bool = False) -> Entry:
        """A method's run, of half the length where something is chosen by it."""
        return entry(self.source, method, seed, self.sets, options, self.out, equal=self.equal, half=half)


def passes(config: Config) -> int:
    """Forward and backward passes that a user's step makes of each of its images."""
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
    for (section, key), value in common().items():
        shared.setdefault(section, {}).setdefault(key, value)
    configs.apply(shared, options)
    try:
        config = configs.from_dict(shared)
    except ConfigError as error:
        raise ConfigError(f"{method} cannot be played under this protocol: {error}") from error
    config = _with_rounds(config, equal, half)
    called = method.replace("/", "_").replace(":", "_")
    tried = [one.partition(".")[2].replace("=", "") for one in options]
    name = "-".join([called, *tried, *(["half"] if half else []), f"seed{seed}"])
    return Entry(method, options, config, out / name)


def common() -> dict[tuple[str, str], Any]:
    """The general settings of a contest where the config leaves them open: the recommended method's."""
    defaults = methods.find(methods.DEFAULT).defaults
    return {(section, key): defaults[section][key] for section, key in COMMON if key in defaults[section]}


def _with_rounds(config: Config, equal: str, half: bool) -> Config:
    """The config with as many rounds as give users the same work; those that the server plays alone, where a
    method begins so, come on top."""
    work, head = passes(config), config.federation.head_start
    divisor = work if equal == "passes" else 1
    if divisor <= 1 and not head and not half:
        return config
    whole = assemble.rounds(config) / (2 if half else 1)
    count = max(1, round(whole / max(divisor, 1)))
    if divisor > 1 and abs(count * divisor - whole) > 0.1 * whole:
        raise ConfigError(
            f"{config.method.name} does {work} times the work in a step, and {whole:g} rounds cannot be cut "
            f"to as much within a tenth: play a multiple of {work}, or at least {5 * work}"
        )
    count = next(n for n in itertools.count(count) if n - head_start(head, n) >= count)
    return replace(config, federation=replace(config.federation, rounds=count, epochs=None))


def rates(config: Config) -> list[str]:
    """The learning rates that a method tries, as options; the config's own is the first."""
    return [f"train.lr={float(f'{config.train.lr * factor:.2g}'):g}" for factor in RATES]


def thresholds(config: Config) -> list[str]:
    """The thresholds that a method tries besides its own, as options; none where it has no such setting."""
    own = {field.name: getattr(config.method, field.name) for field in fields(config.method)}.get("threshold")
    if not isinstance(own, float):
        return []
    return [f"method.threshold={value:g}" for value in THRESHOLDS if value != own]
