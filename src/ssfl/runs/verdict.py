"""The verdict of a run: whether the unlabelled images helped. The run's federated model is compared with a
server-only model on the same images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ssfl.core import statistics
from ssfl.core.statistics import FEW, Paired

WORDS = {"test": "test images", "validation": "validation images", "folds": "held-out labelled images"}
"""The names, in messages, of the images on which two models are compared."""
DECIDES = ("folds", "validation")
"""The kinds of images (keys of `WORDS`) that decide which model is kept, the federated or the server-only
one. Test images never decide this."""
FEDERATED, SERVER_ONLY = "federated", "server-only"


@dataclass(frozen=True)
class Comparison:
    """A comparison of the federated and the server-only model on the same images."""

    on: str
    """On which images the models are compared: "test", "validation" or "folds" (labelled images held out by
    cross-validation)."""
    pair: Paired
    """The paired statistics: how many images each model classifies correctly, with the interval of the
    difference. The federated model is the first, the server-only model the second."""
    balanced: tuple[float | None, float | None] = (None, None)
    """The balanced accuracies of the federated and of the server-only model; None if unknown."""
    uneven: bool = False
    """Whether the classes have very different numbers of images, so that the balanced accuracy is shown
    too."""

    @property
    def conclusion(self) -> str:
        """The outcome: "helped" or "hurt" if the 95 % interval of the difference excludes zero. Otherwise it
        is "unclear", or "too few" if there are too few images to tell."""
        low, high = self.pair.interval
        if low > 0:
            return "helped"
        if high < 0:
            return "hurt"
        return "unclear" if self.pair.count >= FEW else "too few"

    def as_dict(self) -> dict[str, Any]:
        pair = self.pair
        return {
            "on": self.on,
            "count": pair.count,
            "correct": pair.correct,
            "correct_without": pair.other_correct,
            "only_with": pair.won,
            "only_without": pair.lost,
            "difference": pair.difference,
            "interval": list(pair.interval),
            "mcnemar_p": pair.p,
            "balanced_accuracy": self.balanced[0],
            "balanced_accuracy_without": self.balanced[1],
            "conclusion": self.conclusion,
        }


def compare(on: str, labels: Tensor, federated: Tensor, alone: Tensor, classes: int) -> Comparison:
    """Returns the comparison of two models on the same N images. `labels` [N] are the true classes,
    `federated` [N] and `alone` [N] the classes that the federated and the server-only model predict. `on`
    names the images: "test", "validation" or "folds"."""
    truth = labels.tolist()
    balanced, rights = [], []
    for predicted in (federated.tolist(), alone.tolist()):
        matrix = statistics.confusion(truth, predicted, classes)
        balanced.append(statistics.balanced(statistics.class_accuracies(matrix)))
        rights.append([a == b for a, b in zip(truth, predicted, strict=True)])
    counts = [truth.count(k) for k in range(classes)]
    pair = statistics.paired(*rights)
    return Comparison(on, pair, (balanced[0], balanced[1]), statistics.is_uneven(counts))


def judge(comparisons: Sequence[Comparison], users: str = "unlabelled images") -> dict[str, Any]:
    """Returns the verdict as it is stored in summary.json: its text, its numbers, and which model is kept.
    `users` are the words for the users' data in the text.

    The server-only model is kept if the users' data hurt on the held-out images of the cross-validation
    folds. Without folds, the validation images decide. Test images are never used for this choice.
    """
    shown = next(
        comparison
        for kind in ("test", "folds", "validation")
        for comparison in comparisons
        if comparison.on == kind
    )
    decides = next(
        (comparison for kind in DECIDES for comparison in comparisons if comparison.on == kind), None
    )
    kept = SERVER_ONLY if decides is not None and decides.conclusion == "hurt" else FEDERATED
    lines = [sentence(shown, users)]
    if decides is not None and decides is not shown:
        lines.append(f"On the {_held_out(decides)}: {_numbers(decides, users)}: {_ending(decides)}.")
    if kept == SERVER_ONLY and decides is not None:
        lines.append(
            "Therefore this run keeps the server-only model; the choice was made on the "
            f"{_held_out(decides)}."
        )
    elif shown.on == "test" and shown.conclusion == "hurt":
        lines.append(
            "The federated model is kept nevertheless, because test images must not be used to choose a "
            "model. With --set data.validation=0.2 or --folds 5, held-out labelled images make the choice."
        )
    return {
        "text": " ".join(lines),
        "conclusion": shown.conclusion,
        "kept": kept,
        "comparisons": [comparison.as_dict() for comparison in comparisons],
    }


def sentence(one: Comparison, users: str = "unlabelled images") -> str:
    """Returns the outcome of a comparison as one or two sentences. `users` are the words for the users'
    data."""
    images = WORDS[one.on]
    if one.conclusion == "too few":
        text = (
            f"{one.pair.count:,} {images} are too few to tell whether the {users} helped: "
            f"{one.pair.correct:,} are correct with them and {one.pair.other_correct:,} without "
            f"({_interval(one)})."
        )
    else:
        text = (
            f"With the {users}, {one.pair.correct:,} of {one.pair.count:,} {images} are correct; without "
            f"them, {one.pair.other_correct:,}: {_ending(one)}."
        )
    first, second = one.balanced
    if one.uneven and first is not None and second is not None:
        text += f" The balanced accuracy is {100 * first:.1f} % with them and {100 * second:.1f} % without."
    return text


def _ending(one: Comparison) -> str:
    words = {"helped": "they helped", "hurt": "they hurt", "unclear": "no clear difference"}
    return f"{words.get(one.conclusion, 'too few to tell')} ({_interval(one)})"


def _numbers(one: Comparison, users: str) -> str:
    pair = one.pair
    return (
        f"{pair.correct:,} of {pair.count:,} are correct with the {users} and {pair.other_correct:,} "
        "without them"
    )


def _held_out(one: Comparison) -> str:
    return WORDS[one.on] + (" of the folds" if one.on == "folds" else "")


def _interval(one: Comparison) -> str:
    low, high = (100 * end for end in one.pair.interval)
    return f"95 % interval of the difference: {_points(low)} to {_points(high)} percentage points"


def _points(value: float) -> str:
    """Returns the difference `value`, which is in percentage points, as text with its sign. It is rounded to
    whole points, or to 0.1 if its absolute value is below 0.95."""
    shown = f"{value:+.0f}" if abs(value) >= 0.95 else f"{value:+.1f}"
    return shown.replace("-", "−")
