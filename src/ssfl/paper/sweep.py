"""Runs the experiments of the paper's table. Finished runs are skipped, and stopped runs are continued."""

import hashlib
import itertools
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ssfl.config.settings import Config
from ssfl.errors import ConfigError, DataError, DivergedError, SsflError
from ssfl.paper import fidelity, results
from ssfl.paper.rows import PaperRun, Row
from ssfl.runs import folder as folders
from ssfl.runs import same, side_by_side
from ssfl.runs.side_by_side import Runner

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of `ssfl paper run`. `fidelity` says which settings to use: those of the paper's text
    ("paper"), of its authors' code ("reference"), or those that we recommend ("recommended"). `scale` is the
    fraction of the training to run, and `seeds` the number of seeds. `data` replaces the paper's data set,
    unless it is None. Runs are saved in the folder `out`."""

    fidelity: str = "paper"
    scale: float = 1.0
    seeds: int = 1
    data: str | None = None
    only: str = ""
    """If not empty, only runs whose names contain this text are run."""
    sets: tuple[str, ...] = ()
    """Changed settings, each as `section.key=value`."""
    out: Path = Path("runs/paper")

    @property
    def changes(self) -> tuple[str, ...]:
        """The changed settings that can change the results, so that the run is no longer the paper's
        experiment. File locations and execution settings (section [run]) are left out."""
        aside = ("data.root", "data.download", "run.")
        return tuple(sorted(one for one in self.sets if not one.startswith(aside)))


def folder(run: PaperRun, options: Options, seed: int) -> Path:
    """Returns the folder for a run with this seed. Rows that contain the same run share its folder, so that
    it is trained once."""
    parts = [fidelity.actual(run, options.fidelity).name, options.fidelity]
    if options.data:
        parts.append(Path(options.data).stem)
    if options.scale != 1:
        parts.append(f"scale{options.scale:g}")
    if options.changes:
        parts.append(hashlib.sha256("\n".join(options.changes).encode()).hexdigest()[:8])
    return options.out / "-".join([*parts, f"seed{seed}"])


def play(rows: list[Row], options: Options, tell: Tell, quiet: bool = False, jobs: int = 1) -> list[Path]:
    """Trains all runs of the rows with the first seed, then all with the second seed, and so on. Returns
    their folders in this order. A run that is in several rows is trained once.

    If a run diverges, or its data cannot be loaded and other rows use other data, the remaining runs are
    still trained. Then the last such error is raised. `tell` shows a line of text to the user, and `quiet`
    hides the progress of each run. `jobs` is how many runs are played at the same time.
    """
    if any(one.startswith("run.seed") for one in options.sets):
        raise ConfigError("--set run.seed would make every seed the same: use --seeds", key="run.seed")
    kinds = sorted({run.data for row in rows for run in row.runs})
    if options.data not in (None, "digits") and len(kinds) > 1:
        raise ConfigError(
            f"these rows use {' and '.join(kinds)}, and --data replaces only one data set: run them "
            "separately",
            key="--data",
            value=options.data,
        )
    wanted: dict[Path, tuple[PaperRun, int]] = {}
    for seed, row in itertools.product(range(1, options.seeds + 1), rows):
        for run in row.runs:
            if options.only in run.name:  # if rows share a run, it is taken from the first row
                wanted.setdefault(folder(run, options, seed), (run, seed))
    configs = {  # finds mistakes before anything is trained
        path: fidelity.settings(run, options.fidelity, options.scale, seed, options.data, options.sets)
        for path, (run, seed) in wanted.items()
    }
    for path, config in configs.items():
        if config.run.test == "never":
            raise ConfigError(
                "--set run.test=never: rows are compared by their test accuracy, so leave it out",
                key="run.test",
                value="never",
            )
        same.require(config, path)
    with side_by_side.runner(jobs, quiet) as runner:
        played = partial(_played, options=options, many_kinds=len(kinds) > 1, tell=tell, runner=runner)
        plans = [
            Planned(run, seed, path, configs[path], f"[{number}/{len(wanted)}] {path.name}")
            for number, (path, (run, seed)) in enumerate(wanted.items(), 1)
        ]
        failed = [error for error in runner.each(played, plans) if error is not None]
    if failed:
        raise failed[-1]
    return list(wanted)


@dataclass(frozen=True)
class Planned:
    """A run that is to be trained."""

    run: PaperRun
    seed: int
    path: Path
    config: Config
    label: str
    """The beginning of every line about this run."""


def _played(
    plan: Planned, options: Options, many_kinds: bool, tell: Tell, runner: Runner
) -> SsflError | None:
    """Trains a run, unless it is finished, and writes its results. Returns the error with which training
    diverged, and None otherwise. If the runs need several kinds of data (`many_kinds`), the error of missing
    data is returned, too."""
    path, here = plan.path, plan.label
    if results.is_written(path):
        tell(f"{here}: already finished")
        return None
    run = fidelity.actual(plan.run, options.fidelity)
    origin = {
        "command": shlex.join(["ssfl", *sys.argv[1:]]),
        "fidelity": options.fidelity, "scale": options.scale, "seed": plan.seed, "changes": options.changes,
    }  # fmt: skip
    try:
        runner.play(plan.config, path, lambda: tell(here))
    except DivergedError as error:  # divergence is a result as well, and the other runs continue
        results.write(path, run, origin | {"diverged": str(error)})
        tell(f"{here}: {error}")
        return error
    except DataError as error:  # other rows may use other data, which may be available
        if not many_kinds:
            raise
        tell(f"{here}: {error}")
        return error
    results.write(path, run, origin)
    compared = run.published is not None and options.data != "digits" and not options.changes
    printed = f" (published {run.published:.2f})" if compared else ""
    images = f" on {Path(options.data).stem}" if options.data else ""
    accuracy = 100 * (folders.read_summary(path) or {})["accuracy"]
    tell(f"{here}: {accuracy:.2f} %{images}{printed}, at scale {options.scale:g}")
    if results.made_no_pseudo_labels(path):
        tell(f"{here}: no pseudo-label was made, because the mask rate was 0 in every round")
    return None
