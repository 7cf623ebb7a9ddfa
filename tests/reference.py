"""Reference numbers: the state after five rounds of every built-in method, to notice when results drift.

    python -m tests.reference record FILE [WORD...]    # writes the numbers of the code that is installed
    python -m tests.reference compare FILE [WORD...]   # compares it with them

With words, only cases that have one of them in their names are played, and the others stay as recorded.
`reference.json` beside this file was recorded at commit 1402bc8, the first release, but for the methods in
`CHANGED`. Float64 cases are kept
as projections of the state and agree to 1e-12. Float32 cases are kept as digests and agree byte for byte,
on the machine and with the versions that recorded them.
"""

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
ROUNDS = 5
STEP = 0.7390851332151607
"""Any irrational number: projections on cosines of its multiples notice every entry."""
METHODS = (
    "anchored", "alternate", "grouping", "crl-gn", "crl-bn", "self-training", "supervised", "fixmatch",
    "data-sharing", "easgd", "overlap-sgd", "fedmatch", "semifl", "fl2", "rscfed", "cbafed", "fedprox",
    "flexmatch", "freematch", "server-only",
)  # fmt: skip
NO_BATCH_NORM = ("fedmatch", "fl2")
COMMON = (
    "split.users=6", "federation.participants=4", "federation.period=3", f"federation.rounds={ROUNDS}",
    "train.batch_size=8", "train.lr=0.03", "train.momentum_policy=reset", "run.threads=1", "run.device=cpu",
    "run.compile=false",
)  # fmt: skip
ALONE = ("fixmatch",)
"""Methods of one user."""
THRESHOLD = "method.threshold=0.3"
"""Low, so that after so few steps some images have a pseudo-label and others have none."""
UNTRAINED = "method.threshold=0.11"
"""With batch normalisation whose running statistics are still those of the first round."""
TRAIN_MODE = ("grouping", "crl-gn", "crl-bn", "self-training", "fixmatch")
"""Methods that label in training mode."""
NO_THRESHOLD = (
    "supervised", "data-sharing", "easgd", "overlap-sgd", "server-only", "fl2", "freematch", "rscfed",
)  # fmt: skip
CHANGED = {
    "semifl": "users take as many steps as their confident images fill",
    "fl2": "users take as many steps as their confident images fill",
    "cbafed": "the same, the server joins the average by its number of images instead of training last, and "
    "users train on weak views, also with rare second classes",
    "rscfed": "users train with the squared error to a teacher, and the server joins the halves",
    "alternate-attacked": "the gate cuts updates, and their part in each tensor, to the usual length",
}
"""Cases whose numbers were changed on purpose after the first release, and why."""
OLD = {
    "federation.slow_average": "method.slow", "federation.head_start": "method.head_start",
    "federation.gate": "method.gate", "federation.combine": "method.combine",
    "federation.median_fallback": "method.check", "train.server_views": "method.server_views",
    "method.momentum": "method.server_momentum",
}  # fmt: skip
"""What settings were called in the first release, by the names they have now."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "grouping-reference": (
        "method.name=grouping", "method.views=joint", "method.server_replicas=true",
        "federation.groups=2", "federation.group_sizes=filled", "federation.extra_step=true",
        "federation.epoch_images=48", "train.momentum_policy=slot", "train.batches=restart",
        "model.norm=batch", "model.norm_statistics=server", THRESHOLD,
    ),
    "grouping-user-momentum": (
        "method.name=grouping", "federation.groups=3", "train.momentum_policy=user", THRESHOLD,
        "federation.dropout=0.3",
    ),
    "self-training-eval": (
        "method.name=self-training", "method.views=separate", "method.teacher_mode=eval", UNTRAINED,
    ),
    "alternate-both": ("method.name=alternate", "split.labels_at=both", "split.user_labels=20", THRESHOLD),
    "anchored-dropout": ("method.name=anchored", "federation.dropout=0.5", THRESHOLD),
    "anchored-plain": ("method.name=anchored", "method.guard=false", "method.pace=full", THRESHOLD),
    "anchored-median": ("method.name=anchored", "federation.combine=median", THRESHOLD),
    "alternate-attacked": (
        "method.name=alternate", "federation.attackers=0.3", "federation.attack_scale=20",
        "federation.gate=true", "federation.median_fallback=true", "federation.combine=trimmed", THRESHOLD,
    ),
    "semifl-momentum-kept": ("method.name=semifl", "train.momentum_policy=user", THRESHOLD),
    "alternate-private": (
        "method.name=alternate", "privacy.clip=1.0", "privacy.noise=0.01", "federation.head_start=0.2",
        "federation.slow_average=0.9", THRESHOLD,
    ),
    "alternate-recompute": (
        "method.name=alternate", "model.norm=batch", "model.norm_statistics=recompute",
        "train.server_views=both", "train.clip=1.0", UNTRAINED,
    ),
    "at-once": ("method.name=grouping", "federation.groups=2", "run.users_at_once=3", THRESHOLD),
    "diversity": ("method.name=grouping", "federation.groups=2", "run.diversity_every=1", THRESHOLD),
}  # fmt: skip


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The name of every case, and its settings."""
    for engine in ("loop", "vmap"):
        for precision in ("float64", "float32"):
            how = (f"run.engine={engine}", f"train.precision={precision}")
            for method in METHODS:
                for norm in ("group", "batch"):
                    if (norm == "batch" and method in NO_BATCH_NORM) or (
                        engine == "vmap" and method == "fedmatch"
                    ):
                        continue
                    said = [*COMMON, f"method.name={method}", f"model.norm={norm}", *how]
                    if method in ALONE:
                        said += ["split.users=1", "federation.participants=1"]
                    if method not in NO_THRESHOLD:
                        said.append(UNTRAINED if norm == "batch" and method not in TRAIN_MODE else THRESHOLD)
                    if method == "fedmatch":
                        said += ["train.lr=0.01", "federation.rounds=11"]
                    yield f"{method}/{norm}/{engine}/{precision}", tuple(said)
            for name, settings in VARIANTS.items():
                yield f"{name}/-/{engine}/{precision}", (*COMMON, *settings, *how)


