"""Settings: frozen dataclasses, a docstring under each field, TOML in and out, dotted overrides.

A setting that is None is chosen when the data are known; the resolved config of a run shows what it
became. Order of precedence: a person's keys, the method's row in `methods.py`, the defaults here.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssfl.errors import ConfigError
from ssfl.methods import METHODS

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Data:
    """[data] Which images."""

    name: str | None = None
    """A known data set: digits, cifar10, svhn, emnist, stl10."""
    path: str | None = None
    """Your own images instead: an .npz file (x_train, y_train, x_test, y_test) or an image folder."""
    root: str = "data"
    """The folder that holds the known data sets' official files."""
    download: bool = False
    """Whether missing official files may be fetched."""
    size: int | None = None
    """Resize the images of a folder to this many pixels square."""
    test_fraction: float = 0.2
    """The part of a folder's labelled images held out for testing where it has no test/ of its own."""
    validation: float = 0.0
    """The part of the training images set aside before the split, to choose settings by."""
    flip: bool | None = None
    """Whether views may be mirrored; by itself: yes for objects, no for digits and letters."""


@dataclass(frozen=True)
class Split:
    """[split] Who gets which images."""

    scheme: str = "skew"
    """"skew" (the paper's R), "iid", "dirichlet", "shards" (n classes per user) or "mixture"."""
    users: int = 10
    """K, the number of users."""
    skew: float = 0.4
    """R, the non-iidness: 0 is iid, 1 is one main class each (scheme "skew")."""
    server_labels: int | None = None
    """N_s, labelled images at the server, uniform over classes; by itself at most 100 per class, or
    every labelled image where there are others without labels."""
    labels_at: str = "server"
    """Who holds labels: "server", "users" or "both"."""
    user_labels: int | None = None
    """Labelled images of all users together, where users have labels; by itself as server_labels."""
    alpha: float = 0.1
    """Concentration of scheme "dirichlet"."""
    classes_per_user: int = 2
    """Classes each user holds in scheme "shards"."""
    mixtures: tuple[tuple[float, ...], ...] = ()
    """Rows of class weights for scheme "mixture"; user u takes row u mod their number."""
    seed: int = 2019
    """Names the random choices of the split; 2019 is the paper's."""


@dataclass(frozen=True)
class Model:
    """[model] The network."""

    name: str | None = None
    """small, cnn, resnet9, resnet18, vgg11 or wide_resnet; by itself what suits the image size."""
    norm: str = "group"
    """Normalisation: "group", "batch" or "none"."""
    norm_statistics: str = "average"
    """With batch normalisation, the averaged model's running statistics: "average" (of users and
    server, like the weights), "server" (the server's own, as in the authors' code) or "recompute"
    (anew on the server's images before each evaluation)."""


@dataclass(frozen=True)
class Method:
    """[method] How users learn and how models are averaged."""

    name: str = "alternate"
    """A row of the methods table: alternate, grouping, crl-gn, crl-bn, self-training, supervised,
    server-only."""
    objective: str = "consistency"
    """The users' loss: "consistency" (CRL), "self-training", "supervised" or "none"."""
    threshold: float = 0.95
    """τ: a pseudo-label counts when the model is at least this sure."""
    averaging: str = "fedavg"
    """"fedavg", "grouping" (federation.groups streams) or "weighted" (method.server_weight)."""
    server: str = "parallel"
    """When the server trains: "parallel" to the users (paper), "alternate" (after the average) or
    "none"."""
    server_weight: float | None = None
    """The server's share in averaging "weighted"."""
    views: str = "separate"
    """Whether weak and strong views pass through the network in "joint" or "separate" batches; with
    batch normalisation they differ."""
    teacher_mode: str = "eval"
    """Pseudo-labels from the network in "eval" or "train" mode; with dropout or batch normalisation
    they differ. Joint views are always in training mode."""


@dataclass(frozen=True)
class Federation:
    """[federation] Rounds and who takes part."""

    participants: int | None = None
    """C, users per round; by itself all of them."""
    groups: int | None = None
    """S, the number of group streams; by itself max(2, C/10 rounded up) for grouping, else 1."""
    period: int = 16
    """T, local steps per round."""
    rounds: int | None = None
    """How many rounds; or give epochs."""
    epochs: int | None = None
    """E, rounds counted in epochs of epoch_images images per trainer."""
    epoch_images: int = 65536
    """M, images each trainer sees in an epoch."""
    dropout: float = 0.0
    """The chance that a participant does not come back; the average is over those who do."""


