"""Describes a run in sentences for a report: its question, its settings, and its result."""

from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.core.outside import IN_MEMORY
from ssfl.core.schedule import head_start
from ssfl.core.words import count
from ssfl.federation import Method
from ssfl.models import backbones
from ssfl.report.gather import Run, finite, inside
from ssfl.runs.text import interval, percent

_EPSILONS = {
    "epsilon_sent": "for all that one user sends",
    "epsilon_model": "for the averaged model",
}


_BY_CLASS = ("flexmatch", "cbafed")
"""The built-in methods that compute a threshold for each class from their setting `threshold`."""


def question(run: Run) -> str:
    """Returns the question that a run answers, as a sentence made from its config."""
    split, method = run.config.split, run.config.method
    labels, users = count(split.server_labels or 0, "labelled image"), count(split.users, "user")
    kinds = f" of {len(run.classes)} classes" if run.classes else ""
    if not method.trains_users:
        return f"How accurate is a model trained only on {labels} at a server?"
    if "labels" in method.needs():
        return f"How accurate would the model be if {users} had the labels of all their images?"
    if split.labels_at == "users":
        labelled = count(split.user_labels or 0, "labelled image")
        return (
            f"Can {users}, with {labelled} among their own, train one good classifier{kinds} without sharing "
            "any image?"
        )
    labels_too = " and some labels" if split.labels_at == "both" else ""
    return (
        f"Can {labels} at a server and the unlabelled images{labels_too} of {users}, which never leave them, "
        f"train one good classifier{kinds}?"
    )


def setting(run: Run) -> list[str]:
    """Returns sentences that describe a run's settings: data, users, method, privacy and network."""
    config = run.config
    split, method, federation, train = config.split, config.method, config.federation, config.train
    if config.run.engine == "sites":
        dealt = f"The {count(split.users, 'user')} were real sites with their own images"
    else:
        scheme = {
            "skew": f"with skew R = {split.skew:g} (0: all alike, 1: one main class each)",
            "iid": "evenly and at random",
            "dirichlet": f"by a Dirichlet distribution with concentration {split.alpha:g}",
            "shards": f"so that each has {count(split.classes_per_user, 'class')}",
            "mixture": "by given mixtures of classes",
            "given": "",
        }[split.scheme]
        if "measured_skew" in run.split and run.split["measured_skew"] is None:
            scheme = "in equal shares, because their images have no labels"
        dealt = f"The images of {data_name(run)} were divided among {count(split.users, 'user')} {scheme}"
        if split.scheme == "given":
            dealt = f"The {count(split.users, 'user')} have their own images"
    sentences = [dealt + "."]
    skew = finite(run.split.get("measured_skew"))
    if skew is not None:
        sentences.append(f"The measured skew R is {skew:.3f}.")
    if not method.trains_users:
        sentences.append("The users do not train; only the server trains.")
    else:
        chosen = f"{federation.participants or split.users:,} of {split.users:,} users take part"
        steps = count(federation.period, "step")
        alone = head_start(federation.head_start, run.planned)
        if alone:
            sentences.append(f"In the first {count(alone, 'round')}, only the server trains.")
        which = f"{run.planned - alone:,} {'further ' if alone else ''}rounds"
        sentences += [
            f"In each of {which}, {chosen} and train {steps} with batch size {train.batch_size}.",
            *_method(config),
        ]
    if method.label is not None:
        sentences.append("Pseudo-labels are made once per round, by the model that the user received.")
    if train.server_views == "both":
        sentences.append("Every second image in the server's training is a strong view.")
    if any("alone" in event for event in run.rounds):
        alone = sum(bool(event.get("alone")) for event in run.rounds)
        sentences.append(f"In {count(alone, 'round')}, the guard discarded the users' updates.")
    if federation.slow_average:
        sentences.append("The evaluated model is a slow average over the rounds.")
    sentences += _privacy(run)
    if federation.gate:
        sentences.append(
            "The gate clips updates with a large norm, refuses updates that are not finite, and gives less "
            "weight "
            "to users whose updates point away from the server's direction."
        )
    if federation.combine != "mean":
        sentences.append(f"Updates are aggregated by the {federation.combine}, not by the mean.")
    if federation.attackers:
        sentences.append(f"{federation.attackers:.0%} of the users are attackers ({federation.attack}).")
    if federation.dropout:
        sentences.append(f"The dropout rate of participants is {federation.dropout:.0%}.")
    network = config.model.name or "not chosen yet"
    norm = "" if outside.is_outside(network) else f" with {_norm(config)}"
    sentences.append(f"The network is {network}{norm}.")
    return sentences


