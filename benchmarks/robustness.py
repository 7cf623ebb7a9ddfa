"""Measures how attackers reduce the accuracy: without a defence, with the gate, and with robust averages.

  python -m benchmarks.robustness [--data FILE.npz] [--rounds N] [--seeds N ...] [--validation] [--json FILE]

Some sites send bad updates in every round. All sites take part in every round, and their images are skewed.
Every run is compared with the clean run of the same seed: no attackers, plain mean, no gate. Without --data
the images are scikit-learn's digits.

The file of --json is written after every run. Runs that it already has are not repeated, so several calls can
fill one file. A run that fails is listed there, and the others continue.

The accuracy is on the test images. With --validation it is on a part of the training images; use that to
choose --reach, the length to which the gate cuts updates.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import ssfl
from benchmarks import report
from ssfl.errors import DivergedError, one_line
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
"""The number of sites, and the fraction of them that attack."""
ATTACKS: dict[str, list[str]] = {
    "none": [],
    "sign flip": ["federation.attack=sign"],
    "sign flip, 2.9 times as long": ["federation.attack=sign", "federation.attack_scale=2.9"],
    "scaled gradient ascent": ["federation.attack=ascent"],
    "noise": ["federation.attack=noise"],
    "label shift": ["federation.attack=shift"],
    "slow poisoning": ["federation.attack=slow"],
    "sign flip in every second round": ["federation.attack=alternating"],
}
DEFENCES: dict[str, list[str]] = {
    "no defence": [],
    "gate": ["federation.gate=true"],
    "gate and trimmed mean": ["federation.gate=true", "federation.combine=trimmed"],
    "median": ["federation.combine=median"],
}
CLEAN = ("none", "no defence")


class Case(NamedTuple):
    """One run of the benchmark: sites, attack, defence, seed and settings."""

    sites: str
    attack: str
    defence: str
    seed: int
    reach: float
    """The length to which the gate cuts updates, as a multiple of the usual length."""
    settings: tuple[str, ...]
    """The settings that all runs have in common."""
    validation: bool
    """Whether the accuracy is on validation images instead of test images."""


def settings_of(case: Case) -> list[str]:
    """Returns the settings of one run, each as `section.key=value`."""
    users, share = SITES[case.sites]
    sets = ["data.validation=0.1", "run.test=never"] if case.validation else ["run.test=every"]
    sets += [*case.settings, f"split.users={users}", *ATTACKS[case.attack], *DEFENCES[case.defence]]
    sets += [f"run.seed={case.seed}", f"split.seed={case.seed}"]
    return sets + ([f"federation.attackers={share}"] if ATTACKS[case.attack] else [])


class Outcome(NamedTuple):
    """The result of one run."""

    case: Case
    accuracy: float = 0.0
    """The accuracy from 0 to 1; 0 if training diverged."""
    seconds: float = 0.0
    error: str = ""
    """The reason why there is no accuracy; "" if the run succeeded or diverged."""


def play(case: Case) -> Outcome:
    """Runs one case and returns its result. Errors do not raise; they are part of the result."""
    gate.REACH = case.reach
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = ssfl.run(ssfl.load_config("quickstart", settings_of(case)), Path(folder) / "run")
        except DivergedError:
            return Outcome(case, 0.0, time.perf_counter() - began)
        except Exception as error:  # for example a full GPU: the other runs continue
            return Outcome(case, seconds=time.perf_counter() - began, error=one_line(error))
        last = next(event for event in reversed(result.history) if event["event"] == "eval")
    accuracy = float(last["validation_accuracy" if case.validation else "accuracy"])
    return Outcome(case, accuracy, time.perf_counter() - began)


def outcomes(cases: list[Case], processes: int) -> Iterator[Outcome]:
    """Runs the cases in several processes, and yields each result when its run ends. If a process dies or its
    run fails, only this run is lost: a new process continues with the others."""
    waiting, ended = Queue[Case](), Queue[Outcome]()
    for case in cases:
        waiting.put(case)

    def work() -> None:
        pool = None
        while True:
            try:
                case = waiting.get_nowait()
            except Empty:
                break
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            try:
                outcome = pool.submit(play, case).result()
            except BrokenProcessPool:
                outcome = Outcome(case, error="its process died, perhaps for want of memory")
            if outcome.error:  # a broken GPU context, for example, could make the next run fail too
                pool.shutdown(wait=False)
                pool = None
            ended.put(outcome)
        if pool:
            pool.shutdown()

    for _ in range(min(processes, len(cases))):
        threading.Thread(target=work, daemon=True).start()
    for _ in cases:
        yield ended.get()


def case_to_run(case: Case) -> Case:
    """Returns the case to run instead: without an attack, federations with equally many sites are equal."""
    if ATTACKS[case.attack]:
        return case
    return case._replace(sites=next(name for name in SITES if SITES[name][0] == SITES[case.sites][0]))


def _place(case: Case) -> tuple[int, int, int, float]:
    """Returns the position of a run in the table, for sorting."""
    sites, attack = list(SITES).index(case.sites), list(ATTACKS).index(case.attack)
    return sites, attack, list(DEFENCES).index(case.defence), case.reach


def rows_of(accuracies: dict[Case, float], seeds: list[int]) -> list[dict[str, Any]]:
    """Returns one row for each kind of run that has ended with all seeds: its accuracies, and their
    differences from the clean runs of the same seeds."""
    rows = []
    for case in sorted((case for case in accuracies if case.seed == seeds[0]), key=_place):
        if any(case._replace(seed=seed) not in accuracies for seed in seeds):
            continue
        each = [accuracies[case._replace(seed=seed)] for seed in seeds]
        clean_case = case_to_run(case._replace(attack=CLEAN[0], defence=CLEAN[1], reach=gate.REACH))
        clean = [accuracies.get(clean_case._replace(seed=seed)) for seed in seeds]
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
        f"run.checkpoint_every={options.rounds}",
        "run.threads=1",
        "run.baseline=false",  # the default would also train a baseline without the sites
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
    cases = list(dict.fromkeys(case_to_run(case) for case in cases))
    if options.data is not None:  # do not publish a path of this machine
        both = (*(one for one in both if not one.startswith("data.path=")), f"data: {options.data.stem}")
    protocol = {"seeds": options.seeds, "settings": list(both), "on": _on(options.validation)}
    known = earlier(options.json, protocol, cases[0])
    accuracies, runs, failed = (
        {case: run["accuracy"] for case, run in known.items()},
        list(known.values()),
        [],
    )
    for case, accuracy, seconds, error in outcomes(
        [case for case in cases if case not in accuracies], options.processes
    ):
        about = {"sites": case.sites, "attack": case.attack, "defence": case.defence, "reach": case.reach}
        label = "; ".join(f"{key} {value}" for key, value in (about | {"seed": case.seed}).items())
        print(f"{label}: {error or f'{100 * accuracy:.2f}'}  {seconds:.1f} s", file=sys.stderr, flush=True)
        if error:
            failed.append(about | {"seed": case.seed, "error": error})
        else:
            accuracies[case] = accuracy
            runs.append(about | {"seed": case.seed, "accuracy": accuracy, "seconds": round(seconds, 1)})
        if options.json:
            around = report.circumstances("benchmarks.robustness") | {"versions": versions()}
            rows = rows_of(accuracies, options.seeds)
            report.save(options.json, around | protocol | {"rows": rows, "runs": runs, "failed": failed})
    if accuracies:
        print(table_of(rows_of(accuracies, options.seeds)))
    if failed:
        sys.exit(f"{len(failed)} runs failed, the last because: {failed[-1]['error']}")


def earlier(file: Path | None, protocol: dict[str, Any], like: Case) -> dict[Case, dict[str, Any]]:
    """Returns the runs that earlier calls with the same settings have written to the file. `like` is one case
    of this call, whose settings must match."""
    if file is None or not file.is_file():
        return {}
    before = json.loads(file.read_text())
    if any(before[key] != value for key, value in protocol.items()) or "runs" not in before:
        sys.exit(f"{file} has other settings or seeds: name another file, or remove it")
    keys = "sites", "attack", "defence", "reach", "seed"
    return {like._replace(**{key: run[key] for key in keys}): run for run in before["runs"]}


def table_of(rows: list[dict[str, Any]]) -> str:
    """Returns a table as text: the accuracy in percent and, in brackets, the difference from the clean
    run."""
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
    """Returns a phrase that says on which images the accuracy is measured, for the table."""
    return "a tenth of the training images" if validation else "the test images"


if __name__ == "__main__":
    main()
