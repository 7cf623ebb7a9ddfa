"""Lets the trained model of a run classify images for a report: for the confusion matrix, the example images,
and the weak and strong views of training images."""

import base64
import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ssfl.core import outside
from ssfl.core.rows import layout_of
from ssfl.data import inventory
from ssfl.data.dataset import Dataset
from ssfl.errors import RunError, SsflError, one_line, warn_user
from ssfl.models import external
from ssfl.models.building import network_of, plain_network_of
from ssfl.report.gather import Run, inside, whole
from ssfl.runs import assemble, checkpoints, folder, resolve, surroundings
from ssfl.runs.predict import Classifier, load_model
from ssfl.runs.result import test_views
from ssfl.simulate.scoring import at_once
from ssfl.simulate.simulation import evaluated_row

MOST_TESTED = 10_000
"""The model classifies at most this many test images for a report."""
SIDE = 48
"""The largest width or height of an image in a report, in pixels. Larger images are scaled down to keep the
file small."""
EACH, VIEWED, WEAK, STRONG = 8, 6, 2, 3
"""EACH example images are shown of each of three kinds: confident mistakes, the images with the least
confident predictions, and random images. VIEWED training images are shown, each with WEAK weak and STRONG
strong views."""

Shown = dict[str, Any]
"""An image on the page: the picture as a data: URL, its true class (if known), the predicted class, and the
confidence of the prediction."""


@dataclass(frozen=True)
class Seen:
    """The predictions of a run's model for its test images, and the images to show. If the run has no test
    images, the predictions are those of its cross-validation for the labelled images."""

    round: int
    """The round after which the model was saved."""
    tested: int
    """The number of test images that the model classified, or of labelled images in the cross-validation."""
    of: int
    """The number of all test images, or of labelled images in the cross-validation."""
    confusion: list[list[int]]
    """The number of images by [true class][predicted class]."""
    classes: list[str]
    examples: list[tuple[str, list[Shown]]]
    """Lists of example images, each with a title. An example has the picture, its true class, the predicted
    class and the confidence."""
    views: list[Shown]
    """Training images, each with its weak and strong views and its pseudo-label."""
    correct: list[bool] | None = None
    """For each classified test image, whether it was classified correctly. None if the confusion matrix comes
    from cross-validation."""
    source: str = ""
    """The fingerprint (a hash) of the data. Predictions of two runs are compared only if it is the same."""


class Loader:
    """Loads each data set only once for all runs of a report."""

    def __init__(self) -> None:
        self._held: dict[Any, Dataset] = {}
        self.shown: dict[str, set[int]] = {}
        """By data fingerprint, the test images that are already on the page, so that none is shown twice."""

    def dataset(self, run: Run) -> Dataset:
        """Returns the data of a run. Raises if the images have changed since the run. Nothing is
        downloaded."""
        config = replace(run.config, data=replace(run.config.data, download=False))
        key = config.data, bool(config.run.folds)
        if key not in self._held:
            self._held[key] = resolve.load_data(config)
        images = assemble.scaled_for(config, self._held[key])
        if run.split.get("fingerprint") != inventory.fingerprint(images):
            raise RunError(f"the images of {images.name} have changed since the run")
        return images


def look(run: Run, loader: Loader) -> Seen | str:
    """Returns the predictions of a run's model for its test images, or a sentence that says why there are
    none. For a run without test images, they are the predictions of its cross-validation for the labelled
    images."""
    if run.test_kept and not run.accuracy:
        when = "are never" if run.judged_by == "validation" else "are not yet"
        return (
            f"There are no images and no confusion matrix: the test images {when} used (run.test = "
            f"{run.config.run.test!r})."
        )
    try:
        _require_loadable(run)
        data = loader.dataset(run)
        model, at = _model(run, data)
        return _seen(run, data, model, at, loader) if len(data.test_labels) else _folded(run, data, model, at)
    except (SsflError, OSError) as error:
        why = one_line(error)
        if outside.is_outside(run.config.model.name) or outside.is_outside(run.config.data.name):
            warn_user(
                f"the report has no confusion matrix, test images and training views of {run.path}: {why}"
            )
        return f"There are no images and no confusion matrix: {why}."


def _require_loadable(run: Run) -> None:
    """Raises if the images or the network of the run were passed from Python. The message says what to do in
    the next run, because a report has no way to receive them."""
    names = {"data": run.config.data.name, "model": run.config.model.name}
    nouns = {"data": "the images (data=...)", "model": "the network (model=...)"}
    passed = [key for key, name in names.items() if name == outside.IN_MEMORY]
    if passed:
        what = " and ".join(nouns[key] for key in passed)
        instead = " and ".join(f"{key}.name=FILE.py:function" for key in passed)
        raise RunError(
            f"a report cannot load what was passed from Python, here {what}. The next time, train with "
            f"{instead}; then `ssfl report RUN --with FILE.py` shows them"
        )