def answer(run: Run) -> str:
    """Returns sentences with a run's result: its accuracy with the 95 % interval, or how many rounds are
    done."""
    kind, points = run.judged_by, run.judged
    if kind == "folds":
        return _folded(run)
    if not points:
        late = run.test_kept and kind == "test"
        what = "The test images are used in the last round" if late else "No evaluation yet"
        return f"{what}: {run.played:,} of {run.planned:,} rounds are done."
    (at, last), best = points[-1], max(points, key=lambda point: point[1])
    there = finite(run.split.get(kind))
    images = f"the {there:,.0f} {kind} images" if there else f"the {kind} images"
    text = (
        f"After {at:,} of {run.planned:,} rounds, the model classifies {percent(last)} of {images} correctly"
    )
    if run.score is not None and run.score.count and not run.finished:
        text += f" (95 % interval {interval(run.score.correct, run.score.count)})"
    if run.finished and run.score is not None:
        correct = (
            f"{run.score.correct:,} of {run.score.count:,}" if run.score.count else percent(run.score.share)
        )
        text = f"The model classifies {correct} {kind} images correctly"
        if run.score.count:
            among = interval(run.score.correct, run.score.count)
            text += f": {percent(run.score.share)}, with a 95 % interval of {among}"
    if best[1] - last >= 0.005:
        text += f"; the best evaluation was {percent(best[1])} in round {best[0]:,}"
    if run.classes:
        text += f". Chance level is about {percent(1 / len(run.classes))}"
    text += ". The test images are never used" if kind == "validation" else ""
    return text + ("." if run.finished else ". The run is not finished.")


def _folded(run: Run) -> str:
    """Returns sentences with the result of a run that is evaluated by cross-validation."""
    score = run.score
    if score is None:
        return f"{run.played:,} of {run.planned:,} rounds are done; the folds come after them."
    groups = finite(inside(run.summary.get("folds"), "groups"))
    together = " Images of one group, such as those of one patient, stayed together." if groups else ""
    return (
        f"In cross-validation, {score.correct:,} of {score.count:,} labelled images are correct, each "
        f"predicted by a model that was not trained on it: {percent(score.share)}, with a 95 % interval of "
        f"{interval(score.correct, score.count)}.{together} The final model was trained on all of them."
    )


def data_name(run: Run) -> str:
    """Returns the name of a run's data set, or the name of its folder or file."""
    data = run.config.data
    name = str(run.summary.get("data") or data.name or (data.path or "").rstrip("/").rsplit("/", 1)[-1])
    return "data in memory" if name == IN_MEMORY else name


def _method(config: Config) -> list[str]:
    """Returns sentences that describe the method and its main settings."""
    method, groups = config.method, config.federation.groups or 1
    sentences = [f"The method is {method.name}: {' '.join((type(method).__doc__ or '').split())}"]
    rule = _rule(method)
    if rule:
        sentences.append(f"A pseudo-label is used if its confidence is at least {rule}.")
    if groups > 1 and method.start == "group":
        sentences.append(
            f"In every round the users are divided at random into {groups} groups. Each group has its own "
            "model, and the mean of these models is the result."
        )
    weight = getattr(method, "server_weight", None)
    if weight is not None:
        sentences.append(f"In the average, the server's model has the weight {weight}.")
    return sentences


def threshold(run: Run) -> float | None:
    """Returns the confidence from which a prediction for a weak view was used as the pseudo-label of a strong
    view. With a relative threshold, it is that of the last round. Returns None if the method uses no such
    pseudo-labels, has no setting `threshold`, or has a different threshold for each class."""
    method = run.config.method
    value = getattr(method, "threshold", None)
    if not threshold_rule(run) or not isinstance(value, int | float) or method.name in _BY_CLASS:
        return None
    if not _is_relative(method):
        return value
    known = run.series("labelled_confidence")
    return value * known[-1][1] if known else None


def threshold_rule(run: Run) -> str:
    """Returns the end of a sentence that says which confidence a prediction for a weak view needs to be used
    as the pseudo-label of a strong view, such as "0.8". It is empty if the method uses no such pseudo-labels
    or has no setting `threshold`."""
    method = run.config.method
    if not method.trains_users or "labels" in method.needs() or "strong" not in method.uses():
        return ""
    return _rule(method)


def _rule(method: Method) -> str:
    """Returns the confidence that a pseudo-label needs, as the end of a sentence; "" if the method has no
    setting `threshold`."""
    value = getattr(method, "threshold", None)
    if not isinstance(value, int | float):
        return ""
    if method.name in _BY_CLASS:
        return f"the threshold of its class, which the method computes from method.threshold = {value:g}"
    relative = " times the mean confidence on the labelled images" if _is_relative(method) else ""
    return f"{value:g}{relative}"


def _is_relative(method: Method) -> bool:
    """Returns whether the method's threshold is a multiple of the mean confidence on labelled images, rather
    than a confidence itself."""
    return bool(getattr(method, "relative", False))


def _privacy(run: Run) -> list[str]:
    """Returns sentences with the differential privacy settings and the resulting ε; empty without privacy."""
    wanted = run.config.privacy
    if wanted.clip is None:
        return []
    clauses = [f"The update of each user is clipped to the norm {wanted.clip:g}"]
    if wanted.noise:
        clauses.append(
            f"and Gaussian noise with a standard deviation of {wanted.noise:g} times that norm is added"
        )
    spent = run.summary.get("privacy")
    epsilons = [(finite(inside(spent, key)), who) for key, who in _EPSILONS.items()]
    worth = " and ".join(f"ε = {value:.4g} {who}" for value, who in epsilons if value is not None)
    delta = finite(inside(spent, "delta"))
    worth += f" (δ = {delta:.2g})" if worth and delta else ""
    return [" ".join(clauses) + (f": {worth}." if worth else ".")]


def _norm(config: Config) -> str:
    """Returns the kind of normalisation in the network, in words."""
    if config.model.name in backbones.NAMES:
        return "its normalisation folded into the weights"
    return {"group": "group normalisation", "batch": "batch normalisation"}.get(
        config.model.norm, "no normalisation"
    )
