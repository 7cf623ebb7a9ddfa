"""`ssfl new`: a commented config for a folder of images, checked to run as it is."""

import json
from pathlib import Path
from typing import Any

from ssfl.config.loading import PROJECT
from ssfl.config.settings import DataSettings, ModelSettings
from ssfl.core.fields import limits_of
from ssfl.data import own
from ssfl.errors import ConfigError
from ssfl.runs import choose
from ssfl.runs.choose import Choice, Facts
from ssfl.runs.text import loose, printable, untested


def project(folder: Path, images: Path | None) -> list[str]:
    """Write DIR/ssfl.toml; what to tell the person who asked for it."""
    target = folder / PROJECT
    if target.exists():
        raise ConfigError(f"{target} exists already and is not overwritten: choose another DIR or move it")
    choose.require_images(images or folder, images is None)
    found = choose.inspect(images or folder)
    chosen = choose.choose(found, choose.cores(), choose.on_gpu({}), choose.has_pretrained())
    text = config(found, chosen)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the name of a folder is not UTF-8"
        raise ConfigError(f"cannot write {target}: {reason}; choose another DIR") from error
    return [
        *summary(found, chosen),
        f"wrote {target}; now",
        f"  ssfl split {folder}    who would get which images",
        f"  ssfl run {folder}      train",
    ]


def summary(found: Facts, chosen: Choice) -> list[str]:
    """What was found and chosen, in words."""
    files, names, users = found.files, list(found.files.train), chosen.settings["split"]["users"]
    labelled, test = (sum(map(len, part.values())) for part in (files.train, files.test))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    sizes = sorted(found.sizes)
    pixels = " to ".join(f"{width}x{height}" for width, height in sorted({sizes[0], sizes[-1]}))
    told = [
        f"{found.folder}: {len(names)} classes ({shown})",
        f"  {labelled} labelled images, {len(files.unlabelled)} without labels, {test} for testing"
        + ("" if files.own_test else " (a part of each class, held out)"),
        f"  stored as {'grey' if found.grey else 'colour'}, {pixels} pixels",
    ]
    if files.users:
        named = ", ".join([*files.users][:8]) + (", ..." if users > 8 else "")
        told.append(f"  {users} users, one for each sub-folder of unlabelled/ ({named})")
    told += [f"  {line}" for line in loose(len(files.users.get(own.LOOSE, [])))]
    told += [f"  {line}" for line in untested(names, [len(files.test.get(name, [])) for name in names])]
    if not files.unlabelled:
        told.append(f"  all are labelled: the server keeps some, {users} users get the others without labels")
    return [printable(line) for line in (*told, *(f"  {line}" for line in chosen.why))]


def config(found: Facts, chosen: Choice) -> str:
    """The commented TOML."""
    about = "\n".join(f"# {line.strip()}" for line in summary(found, chosen))
    testing = (
        "# test images come from test/"
        if found.files.own_test
        else f"test_fraction = {DataSettings.test_fraction}  # of each class: there is no folder test/"
    )
    size, users = chosen.settings["data"].get("size"), chosen.settings["split"]["users"]
    resized = f"size = {size}  # pixels: every" if size else "# size = 32  # pixels: every"
    known = ", ".join(limits_of(ModelSettings)["name"].choices)
    network = f'# name = "small"  # {known}; by default what suits the images and the machine'
    model: dict[str, Any] = dict(chosen.settings["model"])
    if name := model.pop("name", None):
        network = f'name = "{name}"  # chosen for this machine; others: {known}'
    network = "\n".join([network, *(f"{key} = {json.dumps(value)}" for key, value in model.items())])
    federation, train = chosen.settings["federation"], dict(chosen.settings["train"])
    batch, warmup, rate = train.pop("batch_size"), train.pop("warmup"), train.pop("lr", 0.03)
    more = "".join(f"\n{key} = {json.dumps(value)}" for key, value in train.items())
    method = (
        'name = "anchored"  # users and server in turn; "server-only" trains on the labels alone\n'
        "# threshold = 0.8  # a pseudo-label counts when the model is this sure"
    )
    if own_method := chosen.settings.get("method"):
        method = "\n".join(f"{key} = {json.dumps(value)}" for key, value in own_method.items())
    part = f"participants = {federation['participants']}  # users that take part in a round"
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
# Lines that begin with # show defaults and examples. All settings: `ssfl settings`.

[data]
path = {json.dumps(str(found.folder.absolute()), ensure_ascii=False)}
{resized} image is resized to this square
{testing}
# validation = 0.1  # a part of the training images to choose settings by; test images choose nothing
# flip = false  # whether a mirrored image is still of its class; default: not if most images are grey
# broken = "stop"  # end with an error if a file cannot be read; default: leave it out

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
rounds = {federation["rounds"]}  # how long: accuracy that still rises at the end asks for more
period = {federation["period"]}  # local steps a round
{part}

[train]
batch_size = {batch}
lr = {rate}
warmup = {warmup}  # steps in which the learning rate rises from 0{more}

[run]
seed = 1  # another seed, another run: report the mean of several
device = "auto"  # a GPU where there is one
# track = "tensorboard"  # event files besides the run folder; also "mlflow" or "wandb"
"""
