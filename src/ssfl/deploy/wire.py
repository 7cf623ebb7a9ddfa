"""What travels: a row of weights as float32, the settings a user needs as TOML, counts and numbers.

Every message to a site says all that its work depends on, so that a site keeps nothing and may be started
anew at any time. What arrives is checked before it is used, at both ends.
"""

import io
import json
import tomllib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ssfl.config.checks import obstacle
from ssfl.config.loading import as_dict, from_dict, to_toml
from ssfl.config.settings import Config, DataSettings, RunSettings
from ssfl.data.dataset import WHITE, Dataset
from ssfl.engines.local import Returned
from ssfl.errors import ConfigError, DataError, MethodError
from ssfl.federation import METRICS, Named

LOSS = 1e3
"""The largest loss that a site may tell: a single huge number would be all that a mean shows."""
LARGEST = 1e15
"""No number of a model or of its loss is larger: a million of them squared are still float32 numbers."""
MOST_CLASSES = 100_000
MODEL, ROW = "model", "row"
"""What a model is called in a message."""
NUMBERS = "numbers"
"""What the numbers are called that a method sends users with the model."""
MOST_NUMBERS = 1000
"""How many of them there may be under one name."""


@dataclass(frozen=True)
class Sent:
    """What a user is sent for a round."""

    row: Tensor
    numbers: Named
    """[1] or [1, n] each: what the method sends besides the model."""


@dataclass(frozen=True)
class Terms:
    """What everybody must have in common."""

    config: Config
    """Resolved, without anything of the centre's machine."""
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int
    outside: dict[str, str] = field(default_factory=dict)
    """Of a network and a method from outside: digests of the text, and the fingerprint of what is frozen."""

    @classmethod
    def of(cls, config: Config, data: Dataset, brought: dict[str, Any]) -> "Terms":
        """The terms of a centre, which may have brought its own network and method."""
        here = replace(
            config,
            data=DataSettings(path="site", flip=config.data.flip),
            model=replace(config.model, weights=None),  # a file of the centre; models come from there
            run=RunSettings(seed=config.run.seed, engine="loop", users_at_once=1),
        )
        known = {
            f"{section}.{key}": str(one[key])
            for section, one in brought.items()
            for key in ("digest", "frozen")
            if key in one
        }
        return cls(here, len(data.classes), data.shape, data.mean, data.std, data.white, known)

    def text(self) -> str:
        """As JSON, the config as TOML inside."""
        fields = {"config": to_toml(self.config), "classes": self.classes, "shape": self.shape}
        known = {"outside": self.outside} if self.outside else {}
        return json.dumps(fields | {"mean": self.mean, "std": self.std, "white": self.white} | known)


def read_terms(text: str) -> Terms:
    """Terms from the centre, checked: a site trusts no message."""
    try:
        fields = json.loads(text)
        given = tomllib.loads(fields["config"])
        config = from_dict(given, resolved=True)
        classes, shape = int(fields["classes"]), tuple(int(n) for n in fields["shape"])
        mean, std = (tuple(float(x) for x in fields[name]) for name in ("mean", "std"))
        white = int(fields["white"])
        known = {str(key): str(value) for key, value in dict(fields.get("outside", {})).items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"the centre's message cannot be read ({error}): has it another ssfl?") from error
    for key, value in as_dict(config)["method"].items():
        if value is not None and key not in given.get("method", {}):  # what it is here may be else there
            raise DataError(f"the centre's message does not say method.{key}: has it another ssfl?")
    channels = shape[0] if len(shape) == 3 else 0
    fits = channels in (1, 3) and all(4 <= side <= 1024 for side in shape[1:])
    if not (fits and len(mean) == len(std) == channels and 2 <= classes <= MOST_CLASSES):
        raise DataError(f"the centre asks for images of shape {shape} in {classes} classes: ask its keeper")
    if not (np.isfinite(mean + std).all() and min(std) > 0 and 255 <= white <= WHITE):
        raise DataError("the centre's normalisation is not of positive numbers: ask its keeper")
    check(config)
    return Terms(config, classes, (shape[0], shape[1], shape[2]), mean, std, white, known)


