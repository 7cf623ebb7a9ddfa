"""A run in words: what it asks, how it was set, what came of it, and whether it collapsed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ssfl.report.gather import Points, Run, finite, numbers
from ssfl.settings import Config

SURE, WRONG, FELL, ONE_WAY = 0.7, 0.5, 0.1, 2.0
"""Of a collapse: the least mask rate, the most pseudo-labels right, the least fall of accuracy from its best,
and the most n·Δ (1: all move one way; n: at right angles; the quickstart has more than 6)."""
STAYS = 3
"""Rounds that it must last."""

_LEARN = {
    "consistency": "A user's model predicts a weakly changed view of an image; where it is at least "
    "{threshold:g} sure, that prediction is the label of a strongly changed view of the same image.",
    "self-training": "A user's model labels its own images where it is at least {threshold:g} sure.",
    "supervised": "The users know the true labels of their images: an oracle, not semi-supervised.",
    "fedmatch": "The users train as FedMatch does: two sets of weights, helpers (threshold {threshold:g}).",
    "none": "The users do not train.",
}
_SERVER = {
    "parallel": "The server trains on its labels at the same time and joins the average.",
    "alternate": "Then the server trains that average on its labels: it has the last word.",
    "none": "The server holds no data.",
}


@dataclass(frozen=True)
class Verdict:
    """What the curves say together."""

    text: str
    bad: bool = False
    since: int | None = None
    """The round in which it began."""


def question(run: Run) -> str:
    """What the experiment asks."""
    split, method = run.config.split, run.config.method
    labels, users = count(split.server_labels or 0, "labelled image"), count(split.users, "user")
    kinds = f" of {len(run.classes)} classes" if run.classes else ""
    if method.objective == "none":
        return f"How far do {labels} at a server go on their own?"
    if method.objective == "supervised":
        return f"What would be reached if {users} knew the labels of all their images?"
    if split.labels_at == "users":
        some = count(split.user_labels or 0, "labelled image")
        return (
            f"Can {users}, with {some} among their own, make one good classifier{kinds} and share no image?"
        )
    own = " and some labels" if split.labels_at == "both" else ""
    return (
        f"Can {labels} at a server and the unlabelled images{own} of {users}, which never leave them, make "
        f"one good classifier{kinds}?"
    )


def setting(run: Run) -> list[str]:
    """How it was set, a sentence each."""
    config = run.config
    split, method, federation, train = config.split, config.method, config.federation, config.train
    if config.run.engine == "sites":
        dealt = f"The {count(split.users, 'user')} were real sites with their own images"
    else:
        scheme = {
            "skew": f"by skew R = {split.skew:g} (0: all alike, 1: a main class each)",
            "iid": "evenly and at random",
            "dirichlet": f"by a Dirichlet distribution with concentration {split.alpha:g}",
            "shards": f"so that each holds {count(split.classes_per_user, 'class')}",
            "mixture": "by given mixtures of classes",
        }[split.scheme]
        dealt = f"The images of {data_name(run)} were dealt to {count(split.users, 'user')} {scheme}"
    sentences = [dealt + "."]
    skew = finite(run.split.get("measured_skew"))
    if skew is not None:
        sentences.append(f"Measured afterwards, R is {skew:.3f}.")
    if method.objective == "none":
        sentences.append("The users do not train; the server trains alone.")
    else:
        chosen = f"{federation.participants or split.users:,} of {split.users:,} users take part"
        steps = count(federation.period, "step")
        sentences += [
            f"In each of {run.planned:,} rounds {chosen} and train {steps} of {train.batch_size} images.",
            _LEARN[method.objective].format(threshold=method.threshold),
            _averaging(config),
            _SERVER[method.server],
        ]
    if method.gate:
        sentences.append("A gate refuses models that are not finite or far too long.")
    if method.combine != "mean":
        sentences.append(f"The users of a group are combined by the {method.combine}, not the mean.")
    if federation.attackers:
        sentences.append(f"Of the users, {federation.attackers:.0%} attack ({federation.attack}).")
    if federation.dropout:
        sentences.append(f"Of the participants, {federation.dropout:.0%} do not come back.")
    sentences.append(f"The network is {config.model.name or 'not chosen yet'} with {_norm(config)}.")
    return sentences


def answer(run: Run) -> str:
    """What came of it."""
    if not run.accuracy:
        return f"No evaluation yet: {run.played:,} of {run.planned:,} rounds are played."
    (at, last), best = run.accuracy[-1], max(run.accuracy, key=lambda point: point[1])
    tests = finite(run.split.get("test"))
    images = f"the {tests:,.0f} test images" if tests else "the test images"
    text = f"After {at:,} of {run.planned:,} rounds the model gets {percent(last)} of {images} right"
    if best[1] - last >= 0.005:
        text += f"; its best evaluation, in round {best[0]:,}, gave {percent(best[1])}"
    if run.classes:
        text += f". Guessing would give about {percent(1 / len(run.classes))}"
    return text + ("." if run.finished else ". The run is not finished.")


def verdict(run: Run) -> Verdict:
    """A collapse, where there is one: users sure of wrong labels, moving one way, while accuracy falls."""
    masks, right = run.told("mask_rate"), dict(run.told("pseudo_accuracy"))
    if run.config.method.objective in ("none", "supervised"):
        return Verdict("This method has no pseudo-labels, and so cannot collapse onto wrong ones.")
    if len(masks) < STAYS:
        return Verdict("Too few rounds to tell whether the run is collapsing.")
    if right:
        sure = [at for at, mask in masks if mask >= SURE and right.get(at, 1.0) <= WRONG]
    else:  # real sites know no labels: only the fall of accuracy can tell
        sure = [at for at, mask in masks if mask >= (1 + SURE) / 2]
    since = _first_to_stay([at for at, _ in masks], sure)
    last = masks[-max(STAYS, len(masks) // 5) :]
    mask = fmean(value for _, value in last)
    labels = [right[at] for at, _ in last if at in right]
    truth = fmean(labels) if labels else None
    fallen = _fall(run.accuracy, since)
    streams = _streams(run)
    if since is not None and (fallen[1] >= FELL or (right and masks[-1][0] in sure)):
        facts = [f"the users are sure of {percent(mask)} of their images"]
        if truth is not None:
            facts.append(f"only {percent(truth)} of these pseudo-labels are right")
        spread = _spread(run, since)
        low = spread is not None and spread <= ONE_WAY
        if spread is not None:
            way = "they nearly all move one way" if low else "though they do not all move one way"
            facts.append(f"{way} (n·Δ = {spread:.2f}; 1 is one way, n at right angles)")
        if fallen[1] >= FELL:
            facts.append(f"accuracy fell from {percent(fallen[0])} by {100 * fallen[1]:.1f} points")
            head = "Collapse"
        else:
            head = "The users are sure and mostly wrong"
        unmeasured = (
            "" if spread is not None else " Gradient diversity was not measured (run.diversity_every)."
        )
        return Verdict(
            f"{head} from round {since:,} on: {', '.join(facts)}.{unmeasured}{streams}", True, since
        )
    if streams:
        return Verdict(f"The average hides a collapse.{streams}", True)
    if since is not None and right:
        return Verdict(
            f"From round {since:,} on the users were sure of mostly wrong labels for a while, and recovered: "
            f"now they are sure of {percent(mask)} of their images{_right(truth)}."
        )
    if mask < 0.02:
        return Verdict(
            f"The users hardly learn: they are sure of {percent(mask)} of their images, too few to train on. "
            "A lower method.threshold or more rounds may change that.",
            True,
        )
    return Verdict(f"No collapse: the users are sure of {percent(mask)} of their images{_right(truth)}.")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count(many: int, noun: str) -> str:
    """A number with its noun."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{many:,} {noun}{'' if many == 1 else plural}"


