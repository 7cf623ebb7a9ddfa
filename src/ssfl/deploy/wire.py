"""The content of the messages between the centre and the sites: a model as one float32 vector, settings as
text, counts and metrics.

Every message to a site has everything that its work depends on. So a site needs no memory of earlier rounds
and can be restarted at any time. The receiver of a message checks it before using it.
"""

import io
import json
import math
import tomllib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ssfl.config.checks import obstacle
from ssfl.config.loading import from_dict
from ssfl.config.settings import Config, DataSettings, RunSettings
from ssfl.config.writing import as_dict, to_toml
from ssfl.data.dataset import WHITE, Dataset
from ssfl.deploy.disclosure import PublicError
from ssfl.engines.local import Returned
from ssfl.errors import ConfigError, DataError, MethodError
from ssfl.federation import METRICS, Named

LOSS = 1e3
"""The largest loss that a site may report. A single huge value would dominate the mean of all sites."""
LARGEST = 1e15
"""The largest absolute value allowed in a model, or in the numbers sent with it. The sum of a million squares
of such values still fits into float32."""
MOST_CLASSES = 100_000
"""The largest number of classes that a site accepts from the centre."""
MODEL, ROW = "model", "row"
"""The names of the record and of its array that hold the model in a message."""
NUMBERS = "numbers"
"""The name of the record with additional numbers, which some methods send to the users together with the
model."""
SAME_VERSION = "make sure that the centre and this site have the same version of ssfl"
MOST_NUMBERS = 1000
"""How many additional numbers a method may send under one name."""


@dataclass(frozen=True)
class Sent:
    """What the centre sends to one user for a round. `row` is the model: all its weights as one vector."""

    row: Tensor
    numbers: Named
    """Additional numbers that the method sends, by name: a tensor [1] for one number, or [1, n] for n
    numbers. The first dimension counts users, and is 1 because this message is for one user."""


