"""`ssfl new`: a commented config for a folder of images, checked to run as it is."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from ssfl.config.loading import PROJECT, load_config
from ssfl.config.settings import Config, Data, Model
from ssfl.core.fields import limits_of
from ssfl.data import decoding, own, pictures
from ssfl.data.dataset import Dataset, checked
from ssfl.errors import ConfigError, DataError, SsflError
from ssfl.models import networks
from ssfl.runs import assemble
from ssfl.runs.text import loose, printable, untested

GPU = torch.cuda.is_available()
LARGE = 96 if GPU else 32
"""Pixels on a side above which images are made smaller: a first run should end today."""
USERS = 10
FEW = 3
"""Users that take part in a round on a CPU, which trains them one or two at a time."""


@dataclass(frozen=True)
class Found:
    """What a folder of images holds."""

    folder: Path
    files: own.Files
    sizes: Counter[tuple[int, int]]  # width, height
    grey: bool

    @property
    def size(self) -> int | None:
        """What to resize to: None where all images have one size that is not large."""
        if len(self.sizes) == 1 and max(next(iter(self.sizes))) <= LARGE:
            return None
        return 64 if GPU and min(self.sizes.most_common(1)[0][0]) >= 64 else 32


def project(folder: Path, images: Path | None) -> list[str]:
    """Write DIR/ssfl.toml; what to tell the person who asked for it."""
    target = folder / PROJECT
    if target.exists():
        raise ConfigError(f"{target} exists already and is not overwritten: choose another DIR or move it")
    found = inspect(images or folder, images is None)
    users = most_users(found)
    text = config(found, users)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the name of a folder is not UTF-8"
        raise ConfigError(f"cannot write {target}: {reason}; choose another DIR") from error
    return [
        *summary(found, users),
        f"wrote {target}; now",
        f"  ssfl split {folder}    who would get which images",
        f"  ssfl run {folder}      train",
    ]


def inspect(folder: Path, by_itself: bool) -> Found:
    """Look at every file's name and header, not at its pixels."""
    layout = "put the images of each class in a sub-folder, and those without labels in unlabelled/"
    if not folder.is_dir():
        if folder.exists():
            raise DataError(f"{folder} is a file: give the folder that holds the images; {layout}")
        option = "give the images' folder with --images FOLDER" if by_itself else "check its name"
        raise DataError(f"there is no folder {folder}: {option}; {layout}")
    if by_itself and not pictures.list_images(folder):
        raise DataError(f"{folder} holds no images: give their folder with --images FOLDER; {layout}")
    if not pictures.list_images(folder):
        raise DataError(f"{folder} holds no images ({', '.join(sorted(pictures.IMAGE_SUFFIXES))}): {layout}")
    files = own.sort_files(folder, Data.test_fraction)
    good, broken = decoding.headers(files.everything)
    files = own.readable(files, broken, "skip")
    sizes = Counter((header.width, header.height) for header in good.values())
    return Found(folder, files, sizes, all(header.grey for header in good.values()))


def most_users(found: Found) -> int:
    """As many users as get images in the split that the config asks for, at most ten.

    The split is tried with the labels alone, so that the config is known to run before it is written.
    """
    size = found.size
    width, height = (size, size) if size else next(iter(found.sizes))
    train = found.files.labels(found.files.train) + [-1] * len(found.files.unlabelled)
    test = found.files.labels(found.files.test)
    shape = (1 if found.grey else 3, height, width)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    dataset = Dataset(
        found.folder.name,
        none.expand(len(train), *shape), torch.tensor(train),
        none.expand(len(test), *shape), torch.tensor(test),
        tuple(found.files.train), (0.0,), (1.0,), not found.grey, **own.owners(found.files),
    )  # fmt: skip
    checked(dataset, found.folder)
    named = len(found.files.users)
    for users in [named] if named else range(min(USERS, len(train)), 0, -1):
        try:
            assemble.make_parts(assemble.resolve(_settings(found, users), dataset), dataset)
            return users
        except SsflError:
            continue
    raise DataError(
        f"{found.folder}: {len(train)} training images are too few for a server and one user: add some"
    )


def _settings(found: Found, users: int) -> Config:
    chosen = [f"model.name={model}"] if (model := light_model(found)) else []
    path = f"data.path={json.dumps(str(found.folder))}"
    return load_config("own", [path, f"split.users={users}", *chosen])


