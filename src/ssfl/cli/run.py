"""`ssfl run`: train a model with a simulated federation."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli import verbs
from ssfl.cli.options import ConfigName, Json, Quiet
from ssfl.cli.training import carry_out
from ssfl.cli.verbs import With


def run(
    config: ConfigName = None,
    sets: verbs.Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder to create. Default: runs/NAME, then runs/NAME-2.")
    ] = None,
    folds: Annotated[
        int | None, typer.Option(help="Cross-validate on the labelled images, with this many folds.")
    ] = None,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Do not train a server-only model for comparison.")
    ] = False,
    code: With = None,
    quiet: Quiet = False,
    json_only: Json = False,
) -> None:
    """Train a model with a simulated federation.

    CONFIG may also be a folder of images, with a sub-folder for each class and a sub-folder unlabelled/.

    Example: ssfl run scans
    """
    from ssfl.config.loading import check_early
    from ssfl.config.sources import PROJECT
    from ssfl.core import outside, progress

    outside.supply(code or [])
    sets = [*(sets or []), *([] if folds is None else [f"run.folds={folds}"])]
    sets += ["run.baseline=false"] if no_baseline else []
    check_early(config, sets)  # before torch is imported, which takes seconds
    progress.show(not (quiet or json_only))
    from ssfl.runs import train
    from ssfl.runs.choose import load_config
    from ssfl.runs.folder import next_free

    loaded = load_config(config, sets)

    named = Path(config or "quickstart").absolute()
    target = out or next_free(Path("runs") / (named.parent if named.name == PROJECT else named).stem)
    carry_out(lambda report: train.run(loaded, target, report, forecast=True), quiet or json_only, json_only)
