"""`ssfl paper`: the commands that list, run and show the paper's experiments."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ssfl.cli.options import Jobs, Json, Quiet
from ssfl.cli.verbs import Sets, Verbs

app = typer.Typer(
    name="paper",
    cls=Verbs,
    help="Reproduce the paper's fifty experiments and compare with its published numbers."
    "\n\nExample: ssfl paper ls",
    no_args_is_help=True,
)
Number = Annotated[
    str,
    typer.Argument(
        metavar="ROW",
        help="A row of the experiment table, 1 to 50, or `methods` for the five methods of section 3.",
    ),
]
Fidelity = Annotated[
    str,
    typer.Option(
        help="Whose settings: the paper's text (paper), its authors' code (reference), or ours (recommended)."
    ),
]
Scale = Annotated[
    float,
    typer.Option(help="The fraction of the training to run, above 0 and at most 1; shortens the schedule."),
]
DataFile = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="FILE", help="Other images to use: an .npz file, a folder, or digits (bundled)."
    ),
]
Only = Annotated[str, typer.Option(help="Only runs whose name contains this text, such as C47.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="DIR", help="A folder with results. Default: runs/paper. Repeatable."),
]


@app.command()
def ls(json_only: Json = False) -> None:
    """List the paper's fifty experiments, the rows of its experiment table.

    Example: ssfl paper ls
    """
    from ssfl.paper import rows

    described = [_row(row) for row in rows.ROWS]
    if json_only:
        print(json.dumps(described))
        return
    for row in (*described, _row(rows.METHODS)):
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
    """Show one row of the experiment table: its runs, and the settings of the first run as a config file.

    Example: ssfl paper show 21
    """
    from ssfl.config.writing import as_dict, to_toml
    from ssfl.errors import ConfigError
    from ssfl.paper import rows, tables
    from ssfl.paper.fidelity import settings

    row = rows.row(number)
    chosen = [run for run in row.runs if only in run.name]
    if not chosen:
        raise ConfigError(
            f"--only {only}: no run of row {number} has this in its name; leave out --only to see all runs",
            key="--only",
            value=only,
        )
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
        printed = "not published" if run.published is None else f"published {run.published:.2f} ({run.where})"
        print(f"#   {run.name}\n#     {tables.setting(run)}: {printed}")
    print(
        f"# settings of {chosen[0].name}, fidelity {fidelity}, scale {scale:g}\n\n{to_toml(configs[0])}",
        end="",
    )


@app.command()
def run(
    numbers: Annotated[
        list[str],
        typer.Argument(metavar="ROW...", help="Rows of the experiment table, 1 to 50, or `methods`."),
    ],
    scale: Scale = 1.0,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="The number of seeds. With 3, every run is repeated with seeds 1, 2 and 3."),
    ] = 1,
    fidelity: Fidelity = "paper",
    data: DataFile = None,
    only: Only = "",
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="The folder for the runs.")] = Path("runs/paper"),
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Run rows of the experiment table. Stopped runs are continued, and finished ones are skipped.

    Example: ssfl paper run 21 --data digits --scale 0.1
    """
    from ssfl.errors import ConfigError
    from ssfl.paper import rows, sweep

    options = sweep.Options(fidelity, scale, seeds, data, only, tuple(sets or ()), out)

    def tell(line: str) -> None:
        print(line, flush=True)

    paths = sweep.play([rows.row(n) for n in numbers], options, tell, quiet, jobs)
    if not paths:
        raise ConfigError(
            f"--only {only}: no run of these rows has this in its name; see `ssfl paper show {numbers[0]}`",
            key="--only",
            value=only,
        )


@app.command()
def table(
    number: Annotated[
        str, typer.Argument(help="A table, 1 to 5 or E.1 to J.1; `methods`; or `all` for every row.")
    ],
    places: From = None,
    json_only: Json = False,
) -> None:
    """Print a table of the paper, with our results from finished runs beside the published ones.

    Example: ssfl paper table 2
    """
    from ssfl.paper import results, rows, tables

    lines = tables.lines(rows.table(number), results.read(places or [Path("runs/paper")]))
    print(json.dumps(lines) if json_only else tables.markdown(lines))


@app.command()
def figure(
    number: Annotated[
        str,
        typer.Argument(metavar="ID", help="2 to 6, B.1, C.1, D.1 to D.4, D for all four of them, or lr."),
    ],
    places: From = None,
    fidelity: Fidelity = "paper",
    with_changes: Annotated[
        bool, typer.Option("--with-changes", help="Also draw runs that were changed with --set.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("figures"),
) -> None:
    """Draw a figure of the paper from finished runs, or the learning rates (lr), as PNG and SVG.

    Example: ssfl paper figure 6"""
    from ssfl.paper import figures, results
    from ssfl.paper.fidelity import require

    require(fidelity)
    if number.lower() == "lr":
        print(*figures.schedules(out), sep="\n")
        return
    finished = results.read(places or [Path("runs/paper")])
    for path in figures.draw(number, finished, out, fidelity, with_changes):
        print(path)


def _row(row: Any) -> dict[str, Any]:
    """Returns a row of the experiment table, with its runs, as a dict for JSON."""
    runs = [asdict(run) | {"name": run.name} for run in row.runs]
    return {"row": row.number, "title": row.title, "where": row.where, "note": row.note, "runs": runs}