def _model(run: Run, data: Dataset) -> tuple[Classifier, int]:
    """Returns the model of a run and the round after which it was saved. For an unfinished run it is the
    model of the last checkpoint."""
    if (run.path / "model.safetensors").is_file():
        model = load_model(run.path)
        if model.classes != data.classes or model.shape != data.shape:
            raise RunError(
                f"the model has {len(model.classes)} classes and images of the shape {list(model.shape)}, "
                f"but the data have {len(data.classes)} classes and the shape {list(data.shape)}, or the "
                "names of the classes differ"
            )
        return model, run.played
    saved = checkpoints.newest(run.path, torch.device("cpu"))
    if saved is None:
        raise RunError("no model is saved yet")
    if run.config.model.norm_statistics in ("recompute", "everyone"):
        raise RunError(
            "the model cannot be used before the run ends, because its BatchNorm statistics are computed then"
        )
    config = run.config
    data = assemble.scaled_for(config, data)
    folder.require_same_code(run.path, "model", config.model.name)
    network = network_of(config, data)
    row = evaluated_row(saved.state)
    tensors = config.method.plain(layout_of(network).unflatten(row))
    plain = plain_network_of(config, data)
    plain.to(row.dtype).load_state_dict(tensors, strict=False)
    plain = external.plain(plain)
    card = {
        "classes": data.classes, "shape": data.shape, "mean": data.mean, "std": data.std,
        **test_views(config.data),
    }  # fmt: skip
    return Classifier(plain, card).eval(), saved.state.round


def _folded(run: Run, data: Dataset, model: Classifier, at: int) -> Seen | str:
    """Returns the predictions for a run without test images: the confusion matrix that its cross-validation
    recorded, and views of training images. `at` is the round after which the model was saved. If there is no
    matrix yet, returns a sentence that says so."""
    matrix = inside(run.summary.get("folds"), "confusion")
    size = len(data.classes)
    square = (
        isinstance(matrix, list) and len(matrix) == size and all(len(whole(row)) == size for row in matrix)
    )
    if not square:
        return "There is no confusion matrix yet, because cross-validation starts after the last round."
    with torch.no_grad(), surroundings.enough_memory():
        views = _views(run, data, model, torch.Generator().manual_seed(0))
    count = sum(map(sum, matrix))
    return Seen(at, count, count, matrix, list(data.classes), [], views)


def _seen(run: Run, data: Dataset, model: Classifier, at: int, loader: Loader) -> Seen:
    """Returns the model's predictions for at most MOST_TESTED test images, with example images and views of
    training images. `at` is the round after which the model was saved. `loader` knows which images are
    already on the page."""
    seed = torch.Generator().manual_seed(0)  # runs on the same data show the same images
    with torch.no_grad(), surroundings.enough_memory():
        total = len(data.test_labels)
        chosen = torch.randperm(total, generator=seed)[:MOST_TESTED].sort().values
        images, labels = data.test_images[chosen], data.test_labels[chosen]
        device = assemble.choose_device("auto")
        model.to(device)
        parts = [
            model.averaged(part.to(device)).softmax(-1).cpu() for part in images.split(at_once(data.shape))
        ]
        shares = torch.cat(parts)
        model.cpu()
        sure, predicted = shares.max(-1)
        size = len(data.classes)
        pairs = torch.bincount(labels * size + predicted, minlength=size * size)
        wrong = (predicted != labels).nonzero()[:, 0]
        mistakes = wrong[sure[wrong].argsort(descending=True)]
        unsure = sure.argsort()[: 3 * EACH]
        random_order = torch.randperm(len(labels), generator=seed)
        source = str(run.split.get("fingerprint"))
        shown = loader.shown.setdefault(source, set())
        examples = []
        for title, places in (
            ("Confident mistakes", mistakes),
            ("Least confident", unsure),
            ("Drawn at random", random_order),
        ):
            new = [i for i in places.tolist() if i not in shown][:EACH]
            shown.update(new)
            items = [_example(images[i], labels[i], predicted[i], sure[i], data.classes) for i in new]
            examples.append((title, items))
        views = _views(run, data, model, seed)
    matrix = pairs.view(size, size).tolist()
    correct = (predicted == labels).tolist()
    return Seen(at, len(labels), total, matrix, list(data.classes), examples, views, correct, source)


def _example(
    image: Tensor, label: Tensor, predicted: Tensor, sure: Tensor, classes: tuple[str, ...]
) -> Shown:
    """Returns an example image as shown on the page: the picture, its true and predicted class, and the
    confidence."""
    return {
        "image": picture(image),
        "true": classes[int(label)],
        "predicted": classes[int(predicted)],
        "correct": bool(label == predicted),
        "confidence": round(float(sure), 4),
    }


def _views(run: Run, data: Dataset, model: Classifier, seed: torch.Generator) -> list[Shown]:
    """Returns a few training images with their weak and strong views, augmented as in training, and the
    model's prediction for the first weak view."""
    flip = bool(run.config.data.flip)
    chosen = torch.randperm(len(data.images), generator=seed)[:VIEWED]
    images = data.images[chosen]
    weak = [data.weak.of(images, seed, flip) for _ in range(WEAK)]
    strong = [data.strong.of(images, seed, flip) for _ in range(STRONG)]
    sure, predicted = model(weak[0]).softmax(-1).max(-1)
    return [
        {
            "image": picture(images[i]),
            "weak": [picture(views[i]) for views in weak],
            "strong": [picture(views[i]) for views in strong],
            "predicted": data.classes[int(predicted[i])],
            "confidence": round(float(sure[i]), 4),
            "true": None if data.labels[chosen[i]] < 0 else data.classes[int(data.labels[chosen[i]])],
        }
        for i in range(len(images))
    ]


def picture(image: Tensor) -> str:
    """Returns an image, uint8 [C, H, W], as a PNG in a data: URL. Images larger than `SIDE` pixels are scaled
    down."""
    pixels = image.permute(1, 2, 0).numpy()
    shown = Image.fromarray(np.ascontiguousarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]))
    shown.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    shown.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def unpacked(address: str) -> Image.Image:
    """Returns the image from a data: URL that `picture` made. matplotlib needs it for the figures."""
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
