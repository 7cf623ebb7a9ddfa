"""`ssfl contest`: compare methods under one protocol. All methods have the same data, split and network, and
their users do the same amount of training."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli import verbs
from ssfl.cli.options import Jobs, Quiet


class Equal(StrEnum):
    """What is equal for all methods: the number of images that users draw, or the number of the users'
    forward and backward passes."""

    images = "images"
    passes = "passes"


def contest(
    config: Annotated[
        str, typer.Argument(help="The protocol: the name of a preset, or a TOML file.")
    ] = "quickstart",
    methods: Annotated[
        list[str],
        typer.Option(help="Methods, separated by commas; FILE.py:NAME for your own. Repeatable."),
    ] = ["anchored,grouping,crl-gn,semifl,server-only"],  # noqa: B006
    seeds: Annotated[
        int, typer.Option(min=1, help="The number of seeds. With 3, every method runs with seeds 1, 2 and 3.")
    ] = 3,
    choose: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Values of a setting to try. Each method uses the value with its best validation accuracy. "
            "Repeatable.",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            help="Tune each method's learning rate, and its threshold if it has one, on validation images in "
            "runs of half the length. Off if --choose is used."
        ),
    ] = True,
    equal: Annotated[
        Equal,
        typer.Option(
            help="What all methods have in common: the number of images that their users draw (images), or "
            "the number of forward-backward passes (passes)."
        ),
    ] = Equal.images,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="The method to compare the others with. Default: the best."),
    ] = None,
    jobs: Jobs = 1,
    sets: verbs.Sets = None,
    code: verbs.With = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the runs. Default: runs/contest-CONFIG.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare methods with the same data, network and amount of training at the users.

    Example: ssfl contest emnist-47 --methods grouping,semifl
    """
    from ssfl.config.loading import check_overrides
    from ssfl.core import outside
    from ssfl.errors import ConfigError, DivergedError

    outside.supply(code or [])
    names = [name.strip() for group in methods for name in group.split(",")]
    check_overrides(f"method.name={name}" for name in names)  # before torch is imported
    if against is not None and against not in names:
        raise ConfigError(
            f"--against {against}: this method does not take part; use one of {', '.join(names)}, or add it "
            "to --methods",
            key="--against",
            value=against,
        )
    for override in sets or []:
        key = override.partition("=")[0].strip()
        if key.startswith("method."):
            raise ConfigError(
                f"--set {key}: a contest sets no option of [method] for all methods; use --choose {override}",
                key=key,
                fix=f"--choose {override}",
            )
    from ssfl.contest import play as contests
    from ssfl.contest import standings, texts
    from ssfl.report.plots import pyplot

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    pyplot()  # fails now, and not after hours, if matplotlib is missing
    target = out or Path("runs") / f"contest-{Path(config).stem}"
    ranking = contests.play(
        config, names, seeds, sets=sets or [], choose=choose or [], tune=tune and not choose,
        equal=equal.value, out=target, tell=tell, quiet=quiet, jobs=jobs,
    )  # fmt: skip
    print(texts.table(ranking, against))
    origin = {"command": shlex.join(["ssfl", *sys.argv[1:]]), "tuned": tune and not choose}
    standings.write(ranking, target, origin | {"equal": equal.value, "source": config}, against)
    pictures = ", ".join(file.name for file in standings.draw(ranking, target))
    print(f"wrote contest.json, {pictures} to {target}")
    if all(standing.mean is None for standing in ranking):
        raise DivergedError(
            "training diverged with every method: lower train.lr with --set, and choose another --out; "
            "contest.json lists the runs"
        )
