"""What attackers do to the accuracy, without and with the gate, a robust average and the server's check.

python -m benchmarks.robustness [--seeds N ...] [--validation] [--processes N] [--json FILE]

The quickstart in two groups, a fifth of the users sending garbage in every round. Accuracy is on the test
images; with --validation on a part of the training images, to choose by.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

import ssfl
from benchmarks import report
from ssfl.runs import text
from ssfl.runs.folder import versions

SETTINGS = ["method.name=alternate", "method.threshold=0.6", "federation.groups=2",
            "federation.rounds=40", "run.threads=1"]  # fmt: skip
ATTACKS: dict[str, list[str]] = {
    "none": [],
    "sign": ["federation.attack=sign"],
    "sign, twice as long": ["federation.attack=sign", "federation.attack_scale=2"],
    "sign, 2.9 times as long": ["federation.attack=sign", "federation.attack_scale=2.9"],
    "noise": ["federation.attack=noise"],
    "shift": ["federation.attack=shift"],
}
DEFENCES: dict[str, list[str]] = {
    "none": [],
    "gate, trimmed mean": ["federation.gate=true", "federation.combine=trimmed"],
    "gate, trimmed mean, check": [
        "federation.gate=true",
        "federation.combine=trimmed",
        "federation.check=true",
    ],
}
Case = tuple[str, str, int, bool]


def play(case: Case) -> float:
    """The accuracy of one run."""
    attack, defence, seed, validation = case
    sets = [*SETTINGS, *ATTACKS[attack], *DEFENCES[defence], f"run.seed={seed}", f"split.seed={seed}"]
    sets += ["federation.attackers=0.2"] if ATTACKS[attack] else []
    sets += ["data.validation=0.2"] if validation else []
    with tempfile.TemporaryDirectory() as folder:
        result = ssfl.run(ssfl.load_config("quickstart", sets), Path(folder) / "run")
        last = next(event for event in reversed(result.history) if event["event"] == "eval")
    return float(last["validation_accuracy" if validation else "accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description="What attackers do to the accuracy.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    parser.add_argument("--validation", action="store_true", help="score on a part of the training images")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args()
    pairs = [(attack, defence) for attack in given.attacks for defence in given.defences]
    cases = [(*pair, seed, given.validation) for pair in pairs for seed in given.seeds]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        found = {}
        for case, accuracy in zip(cases, pool.imap(play, cases), strict=True):
            found[case] = accuracy
            print(f"{case[0]}; {case[1]}; seed {case[2]}: {100 * accuracy:.2f}", file=sys.stderr)
    rows = []
    for pair in pairs:
        each = [found[(*pair, seed, given.validation)] for seed in given.seeds]
        spread = statistics.stdev(each) if len(each) > 1 else 0.0
        rows.append({"attack": pair[0], "defence": pair[1], "mean": statistics.mean(each), "sd": spread,
                     "accuracies": each})  # fmt: skip
    mean = {(row["attack"], row["defence"]): row["mean"] for row in rows}
    table = [[a, *(f"{100 * mean[a, d]:.2f}" for d in given.defences)] for a in given.attacks]
    print(text.table([["attack", *given.defences], *table]))
    if given.json:
        told = report.circumstances("benchmarks.robustness") | {"versions": versions(), "seeds": given.seeds}
        report.save(given.json, told | {"settings": SETTINGS, "on": _on(given.validation), "rows": rows})


def _on(validation: bool) -> str:
    return "a fifth of the training images" if validation else "the test images"


if __name__ == "__main__":
    main()