@dataclass(frozen=True)
class Terms:
    """The settings that the centre and all sites must share, so that a site trains as a simulated user would.
    The centre sends them as text with every model.

    `shape` is that of an image (C, H, W). `mean` and `std` normalise its channels. `white` concerns image
    files with more than 8 bits per channel: it is the pixel value that becomes 255.
    """

    config: Config
    """The resolved config, without settings that concern only the centre's machine."""
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int
    outside: dict[str, str] = field(default_factory=dict)
    """Digests of the centre's network and method, which a site compares with its own. For external code there
    is a digest of the source ("model.digest", "method.digest"). For an external or pretrained network there
    is a fingerprint of its frozen weights ("model.frozen")."""

    @classmethod
    def of(cls, config: Config, data: Dataset, brought: dict[str, Any]) -> "Terms":
        """Returns the terms of a centre with this config and data. `brought` identifies the centre's network
        and method, as `assemble.brought` describes. It has entries only for external code and for pretrained
        networks."""
        here = replace(
            config,
            data=DataSettings(path="site", flip=config.data.flip, views=config.data.views),
            model=replace(config.model, weights=None),  # a file at the centre; messages bring the model
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
        """Returns the terms as a JSON text, in which the config is a TOML text. `read_terms` reads it."""
        fields = {"config": to_toml(self.config), "classes": self.classes, "shape": self.shape}
        known = {"outside": self.outside} if self.outside else {}
        return json.dumps(fields | {"mean": self.mean, "std": self.std, "white": self.white} | known)


def read_terms(text: str) -> Terms:
    """Returns the terms that the centre sent as text. Raises `PublicError` if they cannot be read or are not
    plausible, because a site trusts no message."""
    try:
        fields = json.loads(text)
        table = tomllib.loads(fields["config"])
        config = from_dict(table, resolved=True)
        classes, shape = int(fields["classes"]), tuple(int(n) for n in fields["shape"])
        mean, std = (tuple(float(x) for x in fields[name]) for name in ("mean", "std"))
        white = int(fields["white"])
        known = {str(key): str(value) for key, value in dict(fields.get("outside", {})).items()}
    except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PublicError(
            f"the centre's settings cannot be read ({error}): {SAME_VERSION}",
            public=f"the centre's settings cannot be read: {SAME_VERSION}",
        ) from error
    for key, value in as_dict(config)["method"].items():
        if value is not None and key not in table.get("method", {}):  # the two defaults may differ
            raise PublicError(f"the centre's message has no value for method.{key}: {SAME_VERSION}")
    channels = shape[0] if len(shape) == 3 else 0
    fits = channels in (1, 3) and all(4 <= side <= 1024 for side in shape[1:])
    if not (fits and len(mean) == len(std) == channels and 2 <= classes <= MOST_CLASSES):
        raise PublicError(
            f"the centre sent the image shape {shape} and {classes} classes. Expected: 1 or 3 channels, "
            f"sides of 4 to 1024 pixels, 2 to {MOST_CLASSES} classes. Ask the operator of the centre to "
            "check its data"
        )
    if not (np.isfinite(mean + std).all() and min(std) > 0 and 255 <= white <= WHITE):
        raise PublicError(
            f"the centre sent the normalisation mean {mean}, std {std} and largest pixel value {white}, "
            "which cannot be used: ask the operator of the centre to check its data"
        )
    check(config)
    return Terms(config, classes, (shape[0], shape[1], shape[2]), mean, std, white, known)


def check(config: Config) -> None:
    """Raises if a config has settings that are possible in a simulation but not with real sites.

    For example, values that a site reports must not affect the average, so methods that need such values are
    refused.
    """
    method, train = config.method, config.train
    why = obstacle(config, ("reports", "sends", "sizes", "labels"))
    if not method.trains_users:
        why = f"method.name = {method.name!r}, which does not train users"
    if why:
        raise ConfigError(
            f"real sites cannot be used with {why}: choose another method, such as method.name=anchored",
            key="method.name",
            value=method.name,
            fix="method.name=anchored",
        )
    fitting: list[tuple[str, object, bool, str]] = [
        ("split.labels_at", config.split.labels_at, config.split.labels_at == "server", "server"),
        (
            "model.norm_statistics",
            config.model.norm_statistics,
            config.model.norm_statistics != "everyone",
            "average",
        ),
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
                f"{key} = {value!r} is not possible with real sites: set {key}={instead}",
                key=key,
                value=value,
                fix=f"{key}={instead}",
            )


def pack(row: Tensor, **settings: str | int) -> RecordDict:
    """Returns the content of a message with a model (`row`, all its weights as one vector) and settings."""
    array = Array(row.detach().to("cpu", torch.float32).numpy())
    content = RecordDict({MODEL: ArrayRecord({ROW: array})})
    if settings:
        content["config"] = ConfigRecord(dict(settings))
    return content


def pack_work(sent: Sent, **settings: str | int) -> RecordDict:
    """Returns the content of the message that asks a site to train for one round: the model, the method's
    additional numbers, and settings."""
    content = pack(sent.row, **settings)
    for name, tensor in sent.numbers.items():
        if tensor.ndim > 2 or tensor.numel() > MOST_NUMBERS:
            raise MethodError(
                f"the method sends {tensor.numel()} numbers named {name!r} with the model: send at most "
                f"{MOST_NUMBERS} to real sites"
            )
    if sent.numbers:
        values: dict[str, int | float | list[int] | list[float]] = {
            name: tensor[0].double().tolist() for name, tensor in sent.numbers.items()
        }
        content[NUMBERS] = MetricRecord(values)
    return content


def read_numbers(content: RecordDict, like: Tensor) -> Named:
    """Returns the additional numbers that the method sent with the model, by name. Each is a tensor [1] for
    one number, or [1, n] for n numbers, with the type and device of `like`. Raises if they are too many, too
    large or not finite."""
    numbers = {}
    for name, value in content.metric_records.get(NUMBERS, MetricRecord()).items():
        values = np.asarray(value, np.float64)
        if values.ndim > 1 or values.size > MOST_NUMBERS or not (np.abs(values) <= LARGEST).all():
            raise PublicError(
                f"the centre sent {values.size} numbers named {name!r} with the model. A site accepts at "
                f"most {MOST_NUMBERS} finite ones: ask the operator of the centre to check its method"
            )
        numbers[str(name)] = torch.from_numpy(values)[None].to(like)
    return numbers


def unpack(content: RecordDict, length: int | None = None) -> Tensor:
    """Returns the model in a message, a vector [length] of float32. Without `length`, any length is accepted.
    Raises if the message has another array or none. Also raises if a value of the model is not finite or has
    an absolute value above `LARGEST`.

    The size in bytes is checked before anything is read, because an array's header can claim any shape.
    """
    record = content.array_records.get(MODEL)
    if record is None or len(content.array_records) > 1 or list(record) != [ROW]:
        names = [f"{name}/{inner}" for name, one in content.array_records.items() for inner in one]
        raise PublicError(f"the arrays {', '.join(names)[:100] or 'none'} instead of {MODEL}/{ROW}")
    array = record[ROW]
    length = math.prod(array.shape) if length is None else length
    header = _header(length)
    size = len(header) + 4 * length
    if array.shape != (length,) or array.dtype != "float32":
        raise PublicError(f"a model of {array.dtype} {array.shape}"[:80] + f" instead of float32 ({length},)")
    if len(array.data) != size or not array.data.startswith(header):
        raise PublicError(f"a truncated or altered model of {len(array.data)} bytes instead of {size}")
    numbers = np.frombuffer(array.data, "<f4", length, len(header))
    if not np.isfinite(numbers).all():
        raise PublicError("a model with values that are not finite")
    if np.abs(numbers).max(initial=0) > LARGEST:
        raise PublicError(f"a model with absolute values above {LARGEST:g}")
    return torch.from_numpy(numbers.astype(np.float32))


def _header(length: int) -> bytes:
    """Returns the bytes with which a NumPy file of a float32 vector of this length begins."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (length,)})
    return buffer.getvalue()


def pack_trained(trained: Returned, images: int, round: int, private: bool) -> RecordDict:
    """Returns the content of a site's answer: its trained model, the metrics of its training, its number of
    images, and the number of the round.

    If `private` is true, the site trains with differential privacy. Then it sends zeros as metrics, because
    no noise protects them.
    """
    content = pack(trained.rows[0])
    metrics: dict[str, int | float | list[int] | list[float]] = {
        name: 0.0 if private else float(trained.metrics[name]) for name in METRICS
    }
    content["metrics"] = MetricRecord(metrics | {"images": images, "round": round})
    return content


def read_trained(content: RecordDict, length: int, round: int) -> tuple[Tensor, dict[str, float]]:
    """Returns the model, a vector [length], and the metrics in a site's answer to this round. Raises
    `DataError` if they are not plausible.

    The number of images in the answer is not returned: nothing that a site reports may affect the weight of
    its model.
    """
    unexpected = content.keys() - {MODEL, "metrics"}
    if unexpected:
        raise DataError(f"unexpected records ({', '.join(map(str, unexpected))[:100]})")
    row = unpack(content, length)
    try:
        numbers = content.metric_records["metrics"]
        metrics = {name: _number(numbers[name]) for name in METRICS}
        answered = _number(numbers["round"])
    except (KeyError, TypeError) as error:
        raise DataError(f"an answer in which a metric is missing or is not a number ({error})") from error
    if answered != round:
        raise DataError(f"an answer to round {answered + 1:.0f} instead of round {round + 1}")
    if not np.isfinite(list(metrics.values())).all():
        raise DataError(f"metrics that are not finite ({metrics})"[:120])
    rates = [metrics[name] for name in METRICS if name != "loss"]
    if abs(metrics["loss"]) > LOSS or not all(-0.01 < rate < 1.01 for rate in rates):
        raise DataError(f"metrics that training cannot produce ({metrics})"[:120])
    return row, metrics


def read_images(content: RecordDict) -> int:
    """Returns the number of images that a site reports. Raises `DataError` if it is missing or impossible."""
    try:
        count = _number(content.metric_records["metrics"]["images"])
    except (KeyError, TypeError) as error:
        raise DataError(f"an answer in which a metric is missing or is not a number ({error})") from error
    if not 0 <= count < 2**53:
        raise DataError(f"an impossible number of images ({count})")
    return int(count)


def read_identity(content: RecordDict) -> tuple[str, int]:
    """Returns the name and the number of images that a site reports when it joins."""
    try:
        name = content.config_records["config"]["name"]
    except KeyError as error:
        raise DataError(f"an answer without a name ({error})") from error
    return str(name), read_images(content)


def _number(value: object) -> float:
    """Returns the value as a float. Raises TypeError if it is not a number, since a record may also hold
    lists and text."""
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} where a number was expected")
    return float(value)


def whole(value: object) -> int:
    """Returns a value of the centre's message that must be an integer. Raises `PublicError` if it is not."""
    if not isinstance(value, int):
        raise PublicError(
            f"the centre's message has {value!r} instead of a whole number: {SAME_VERSION}"[:300]
        )
    return value


def settings(content: RecordDict) -> ConfigRecord:
    """Returns the settings in the centre's message. Raises `PublicError` if it has none."""
    try:
        return content.config_records["config"]
    except KeyError:
        raise PublicError(f"the centre's message has no settings: {SAME_VERSION}") from None
