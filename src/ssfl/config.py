"""Configs: TOML in and out, dotted overrides, errors that name the key, the value and the fix.

Order of precedence: a person's keys, the method's row in `methods.py`, the defaults in `settings.py`.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ssfl.errors import ConfigError
from ssfl.methods import METHODS
from ssfl.settings import CHOICES, INSTEAD, RANGES, SECTIONS, Config, Method, Privacy

CONFIGS = Path(__file__).parent / "configs"
PROJECT = "ssfl.toml"
"""The config in a folder that `ssfl new` made; the folder's name will do for it."""
__all__ = ["CONFIGS", "Config", "apply", "check", "from_dict", "load_config", "presets", "to_toml"]


def load_config(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """A config from a preset's name, a TOML file or a folder with ssfl.toml in it, and `key=value`s.

    The default is `quickstart`, or `own` where the overrides name other data: the quickstart's settings
    are for the digits.
    """
    overrides = list(overrides)
    if source is None:
        other = any(override.startswith(("data.path=", "data.name=")) for override in overrides)
        source = "own" if other else "quickstart"
    given = _read(source)
    apply(given, overrides)
    return from_dict(given)


def apply(given: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put `section.key=value`s into the nested dict of a config."""
    for override in overrides:
        _set(given, override)


def from_dict(given: dict[str, dict[str, Any]]) -> Config:
    """A checked config: the given keys over the method's over the defaults."""
    for section, values in given.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}]{_suggest(section, SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"[{section}] must be a section with keys, not {values!r}")
    name = given.get("method", {}).get("name", Method.name)
    _check_choice("method.name", name)
    settings = METHODS[name]
    sections = {
        section: _section(section, settings.get(section, {}) | given.get(section, {})) for section in SECTIONS
    }
    config = Config(**sections)
    check(config)
    return config


def to_toml(config: Config) -> str:
    """The config as TOML; a setting that is None is left out."""
    blocks = []
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(config, section))
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def presets() -> list[str]:
    """The names of the ready-made configs."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if path.suffix != ".toml":
        path = CONFIGS / f"{source}.toml"
        if not path.is_file():
            path = Path(source) / PROJECT
        if not path.is_file() and Path(source).is_dir():
            raise ConfigError(f"{source} has no {PROJECT}: `ssfl new {source} --images FOLDER` writes one")
        if not path.is_file():
            hint = _suggest(str(source), presets()) or f"; presets: {', '.join(presets())}"
            raise ConfigError(f"no preset {str(source)!r} (a file's name must end in .toml){hint}")
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        hint = _suggest(path.name, [other.name for other in path.parent.glob("*.toml")])
        raise ConfigError(f"cannot read the config {path}: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _set(given: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the nested dict; the value is TOML, or else a plain word."""
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        homes = [s for s, kind in SECTIONS.items() if equals and section in typing.get_type_hints(kind)]
        meant = f"{homes[0]}.{override}" if homes else "split.users=20"
        raise ConfigError(f"--set {override!r}: write section.key=value, such as {meant}")
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r} in --set {override}{_suggest(section, SECTIONS)}")
    values = given.setdefault(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"[{section}] must be a section with keys, not {values!r}")
    values.pop(INSTEAD.get(key.strip(), ""), None)
    values[name.strip()] = _value(text.strip())


