"""Evaluates a trained model on a folder of labelled images that has a sub-folder for each class."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ssfl.core import statistics
from ssfl.data import pictures
from ssfl.data.dataset import UNLABELLED, WHITE
from ssfl.errors import DataError, warn_user
from ssfl.models.external import Factory
from ssfl.runs.predict import load_model, probabilities

BINS = 10


@dataclass(frozen=True)
class Answer:
    """The prediction for one image file: its true class, its predicted class (both as class numbers) and the
    confidence."""

    file: Path
    label: int
    predicted: int
    confidence: float

    @property
    def correct(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a model for all images of a folder, and the metrics computed from them."""

    run: str
    folder: str
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
        return sorted(wrong, key=lambda answer: (-answer.confidence, str(answer.file)))

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole evaluation as a dict of plain values, as `ssfl evaluate --json` prints it."""
        matrix = self.confusion
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
                    "file": str(one.file), "class": self.classes[one.label],
                    "predicted": self.classes[one.predicted], "confidence": one.confidence,
                }
                for one in self.mistakes
            ],
            "skipped": self.broken,
        }  # fmt: skip


def evaluate(run: str | Path, folder: str | Path, *, model: Factory | str | None = None) -> Evaluation:
    """Evaluates a run's model on the images of `folder`, which has a sub-folder for each class. The result
    has `accuracy`, `interval`, `class_accuracy`, `confusion`, `calibration_error`, `mistakes` and others;
    `as_dict()` returns all of them as plain values.

    `run` is a run folder or an exported .safetensors file. If the run used a network of your own,
    `model` is the function that makes it, or its import path.

    Files are read exactly as `predict` reads them. Files that cannot be read are left out, and the field
    `broken` of the result lists them. Raises if no file can be read.
    """
    if not isinstance(folder, str | Path):
        raise DataError(
            f"folder is of type {type(folder).__name__}: pass the path of a folder that has a sub-folder for "
            "each class; for arrays, use ssfl.predict(run, images)"
        )
    classifier = load_model(run, model)
    label_of = dict(labelled_files(Path(folder), classifier.classes))
    broken: list[str] = []
    answers = [
        Answer(file, label_of[file], int(shares.argmax()), float(shares.max()))
        for file, shares in probabilities(classifier, list(label_of), broken)
    ]
    if not answers:
        raise DataError(
            f"{folder}: none of its {len(broken)} images can be read; the first error: {broken[0]}. "
            "Check that the files are complete images"
        )
    return Evaluation(str(run), str(folder), classifier.classes, answers, broken, classifier.white)


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