def state_of(
    settings: tuple[str, ...], first_release: bool
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of the state after the last round, by name, and the rounds' events."""
    from ssfl import load_config
    from ssfl.runs import assemble

    if first_release:
        pairs = (one.partition("=") for one in settings)
        settings = tuple(f"{OLD.get(key, key)}={value}" for key, _, value in pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim = assemble.make(load_config("quickstart", settings))
    state, events = sim.initial(), []
    for _ in range(sim.rounds):
        state, told = sim.play(state)
        events += told
    events.append(sim.evaluate(state))
    tensors = {"streams": state.streams, "average": state.average, "final": sim.final_row(state)}
    return tensors, events


def measured(settings: tuple[str, ...], *, first_release: bool = False) -> dict[str, Any]:
    """What is kept of a case: projections of its state in float64, or a digest of its bytes."""
    tensors, events = state_of(settings, first_release)
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float64:
            flat = tensor.flatten()
            turns = (
                torch.arange(1, 9, dtype=torch.float64)[:, None]
                * torch.arange(len(flat))
                * 0.7390851332151607
            )
            kept[name] = (torch.cos(turns) @ flat).tolist()
        else:
            kept[name] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    rounds = [event for event in events if event["event"] == "round"]
    for key in ("loss", "mask_rate", "pseudo_accuracy", "update_norm", "server_loss"):
        kept[key] = [event.get(key) for event in rounds]
    kept["bytes"] = [event["bytes_up"] + event["bytes_down"] for event in rounds]
    kept["accuracy"] = events[-1]["accuracy"]
    kept["diversity"] = [e for e in events if e["event"] == "diversity"]
    return kept


def differences(before: Any, now: Any, relative: float, where: str = "") -> list[str]:
    """Where two records differ by more than a relative error."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [d for k in keys for d in differences(before.get(k), now.get(k), relative, f"{where}/{k}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, relative, f"{where}[{i}]")]
    if isinstance(before, float) and isinstance(now, float):
        if abs(before - now) <= relative * max(1.0, abs(before), abs(now)):
            return []
    elif before == now:
        return []
    return [f"{where}: {before} is now {now}"]


def main() -> None:
    verb, file, *words = sys.argv[1:]
    torch.set_num_threads(1)
    before = json.loads(Path(file).read_text()) if verb == "compare" else {}
    found, bad = {}, 0
    for name, settings in cases():
        if (words and not any(word in name for word in words)) or (verb == "compare" and name not in before):
            continue
        found[name] = measured(settings, first_release=verb == "record-first-release")
        wrong = differences(before[name], json.loads(json.dumps(found[name])), 1e-12) if before else []
        bad += bool(wrong)
        print(name, "DIFFERS " + wrong[0] if wrong else f"mask rate {found[name]['mask_rate']}", flush=True)
    if verb.startswith("record"):
        kept = json.loads(Path(file).read_text()) if words and Path(file).is_file() else {}
        Path(file).write_text(json.dumps(kept | found))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
