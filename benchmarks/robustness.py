"""Measures the effect of attackers on the accuracy: without a defence, with the gate, with robust averages.

python -m benchmarks.robustness [--data FILE.npz] [--rounds N] [--seeds N ...] [--validation] [--json FILE]

Some sites send bad updates in every round, all sites take part in every round, and their images are skewed.
Every run is paired with the clean run of the same seed: no attackers, plain mean, no gate. Without --data the
images are scikit-learn's digits. The file of --json is written after every run, and rows that it already has
are not run again. Accuracy is on the test images; with --validation it is on a part of the training
images. Use that to choose --reach, the length to which the gate cuts updates.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import ssfl
from benchmarks import report
from ssfl.errors import DivergedError
from ssfl.runs import text
from ssfl.runs.folder import versions
from ssfl.simulate import gate

DIGITS = ["split.server_labels=50", "train.batch_size=32", "train.lr=0.03", "train.weight_decay=0.001"]
LETTERS = [
    "model.name=cnn",
    "split.server_labels=4700",
    "train.batch_size=64",
    "train.lr=0.05",
    "train.cycles=0.5",
]
COMMON = ["method.name=anchored", "split.skew=0.8", "federation.period=16", "train.momentum_policy=reset"]
SITES = {"1 of 4": (4, 0.25), "1 of 10": (10, 0.1), "3 of 10": (10, 0.3)}
"""The number of sites, and the share of bad ones."""
ATTACKS: dict[str, list[str]] = {
    "none": [],
    "sign flip": ["federation.attack=sign"],
    "sign flip, 2.9 times as long": ["federation.attack=sign", "federation.attack_scale=2.9"],
    "scaled gradient ascent": ["federation.attack=ascent"],
    "noise": ["federation.attack=noise"],
    "label shift": ["federation.attack=shift"],
    "slow poisoning": ["federation.attack=slow"],
}
DEFENCES: dict[str, list[str]] = {
    "no defence": [],
    "gate": ["federation.gate=true"],
    "gate and trimmed mean": ["federation.gate=true", "federation.combine=trimmed"],
    "median": ["federation.combine=median"],
}
CLEAN = ("none", "no defence")


class Case(NamedTuple):
    """One run."""

    sites: str
    attack: str
    defence: str
    seed: int
    reach: float
    settings: tuple[str, ...]
    """Settings that all runs have."""
    validation: bool


def settings_of(case: Case) -> list[str]:
    """The settings of one run."""
    users, share = SITES[case.sites]
    sets = ["data.validation=0.1", "run.test=never"] if case.validation else ["run.test=every"]
    sets += [*case.settings, f"split.users={users}", *ATTACKS[case.attack], *DEFENCES[case.defence]]
    sets += [f"run.seed={case.seed}", f"split.seed={case.seed}"]
    return sets + ([f"federation.attackers={share}"] if ATTACKS[case.attack] else [])


def play(case: Case) -> tuple[Case, float, float]:
    """Returns the accuracy of one run (0 if it diverges) and its seconds."""
    gate.REACH = case.reach
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = ssfl.run(ssfl.load_config("quickstart", settings_of(case)), Path(folder) / "run")
        except DivergedError:
            return case, 0.0, time.perf_counter() - began
        last = next(event for event in reversed(result.history) if event["event"] == "eval")
    accuracy = float(last["validation_accuracy" if case.validation else "accuracy"])
    return case, accuracy, time.perf_counter() - began


def rows_of(cases: list[Case], accuracies: dict[Case, float], seeds: list[int]) -> list[dict[str, Any]]:
    """Returns a row for each kind of run that has ended: its accuracies, and the differences to clean runs of
    the same seeds."""
    rows = []
    for case in (case for case in cases if case.seed == seeds[0]):
        if any(case._replace(seed=seed) not in accuracies for seed in seeds):
            continue
        each = [accuracies[case._replace(seed=seed)] for seed in seeds]
        clean = [
            accuracies.get(case._replace(attack=CLEAN[0], defence=CLEAN[1], seed=seed, reach=gate.REACH))
            for seed in seeds
        ]
        apart = [one - other for one, other in zip(each, clean, strict=True) if other is not None]
        rows.append({
            "sites": case.sites, "attack": case.attack, "defence": case.defence, "reach": case.reach,
            "mean": statistics.mean(each), "accuracies": each,
            "beside_clean": statistics.mean(apart) if apart else None, "differences": apart,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the effect of attackers on the accuracy.")
    parser.add_argument("--data", type=Path, help="an .npz of letters; by default the digits")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sites", nargs="+", default=list(SITES), choices=list(SITES))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    parser.add_argument("--reach", type=float, nargs="+", default=[gate.REACH])
    parser.add_argument("--set", nargs="+", default=[], help="further settings of every run")
    parser.add_argument("--validation", action="store_true", help="score on a part of the training images")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    sets = [
        *COMMON,
        f"federation.rounds={options.rounds}",
        f"run.eval_every={options.rounds}",
        "run.threads=1",
    ]
    sets += DIGITS if options.data is None else [*LETTERS, f"data.path={options.data}"]
    both = (*sets, *options.set)
    cases = [
        Case(sites, attack, defence, seed, reach, both, options.validation)
        for sites in options.sites
        for attack in options.attacks
        for defence in options.defences
        for reach in (options.reach if "gate" in defence else [gate.REACH])
        for seed in options.seeds
    ]
    if options.data is not None:  # do not publish a path of this machine
        both = (*(one for one in both if not one.startswith("data.path=")), f"data: {options.data.stem}")
    protocol = {"seeds": options.seeds, "settings": list(both), "on": _on(options.validation)}
    accuracies = known(options.json, protocol, cases)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for case, accuracy, seconds in pool.imap_unordered(
            play, [one for one in cases if one not in accuracies]
        ):
            accuracies[case] = accuracy
            label = f"{case.sites}; {case.attack}; {case.defence}; reach {case.reach}; seed {case.seed}"
            print(f"{label}: {100 * accuracy:.2f}  {seconds:.1f} s", file=sys.stderr, flush=True)
            if options.json:
                around = report.circumstances("benchmarks.robustness") | {"versions": versions()}
                report.save(
                    options.json, around | protocol | {"rows": rows_of(cases, accuracies, options.seeds)}
                )
    print(table_of(rows_of(cases, accuracies, options.seeds)))


def known(file: Path | None, protocol: dict[str, Any], cases: list[Case]) -> dict[Case, float]:
    """Returns the accuracies that an earlier call with the same settings has written to the file."""
    if file is None or not file.is_file():
        return {}
    before = json.loads(file.read_text())
    if any(before[key] != value for key, value in protocol.items()):
        sys.exit(f"{file} has other settings or seeds: name another file, or remove it")
    rows = {(row["sites"], row["attack"], row["defence"], row["reach"]): row for row in before["rows"]}
    accuracies = {}
    for case in cases:
        row = rows.get((case.sites, case.attack, case.defence, case.reach))
        if row is not None:
            accuracies[case] = row["accuracies"][protocol["seeds"].index(case.seed)]
    return accuracies


def table_of(rows: list[dict[str, Any]]) -> str:
    """Returns a table: the accuracy in %, and in brackets the difference to the clean run."""
    columns = list(dict.fromkeys((row["defence"], row["reach"]) for row in rows))
    lines = list(dict.fromkeys((row["sites"], row["attack"]) for row in rows))
    cells = {(row["sites"], row["attack"], row["defence"], row["reach"]): row for row in rows}

    def cell(row: dict[str, Any]) -> str:
        apart = "" if row["beside_clean"] is None else f" ({100 * row['beside_clean']:+.2f})"
        return f"{100 * row['mean']:.2f}{apart}"

    names = [name if name in ("no defence", "median") else f"{name}, {reach:g}" for name, reach in columns]
    body = [
        [*line, *(cell(cells[(*line, *column)]) if (*line, *column) in cells else "-" for column in columns)]
        for line in lines
    ]
    return text.table([["sites", "attack", *names], *body])


def _on(validation: bool) -> str:
    return "a tenth of the training images" if validation else "the test images"


if __name__ == "__main__":
    main()
