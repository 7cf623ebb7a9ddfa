"""Whether the unlabelled images helped: a run's model against one that the server trained alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ssfl.core import statistics
from ssfl.core.statistics import FEW, Paired

WORDS = {"test": "test images", "validation": "validation images", "folds": "held-out labelled images"}
"""By which images two models are compared."""
DECIDES = ("folds", "validation")
"""By which images a model is chosen. Test images never choose."""
FEDERATED, SERVER_ONLY = "federated", "server-only"


@dataclass(frozen=True)
class Comparison:
    """The two models on the same images."""

    on: str
    """"test", "validation" or "folds"."""
    pair: Paired
    """The first model is the federated one."""
    balanced: tuple[float | None, float | None] = (None, None)
    """The balanced accuracy of both."""
    uneven: bool = False
    """Whether the classes have very different numbers of images."""

    @property
    def conclusion(self) -> str:
        """ "helped", "hurt", "unclear" or "too few"."""
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
            "right": pair.right,
            "right_without": pair.other_right,
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
    """A comparison from the labels that two models predict."""
    truth = labels.tolist()
    balanced, rights = [], []
    for predicted in (federated.tolist(), alone.tolist()):
        matrix = statistics.confusion(truth, predicted, classes)
        each = [row[k] / sum(row) if sum(row) else None for k, row in enumerate(matrix)]
        balanced.append(statistics.balanced(each))
        rights.append([a == b for a, b in zip(truth, predicted, strict=True)])
    counts = [truth.count(k) for k in range(classes)]
    pair = statistics.paired(*rights)
    return Comparison(on, pair, (balanced[0], balanced[1]), statistics.is_uneven(counts))


def judge(comparisons: Sequence[Comparison], users: str = "unlabelled images") -> dict[str, Any]:
    """The verdict as it is stored: in words, with its numbers, and which model is kept.

    The server-only model is kept if the unlabelled images hurt on images held out of training; test images
    choose nothing.
    """
    shown = next(one for kind in ("test", "folds", "validation") for one in comparisons if one.on == kind)
    decides = next((one for kind in DECIDES for one in comparisons if one.on == kind), None)
    kept = SERVER_ONLY if decides is not None and decides.conclusion == "hurt" else FEDERATED
    lines = [sentence(shown, users)]
    if decides is not None and decides is not shown:
        lines.append(f"On the {_held_out(decides)}: {_numbers(decides)}, {_ending(decides)}.")
    if kept == SERVER_ONLY and decides is not None:
        lines.append(f"So the model of this run is the server-only one, chosen by the {_held_out(decides)}.")
    elif shown.on == "test" and shown.conclusion == "hurt":
        lines.append(
            "The federated model is kept all the same, because test images must not choose a model: "
            "--set data.validation=0.2, or --folds 5, lets held-out labels choose."
        )
    return {
        "text": " ".join(lines),
        "conclusion": shown.conclusion,
        "kept": kept,
        "comparisons": [one.as_dict() for one in comparisons],
    }


def sentence(one: Comparison, users: str = "unlabelled images") -> str:
    """What a comparison says."""
    images = WORDS[one.on]
    if one.conclusion == "too few":
        told = (
            f"{one.pair.count:,} {images} are too few to tell whether the {users} helped: with them "
            f"{one.pair.right:,} are right, without them {one.pair.other_right:,} ({_interval(one)})."
        )
    else:
        told = (
            f"With the {users} {one.pair.right:,} of {one.pair.count:,} {images} are right, without them "
            f"{one.pair.other_right:,}: {_ending(one)}."
        )
    first, second = one.balanced
    if one.uneven and first is not None and second is not None:
        told += f" Balanced over the classes: {100 * first:.1f} % with them, {100 * second:.1f} % without."
    return told


def _ending(one: Comparison) -> str:
    said = {"helped": "they helped", "hurt": "they hurt", "unclear": "no clear difference"}
    return f"{said.get(one.conclusion, 'too few to tell')} ({_interval(one)})"


def _numbers(one: Comparison) -> str:
    return f"{one.pair.right:,} of {one.pair.count:,} are right with them, {one.pair.other_right:,} without"


def _held_out(one: Comparison) -> str:
    return WORDS[one.on] + (" of the folds" if one.on == "folds" else "")


def _interval(one: Comparison) -> str:
    low, high = (100 * end for end in one.pair.interval)
    return f"95 % interval of the difference: {_points(low)} to {_points(high)} points"


def _points(value: float) -> str:
    """A difference in points, with its sign; close to zero with a digit more, so that its side shows."""
    shown = f"{value:+.0f}" if abs(value) >= 0.95 else f"{value:+.1f}"
    return shown.replace("-", "−")
