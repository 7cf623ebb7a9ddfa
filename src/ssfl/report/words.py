"""A run in words: what it asks, how it was set, and what came of it."""

from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.core.outside import IN_MEMORY
from ssfl.core.schedule import head_start
from ssfl.report.gather import Run, finite, inside
from ssfl.runs.text import interval, percent

_EPSILONS = {
    "epsilon_sent": "for all that one user sends",
    "epsilon_model": "for the averaged model",
}


def question(run: Run) -> str:
    """What the experiment asks."""
    split, method = run.config.split, run.config.method
    labels, users = count(split.server_labels or 0, "labelled image"), count(split.users, "user")
    kinds = f" of {len(run.classes)} classes" if run.classes else ""
    if not method.trains_users:
        return f"How far do {labels} at a server go on their own?"
    if "labels" in method.needs():
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
            "given": "",
        }[split.scheme]
        if "measured_skew" in run.split and run.split["measured_skew"] is None:
            scheme = "in equal shares: nobody knows the classes of their images"
        dealt = f"The images of {data_name(run)} were dealt to {count(split.users, 'user')} {scheme}"
        if split.scheme == "given":
            dealt = f"The {count(split.users, 'user')} have their own images"
    sentences = [dealt + "."]
    skew = finite(run.split.get("measured_skew"))
    if skew is not None:
        sentences.append(f"Measured afterwards, R is {skew:.3f}.")
    if not method.trains_users:
        sentences.append("The users do not train; the server trains alone.")
    else:
        chosen = f"{federation.participants or split.users:,} of {split.users:,} users take part"
        steps = count(federation.period, "step")
        alone = head_start(federation.head_start, run.planned)
        if alone:
            sentences.append(f"The server plays the first {count(alone, 'round')} alone.")
        which = f"{run.planned - alone:,} {'further ' if alone else ''}rounds"
        sentences += [
            f"In each of {which} {chosen} and train {steps} of {train.batch_size} images.",
            *_method(config),
        ]
    if method.label is not None:
        sentences.append("Pseudo-labels are made once a round, by the model that was received.")
    if train.server_views == "both":
        sentences.append("Every second image that the server trains on is in a strong view.")
    if any("alone" in event for event in run.rounds):
        alone = sum(bool(event.get("alone")) for event in run.rounds)
        sentences.append(f"A guard played {count(alone, 'round')} without the users.")
    if federation.slow_average:
        sentences.append("What is evaluated and kept is a slow average of the model over the rounds.")
    sentences += _privacy(run)
    if federation.gate:
        sentences.append(
            "A gate cuts updates that are too long, refuses models that are not finite, and gives users "
            "whose updates work against the server's labels less weight."
        )
    if federation.combine != "mean":
        sentences.append(f"The users of a group are combined by the {federation.combine}, not the mean.")
    if federation.attackers:
        sentences.append(f"Of the users, {federation.attackers:.0%} attack ({federation.attack}).")
    if federation.dropout:
        sentences.append(f"Of the participants, {federation.dropout:.0%} do not come back.")
    network = config.model.name or "not chosen yet"
    own = "" if outside.is_outside(network) else f" with {_norm(config)}"
    sentences.append(f"The network is {network}{own}.")
    return sentences


def answer(run: Run) -> str:
    """What came of it."""
    kind, points = run.judged_by, run.judged
    if kind == "folds":
        return _folded(run)
    if not points:
        late = run.test_kept and kind == "test"
        what = "The test images are looked at in the last round" if late else "No evaluation yet"
        return f"{what}: {run.played:,} of {run.planned:,} rounds are played."
    (at, last), best = points[-1], max(points, key=lambda point: point[1])
    there = finite(run.split.get(kind))
    images = f"the {there:,.0f} {kind} images" if there else f"the {kind} images"
    text = f"After {at:,} of {run.planned:,} rounds the model gets {percent(last)} of {images} right"
    if run.score is not None and run.score.count and not run.finished:
        text += f" (95 % interval {interval(run.score.right, run.score.count)})"
    if run.finished and run.score is not None:
        right = f"{run.score.right:,} of {run.score.count:,}" if run.score.count else percent(run.score.share)
        text = f"The model gets {right} {kind} images right"
        if run.score.count:
            among = interval(run.score.right, run.score.count)
            text += f": {percent(run.score.share)}, with a 95 % interval of {among}"
    if best[1] - last >= 0.005:
        text += f"; its best evaluation, in round {best[0]:,}, gave {percent(best[1])}"
    if run.classes:
        text += f". Guessing would give about {percent(1 / len(run.classes))}"
    text += ". The test images are never looked at" if kind == "validation" else ""
    return text + ("." if run.finished else ". The run is not finished.")


def _folded(run: Run) -> str:
    """What came of a run whose labelled images were held out in folds."""
    score = run.score
    if score is None:
        return f"{run.played:,} of {run.planned:,} rounds are played; the folds come after them."
    groups = finite(inside(run.summary.get("folds"), "groups"))
    kept = f" The images of each of {groups:,.0f} patients or groups stayed together." if groups else ""
    return (
        f"In cross-validation {score.right:,} of {score.count:,} labelled images are right, each judged by a "
        f"model that had not seen it: {percent(score.share)}, with a 95 % interval of "
        f"{interval(score.right, score.count)}.{kept} The final model was trained on all of them."
    )


def count(many: int, noun: str) -> str:
    """A number with its noun."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{many:,} {noun}{'' if many == 1 else plural}"


def data_name(run: Run) -> str:
    """The data set, or the name of its folder or file."""
    data = run.config.data
    name = str(run.summary.get("data") or data.name or (data.path or "").rstrip("/").rsplit("/", 1)[-1])
    return "data in memory" if name == IN_MEMORY else name


def _method(config: Config) -> list[str]:
    """The method in its own words, and what its settings add."""
    method, groups = config.method, config.federation.groups or 1
    sentences = [f"The method is {method.name}: {' '.join((type(method).__doc__ or '').split())}"]
    threshold = getattr(method, "threshold", None)
    if threshold is not None:
        sentences.append(f"A pseudo-label counts where the model is at least {threshold:g} sure.")
    if groups > 1 and method.start == "group":
        sentences.append(
            f"The users are dealt anew into {groups} groups in every round; each group has its own model, "
            "and the mean of these is the result."
        )
    weight = getattr(method, "server_weight", None)
    if weight is not None:
        sentences.append(f"In the average, the server's model has the share {weight}.")
    return sentences


def _privacy(run: Run) -> list[str]:
    """What was done for the privacy of the users, and what it is worth."""
    wanted = run.config.privacy
    if wanted.clip is None:
        return []
    told = [f"The update of each user is cut to the length {wanted.clip:g}"]
    if wanted.noise:
        told.append(f"and noise of {wanted.noise:g} times that is added to every number of it")
    spent = run.summary.get("privacy")
    epsilons = [(finite(inside(spent, key)), who) for key, who in _EPSILONS.items()]
    worth = " and ".join(f"ε = {value:.4g} {who}" for value, who in epsilons if value is not None)
    delta = finite(inside(spent, "delta"))
    worth += f" (δ = {delta:.2g})" if worth and delta else ""
    return [" ".join(told) + (f": {worth}." if worth else ".")]


def _norm(config: Config) -> str:
    return {"group": "group normalisation", "batch": "batch normalisation"}.get(
        config.model.norm, "no normalisation"
    )
