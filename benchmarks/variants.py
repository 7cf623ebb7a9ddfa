"""Compares variants of one method over several splits, to measure the effect of each part of the method.

  python -m benchmarks.variants {anchored,norms,screen} [--config NAME] [--seeds N] [--jobs N] [--json FILE]

A seed sets the weights, the random draws and the split. Accuracy is on validation images, because the
variants are used to choose settings. These images are set aside before the split and never trained on. Each
variant is compared with the first one, seed by seed; the table shows the mean difference with its standard
error. Finished runs are not repeated.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import report
from ssfl.config.loading import load_config
from ssfl.errors import ConfigError, DivergedError
from ssfl.runs import assemble, same, text, train
from ssfl.runs import folder as runs
from ssfl.runs.folder import versions

Variants = dict[str, list[str]]
IDEAS = "benchmarks/ideas.py"
ANCHORED: Variants = {
    "anchored": [],
    "full pace": ["method.pace=full"],
    "threshold 0.4": ["method.threshold=0.4"],
    "threshold 0.6": ["method.threshold=0.6"],
    "threshold 0.95": ["method.threshold=0.95"],
    "no momentum": ["method.momentum=0.0"],
    "no slow average": ["federation.slow_average=0.0"],
    "no guard": ["method.guard=false"],
    "weak views at the server": ["train.server_views=weak"],
    "strong views at the server": ["train.server_views=both"],
    "T = 4": ["federation.period=4"],
    "T = 8": ["federation.period=8"],
    "T = 32": ["federation.period=32"],
    "a third of the learning rate": ["train.lr=0.01"],
    "three times the learning rate": ["train.lr=0.09"],
    "alternate": ["method.name=alternate"],
    "alternate, threshold 0.6": ["method.name=alternate", "method.threshold=0.6"],
    "server beside the users, its weight 0.5, threshold 0.6": [
        "method.name=crl-gn",
        "method.server_weight=0.5",
        "method.threshold=0.6",
    ],
    "a stream for each of ten users (server's weight 0.5), threshold 0.6": [
        "method.name=grouping",
        "federation.groups=10",
        "method.threshold=0.6",
    ],
    "server-only": ["method.name=server-only"],
}
"""The method `anchored`, variants of it with one change each, and the methods that it is based on."""
_SERVERS = "model.norm_statistics=server"
_NORMS: Variants = {
    "FedAvg, GroupNorm": ["method.name=crl-gn"],
    "FedAvg, BatchNorm, statistics averaged": ["method.name=crl-bn"],
    "FedAvg, BatchNorm, the server's statistics": ["method.name=crl-bn", _SERVERS],
    "server last, GroupNorm": ["method.name=alternate"],
    "server last, BatchNorm, statistics averaged": ["method.name=alternate", "model.norm=batch"],
    "server last, BatchNorm, the server's statistics": [
        "method.name=alternate",
        "model.norm=batch",
        _SERVERS,
    ],
}
NORMS: Variants = {
    f"R = {skew}, {name}": [f"split.skew={skew}", *sets]
    for skew in (0.0, 0.4, 1.0)
    for name, sets in _NORMS.items()
}
"""GroupNorm compared with BatchNorm, for three skews R. The authors' code evaluates with the server's running
statistics."""
SCREEN: Variants = {
    "anchored": [],
    "server: batches of 64": ["train.server_batch_size=64"],
    "server: batches of 512": ["train.server_batch_size=512"],
    "server: 48 steps": ["train.server_steps=48"],
    "server: a third of the learning rate": ["train.server_lr=0.03"],
    "server: keeps its momentum": ["train.momentum_policy=server"],
    "T = 4": ["federation.period=4"],
    "T = 8": ["federation.period=8"],
    "threshold 0.95": ["method.threshold=0.95"],
    "relative threshold 0.9": ["method.relative=true", "method.threshold=0.9"],
    "relative threshold 0.9 by held-out labels": [
        "method.relative=true", "method.threshold=0.9", "train.server_held_out=0.1",
    ],
    "no guard": ["method.guard=false"],
    "guard by held-out labels": ["train.server_held_out=0.1"],
    "users without a label left out": ["federation.skip_unlabelled=true"],
    "no momentum": ["method.momentum=0.0"],
    "a longer step instead of momentum": [f"method.name={IDEAS}:LongStep"],
    "soft weights": [f"method.name={IDEAS}:SoftWeights"],
    "distribution alignment": [f"method.name={IDEAS}:Aligned"],
    "full pace": ["method.pace=full"],
    "annealed learning rate": ["train.schedule=annealing"],
    "a head start of a tenth": ["federation.head_start=0.1"],
    "gradients cut at 1": ["train.clip=1.0"],
    "semifl": ["method.name=semifl"],
    "semifl, learning rate 0.03": ["method.name=semifl", "train.lr=0.03"],
    "cbafed": ["method.name=cbafed"],
}  # fmt: skip
"""Ideas to try with one seed on photographs (learning rate 0.1). Those that help are repeated with more
seeds. Run it from the repository's root, where `IDEAS` is found."""
_CONDITIONS = {
    "default": [],
    "threshold 0.4": ["method.threshold=0.4"],
    "three times the learning rate": ["train.lr=0.09"],
    "nine times the learning rate": ["train.lr=0.27"],
    "one label per class": ["split.server_labels=10"],
    "one label per class, threshold 0.4": ["split.server_labels=10", "method.threshold=0.4"],
    "one label per class, three times the learning rate": ["split.server_labels=10", "train.lr=0.09"],
    "one class per user, full pace": ["split.skew=1", "method.pace=full"],
    "one class per user, full pace, threshold 0.4": [
        "split.skew=1", "method.pace=full", "method.threshold=0.4",
    ],
    "one step of the server": ["train.server_steps=1"],
    "one step of the server, threshold 0.4": ["train.server_steps=1", "method.threshold=0.4"],
}  # fmt: skip
_HELD_OUT = "train.server_held_out=0.2"
GUARD: Variants = {
    f"{condition}: {guard}": [*sets, *more]
    for condition, sets in _CONDITIONS.items()
    for guard, more in {
        "guard": [],
        "no guard": ["method.guard=false"],
        "guard, labels held out": [_HELD_OUT],
        "no guard, labels held out": [_HELD_OUT, "method.guard=false"],
    }.items()
}
"""Conditions in which `anchored` may collapse, with and without its guard."""
SETS = {"anchored": ANCHORED, "norms": NORMS, "screen": SCREEN, "guard": GUARD}
"""The sets of variants, by the name that the command takes."""


