"""Writes the config file of `ssfl new` for a folder of images. The file has comments and can be run without
changes."""

import json
from pathlib import Path
from shlex import quote
from typing import Any

from ssfl.config.settings import DataSettings, ModelSettings
from ssfl.config.sources import PROJECT
from ssfl.core import machine
from ssfl.core.fields import limits_of
from ssfl.data import own
from ssfl.errors import ConfigError
from ssfl.runs import choose
from ssfl.runs.choose import Choice, Facts
from ssfl.runs.text import loose, printable, untested


def project(folder: Path, images: Path | None) -> list[str]:
    """Writes `folder`/ssfl.toml for the images in `images` (default: in `folder`). Returns the lines that
    `ssfl new` prints."""
    target = folder / PROJECT
    if target.exists():
        raise ConfigError(f"{target} already exists and is not overwritten: choose another DIR, or move it")
    choose.require_images(images or folder, images is None)
    facts = choose.inspect(images or folder)
    chosen = choose.choose(facts, machine.cores(), choose.on_gpu({}), choose.has_pretrained())
    text = config(facts, chosen)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose another DIR") from error
    except ValueError as error:
        raise ConfigError(
            f"cannot write {target}: the path of the images is not UTF-8 ({images or folder}); rename that "
            "folder"
        ) from error
    return [
        *summary(facts, chosen),
        f"wrote {target}; next:",
        f"  ssfl split {quote(str(folder))}    shows which images the server and each user get",
        f"  ssfl run {quote(str(folder))}      trains",
    ]


def summary(facts: Facts, chosen: Choice) -> list[str]:
    """Returns lines of text that say what the folder of images contains and which settings were chosen for
    it."""
    files, names, users = facts.files, list(facts.files.train), chosen.settings["split"]["users"]
    labelled, test = (sum(map(len, part.values())) for part in (files.train, files.test))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    sizes = sorted(facts.sizes)
    pixels = " to ".join(f"{width}x{height}" for width, height in sorted({sizes[0], sizes[-1]}))
    lines = [
        f"{facts.folder}: {len(names)} classes ({shown})",
        f"  {labelled} labelled images, {len(files.unlabelled)} without labels, {test} test images"
        + ("" if files.own_test else " (a part of each class, held out)"),
        "  sub-folders and file names show no patients: if there are any, their images may be divided"
        if files.patients is None
        else f"  {files.patients} patients, by sub-folders or file names: no patient's images are divided",
        f"  stored as {'grey' if facts.grey else 'colour'}, {pixels} pixels",
    ]
    if files.users:
        named = ", ".join([*files.users][:8]) + (", ..." if users > 8 else "")
        lines.append(f"  {users} users, one for each sub-folder of unlabelled/ ({named})")
    lines += [f"  {line}" for line in loose(len(files.users.get(own.LOOSE, [])))]
    lines += [f"  {line}" for line in untested(names, [len(files.test.get(name, [])) for name in names])]
    if not files.unlabelled:
        lines.append(
            f"  every image has a label: the server keeps some, and {users} users get the rest without labels"
        )
    return [printable(line) for line in (*lines, *(f"  {line}" for line in chosen.why))]


def config(facts: Facts, chosen: Choice) -> str:
    """Returns the content of the config file, as TOML with comments."""
    about = "\n".join(f"# {line.strip()}" for line in summary(facts, chosen))
    testing = (
        "# test images come from test/"
        if facts.files.own_test
        else f"test_fraction = {DataSettings.test_fraction}  # the part of each class held out for testing"
    )
    size, users = chosen.settings["data"].get("size"), chosen.settings["split"]["users"]
    resized = f"size = {size}  # pixels: every" if size else "# size = 32  # pixels: every"
    known = ", ".join(limits_of(ModelSettings)["name"].choices)
    network = f'# name = "small"  # {known}; default: chosen for the images and the machine'
    model: dict[str, Any] = dict(chosen.settings["model"])
    if name := model.pop("name", None):
        network = f'name = "{name}"  # chosen for this machine; others: {known}'
    network = "\n".join([network, *(f"{key} = {json.dumps(value)}" for key, value in model.items())])
    federation, train = chosen.settings["federation"], dict(chosen.settings["train"])
    batch, warmup, rate = train.pop("batch_size"), train.pop("warmup"), train.pop("lr", 0.03)
    other_train = "".join(f"\n{key} = {json.dumps(value)}" for key, value in train.items())
    method = (
        'name = "anchored"  # users and server train in turn; "server-only" uses only the labelled images\n'
        "# threshold = 0.8  # a pseudo-label is used if the model's confidence is at least this"
    )
    if own_method := chosen.settings.get("method"):
        method = "\n".join(f"{key} = {json.dumps(value)}" for key, value in own_method.items())
    part = f"participants = {federation['participants']}  # users that take part in a round"
    differ = "skew = 0.4  # how different the users' classes are: 0 all alike, 1 one main class each"
    dealt = "the images without labels are divided among this many users"
    if facts.files.users:
        dealt = "one for each sub-folder of unlabelled/; loose files form one more"
        differ = "# every user has its own images: scheme and skew have no effect"
    elif facts.files.unlabelled:
        differ = "# images without labels are divided equally: scheme and skew need their classes"
    labels = "all of them" if facts.files.unlabelled else "at most half of each class"
    return f"""\
{about}
#
#   ssfl split {PROJECT}    shows which images the server and each user get
#   ssfl run {PROJECT}      trains; `--set section.key=value` changes a setting for one run
#
# Lines that begin with # show defaults and examples. All settings: `ssfl settings`.

[data]
path = {json.dumps(str(facts.folder.absolute()), ensure_ascii=False)}
{resized} image is resized to this square
{testing}
# validation = 0.1  # part of the training images for choosing settings; never use test images for that
# flip = false  # whether a mirrored image keeps its class; default: false if most images are grey
# broken = "stop"  # end with an error if a file cannot be read; default: leave the file out

[split]
users = {users}  # {dealt}
{differ}
# server_labels = 100  # labelled images at the server, default: {labels}

[model]
{network}
norm = "group"

[method]
{method}

[federation]
rounds = {federation["rounds"]}  # use more if the accuracy is still rising at the end
period = {federation["period"]}  # local steps per round
{part}

[train]
batch_size = {batch}
lr = {rate}
warmup = {warmup}  # steps in which the learning rate rises from 0{other_train}

[run]
seed = 1  # for a publication, report the mean over several seeds
device = "auto"  # a GPU if there is one
# track = "tensorboard"  # event files besides the run folder; also "mlflow" or "wandb"
"""