def check(config: Config) -> None:
    """Raise where a real federation cannot do what a config asks for.

    Values reported by a site must not affect the average, so that methods that need them are refused.
    """
    method, train = config.method, config.train
    why = obstacle(config, ("reports", "sends", "sizes", "labels"))
    if not method.trains_users:
        why = f"method.name = {method.name!r}, which does not train users"
    if why:
        raise ConfigError(
            f"real sites do not go with {why}: use another method, such as method.name=anchored",
            key="method.name",
            value=method.name,
            fix="method.name=anchored",
        )
    fitting: list[tuple[str, object, bool, str]] = [
        ("split.labels_at", config.split.labels_at, config.split.labels_at == "server", "server"),
        ("split.shared", config.split.shared, not config.split.shared, "false"),
        (
            "train.momentum_policy",
            train.momentum_policy,
            train.momentum_policy in ("reset", "server"),
            "server",
        ),
        ("train.precision", train.precision, train.precision != "float64", "float32"),
        ("federation.dropout", config.federation.dropout, config.federation.dropout == 0, "0"),
        ("federation.attackers", config.federation.attackers, config.federation.attackers == 0, "0"),
        (
            "federation.skip_unlabelled",
            config.federation.skip_unlabelled,
            not config.federation.skip_unlabelled,
            "false",
        ),
        ("run.diversity_every", config.run.diversity_every, config.run.diversity_every == 0, "0"),
    ]
    for key, value, fits, instead in fitting:
        if not fits:
            raise ConfigError(
                f"{key} = {value!r} does not go with real sites: set {key}={instead}",
                key=key,
                value=value,
                fix=f"{key}={instead}",
            )


def pack(row: Tensor, **more: str | int) -> RecordDict:
    """A model on its way, and what goes with it."""
    array = Array(row.detach().to("cpu", torch.float32).numpy())
    content = RecordDict({MODEL: ArrayRecord({ROW: array})})
    if more:
        content["config"] = ConfigRecord(dict(more))
    return content


def pack_work(sent: Sent, **settings: str | int) -> RecordDict:
    """A round's work on its way to a site."""
    content = pack(sent.row, **settings)
    for name, tensor in sent.numbers.items():
        if tensor.ndim > 2 or tensor.numel() > MOST_NUMBERS:
            raise MethodError(
                f"the round sends {tensor.numel()} numbers {name!r} with the model: real sites take at most "
                f"{MOST_NUMBERS}"
            )
    if sent.numbers:
        values: dict[str, int | float | list[int] | list[float]] = {
            name: tensor[0].double().tolist() for name, tensor in sent.numbers.items()
        }
        content[NUMBERS] = MetricRecord(values)
    return content


def read_numbers(content: RecordDict, like: Tensor) -> Named:
    """The numbers that the method sends with the model, checked: [1, ...] each, of the model's type."""
    numbers = {}
    for name, value in content.metric_records.get(NUMBERS, MetricRecord()).items():
        values = np.asarray(value, np.float64)
        if values.ndim > 1 or values.size > MOST_NUMBERS or not (np.abs(values) <= LARGEST).all():
            raise DataError(
                f"the centre's numbers {name!r} are not at most {MOST_NUMBERS} finite ones: ask its keeper"
            )
        numbers[str(name)] = torch.from_numpy(values)[None].to(like)
    return numbers


