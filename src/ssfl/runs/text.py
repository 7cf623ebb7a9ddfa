"""Formats numbers, tables and splits as plain text for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from ssfl.config.settings import Config
from ssfl.core import statistics
from ssfl.core.words import count

BLOCKS = " ▁▂▃▄▅▆▇█"
MOST_USERS = 30


def histogram(counts: list[int]) -> str:
    """Returns a histogram as one line of text, with one block character for each class. The largest count has
    full height, and a count of zero is a blank."""
    most = max([*counts, 1])
    return "".join(BLOCKS[-(-count * (len(BLOCKS) - 1) // most)] for count in counts)


def printable(line: str) -> str:
    """Returns the line with a question mark in place of every character that is not printable. File names and
    class names could otherwise send control codes to the terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def percent(share: float) -> str:
    """Returns a share from 0 to 1 as text in percent, such as "81.5 %"."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Returns a time as text with a suitable unit, such as "2.5 min"."""
    for least, unit, length in ((7200, "h", 3600), (120, "min", 60), (0.1, "s", 1)):
        if seconds >= least:
            return f"{seconds / length:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


def interval(correct: float, count: int) -> str:
    """Returns the 95 % confidence interval (Wilson) of the share `correct` / `count` as text, such as "78.1
    to 84.6 %"."""
    low, high = statistics.wilson(correct, count)
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def points(low: float, high: float) -> str:
    """Returns an interval of a difference in percentage points as text, such as "−0.63 to 1.07"."""
    return f"{_point(low)} to {_point(high)}"


def difference(apart: statistics.SeedMean) -> str:
    """Returns a mean difference in percentage points as text, with its 95 % interval in brackets if there is
    one, such as "0.22 (−0.63 to 1.07)"."""
    interval = "" if apart.interval is None else f" ({points(*apart.interval)})"
    return f"{_point(apart.mean)}{interval}"


def _point(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")  # adding 0.0 turns -0.0 into 0.0


def accuracy(correct: float, count: int) -> str:
    """Returns the accuracy `correct` / `count` as text, with both numbers and its 95 % confidence
    interval."""
    share = percent(correct / count) if count else "-"
    return f"{share} ({correct:,.0f} of {count:,}; 95 % interval {interval(correct, count)})"


def ending(scores: Mapping[str, Any]) -> str:
    """Returns the final accuracy of a run as text: that on test images or cross-validation folds, otherwise
    that on validation images. `scores` is the run's last evaluation event or its summary. If it has no
    accuracy, the text is "finished"."""
    for key, name in (("accuracy", "accuracy"), ("validation_accuracy", "validation accuracy")):
        if key not in scores:
            continue
        prefix = "validation_" if name != key else ""
        correct, count = scores.get(f"{prefix}correct"), scores.get(f"{prefix}count")
        if correct is None or not count:  # a run of an older version
            return f"{name} {percent(scores[key])}"
        over = " over folds" if scores.get("judged_by") == "folds" else ""
        return f"{name} {accuracy(correct, count)}{over}"
    return "finished"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def split(config: Config, described: dict[str, Any]) -> str:
    """Returns a description of a split as text: how many images the server and each user have, and a
    histogram of their classes. `described` is the content of split.json, and `config` says by which scheme
    the images were divided."""
    users, classes = described["users"], described["classes"]
    sizes, rows = described["sizes"], described["user_classes"]
    wanted = config.split
    scheme = {
        "skew": f"skew R = {wanted.skew}",
        "dirichlet": f"Dirichlet({wanted.alpha})",
        "shards": f"{wanted.classes_per_user} classes per user",
    }.get(wanted.scheme, wanted.scheme)
    how = f"by {scheme}"
    if wanted.scheme == "given":
        how = "given by the data"
    elif described["measured_skew"] is None:
        how = "with equal shares (their images have no labels: split.scheme and split.skew have no effect)"
    elif sum(map(sum, rows)) < sum(sizes):
        how += " (images without labels in equal shares)"
    seed = "" if wanted.scheme == "given" else f", seed {wanted.seed}"
    lines = [
        f"{count(users, 'user')} {how}{seed}; {len(classes)} classes ({_few(classes)})",
        f"server   {_column(sum(described['server']), 'labelled image')}{histogram(described['server'])}",
    ]
    names = described.get("names", [])
    for user, (size, counts) in enumerate(zip(sizes[:MOST_USERS], rows, strict=False)):
        name = f"   {printable(names[user])}" if names else ""
        lines.append(f"user {user:<4}{_column(size, 'image')}{histogram(counts)}{name}")
    if users > MOST_USERS:
        least, _, middle, _, most = described["size_quartiles"]
        lines.append(
            f"... and {users - MOST_USERS} more users; all users have {least:.0f} to {most:.0f} images, "
            f"with a median of {middle:.0f}"
        )
    skew = described["measured_skew"]
    known_only = ""
    if sum(map(sum, rows)) < sum(sizes):
        known_only = f" among the {sum(described['class_totals']):,} images whose class is known"
    if skew is None:
        lines.append("the label skew R is unknown, because the users' images have no labels")
    else:
        lines.append(
            f"measured label skew R = {skew:.4f}{known_only} (Definition 2 of the paper: 0 is iid, 1 is "
            "disjoint)"
        )
    if described["validation"]:
        lines.append(count(described["validation"], "validation image"))
    lines += untested(classes, described["test_classes"])
    lines.append(_typical(sizes[0], rows[0], classes))
    if "user_labelled" in described:
        lines.append(f"users have {count(described['user_labelled_total'], 'labelled image')} in total")
    return "\n".join(lines)


def untested(classes: Sequence[str], counts: Sequence[float | None]) -> list[str]:
    """Returns a list with one line of text that names the classes without test images. The list is empty if
    every class has test images, or if there are no test images at all. `counts` has the number of test images
    of each class."""
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if not missing or len(missing) == len(classes):
        return []
    named = printable(_few(missing))
    return [
        f"{len(missing)} of {len(classes)} classes have no test images ({named}), so the accuracy does not "
        "include these classes"
    ]


def loose(images: int) -> list[str]:
    """Returns a list with one line of text. The line says that `images` images are in unlabelled/ itself, not
    in one of its sub-folders, and form one more user. The list is empty if `images` is 0."""
    if not images:
        return []
    are, form = ("is", "it forms") if images == 1 else ("are", "together they form")
    return [
        f"{count(images, 'image')} {are} in unlabelled/ itself, not in one of its sub-folders; {form} one "
        "more user"
    ]


def _typical(size: int, counts: list[int], classes: list[str]) -> str:
    """Returns a sentence about user 0 as an example: how many images it has (`size`), and of which classes.
    `counts` has, for each class, how many of the user's images are known to be of that class."""
    if not sum(counts):
        return f"user 0 has {count(size, 'image')} without a label"
    order = sorted(range(len(counts)), key=lambda label: -counts[label])
    shares = [f"{100 * counts[i] / sum(counts):.0f} % are {classes[i]}" for i in order[:3] if counts[i]]
    rest = " and so on" if sum(count > 0 for count in counts) > 3 else ""
    known = "" if sum(counts) == size else f", {sum(counts)} of known class"
    return f"for example, user 0 has {count(size, 'image')}{known}: {', '.join(shares)}{rest}"


def _column(number: int, noun: str) -> str:
    """Returns a number and its noun with a fixed width."""
    digits, words = count(number, noun).split(" ", 1)
    return f"{digits:>7} {words:<18}"


def _few(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 12 else [*names[:5], "...", names[-1]])