def data_name(run: Run) -> str:
    """The data set, or the name of its folder or file."""
    data = run.config.data
    return str(run.summary.get("data") or data.name or (data.path or "").rstrip("/").rsplit("/", 1)[-1])


def _averaging(config: Config) -> str:
    groups = config.federation.groups or 1
    return {
        "grouping": f"The users are dealt anew into {groups} groups in every round; each group has a model "
        "of its own, and the mean of these is the result.",
        "weighted": f"In the average, the server's model has the share {config.method.server_weight}.",
        "elastic": "Every user keeps a model of its own, drawn to a common one (EASGD).",
        "overlap": "Every user keeps a model of its own, drawn to a common one (OverlapSGD).",
    }.get(config.method.averaging, "Their models are averaged.")


def _norm(config: Config) -> str:
    return {"group": "group normalisation", "batch": "batch normalisation"}.get(
        config.model.norm, "no normalisation"
    )


def _first_to_stay(rounds: Sequence[int], found: Sequence[int]) -> int | None:
    """The first of the rounds from which several in a row were found."""
    marked = set(found)
    for place, at in enumerate(rounds[: len(rounds) - STAYS + 1]):
        if all(other in marked for other in rounds[place : place + STAYS]):
            return at
    return None


def _fall(accuracy: Points, since: int | None) -> tuple[float, float]:
    """The best accuracy before a round (or in it), and how far the last one lies below it."""
    if since is None or not accuracy:
        return 0.0, 0.0
    before = [value for at, value in accuracy if at <= since] or [accuracy[0][1]]
    return max(before), max(before) - accuracy[-1][1]


def _spread(run: Run, since: int) -> float | None:
    """The middle of n·Δ within groups from a round on."""
    found = sorted(value for at, value in run.diversity("authors_groups") if at >= since)
    return found[len(found) // 2] if found else None


def _streams(run: Run) -> str:
    """In words, where the groups' own models are far worse than their mean."""
    told = [event for event in run.evaluations if numbers(event.get("stream_accuracy"))]
    if not told:
        return ""
    found = [value for value in numbers(told[-1]["stream_accuracy"]) if value is not None]
    mean = finite(told[-1]["accuracy"]) or 0.0
    if not found or mean - max(found) < 0.25:
        return ""
    return (
        f" Each of the {len(found)} group models alone gets at most {percent(max(found))} right; only their "
        f"mean ({percent(mean)}) still tells classes apart."
    )


def _right(truth: float | None) -> str:
    return "" if truth is None else f", and {percent(truth)} of these pseudo-labels are right"
