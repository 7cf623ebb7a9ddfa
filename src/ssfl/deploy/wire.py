"""What travels: a row of weights as float32, the settings a user needs as TOML, counts and numbers.

Every message to a site says all that its work depends on, so that a site keeps nothing and may be started
anew at any time. What arrives is checked before it is used, at both ends.
"""

import json
import tomllib
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ssfl.config import from_dict, to_toml
from ssfl.data.dataset import Dataset
from ssfl.errors import ConfigError, DataError
from ssfl.settings import Config, Data, Run
from ssfl.work import TOLD, Trained

OBJECTIVES = ("consistency", "self-training")
AVERAGES = ("fedavg", "grouping", "weighted")
MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Terms:
    """What everybody must have in common."""

    config: Config
    """Resolved, without anything of the centre's machine."""
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, config: Config, data: Dataset) -> "Terms":
        """The terms of a centre."""
        here = replace(
            config,
            data=Data(path="site", flip=config.data.flip),
            run=Run(seed=config.run.seed, engine="loop", users_at_once=1),
        )
        return cls(here, len(data.classes), data.shape, data.mean, data.std)

    def text(self) -> str:
        """As JSON, the config as TOML inside."""
        told = {"config": to_toml(self.config), "classes": self.classes, "shape": self.shape}
        return json.dumps(told | {"mean": self.mean, "std": self.std})


def read_terms(text: str) -> Terms:
    """Terms from the centre, checked: a site trusts no message."""
    try:
        told = json.loads(text)
        config = from_dict(tomllib.loads(told["config"]))
        classes, shape = int(told["classes"]), tuple(int(n) for n in told["shape"])
        mean, std = (tuple(float(x) for x in told[name]) for name in ("mean", "std"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"the centre's message cannot be read ({error}): has it another ssfl?") from error
    channels = shape[0] if len(shape) == 3 else 0
    fits = channels in (1, 3) and all(4 <= side <= 1024 for side in shape[1:])
    if not (fits and len(mean) == len(std) == channels and 2 <= classes <= MOST_CLASSES):
        raise DataError(f"the centre asks for images of shape {shape} in {classes} classes: ask its keeper")
    if not (np.isfinite(mean + std).all() and min(std) > 0):
        raise DataError("the centre's normalisation is not of positive numbers: ask its keeper")
    check(config)
    return Terms(config, classes, (shape[0], shape[1], shape[2]), mean, std)


def check(config: Config) -> None:
    """What a real federation can do."""
    method, train = config.method, config.train
    settled = [
        (method.objective in OBJECTIVES, f"method.name = {method.name!r}", "one whose users need no labels"),
        (method.averaging in AVERAGES, f"method.averaging = {method.averaging!r}", "'fedavg'"),
        (config.split.labels_at == "server", f"split.labels_at = {config.split.labels_at!r}", "'server'"),
        (not config.split.shared, "split.shared", "false"),
        (train.momentum_policy == "reset", f"train.momentum_policy = {train.momentum_policy!r}", "'reset'"),
        (train.precision != "float64", "train.precision = 'float64'", "'float32'"),
        (config.federation.dropout == 0, "federation.dropout", "0: real sites fail by themselves"),
        (config.federation.attackers == 0, "federation.attackers", "0: real sites are what they are"),
        (config.run.diversity_every == 0, "run.diversity_every", "0"),
    ]
    for fits, given, instead in settled:
        if not fits:
            raise ConfigError(f"{given} does not go with real sites: use {instead}")


def pack(row: Tensor, **more: str | int) -> RecordDict:
    """A model on its way, and what goes with it."""
    content = RecordDict({"model": ArrayRecord([row.detach().to("cpu", torch.float32).numpy()])})
    if more:
        content["config"] = ConfigRecord(dict(more))
    return content


def unpack(content: RecordDict, length: int) -> Tensor:
    """The model in a message: so many finite float32 numbers."""
    try:
        arrays = content["model"].to_numpy_ndarrays()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"a message without a model ({error})") from error
    if len(arrays) != 1 or arrays[0].shape != (length,) or arrays[0].dtype != np.float32:
        shapes = [f"{array.dtype} {array.shape}" for array in arrays]
        raise DataError(f"a model of {length} float32 numbers was expected, not {', '.join(shapes)}")
    if not np.isfinite(arrays[0]).all():
        raise DataError("a model with numbers that are not finite")
    return torch.from_numpy(arrays[0].copy())


def pack_trained(trained: Trained, images: int, private: bool) -> RecordDict:
    """A site's answer: its model and the few numbers that are told of its training; a private one keeps
    them back, since they are not noised."""
    content = pack(trained.rows[0])
    numbers = {name: 0.0 if private else float(trained.stats[name]) for name in TOLD}
    content["told"] = MetricRecord({**numbers, "images": images})
    return content


def read_told(content: RecordDict) -> dict[str, float]:
    """The numbers of a site's answer."""
    try:
        told = {name: float(content["told"][name]) for name in TOLD}
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"an answer without its numbers ({error})") from error
    if not np.isfinite(list(told.values())).all():
        raise DataError("numbers that are not finite")
    return told
