"""Measures which engine, "loop" or "vmap", is faster on a CPU, by network, image size and batch size.
`engines.choice` relies on the results.

  python -m benchmarks.engines [--json FILE]

It uses one thread and five users, and reports the fastest of several rounds of two steps each.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.jobs import Job, draw_images
from ssfl.config.loading import load_config
from ssfl.engines import choice
from ssfl.runs import assemble
from ssfl.runs.surroundings import reproducible

NETWORKS = (
    ("small", "group", (8, 8)), ("small", "group", (28, 28)), ("small", "group", (32, 32, 3)),
    ("cnn", "none", (8, 8)), ("cnn", "none", (28, 28)), ("cnn", "none", (32, 32, 3)),
    ("resnet9", "group", (8, 8, 3)), ("resnet18", "group", (8, 8, 3)),
)  # fmt: skip
BATCHES = (4, 16, 64)
USERS, STEPS, ROUNDS = 5, 2, 5


def measure(model: str, norm: str, data: Path, batch: int, engine: str) -> tuple[float, float]:
    """Returns the milliseconds of one training step of one user, and the memory in MiB that the engine "vmap"
    says it needs."""
    sim = assemble.make(
        load_config(
            "own",
            [
                f"data.path={data}", f"model.name={model}", f"model.norm={norm}", "run.device=cpu",
                "run.threads=1", f"run.engine={engine}", f"split.users={USERS}", "federation.rounds=4",
                f"federation.period={STEPS}", f"train.batch_size={batch}",
            ],
        )
    )  # fmt: skip
    cohort, state = sim.plan.cohort(0), sim.initial()
    work = sim.plan.users_work(0, cohort)
    rows = state.streams[list(cohort.streams)]
    rest = torch.zeros_like(rows[:, : sim.layout.weights])
    spent = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        sim.engine.train(rows, rest, work)
        spent.append(time.perf_counter() - start)
    needed = sim.engine.memory(batch)
    return 1000 * min(spent[1:]) / (USERS * STEPS), needed / 2**20


def main() -> None:
    """Runs the command: measures all combinations and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description="Measure which engine is faster on a CPU."
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, reproducible():
        for model, norm, shape in NETWORKS:
            place = Path(folder) / "x".join(map(str, shape))
            place.mkdir(exist_ok=True)
            data = draw_images(Job("", "", (), 0, 2000, shape, 10), place)
            for batch in BATCHES:
                loop, _ = measure(model, norm, data, batch, "loop")
                vmap, needed = measure(model, norm, data, batch, "vmap")
                chosen = choice.choose(torch.device("cpu"), int(needed * 2**20))
                rows.append({
                    "model": model, "shape": shape, "batch": batch, "loop_ms": loop, "vmap_ms": vmap,
                    "needed_mib": needed, "chosen": chosen,
                })  # fmt: skip
                print(
                    f"{model:9} {place.name:8} B={batch:<3} {needed:7.1f} MiB  loop {loop:7.2f}  "
                    f"vmap {vmap:7.2f} ms  loop / vmap {loop / vmap:.2f}  {chosen}",
                    flush=True,
                )
    if options.json:
        where = report.circumstances("benchmarks.engines")
        report.save(options.json, where | {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
