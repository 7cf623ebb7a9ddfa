"""Evaluates a trained model on labelled images: a folder that has a sub-folder for each class, or arrays."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ssfl.core import statistics
from ssfl.data import pictures
from ssfl.data.array_checks import Array, as_array, coded_labels
from ssfl.data.dataset import UNLABELLED, WHITE
from ssfl.errors import DataError, warn_user
from ssfl.models.external import Factory
from ssfl.runs import text
from ssfl.runs.predict import Classifier, load_model, of_array, probabilities

BINS = 10
MOST_CLASSES = 20
"""With more classes than this, the confusion matrix is not shown as text."""


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: its true class, its predicted class (both as class numbers) and the
    confidence."""

    label: int
    predicted: int
    confidence: float
    number: int
    """The position of the image in the array, or of its file among those that could be read."""
    score: float | None = None
    """With two classes, the probability of the second class. Otherwise None."""
    file: Path | None = None
    """The image file; None for an image of an array."""

    @classmethod
    def of(cls, label: int, shares: Tensor, number: int, file: Path | None = None) -> "Answer":
        """Returns the prediction with the probabilities `shares` [classes]."""
        likely = int(shares.argmax())
        score = None
        if len(shares) == 2:  # 1 minus a very small number is exact enough only as a Python number
            score = float(shares[1]) if likely == 0 else 1 - float(shares[0])
        return cls(label, likely, float(shares[likely]), number, score, file)

    @property
    def correct(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a model for labelled images, and the metrics computed from them. As text
    (`print(evaluation)`), it is the table that `ssfl evaluate` shows."""

    run: str
    folder: str | None
    """The folder of the images; None if they were arrays."""
    classes: tuple[str, ...]
    answers: list[Answer] = field(repr=False)
    broken: list[str]
    """One line of text for each file that could not be read. These files are not in `answers`."""
    white: int = WHITE
    """The pixel value that becomes 255 (white) when image files with more than 8 bits per channel are
    read."""

    @property
    def count(self) -> int:
        return len(self.answers)

    @property
    def correct(self) -> int:
        return sum(answer.correct for answer in self.answers)

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def interval(self) -> statistics.Interval:
        return statistics.wilson(self.correct, self.count)

    @property
    def confusion(self) -> list[list[int]]:
        """The confusion matrix: how many images of each true class (row) are predicted as each class
        (column)."""
        labels, predictions = (
            [getattr(answer, key) for answer in self.answers] for key in ("label", "predicted")
        )
        return statistics.confusion(labels, predictions, len(self.classes))

    @property
    def class_accuracy(self) -> list[float | None]:
        """The accuracy on the images of each class; None for a class without images."""
        return statistics.class_accuracies(self.confusion)

    @property
    def balanced_accuracy(self) -> float:
        """The mean of the accuracies of all classes that have images."""
        return statistics.balanced(self.class_accuracy) or 0.0

    @property
    def auroc(self) -> tuple[float, statistics.Interval | None] | None:
        """The area under the ROC curve and its 95 % interval, if there are two classes and both have images;
        otherwise None. The interval is None if the model separates the classes completely."""
        scores: tuple[list[float], list[float]] = ([], [])
        for answer in self.answers:
            if answer.score is not None:
                scores[answer.label].append(answer.score)
        return statistics.auroc(*scores) if all(scores) else None

    @property
    def bins(self) -> list[statistics.Bin]:
        """The data of a reliability diagram: predictions are divided into bins by confidence, and each bin
        has its mean confidence and accuracy."""
        confidences = [answer.confidence for answer in self.answers]
        return statistics.reliability(confidences, [answer.correct for answer in self.answers], BINS)

    @property
    def calibration_error(self) -> float:
        """The expected calibration error (ECE). For each of the `bins`, the distance between its mean
        confidence and its accuracy is computed. The error is the mean of these distances, weighted by the
        number of images in each bin."""
        return statistics.calibration_error(self.bins) or 0.0

    @property
    def mean_confidence(self) -> float:
        return sum(answer.confidence for answer in self.answers) / self.count

    @property
    def mistakes(self) -> list[Answer]:
        """The wrong predictions, sorted by confidence: the most confident mistake comes first."""
        wrong = [answer for answer in self.answers if not answer.correct]
        return sorted(wrong, key=lambda answer: (-answer.confidence, str(answer.file), answer.number))

    def __str__(self) -> str:
        caveat = (
            f"; only {self.count} images, so this is a rough estimate" if self.count < statistics.FEW else ""
        )
        gap = self.mean_confidence - self.accuracy
        calibration = "neither over- nor underconfident on average"
        if abs(gap) >= 0.03:
            calibration = "overconfident" if gap > 0 else "underconfident"
        matrix, classes = self.confusion, self.classes
        rows = [["class", "images", "correct", "accuracy", "95 % interval", "most often confused with"]]
        for k, row in enumerate(matrix):
            total = sum(row)
            if not total:
                continue
            most, other = max(((many, j) for j, many in enumerate(row) if j != k), default=(0, k))
            confused = f"{classes[other]} ({most})" if most else "-"
            share = text.percent(row[k] / total)
            rows.append([classes[k], f"{total}", f"{row[k]}", share, text.interval(row[k], total), confused])
        lines = [
            f"accuracy           {text.accuracy(self.correct, self.count)}{caveat}",
            f"balanced accuracy  {text.percent(self.balanced_accuracy)}",
            f"calibration error  {text.percent(self.calibration_error)} (mean confidence "
            f"{text.percent(self.mean_confidence)}: {calibration})",
            "",
            *text.table(rows).splitlines(),
        ]
        if (found := self.auroc) is not None:
            area, between = found
            ends = "" if between is None else f" (95 % interval {between.low:.3f} to {between.high:.3f})"
            lines.insert(2, f"area under ROC     {area:.3f}{ends}")
        if len(classes) <= MOST_CLASSES:
            head = ["true \\ predicted", *classes]
            cells = [
                [classes[k], *(str(many or "·") for many in row)] for k, row in enumerate(matrix) if sum(row)
            ]
            lines += ["", *text.table([head, *cells]).splitlines()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole evaluation as a dict of plain values, as `ssfl evaluate --json` prints it."""
        matrix = self.confusion
        area, between = self.auroc or (None, None)
        by_class = {
            name: {
                "accuracy": share, "correct": matrix[k][k], "count": sum(matrix[k]),
                "interval": list(statistics.wilson(matrix[k][k], sum(matrix[k]))),
            }
            for k, (name, share) in enumerate(zip(self.classes, self.class_accuracy, strict=True))
        }  # fmt: skip
        return {
            "run": self.run,
            "folder": self.folder,
            "count": self.count,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "balanced_accuracy": self.balanced_accuracy,
            "auroc": area,
            "auroc_interval": None if between is None else list(between),
            "classes": list(self.classes),
            "class_accuracy": by_class,
            "confusion": matrix,
            "calibration": {
                "error": self.calibration_error,
                "mean_confidence": self.mean_confidence,
                "bins": [asdict(one) for one in self.bins],
            },
            "mistakes": [
                {
                    **({"image": one.number} if one.file is None else {"file": str(one.file)}),
                    "class": self.classes[one.label],
                    "predicted": self.classes[one.predicted], "confidence": one.confidence,
                }
                for one in self.mistakes
            ],
            "skipped": self.broken,
        }  # fmt: skip


def evaluate(
    run: str | os.PathLike[str],
    images: str | Path | tuple[Array, Array],
    *,
    model: Factory | str | None = None,
) -> Evaluation:
    """Evaluates a run's model on labelled images. The result has `accuracy`, `interval`, `class_accuracy`,
    `confusion`, `calibration_error`, `mistakes` and others. `as_dict()` returns all of them as plain values,
    and `print` shows them as a table.

    `images` is a folder that has a sub-folder for each class, or a pair (images, labels) of arrays as for
    `ssfl.Data`. `run` is a run folder, its `ssfl.Result` or an exported .safetensors file. If the run used a
    network of your own, `model` is the function that makes it, or its import path.

    Files are read exactly as `predict` reads them. Files that cannot be read are left out, and the field
    `broken` of the result lists them. Raises if no file can be read.
    """
    pair = isinstance(images, tuple) and len(images) == 2
    if not pair and not isinstance(images, str | Path):
        raise DataError(
            f"images is of type {type(images).__name__}: pass the path of a folder that has a sub-folder for "
            "each class, or a pair (images, labels) of arrays"
        )
    classifier = load_model(run, model)
    if isinstance(images, tuple):
        answers = _answers(classifier, *images)
        return Evaluation(os.fspath(run), None, classifier.classes, answers, [], classifier.white)
    label_of = dict(labelled_files(Path(images), classifier.classes))
    broken: list[str] = []
    answers = [
        Answer.of(label_of[file], shares, number, file)
        for number, (file, shares) in enumerate(probabilities(classifier, list(label_of), broken))
    ]
    if not answers:
        raise DataError(
            f"{images}: none of its {len(broken)} images can be read; the first error: {broken[0]}. "
            "Check that the files are complete images"
        )
    return Evaluation(os.fspath(run), str(images), classifier.classes, answers, broken, classifier.white)


def _answers(classifier: Classifier, images: Array, labels: Array) -> list[Answer]:
    """Returns the predictions for the labelled images of an array; images without a label are left out."""
    pixels = images if isinstance(images, Tensor) else as_array(images, "images")
    codes = coded_labels(labels, classifier.classes, "labels")
    if len(pixels) != len(codes):
        raise DataError(f"there are {len(pixels)} images and {len(codes)} labels: pass one label per image")
    known = np.flatnonzero(codes >= 0)
    if not len(known):
        raise DataError("no image has a label: pass at least one image whose label is not -1 or None")
    return [
        Answer.of(int(codes[number]), shares, int(number))
        for number, shares in zip(known, of_array(classifier, pixels[known]), strict=True)
    ]


def labelled_files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Returns all image files in the sub-folders of `folder`, each with its class number. The name of a
    sub-folder is the class of its images. A sub-folder for unlabelled images is skipped. Raises if any other
    sub-folder is empty or is not one of the `classes`."""
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such folder; name a folder that has a sub-folder for each class"
        )
    places = {place.name: place for place in pictures.list_folders(folder) if place.name not in UNLABELLED}
    known = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
    if not places:
        raise DataError(
            f"{folder}: holds no sub-folders; put the images of each class in a sub-folder with its name "
            f"({known})"
        )
    unknown = [name for name in places if name not in classes]
    if unknown:
        inner = [name for name in ("test", "validation", "train") if name in unknown]
        hint = f"did you mean {folder / inner[0]}?" if inner else "rename or remove the folder"
        named = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise DataError(f"{folder}: the model has no class {named}, only {known}; {hint}", value=unknown[0])
    labelled = []
    for name, place in places.items():
        files = pictures.list_images(place)
        if not files:
            raise DataError(f"{pictures.nothing_in(place)}; add images, or remove the folder")
        labelled += [(file, list(classes).index(name)) for file in files]
    loose = len(pictures.list_images(folder, nested=False))
    if loose:
        warn_user(f"{loose} images in {folder} are in no sub-folder of a class and are left out")
    return labelled