def _value(text: str) -> Any:
    """A value from the command line: TOML, or a number as people write it (.4), or a plain word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _section(section: str, values: dict[str, Any]) -> Any:
    kind = SECTIONS[section]
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown key {section}.{key}{_suggest(key, hints, section)}")
        values = values | {key: _typed(f"{section}.{key}", value, hints[key])}
        _check_choice(f"{section}.{key}", values[key])
        _check_range(f"{section}.{key}", values[key])
    return kind(**values)


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the field's type, or an error; a whole number may stand for a float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if key == "split.mixtures":
        if isinstance(value, list | tuple) and all(isinstance(row, list | tuple) for row in value):
            try:
                rows = tuple(tuple(float(number) for number in row) for row in value)
                if len({len(row) for row in rows}) <= 1 and all(sum(row) < 1e9 for row in rows):
                    return rows
            except (TypeError, ValueError, OverflowError):
                pass
        raise ConfigError(f"{key} must be equally long rows of numbers, such as [[0.5, 0.5], [0.1, 0.9]]")
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(min(max(value, -(10**300)), 10**300))
    if value == "" and str in allowed:
        raise ConfigError(f"{key} is empty: give it a value or leave it out")
    if type(value) in allowed:
        return value
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    wanted = " or ".join(names[kind] for kind in allowed if kind in names)
    raise ConfigError(f"{key} = {value!r} must be {wanted}")


def _check_choice(key: str, value: Any) -> None:
    if value is not None and key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(
            f"{key} = {value!r} is not one of {', '.join(CHOICES[key])}{_suggest(str(value), CHOICES[key])}"
        )


def _check_range(key: str, value: Any) -> None:
    if key in RANGES and value is not None:
        least, most, why = RANGES[key]
        if not least <= value <= most:
            raise ConfigError(f"{key} = {value} must lie between {least} and {most} ({why})")


def check(config: Config) -> None:
    """What must hold between settings."""
    split, method, federation = config.split, config.method, config.federation
    if (config.data.name is None) == (config.data.path is None):
        raise ConfigError("set either data.name (such as digits) or data.path (your own images)")
    participants = split.users if federation.participants is None else federation.participants
    if participants > split.users:
        raise ConfigError(
            f"federation.participants = {participants} is more than split.users = {split.users}: "
            f"set it to at most {split.users}"
        )
    if federation.groups is not None and federation.groups > participants:
        raise ConfigError(
            f"federation.groups = {federation.groups} is more than the {participants} participants: "
            f"set it to at most {participants}"
        )
    if federation.groups not in (None, 1) and method.averaging != "grouping":
        raise ConfigError(
            f"federation.groups = {federation.groups} needs method.averaging = 'grouping', "
            f"not {method.averaging!r}"
        )
    if (federation.rounds is None) == (federation.epochs is None):
        raise ConfigError("set either federation.rounds or federation.epochs, not both or neither")
    if (method.averaging == "weighted") != (method.server_weight is not None):
        raise ConfigError("method.averaging = 'weighted' and method.server_weight go together")
    if method.averaging == "weighted" and method.server != "parallel":
        raise ConfigError("method.averaging = 'weighted' needs method.server = 'parallel'")
    if method.averaging in ("elastic", "overlap"):
        if method.server != "none":
            raise ConfigError(f"method.averaging = {method.averaging!r} needs method.server = 'none'")
    elif method.elasticity is not None:
        raise ConfigError("method.elasticity needs method.averaging = 'elastic' or 'overlap'")
    if method.server_replicas and (method.averaging, method.server) != ("grouping", "parallel"):
        raise ConfigError(
            "method.server_replicas needs method.averaging = 'grouping' and method.server = 'parallel'"
        )
    _check_round_labels(method, config.model.norm)
    if method.server_momentum and method.server == "parallel":
        raise ConfigError("method.server_momentum needs method.server = 'alternate' or 'none'")
    guarded = method.gate or method.combine != "mean" or federation.attackers > 0
    guarded = guarded or method.weighting != "even" or method.fill
    if guarded and (config.run.engine == "dist" or method.averaging in ("elastic", "overlap")):
        raise ConfigError(
            "method.gate, combine, weighting and fill and federation.attackers do not go with "
            "run.engine = 'dist' or models of the users' own"
        )
    if config.run.engine == "dist" and (
        method.averaging in ("elastic", "overlap") or method.objective == "fedmatch"
    ):
        raise ConfigError(f"run.engine = 'dist' does not go with method.name = {method.name!r}: use 'auto'")
    if method.name == "fixmatch" and split.users != 1:
        raise ConfigError(f"method.name = 'fixmatch' is one model: set split.users=1, not {split.users}")
    if method.objective == "fedmatch":
        _check_fedmatch(config)
    if config.privacy != Privacy():
        _check_privacy(config)
    if split.shared and split.labels_at != "server":
        raise ConfigError("split.shared shares the server's images: use split.labels_at = 'server'")
    if method.objective == "none" and method.server == "none":
        raise ConfigError("nobody would train: set method.objective or method.server")
    if split.labels_at == "users" and method.server != "none":
        raise ConfigError("split.labels_at = 'users' leaves the server no data: add method.server = 'none'")
    if split.labels_at != "server" and method.objective == "none":
        raise ConfigError(
            f"method.name = {method.name!r} does not train users: use split.labels_at = 'server'"
        )
    if split.scheme == "mixture" and not split.mixtures:
        raise ConfigError("split.scheme = 'mixture' needs split.mixtures, a row of weights per kind of user")
    if config.train.nesterov and config.train.momentum == 0:
        raise ConfigError("train.nesterov = true needs train.momentum above 0: set train.nesterov=false")


def _check_round_labels(method: Method, norm: str) -> None:
    """What goes with labels once a round alone, and what they do not go with."""
    if method.labels == "round":
        if method.objective != "consistency" or method.views != "separate":
            raise ConfigError(
                "method.labels = 'round' needs method.objective = 'consistency' and method.views = 'separate'"
            )
        if method.sharpness and norm == "batch":
            raise ConfigError("method.sharpness needs model.norm = 'group' or 'none'")
        if method.weighting != "even" and method.combine != "mean":
            raise ConfigError(f"method.weighting = {method.weighting!r} needs method.combine = 'mean'")
        return
    plain = Method()
    for key in ("thresholds", "fill", "mix", "sharpness", "weighting"):
        if getattr(method, key) != getattr(plain, key):
            raise ConfigError(f"method.{key} = {getattr(method, key)!r} needs method.labels = 'round'")


def _check_fedmatch(config: Config) -> None:
    """What FedMatch cannot do."""
    method, train = config.method, config.train
    settled = [
        (config.model.norm != "batch", f"model.norm = {config.model.norm!r}", "model.norm=none"),
        (method.averaging == "fedavg", f"method.averaging = {method.averaging!r}", "method.averaging=fedavg"),
        (method.views == "separate", f"method.views = {method.views!r}", "method.views=separate"),
        (train.momentum == 0, f"train.momentum = {train.momentum}", "train.momentum=0"),
        (train.lr < 0.1, f"train.lr = {train.lr}, which draws ψ beyond σ", "train.lr below 0.1"),
        (config.run.diversity_every == 0, "gradient diversity", "run.diversity_every=0"),
    ]
    for fits, given, instead in settled:
        if not fits:
            raise ConfigError(f"method.objective = 'fedmatch' does not go with {given}: set {instead}")
    if method.server == "parallel" or (method.server == "none" and config.split.labels_at == "server"):
        raise ConfigError(
            f"method.objective = 'fedmatch' does not go with method.server = {method.server!r}: set "
            "method.server=alternate, or method.server=none and split.labels_at=users"
        )


def _check_privacy(config: Config) -> None:
    """Where clipping and noise on what users send would not keep the promise, they are refused."""
    privacy, method, users = config.privacy, config.method, config.split.users
    if privacy.clip is None or privacy.noise is None:
        raise ConfigError("privacy.clip and privacy.noise go together: set both, such as 1.0 and 0.5")
    if privacy.delta is not None and privacy.delta * users >= 1:
        raise ConfigError(f"privacy.delta = {privacy.delta} is no promise to {users} users: set it below 1/K")
    broken = [
        (method.objective == "fedmatch", "method.objective = 'fedmatch' shows users' weights to others"),
        (method.objective == "none", f"method.name = {method.name!r} does not train users"),
        (method.averaging in ("elastic", "overlap"), f"method.averaging = {method.averaging!r} keeps models"),
        (config.train.momentum_policy == "slot", "train.momentum_policy = 'slot' hands momentum on"),
    ]
    for true, why in broken:
        if true:
            raise ConfigError(f"[privacy] cannot hold: {why}; change that, or leave [privacy] out")


def _suggest(word: str, known: Iterable[str], section: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    if close:
        return f": did you mean {section + '.' if section else ''}{close[0]}?"
    if section:
        homes = [s for s, kind in SECTIONS.items() if word in typing.get_type_hints(kind)]
        if homes:
            return f": did you mean {homes[0]}.{word}?"
        return f"; [{section}] has {', '.join(known)}"
    return ""


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
