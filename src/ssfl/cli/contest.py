"""`ssfl contest`: methods side by side under one protocol."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli import verbs
from ssfl.cli.options import Quiet


class Equal(StrEnum):
    """What is the same for all methods."""

    images = "images"
    passes = "passes"


def contest(
    config: Annotated[
        str, typer.Argument(help="A preset's name or a TOML file: the protocol.")
    ] = "quickstart",
    methods: Annotated[
        list[str], typer.Option(help="Names of methods, or FILE.py:Name, with commas; repeatable.")
    ] = ["anchored,grouping,crl-gn,semifl,server-only"],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 1 on.")] = 3,
    choose: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Values to choose from by validation images; repeatable."),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            help="Let each method choose its learning rate, and its threshold if it has one, by validation "
            "images in runs of half the length. Off where --choose is given."
        ),
    ] = True,
    equal: Annotated[
        Equal, typer.Option(help="Whether users train on equally many images or make equally many passes.")
    ] = Equal.images,
    sets: verbs.Sets = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the runs.")] = None,
    quiet: Quiet = False,
) -> None:
    """Methods side by side under one protocol.  Example: ssfl contest emnist-47 --methods grouping,semifl"""
    from ssfl.config.loading import check_overrides

    names = [name.strip() for some in methods for name in some.split(",")]
    check_overrides(f"method.name={name}" for name in names)  # before torch is imported
    from ssfl.contest import play as contests
    from ssfl.contest import standings
    from ssfl.errors import DivergedError
    from ssfl.report.plots import pyplot

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    pyplot()  # what the picture needs is missed now, not after hours
    target = out or Path("runs") / f"contest-{Path(config).stem}"
    found = contests.play(
        config, names, seeds, sets=sets or [], choose=choose or [], tune=tune and not choose,
        equal=equal.value, out=target, tell=tell, quiet=quiet,
    )  # fmt: skip
    print(standings.table(found))
    told = {"command": shlex.join(["ssfl", *sys.argv[1:]]), "tuned": tune and not choose}
    standings.write(found, target, told | {"equal": equal.value, "source": config})
    print(f"in {target}: contest.json, {', '.join(file.name for file in standings.draw(found, target))}")
    if all(one.mean is None for one in found):
        raise DivergedError("every method broke down: lower train.lr, or see contest.json")
