"""Loads the trained model of a run, predicts classes with it, and exports it to files."""

import io
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssfl.core import outside, progress, rows
from ssfl.data import formats, gentle, sources
from ssfl.data.array_checks import as_array, image_tensor
from ssfl.data.dataset import WHITE
from ssfl.data.formats import LARGEST
from ssfl.errors import DataError, RunError, warn_user, with_class
from ssfl.models import backbones, external, networks
from ssfl.runs import folder, resuming, surroundings
from ssfl.simulate import scoring

LONGEST = 1000
"""The largest number of characters in the name of a class, when a model file is read."""
MOST_VIEWS = 64
"""The largest number of test views over which a prediction can be averaged, when a model file is read."""
SLACK = 1e-3
"""How far below 0 or above 1 the pixel values of float images may be. Resizing can put them slightly
outside."""


class Classifier(nn.Module):
    """A trained network together with its normalisation: it takes images and returns logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, card: dict[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.card = card
        self.saved = set(network.state_dict())
        """The names of the tensors that an export writes. Frozen weights are among them only if the model
        card has "whole", which means that the file contains all tensors of the network."""
        self.classes: tuple[str, ...] = tuple(card["classes"])
        self.shape: tuple[int, int, int] = tuple(card["shape"])
        self.white = int(card.get("white", WHITE))
        if not 255 <= self.white <= WHITE:
            raise ValueError(
                f"its model card says that the largest pixel value is {self.white}, not 255 to {WHITE}"
            )
        self.test_views, self.flip = int(card.get("test_views", 0)), bool(card.get("flip", False))
        """The number of test views that `averaged` uses besides the image itself, and whether some of them
        are mirrored."""
        self.register_buffer("mean", torch.tensor(card["mean"]))
        self.register_buffer("std", torch.tensor(card["std"]))

    def _require_scaled(self, least: float, most: float) -> None:
        if least < -SLACK or most > 1 + SLACK:
            raise ValueError(
                f"floats must be from 0 to 1, not {least:g} to {most:g}: divide by 255, or use uint8"
            )

    def forward(self, images: Tensor | np.ndarray) -> Tensor:
        """Returns the logits [N, classes] for N images. The images are a tensor [N, C, H, W], or a numpy
        array [N, H, W] or [N, H, W, 3]. They are uint8, or floats from 0 to 1."""
        if not isinstance(images, Tensor):
            images = torch.from_numpy(np.array(images)).to(self.mean.device)
            images = images.unsqueeze(-1) if images.dim() == 3 else images
            if images.dim() == 4 and tuple(images.shape[1:]) != self.shape:
                images = images.movedim(-1, 1)
        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(
                f"images must be [N, {', '.join(map(str, self.shape))}], not {list(images.shape)}"
            )
        scale = 1.0 if images.is_floating_point() else 255.0
        if scale == 1.0 and len(images) and not torch.compiler.is_compiling():
            with suppress(RuntimeError):  # values cannot be read inside vmap or on the device "meta"
                self._require_scaled(*(float(value) for value in images.detach().aminmax()))
        weight = next(self.network.parameters())
        x = images.to(weight.dtype) / scale
        x = (x - self.mean[:, None, None]) / self.std[:, None, None]
        return self.network(x.to(weight.dtype))  # type: ignore[no-any-return]

    def averaged(self, images: Tensor) -> Tensor:
        """Returns the logits [N, classes] for uint8 images [N, C, H, W], averaged over each image and its
        test views (data.test_views). Evaluations, `ssfl predict` and `ssfl evaluate` use these logits."""
        views = (gentle.test_view(images, number, self.flip) for number in range(1, self.test_views + 1))
        return scoring.averaged(self, chain([images], views))


class Averaged(nn.Module):
    """The module that `export` saves as a torch.export program. It makes the same predictions as `ssfl
    predict`."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits [N, classes] for uint8 images [N, C, H, W], averaged over test views."""
        return self.classifier.averaged(images)