def unpack(content: RecordDict, length: int) -> Tensor:
    """The model in a message: so many finite float32 numbers, under its name and no other.

    Nothing is read that is not of exactly the bytes expected: the header of an array can claim any shape.
    """
    record = content.array_records.get(MODEL)
    if record is None or len(content.array_records) > 1 or list(record) != [ROW]:
        names = [f"{name}/{inner}" for name, one in content.array_records.items() for inner in one]
        raise DataError(f"a model under other names than {MODEL}/{ROW} ({', '.join(names)[:100] or 'none'})")
    array, header = record[ROW], _header(length)
    size = len(header) + 4 * length
    if array.shape != (length,) or array.dtype != "float32":
        raise DataError(f"a model of {array.dtype} {array.shape}"[:80] + f", not of {length} float32 numbers")
    if len(array.data) != size or not array.data.startswith(header):
        raise DataError(f"a model of {len(array.data)} bytes, truncated or altered: it has {size}")
    numbers = np.frombuffer(array.data, "<f4", length, len(header))
    if not np.isfinite(numbers).all():
        raise DataError("a model with numbers that are not finite")
    if np.abs(numbers).max(initial=0) > LARGEST:
        raise DataError(f"a model with numbers beyond {LARGEST:g}")
    return torch.from_numpy(numbers.astype(np.float32))


def _header(length: int) -> bytes:
    """How NumPy's file of a row begins."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (length,)})
    return buffer.getvalue()


def pack_trained(trained: Returned, images: int, round: int, private: bool) -> RecordDict:
    """A site's answer: its model and the few numbers that are told of its training; a private one keeps
    them back, since they are not noised."""
    content = pack(trained.rows[0])
    metrics: dict[str, int | float | list[int] | list[float]] = {
        name: 0.0 if private else float(trained.metrics[name]) for name in METRICS
    }
    content["metrics"] = MetricRecord(metrics | {"images": images, "round": round})
    return content


def read_trained(content: RecordDict, length: int, round: int) -> tuple[Tensor, dict[str, float]]:
    """The model and the numbers of a site's answer, checked. Nothing that it says weighs its model."""
    strange = content.keys() - {MODEL, "metrics"}
    if strange:
        raise DataError(f"what nobody asked for ({', '.join(map(str, strange))[:100]})")
    row = unpack(content, length)
    try:
        numbers = content.metric_records["metrics"]
        metrics = {name: _number(numbers[name]) for name in METRICS}
        answered = _number(numbers["round"])
    except (KeyError, TypeError) as error:
        raise DataError(f"an answer without its numbers ({error})") from error
    if answered != round:
        raise DataError(f"an answer to round {answered + 1:.0f}, not {round + 1}")
    if not np.isfinite(list(metrics.values())).all():
        raise DataError("numbers that are not finite")
    rates = [metrics[name] for name in METRICS if name != "loss"]
    if abs(metrics["loss"]) > LOSS or not all(-0.01 < rate < 1.01 for rate in rates):
        raise DataError(f"numbers that no training gives ({metrics})"[:120])
    return row, metrics


def read_images(content: RecordDict) -> int:
    """How many images a site says that it has."""
    try:
        count = _number(content.metric_records["metrics"]["images"])
    except (KeyError, TypeError) as error:
        raise DataError(f"an answer without its numbers ({error})") from error
    if not 0 <= count < 2**53:
        raise DataError(f"{count} images")
    return int(count)


def read_who(content: RecordDict) -> tuple[str, int]:
    """The name and the number of images that a site tells of itself."""
    try:
        name = content.config_records["config"]["name"]
    except KeyError as error:
        raise DataError(f"an answer without its numbers ({error})") from error
    return str(name), read_images(content)


def _number(value: object) -> float:
    """A number, or an error: records may hold lists and text."""
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} where a number was expected")
    return float(value)


def whole(value: object) -> int:
    """A whole number of a message."""
    if not isinstance(value, int):
        raise DataError(f"the centre's message has {type(value).__name__} where a whole number was expected")
    return value


def settings(content: RecordDict) -> ConfigRecord:
    """What the centre's message says besides a model."""
    try:
        return content.config_records["config"]
    except KeyError:
        raise DataError("the centre's message cannot be read: has it another ssfl?") from None
