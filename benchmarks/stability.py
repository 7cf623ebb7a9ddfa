"""Tests whether a method works in different federations: one user and many, even and skewed splits, few and
all participants, and users with inverted images. All other settings stay the same.

  python -m benchmarks.stability [--config NAME] [--methods A ...] [--cases N ...] [--seeds N ...]
  [--json FILE]

The accuracy is on the test images after the last round. The column "users" has the smallest, mean and largest
accuracy on the users' own training images, whose labels a simulation knows.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

import ssfl
from benchmarks import report
from ssfl.errors import DivergedError
from ssfl.report.several import spread
from ssfl.runs import assemble, resolve, text
from ssfl.runs.folder import versions
from ssfl.runs.surroundings import reproducible
from ssfl.simulate.simulation import Simulation

CASES: dict[str, list[str]] = {
    "K = 1": ["split.users=1"],
    "K = 3": ["split.users=3"],
    "K = C = 10": ["split.users=10"],
    "K = 47, C = 10": ["split.users=47", "federation.participants=10"],
    "K = 470, C = 30": ["split.users=470", "federation.participants=30"],
    "K = 10, C = 3": ["split.users=10", "federation.participants=3"],
    "R = 0": ["split.users=10", "split.skew=0"],
    "R = 1": ["split.users=10", "split.skew=1"],
    "R = 1, C = 3": ["split.users=10", "split.skew=1", "federation.participants=3"],
    "Dirichlet 0.1": ["split.users=10", "split.scheme=dirichlet", "split.alpha=0.1"],
    "one user in negative": ["split.users=10"],
    "half of the users in negative": ["split.users=10"],
}
NEGATIVE = {"one user in negative": 1, "half of the users in negative": 5}
"""In these cases, the number of users whose images are inverted (negatives)."""


def play(config: str, method: str, case: str, seed: int, sets: list[str]) -> dict[str, Any]:
    """Runs one method in one case with one seed. Returns the test accuracy, each user's accuracy and the mask
    rate, or {"ended": reason} if training diverged."""
    names = [f"method.name={method}", f"run.seed={seed}", f"split.seed={2018 + seed}"]
    wanted = ssfl.load_config(config, [*CASES[case], *names, *sets])
    data = resolve.load_data(wanted)
    resolved = resolve.resolve(wanted, data)
    parts, held = resolve.make_parts(resolved, data)
    for user in range(NEGATIVE.get(case, 0)):
        data.images[parts.users[user]] = 255 - data.images[parts.users[user]]
    sim = assemble.build(resolved, data, parts, held, assemble.choose_device(wanted.run.device))
    state, mask, left_out = sim.initial(), 0.0, 0
    try:
        with reproducible():
            for _ in range(sim.rounds):
                state, events = sim.play(state)
                mask = events[0].get("mask_rate", 0.0)
                left_out += events[0].get("alone", 0)
            accuracy = sim.evaluate(state)["accuracy"]
    except DivergedError as error:
        return {"ended": str(error)}
    finally:
        sim.engine.close()
    row = sim.final_row(state)
    users = [_on(sim, row, sim.parts.users[user]) for user in range(len(sim.parts.users))]
    return {"accuracy": accuracy, "users": users, "mask_rate": mask, "rounds_without_users": left_out}


def _on(sim: Simulation, row: Tensor, images: Any) -> float:
    """Returns the accuracy of the model `row`, from 0 to 1, on the training images with these positions."""
    return sim.score(row, sim.pool.images[images], sim.pool.labels[images].cpu())[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Test a method on different federations.")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--methods", nargs="+", default=["anchored", "alternate", "server-only"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a further setting")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        for method in options.methods:
            for seed in options.seeds:
                result = play(options.config, method, case, seed, options.sets)
                rows.append({"case": case, "method": method, "seed": seed} | result)
                print(f"{case}; {method}; seed {seed}: {result.get('accuracy', 'diverged')}", file=sys.stderr)
    head = ["", *options.methods, "users (first method)"]
    print(text.table([head, *(_line(case, options, rows) for case in options.cases)]))
    if options.json:
        details = report.circumstances("benchmarks.stability") | {
            "versions": versions(),
            "config": options.config,
        }
        report.save(options.json, details | {"settings": CASES, "negative": NEGATIVE, "rows": rows})


def _line(case: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[str]:
    """Returns the cells of one case in the table: the accuracy of each method, and the users' accuracies with
    the first method."""
    cells, here = [case], [row for row in rows if row["case"] == case]
    for method in options.methods:
        ends = [row["accuracy"] for row in here if row["method"] == method and "accuracy" in row]
        lost = len(options.seeds) - len(ends)
        cells.append(spread(ends) + (f" ({lost} diverged)" if lost else ""))
    first = [row.get("users", []) for row in here if row["method"] == options.methods[0]]
    users = [100 * share for shares in first for share in shares]
    cells.append(f"{min(users):.0f} / {statistics.mean(users):.0f} / {max(users):.0f}" if users else "")
    return cells


if __name__ == "__main__":
    main()