def check_card(card: Any, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError if a model card (the description in a model file) cannot come from a run, or does not
    fit the tensors, or if the tensors are not finite."""
    check_description(card)
    classes = len(card["classes"])
    if not any(tensor.dim() and classes == len(tensor) for tensor in tensors.values()):
        raise ValueError(f"its model card lists {classes:,} classes, but no layer has as many outputs")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError("its weights contain values that are not finite")


def check_description(card: Any) -> None:
    """Raises ValueError if a model card cannot come from a run. It is called before the network is built,
    because a manipulated card could ask for a huge network."""
    if not isinstance(card, dict) or not isinstance(card.get("model"), str):
        raise ValueError("its model card names no network")
    classes, shape = card.get("classes"), card.get("shape")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("its model card has no list of class names")
    if any(len(name) > LONGEST for name in classes):
        raise ValueError(f"a class has a name of more than {LONGEST:,} letters")
    sides = shape if isinstance(shape, list) and all(type(side) is int for side in shape) else []
    if len(sides) != 3 or sides[0] not in (1, 3) or not all(1 <= side <= LARGEST for side in sides[1:]):
        raise ValueError(
            f"its model card says that images are {str(shape)[:100]}, not [1 or 3 channels, height, width] "
            f"with sides of at most {LARGEST:,} pixels"
        )
    for key in ("mean", "std"):
        numbers = card.get(key)
        complete = isinstance(numbers, list) and len(numbers) == sides[0]
        if not complete or not all(isinstance(one, float | int) and abs(one) < 1e30 for one in numbers or ()):
            raise ValueError(f"its model card has no finite {key} for each channel")
    if min(card["std"]) <= 0:
        raise ValueError(f"its model card has a std of {min(card['std']):g}, but it must be above 0")
    views = card.get("test_views", 0)
    if type(views) is not int or not 0 <= views <= MOST_VIEWS:
        raise ValueError(
            f"its model card says that predictions are averaged over {str(views)[:100]} views, not over 0 to "
            f"{MOST_VIEWS}"
        )


def load_model(run: str | os.PathLike[str], model: external.Factory | str | None = None) -> Classifier:
    """Returns the final model of a run as a `Classifier`, in eval mode; its class names are in `.classes`.
    `run` is a run folder, its `ssfl.Result` or an exported .safetensors file. If the run is not finished, the
    model of its last checkpoint is returned, with a warning.

    If the run used a network of your own, `model` is the function that makes it, or its import path.
    """
    path = Path(run)
    if isinstance(model, str):
        outside.trust(model)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        config = folder.read_config(path)  # raises if this is not a run folder
        file = path / folder.UNFINISHED
        if not file.is_file():
            folder.require_resumable(path)  # raises for runs of the first release
            raise RunError(f"{path} has no model yet: finish it with `{resuming.command(config, path)}`")
    tensors, card = folder.read_model(file)
    if path.is_dir() and file.name == folder.UNFINISHED:
        warn_user(
            f"{path} is not finished: its model after round {card.get('round')} of "
            f"{config.federation.rounds} is used; `{resuming.command(config, path)}` continues the run"
        )
    try:
        check_card(card, tensors)
    except ValueError as error:
        raise RunError(f"{file} cannot be used, because {error}: export or train it again") from error
    try:
        return classifier(tensors, card, path, None if isinstance(model, str) else model)
    except (KeyError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        if surroundings.is_out_of_memory(error):
            raise RunError(
                f"there is not enough memory to load {file}: end other programs, or use another machine"
            ) from error
        raise RunError(
            f"{file} cannot be loaded into the network that its model card names ({with_class(error, 200)}): "
            "if the file is damaged, export or train it again"
        ) from error


def classifier(
    tensors: dict[str, Tensor], card: dict[str, Any], path: Path, make: external.Factory | None = None
) -> Classifier:
    """Returns the trained model with these tensors as a `Classifier`, in eval mode. The model card says how
    to build its network. If the network is from outside the package, `make` makes it; None means that its
    import path is used. `path` is the run folder or model file, for messages."""
    length = sum(tensor.numel() for tensor in tensors.values())
    network = network_of(card, path, length, make, tensors)
    network.to(next(iter(tensors.values())).dtype)
    return classifier_of(network, tensors, card)


def network_of(
    card: dict[str, Any],
    path: Path,
    length: int,
    make: external.Factory | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> nn.Module:
    """Returns the network that a model card names. A network from outside the package is made by `make`, or,
    if `make` is None, found by its import path. Raises if there is neither `make` nor an import path, or if
    the code at the import path has changed since the training. Also raises if the model card asks for a
    built-in network that has not `length` numbers, before memory is used for it.

    `tensors` are the tensors of the model file. If the file contains all tensors of the network, the frozen
    weights are taken from there. `path` is the run folder or model file, for messages.
    """
    name, classes = card["model"], len(card["classes"])
    channels, height, width = (int(size) for size in card["shape"])
    saved = tensors if card.get("whole") else None
    if name in backbones.NAMES:
        network: nn.Module = backbones.build(
            name, classes, (channels, height, width), card["train"], saved is None
        )
        _require_frozen(network, saved, card["outside"], path)
        return network
    if not outside.is_outside(str(name)):
        with torch.device("meta"):  # without memory for the weights
            sketch = networks.build(name, classes, (channels, height, width), card["norm"])
        described = rows.layout_of(sketch).length
        if length != described:
            raise ValueError(f"its network has {described:,} numbers, and the model has {length:,}")
        return networks.build(name, classes, (channels, height, width), card["norm"])
    if make is None and name == outside.IN_MEMORY:
        raise RunError(
            f"the network of {path} was passed as a Python object: use the same function from Python, with "
            "model=make, where make is the function that makes the network. To avoid this in the next run, "
            "name the function by --set model.name=FILE.py:make",
            key="model",
            fix="model=make",
        )
    identity = card["outside"]
    if make is None:
        outside.require(name, "model.name")
        if outside.digest(name) != identity["digest"]:
            raise RunError(
                f"{name} has changed since {path} was trained: restore the file", key="model.name", value=name
            )
    network = external.named(name, make, classes, (channels, height, width), int(identity["seed"]))
    _require_frozen(network, saved, identity, path)
    return network


def _require_frozen(
    network: nn.Module, saved: dict[str, Tensor] | None, identity: dict[str, Any], path: Path
) -> None:
    """Raises if the network's frozen weights are not those with which the model was trained. The fingerprint
    of the right weights is in `identity`. `saved` are all tensors of the network from the model file, which
    are loaded first; None if the file has no frozen weights. `path` is the run folder or model file, for
    messages."""
    if saved is not None:
        external.plain(network).load_state_dict(saved)
    if external.fingerprint(network) != identity["frozen"]:
        own = identity["name"] not in backbones.NAMES
        raise RunError(
            f"the layers or frozen weights of {identity['name']} have changed since {path} was trained: "
            + ("restore them" if own else "use the version of ssfl that trained it"),
            key="model.name",
            value=identity["name"],
        )


def classifier_of(network: nn.Module, tensors: dict[str, Tensor], card: dict[str, Any]) -> Classifier:
    """Loads the trained `tensors` into a network that already has its frozen weights, and returns it as a
    `Classifier`. Raises if the names of the tensors do not fit the network."""
    trained = set(rows.layout_of(network).names)
    names = set(external.plain(network).state_dict()) if card.get("whole") else trained
    unmatched = (trained - set(tensors)) | (set(tensors) - names)
    if unmatched:
        raise KeyError(f"tensors that only the file or only the network has: {sorted(unmatched)}")
    network.load_state_dict(tensors, strict=False)
    model = Classifier(external.plain(network), card).eval()
    model.saved = names
    return model


def predict(
    run: str | os.PathLike[str],
    images: str | Path | Iterable[str | Path] | np.ndarray | Tensor | Sequence[np.ndarray | Tensor],
    broken: list[str] | None = None,
    *,
    model: external.Factory | str | None = None,
    every_class: bool = False,
) -> list[dict[str, Any]]:
    """Returns for each image a dict with "file", "class" and "confidence". With `every_class`, it also has
    "probabilities", a dict of the probability of each class by its name. `images` is an image file, a
    folder, or a list of both; a folder stands for all image files in it. `run` and `model` are as in
    `load_model`.

    `images` may also be an array, as for `ssfl.Data`: [N, H, W] or [N, H, W, C], or a list of arrays [H, W]
    or [H, W, C]. Then the dicts have "image", the position in the array or list, instead of "file".

    Raises if a file cannot be read. But if `broken` is a list, a line about the file is appended to it
    instead.
    """
    images = _as_paths_or_array(images)
    classifier = load_model(run, model)
    if isinstance(images, np.ndarray | Tensor):
        return [
            {"image": number, **_prediction(classifier, shares, every_class)}
            for number, shares in enumerate(of_array(classifier, images))
        ]
    files = sources.image_files(images)
    return [
        {"file": str(file), **_prediction(classifier, shares, every_class)}
        for file, shares in probabilities(classifier, files, broken)
    ]


def _as_paths_or_array(images: Any) -> list[str | Path] | np.ndarray | Tensor:
    """Returns images that are given as files, folders or arrays as a list of paths, or as an array of images.
    Raises if they are something else."""
    if isinstance(images, Tensor) or (isinstance(images, np.ndarray) and images.dtype.kind not in "UO"):
        return images
    items = [images] if isinstance(images, str | Path) or not isinstance(images, Iterable) else list(images)
    if items and all(isinstance(item, np.ndarray | Tensor) for item in items):
        return as_array([as_array(item, "images") for item in items], "images")
    for item in items:
        if not isinstance(item, str | Path):
            raise DataError(
                f"images: cannot predict something of type {type(item).__name__}: pass image files, folders, "
                "or an array [N, H, W] or [N, H, W, C]"
            )
    return items


def _prediction(classifier: Classifier, shares: Tensor, every_class: bool) -> dict[str, Any]:
    """Returns the most likely class and its probability, given the probabilities [classes] of an image. With
    `every_class`, it also returns the probability of each class."""
    known: dict[str, Any] = {
        "class": classifier.classes[int(shares.argmax())], "confidence": float(shares.max())
    }  # fmt: skip
    if every_class:
        known["probabilities"] = dict(zip(classifier.classes, shares.tolist(), strict=True))
    return known


def of_array(classifier: Classifier, images: np.ndarray | Tensor) -> Iterator[Tensor]:
    """Yields the probabilities [classes] for each image of an array. Images of another size are resized as in
    training, if the model's images are square."""
    pixels = image_tensor(images, "images")
    channels, height, width = classifier.shape
    if tuple(pixels.shape[2:]) != (height, width) and height == width:
        pixels = formats.resized(pixels, height)
    if tuple(pixels.shape[1:]) != classifier.shape:
        raise DataError(
            f"images: the model was trained on images of {channels}x{height}x{width} (channels x height x "
            f"width), and these have {'x'.join(map(str, pixels.shape[1:]))}: convert them first"
        )
    batch = scoring.at_once(classifier.shape)
    for start in range(0, len(pixels), batch):
        part = pixels[start : start + batch]
        yield from _shares(classifier, part, [f"image {start + number}" for number in range(len(part))])


def _shares(classifier: Classifier, images: Tensor, names: Sequence[object]) -> Tensor:
    """Returns the probabilities [N, classes] for uint8 images [N, C, H, W]. Raises if one is not finite;
    `names` are the images in the message."""
    with torch.no_grad():
        shares = classifier.averaged(images).softmax(-1)
    finite = shares.isfinite().all(1).tolist()
    if not all(finite):
        name = names[finite.index(False)]
        raise RunError(
            f"{name}: the model's output for this image is not finite: train the model again, or use another "
            "model",
            value=str(name),
        )
    return shares


def probabilities(
    classifier: Classifier, files: Sequence[Path], broken: list[str] | None
) -> Iterator[tuple[Path, Tensor]]:
    """Yields for each image file that can be read its path and the probabilities [classes]. Raises if a file
    cannot be read. But if `broken` is a list, a line about the file is appended to it instead. Also raises if
    a probability is not finite."""
    batch = scoring.at_once(classifier.shape)
    with progress.bar("predictions", len(files)) as advance:
        for start in range(0, len(files), batch):
            part, read = [], []
            for file in files[start : start + batch]:
                try:
                    read.append(sources.read_image_files([file], *classifier.shape, classifier.white))
                    part.append(file)
                except DataError as error:
                    if broken is None:
                        raise
                    broken.append(str(error))
            if part:
                shares = _shares(classifier, torch.cat(read), part)
                yield from zip(part, shares, strict=True)
            advance(min(batch, len(files) - start))


def export(
    run: str | os.PathLike[str], target: str | Path, *, model: external.Factory | str | None = None
) -> list[Path]:
    """Writes the model of a run to three files and returns their paths: TARGET.safetensors (weights),
    TARGET.json (model card) and TARGET.pt2 (a torch.export program). `run` and `model` are as in
    `load_model`.

    The program takes uint8 images [N, C, H, W] and includes the normalisation and the test views.
    """
    classifier = load_model(run, model)
    files = free_files(target)
    example = torch.zeros(2, *classifier.shape, dtype=torch.uint8)
    # views of more images than this would need 64-bit coordinates
    most = (1 << 31) // math.prod(classifier.shape[1:]) - 1 if classifier.test_views else None
    with torch.no_grad(), warnings.catch_warnings():
        # a warning about weights in channels-last order, on a CPU
        warnings.filterwarnings("ignore", "No complete tensor")
        gentle.prepare(example.device)
        program = torch.export.export(
            Averaged(classifier),
            (example,),
            dynamic_shapes={"images": {0: torch.export.Dim("images", max=most)}},
        )
        program_file = io.BytesIO()
        torch.export.save(program, program_file)
    write(classifier, files[:2])
    folder.write_atomic(files[2], program_file.getvalue())
    return files


def free_files(target: str | Path) -> list[Path]:
    """Returns the paths of the three files that `export` will write; raises if one of them exists. Creates
    their folder if necessary."""
    target = Path(target)
    base = target.with_suffix("") if target.suffix in {".safetensors", ".json", ".pt2"} else target
    files = [base.parent / (base.name + end) for end in (".safetensors", ".json", ".pt2")]
    if not base.name:
        raise RunError(
            f"{str(target)!r} is not a file name: choose one, for example `ssfl export RUN my-model`"
        )
    existing = [str(file) for file in files if file.exists()]
    if existing:
        raise RunError(
            f"{', '.join(existing)} already exists and is not overwritten: choose another name",
            value=str(target),
        )
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {base.parent}: {error.strerror}") from error
    return files


def write(model: Classifier, files: Sequence[Path]) -> list[Path]:
    """Writes a model to the first of two `files`, as safetensors, and its model card to the second, as JSON.
    Returns the two paths. The card also says how image files must be read and scaled."""
    channels, height, width = model.shape
    colours = "grey (Rec. 601 luma)" if channels == 1 else "RGB"
    deep = f"images of 16 bits become 8: x * 255 / {model.white}, at most 255"
    if "white" not in model.card:
        deep = f"8 bits for each value, as in training (a file of 16 bits: x * 255 / {model.white})"
    averaged = (
        f", averaged over an image and {model.test_views} gentle views of it; the program does it, the "
        "weights alone do not"
    )
    card = model.card | {
        "reading": f"upright by EXIF; transparent becomes white; {deep}; {colours}; "
        f"stretched to width {width}, height {height} (bilinear, antialiased; no crop, no border)",
        "input": f"uint8 [N, {channels}, {height}, {width}]",
        "scaling": "(x / 255 - mean) / std, by channel; the program does it, the weights alone do not",
        "output": "logits" + averaged * bool(model.test_views),
    }
    tensors = {n: tensor for n, tensor in model.network.state_dict().items() if n in model.saved}
    folder.write_model(files[0], tensors, card)
    folder.write_atomic(files[1], json.dumps(card, indent=1).encode() + b"\n")
    return list(files)