def light_model(found: Found) -> str | None:
    """The network that a CPU gets, where a GPU would get another."""
    side = found.size or min(next(iter(found.sizes)))
    shape = (1 if found.grey else 3, side, side)
    chosen = networks.suited(shape, GPU)
    return None if chosen == networks.suited(shape, True) else chosen


def summary(found: Found, users: int) -> list[str]:
    """What was found, in words."""
    files, names = found.files, list(found.files.train)
    labelled, test = (sum(map(len, part.values())) for part in (files.train, files.test))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    sizes = sorted(found.sizes)
    pixels = " to ".join(f"{width}x{height}" for width, height in sorted({sizes[0], sizes[-1]}))
    told = [
        f"{found.folder}: {len(names)} classes ({shown})",
        f"  {labelled} labelled images, {len(files.unlabelled)} without labels, {test} for testing"
        + ("" if files.own_test else " (a part of each class, held out)"),
        f"  {'grey' if found.grey else 'colour'}, {pixels} pixels"
        + (f", resized to {found.size}x{found.size}" if found.size else ""),
    ]
    if files.users:
        named = ", ".join([*files.users][:8]) + (", ..." if users > 8 else "")
        told.append(f"  {users} users, one for each sub-folder of unlabelled/ ({named})")
    told += [f"  {line}" for line in loose(len(files.users.get(own.LOOSE, [])))]
    told += [f"  {line}" for line in untested(names, [len(files.test.get(name, [])) for name in names])]
    if not files.unlabelled:
        told.append(f"  all are labelled: the server keeps some, {users} users get the others without labels")
    return [printable(line) for line in told]


def config(found: Found, users: int) -> str:
    """The commented TOML."""
    size = found.size
    about = "\n".join(f"# {line.strip()}" for line in summary(found, users))
    testing = (
        "# test images come from test/"
        if found.files.own_test
        else f"test_fraction = {Data.test_fraction}  # of each class: there is no folder test/"
    )
    resized = f"size = {size}  # pixels: every" if size else "# size = 32  # pixels: every"
    known = ", ".join(limits_of(Model)["name"].choices)
    network = f'# name = "small"  # {known}; by itself what suits the images and the machine'
    part, batch = f"# participants = {users}  # users that take part in a round", 64
    if model := light_model(found):
        part = f"participants = {min(users, FEW)}  # users that take part in a round: few, for a CPU"
        batch = 32
        network = f'name = "{model}"  # quick on a CPU; with a GPU leave it out, or choose from {known}'
    differ = "skew = 0.4  # how different users are: 0 all alike, 1 one main class each"
    dealt = "how many users the images without labels are dealt to"
    if found.files.users:
        dealt = "one for each sub-folder of unlabelled/; loose files form one more"
        differ = "# every user has its own images: scheme and skew deal nothing"
    elif found.files.unlabelled:
        differ = "# images without labels are dealt in equal shares: scheme and skew need their classes"
    labels = "all of them" if found.files.unlabelled else "at most half of each class"
    return f"""\
{about}
#
#   ssfl split {PROJECT}    who would get which images
#   ssfl run {PROJECT}      train; `--set section.key=value` changes a setting for one run
#
# Lines that begin with # are what happens by itself. All settings: `ssfl settings`.

[data]
path = {json.dumps(str(found.folder.absolute()), ensure_ascii=False)}
{resized} image is resized to this square
{testing}
# validation = 0.1  # a part of the training images to choose settings by; test images choose nothing
# flip = {str(not found.grey).lower()}  # whether a mirrored image is still of its class; false for writing

[split]
users = {users}  # {dealt}
{differ}
# server_labels = 100  # labelled images at the server, by itself {labels}

[model]
{network}
norm = "group"

[method]
name = "anchored"  # users and server in turn; "server-only" trains on the labels alone: the line to beat
# threshold = 0.8  # a pseudo-label counts when the model is so sure; lower it if the mask rate stays near 0

[federation]
rounds = 100  # how long: accuracy that still rises at the end asks for more
period = 16  # local steps a round
{part}

[train]
batch_size = {batch}
lr = 0.03
warmup = 80  # steps in which the learning rate rises from 0

[run]
seed = 1  # another seed, another run: report the mean of several
device = "auto"  # a GPU where there is one
# track = "tensorboard"  # event files besides the run folder; also "mlflow" or "wandb"
"""
