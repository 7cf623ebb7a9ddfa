"""Measures the effect of caching only V augmented views of each image (`model.cached_views`): accuracy and
CPU seconds.

  python -m benchmarks.views FOLDER --views 1 2 4 8 --partitions 3 --json FILE
  python -m benchmarks.views digits --views 1 2 4 8 0 --partitions 3 --json FILE
  python -m benchmarks.views FOLDER --views 4 --set data.test_views=0 --json FILE

FOLDER has one sub-folder for each class, and `unlabelled/`. Every run is `ssfl run FOLDER` with another V and
another partition of the labelled images into folds. "digits" are scikit-learn's digits, enlarged to 64
pixels: 60 labelled images, 600 unlabelled ones at three users, and 1,000 test images. V = 0 makes new views
in every step and runs the whole network on them, which is the limit of many views.
"""

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import ssfl
from benchmarks import report
from ssfl.core import cache
from ssfl.runs.folder import versions

SIDE = 64
LABELLED, UNLABELLED, TESTED = 60, 600, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a finite number of cached views costs.")
    parser.add_argument("folder", help='a folder of pictures, or "digits"')
    parser.add_argument("--views", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="a setting for every run")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    details = report.circumstances("benchmarks.views") | {"versions": versions(), "runs": rows}
    for partition in range(options.partitions):
        for views in options.views:
            rows.append(measure(options.folder, views, partition, options.sets))
            print(rows[-1], flush=True)
            if options.json:
                report.save(options.json, details)
    for views in options.views:
        each = [row for row in rows if row["views"] == views]
        print(
            f"V = {views}: {np.mean([row['correct'] for row in each]):.1f} of {each[0]['count']} with the "
            f"unlabelled images, {np.mean([row['correct_without'] for row in each]):.1f} without"
        )


def measure(folder: str, views: int, partition: int, sets: list[str]) -> dict[str, Any]:
    """Runs one V on one partition. Returns the numbers of correct images with and without the unlabelled
    images, the balanced accuracies, and the run's CPU and wall seconds."""
    sets = [f"model.cached_views={views}", f"split.seed={partition}", *sets]
    data = digits(partition) if folder == "digits" else None
    if data is None:
        config = ssfl.load_config(folder, sets)
    else:
        config = ssfl.load_config("pictures", ["data.name=in memory", "run.eval_every=40", *sets])
    before, began, cpu = stored(), time.perf_counter(), seconds()
    with tempfile.TemporaryDirectory() as scratch:
        result = ssfl.run(config, out=Path(scratch) / "run", data=data)
    comparison = result.summary["verdict"]["comparisons"][0]
    return {
        "views": views,
        "partition": partition,
        "test_views": config.data.test_views,
        **{key: comparison[key] for key in ("on", "count", "correct", "correct_without")},
        "balanced_accuracy": comparison["balanced_accuracy"],
        "balanced_accuracy_without": comparison["balanced_accuracy_without"],
        "new_views": stored() - before,
        "cpu_s": seconds() - cpu,
        "wall_s": time.perf_counter() - began,
        "load": os.getloadavg()[0],
    }


def digits(partition: int) -> ssfl.Data:
    """Returns enlarged digits as data in memory. The test images are always the same; each partition has
    other labelled images."""
    from PIL import Image
    from sklearn.datasets import load_digits

    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.target))
    test, rest = order[:TESTED], np.random.default_rng(partition).permutation(order[TESTED:])

    def read(places: np.ndarray) -> np.ndarray:
        pixels = (source.images[places] * 15.9).astype(np.uint8)
        side = (SIDE, SIDE)
        return np.stack(
            [np.array(Image.fromarray(one).resize(side, Image.Resampling.BILINEAR)) for one in pixels]
        )

    train = rest[: LABELLED + UNLABELLED]
    labels = source.target[train].copy()
    labels[LABELLED:] = -1
    users = np.array_split(np.arange(LABELLED, len(train)), 3)
    return ssfl.Data(
        read(train),
        labels,
        read(test),
        source.target[test],
        server=np.arange(LABELLED),
        users=users,
        flip=False,
    )


def stored() -> int:
    """Returns how many files of computed features are in the cache."""
    return sum(1 for _ in (cache.root() / "features").glob("*/*.npy"))


def seconds() -> float:
    """Returns the CPU seconds that this process and its ended child processes have used."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
