"""`ssfl paper`: one function per verb."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ssfl.cli.verbs import Sets, Verbs

app = typer.Typer(
    name="paper",
    cls=Verbs,
    help="The paper's fifty experiments: list, run, set beside what was printed.\n\nExample: ssfl paper ls",
    no_args_is_help=True,
)
Number = Annotated[str, typer.Argument(metavar="ROW", help="1 to 50, or methods (the five of section 3).")]
Fidelity = Annotated[str, typer.Option(help="paper, reference or recommended.")]
Scale = Annotated[float, typer.Option(help="The part of the training to run, schedule and all.")]
DataFile = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="Images to use instead: an .npz, a folder, or digits."),
]
Only = Annotated[str, typer.Option(help="Only runs whose name contains this, such as C47.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="DIR", help="Where results lie, by itself runs/paper; repeatable."),
]


@app.command()
def ls(json_only: Json = False) -> None:
    """The rows of the experiment table.

    Example: ssfl paper ls"""
    from ssfl.paper import rows

    told = [_row(row) for row in rows.ROWS]
    if json_only:
        print(json.dumps(told))
        return
    for row in (*told, _row(rows.METHODS)):
        runs = f"{len(row['runs'])} run{'s' if len(row['runs']) > 1 else ''}"
        first = row["runs"][0]
        print(f"{row['row']:>7}  {first['data']:8} {row['title']:38} {runs:8} {row['where']}")


@app.command()
def show(
    number: Number,
    fidelity: Fidelity = "paper",
    scale: Scale = 1.0,
    data: DataFile = None,
    only: Only = "",
    sets: Sets = None,
    json_only: Json = False,
) -> None:
    """A row, its runs, and the settings of the first as a config file.

    Example: ssfl paper show 21"""
    from ssfl.config.loading import as_dict, to_toml
    from ssfl.errors import ConfigError
    from ssfl.paper import rows, tables
    from ssfl.paper.fidelity import settings

    row = rows.row(number)
    chosen = [run for run in row.runs if only in run.name]
    if not chosen:
        raise ConfigError(f"no run of row {number} has {only!r} in its name: leave out --only to see them")
    configs = [settings(run, fidelity, scale, 1, data, sets or ()) for run in chosen]
    if json_only:
        print(
            json.dumps(
                _row(replace(row, runs=tuple(chosen))) | {"configs": [as_dict(config) for config in configs]}
            )
        )
        return
    print(f"# row {row.number}: {row.title}; {row.where}{'; ' + row.note if row.note else ''}")
    for run in row.runs:
        printed = "none printed" if run.published is None else f"published {run.published:.2f} ({run.where})"
        print(f"#   {run.name}\n#     {tables.setting(run)}: {printed}")
    print(
        f"# settings of {chosen[0].name}, fidelity {fidelity}, scale {scale:g}\n\n{to_toml(configs[0])}",
        end="",
    )


@app.command()
def run(
    numbers: Annotated[list[str], typer.Argument(metavar="ROW...", help="Rows, 1 to 50, or methods.")],
    scale: Scale = 1.0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 1 on.")] = 1,
    fidelity: Fidelity = "paper",
    data: DataFile = None,
    only: Only = "",
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs/paper"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run rows; stopped runs go on, finished ones are not run again.

    Example: ssfl paper run 21 --data digits --scale 0.1"""
    from ssfl.errors import ConfigError
    from ssfl.paper import rows, sweep

    options = sweep.Options(fidelity, scale, seeds, data, only, tuple(sets or ()), out)
    found = sweep.play([rows.row(n) for n in numbers], options, lambda line: print(line, flush=True), quiet)
    if not found:
        raise ConfigError(
            f"no run of these rows has {only!r} in its name: see `ssfl paper show {numbers[0]}`"
        )


@app.command()
def table(
    number: Annotated[str, typer.Argument(help="1 to 5, E.1 to J.1, methods, or all: every row there is.")],
    places: From = None,
    json_only: Json = False,
) -> None:
    """A table of the paper from finished runs.

    Example: ssfl paper table 2"""
    from ssfl.paper import results, rows, tables

    told = tables.lines(rows.table(number), results.read(places or [Path("runs/paper")]))
    print(json.dumps(told) if json_only else tables.markdown(told))


@app.command()
def figure(
    number: Annotated[
        str,
        typer.Argument(metavar="ID", help="2 to 6, B.1, C.1, D.1 to D.4 (D is all four), lr; in any case."),
    ],
    places: From = None,
    fidelity: Fidelity = "paper",
    with_changes: Annotated[
        bool, typer.Option("--with-changes", help="Runs with --set too, as lines of their own.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("figures"),
) -> None:
    """A figure of the paper from finished runs, or the learning rates (lr), as PNG and SVG.

    Example: ssfl paper figure 6"""
    from ssfl.paper import figures, results
    from ssfl.paper.fidelity import require

    require(fidelity)
    if number.lower() == "lr":
        print(*figures.schedules(out), sep="\n")
        return
    found = results.read(places or [Path("runs/paper")])
    for path in figures.draw(number, found, out, fidelity, with_changes):
        print(path)


def _row(row: Any) -> dict[str, Any]:
    runs = [asdict(run) | {"name": run.name} for run in row.runs]
    return {"row": row.number, "title": row.title, "where": row.where, "note": row.note, "runs": runs}