@dataclass(frozen=True)
class Train:
    """[train] Local optimisation."""

    batch_size: int = 64
    """B, images per step."""
    lr: float = 0.03
    """γ, the base learning rate."""
    momentum: float = 0.9
    """SGD's momentum."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: float = 1e-4
    """Weight decay on every parameter."""
    warmup: int = 0
    """Steps of linear warm-up from zero (the paper's e epochs are e · M / B steps)."""
    cycles: float = 7 / 16
    """c, how many half turns the cosine makes; above 1/2 it reaches the floor."""
    floor: float = 1e-4
    """ε, the least fraction of the base rate."""
    momentum_policy: str = "reset"
    """Momentum at the start of a round: "reset" to zero, kept per "slot" or kept per "user"."""
    precision: str | None = None
    """In which numbers networks compute: "bfloat16", "float32" or "float64"; by itself "bfloat16" on a GPU,
    else "float32". Weights, sums, losses and statistics are kept in float32 (float64) in any case."""


@dataclass(frozen=True)
class Run:
    """[run] How the run is carried out. Apart from the seed, what is computed stays the same, up to the
    last digits that another engine, device or number of threads rounds differently."""

    seed: int = 1
    """Names the initial weights and every draw of the training; 1 is the paper's."""
    engine: str = "auto"
    """"loop" (one user after another), "vmap" (all at once) or "auto"."""
    users_at_once: int | None = None
    """How many users are trained together; by itself as many of the participants as memory holds."""
    compile: bool | None = None
    """Compile the steps of "vmap" on a GPU, which takes a while; by itself where the run is long."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1", ..."""
    threads: int | None = None
    """CPU cores to use, by itself all: on a CPU users are trained in so many processes of one thread."""
    eval_every: int | None = None
    """Rounds between evaluations on the test images, by itself a hundredth of all or 5; the last round is
    always evaluated."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints, by itself a hundredth of all or 10."""
    diversity_every: int = 0
    """Rounds between measurements of gradient diversity; 0 is never."""


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

    data: Data = field(default_factory=Data)
    split: Split = field(default_factory=Split)
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    federation: Federation = field(default_factory=Federation)
    train: Train = field(default_factory=Train)
    run: Run = field(default_factory=Run)


SECTIONS: dict[str, type] = {
    "data": Data, "split": Split, "model": Model, "method": Method,
    "federation": Federation, "train": Train, "run": Run,
}  # fmt: skip
CHOICES = {
    "data.name": ("digits", "cifar10", "svhn", "emnist", "stl10"),
    "split.scheme": ("skew", "iid", "dirichlet", "shards", "mixture"),
    "split.labels_at": ("server", "users", "both"),
    "model.name": ("small", "cnn", "resnet9", "resnet18", "vgg11", "wide_resnet"),
    "model.norm": ("group", "batch", "none"),
    "model.norm_statistics": ("average", "server", "recompute"),
    "method.name": tuple(METHODS),
    "method.objective": ("consistency", "self-training", "supervised", "none"),
    "method.averaging": ("fedavg", "grouping", "weighted"),
    "method.server": ("parallel", "alternate", "none"),
    "method.views": ("separate", "joint"),
    "method.teacher_mode": ("eval", "train"),
    "train.momentum_policy": ("reset", "slot", "user"),
    "train.precision": ("bfloat16", "float32", "float64"),
    "run.engine": ("auto", "loop", "vmap"),
}
# Setting one of these from the command line takes the place of the other.
INSTEAD = {
    "data.name": "path",
    "data.path": "name",
    "federation.rounds": "epochs",
    "federation.epochs": "rounds",
}
# key: (least, most, why)
RANGES: dict[str, tuple[float, float, str]] = {
    "data.size": (4, 1024, "pixels"),
    "data.test_fraction": (0.01, 0.9, "a part of the labelled images"),
    "data.validation": (0, 0.5, "a part of the training images"),
    "split.users": (1, 10_000_000, "users"),
    "split.seed": (0, 2**63 - 1, "any whole number"),
    "run.seed": (0, 2**63 - 1, "any whole number"),
    "split.skew": (0, 1, "0 is iid, 1 is one main class each"),
    "split.server_labels": (0, 10**9, "images"),
    "split.user_labels": (0, 10**9, "images"),
    "split.classes_per_user": (1, 10**6, "classes"),
    "split.alpha": (1e-6, 1e6, "small is skewed, large is even"),
    "method.threshold": (0, 1, "a probability"),
    "method.server_weight": (0, 1, "a share of the average"),
    "federation.participants": (1, 10_000_000, "users per round"),
    "federation.groups": (1, 10_000_000, "groups"),
    "federation.period": (1, 10**6, "local steps"),
    "federation.rounds": (1, 10**9, "rounds"),
    "federation.epochs": (1, 10**6, "epochs"),
    "federation.epoch_images": (1, 10**12, "images"),
    "federation.dropout": (0, 1, "a probability"),
    "train.batch_size": (1, 65536, "images"),
    "train.lr": (0, 1000, "a learning rate"),
    "train.momentum": (0, 0.9999, "below 1"),
    "train.weight_decay": (0, 10, "a small number"),
    "train.warmup": (0, 10**9, "steps"),
    "train.cycles": (0, 1000, "half turns of the cosine"),
    "train.floor": (0, 1, "a fraction of train.lr"),
    "run.users_at_once": (1, 10_000_000, "users"),
    "run.threads": (1, 4096, "threads"),
    "run.eval_every": (1, 10**9, "rounds"),
    "run.checkpoint_every": (1, 10**9, "rounds"),
    "run.diversity_every": (0, 10**9, "rounds; 0 is never"),
}


def load_config(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """A config from a preset's name or a TOML file and `key=value`s.

    The default is `quickstart`, or `own` where the overrides name other data: the quickstart's settings
    are for the digits.
    """
    overrides = list(overrides)
    if source is None:
        other = any(override.startswith(("data.path=", "data.name=")) for override in overrides)
        source = "own" if other else "quickstart"
    given = _read(source)
    for override in overrides:
        _set(given, override)
    return from_dict(given)


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
            hint = _suggest(str(source), presets()) or f"; presets: {', '.join(presets())}"
            raise ConfigError(f"no preset {str(source)!r} (a file's name must end in .toml){hint}")
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _set(given: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the nested dict; the value is TOML, or else a plain word."""
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {override!r}: write section.key=value, such as split.users=20")
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