def played(options: argparse.Namespace, name: str, sets: list[str], seed: int) -> dict[str, Any]:
    """Runs one variant with one seed, unless it is finished. Returns its accuracies, seconds, device and
    commit. The accuracies are None if training diverged. If ssfl refuses the variant's settings, the result
    has the error message as "refused" instead, and the other variants still run."""
    result: dict[str, Any] = {"variant": name, "seed": seed}
    folder = options.out / f"{options.set_of}-{name}-seed{seed}".replace(" ", "_").replace(",", "")
    seeds = [f"run.seed={seed}", f"split.seed={100 + seed}"]
    try:
        sets = ["data.validation=0.2", "run.threads=1", *options.sets, *sets, *_rounds(options, sets), *seeds]
        config = load_config(options.config, sets)
        finished = runs.read_summary(folder) is not None or runs.broke_down(folder) is not None
        if not finished:  # some settings are refused only when the data are known
            assemble.make(config).engine.close()
    except ConfigError as error:
        return result | {"refused": str(error)}
    same.require(config, folder)
    if not finished:
        with suppress(DivergedError):  # divergence is a result too, and the other runs continue
            train.begin_or_resume(config, folder)
    summary = runs.read_summary(folder) or {}
    keys = ("validation_accuracy", "accuracy", "seconds", "device", "commit")
    events = list(runs.read_events(folder))
    measured = [one["validation_accuracy"] for one in events if "validation_accuracy" in one]
    return result | {key: summary.get(key) for key in keys} | {
        "best_validation_accuracy": max(measured, default=None),
        "discarded_rounds": sum(one.get("alone", 0) for one in events),  # by the guard of `anchored`
    }  # fmt: skip


def _rounds(options: argparse.Namespace, sets: list[str]) -> list[str]:
    """Returns the setting federation.rounds that gives a variant with another period T the same total number
    of steps. Returns [] if T is the same or the number of rounds is not set."""
    federation = load_config(options.config, options.sets).federation
    longer = load_config(options.config, [*options.sets, *sets]).federation
    if federation.rounds is None or longer.period == federation.period:
        return []
    return [f"federation.rounds={federation.rounds * federation.period // longer.period}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the effect of each part of a method.")
    parser.add_argument("set_of", choices=list(SETS))
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--only", nargs="+", help="run only these variants; the first is the reference")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a setting of all")
    parser.add_argument("--out", type=Path, default=Path("runs/variants"))
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    wanted = SETS[options.set_of]
    unknown = [name for name in options.only or () if name not in wanted]
    if unknown:
        parser.error(f"no variant {unknown[0]!r}: choose from {', '.join(wanted)}")
    wanted = {name: wanted[name] for name in options.only or wanted}
    tasks = [(name, wanted[name], seed) for seed in range(1, options.seeds + 1) for name in wanted]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as lanes:
        rows = list(lanes.map(partial(played, options), *zip(*tasks, strict=True)))
    print(text.table([["", "accuracy, %", "against the first"], *_lines(list(wanted), rows)]))
    if options.json:
        details = report.circumstances("benchmarks.variants") | {
            "versions": versions(),
            "config": options.config,
        }
        report.save(options.json, details | {"sets": options.sets, "variants": wanted, "rows": rows})


def _lines(names: list[str], rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the lines of the table: each variant's mean and standard deviation, and its mean difference
    from the first variant over common seeds."""
    accuracies = {
        name: {row["seed"]: 100 * row["validation_accuracy"] for row in rows
               if row["variant"] == name and row.get("validation_accuracy") is not None}
        for name in names
    }  # fmt: skip
    refused = {row["variant"]: f"refused: {row['refused']}" for row in rows if "refused" in row}
    lines = []
    for name, seeds in accuracies.items():
        mean = refused.get(name, f"{statistics.mean(seeds.values()):.2f}" if seeds else "diverged")
        spread = f" ± {statistics.stdev(seeds.values()):.2f}" if len(seeds) > 1 else ""
        against = "" if name == names[0] else _difference(seeds, accuracies[names[0]])
        lines.append([name, mean + spread, against])
    return lines


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Returns the mean of `ours` minus `theirs` over their common seeds with its standard error as text, such
    as "+1.20 ± 0.31". Both arguments are accuracies by seed. The standard error is left out for a single
    seed, and the text is "–" if there is no common seed."""
    apart = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not apart:
        return "–"
    error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.2f}" if len(apart) > 1 else ""
    return f"{statistics.mean(apart):+.2f}{error}"


if __name__ == "__main__":
    main()
