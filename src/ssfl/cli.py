"""The command line: one function per verb, each a few lines."""

import json
import os
import shlex
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from ssfl import __version__, signals, verbs
from ssfl.deploy import commands as deploy
from ssfl.errors import DataError, SsflError, SsflWarning
from ssfl.paper import commands
from ssfl.text import printable
from ssfl.verbs import With

app = typer.Typer(
    name="ssfl",
    help="Semi-supervised federated learning: one classifier from a few labels at a server and the "
    "unlabelled images of many users.",
    cls=verbs.Verbs,
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(commands.app)
app.add_typer(deploy.app)
ConfigName = Annotated[
    str | None,
    typer.Argument(
        help="A preset's name, a TOML file or a folder that `ssfl new` made; by itself quickstart, or own "
        "where --set names other data.",
        autocompletion=verbs.complete_config,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
LINE = 4000
"""Letters that a line of an error may have: a crafted file may put anything into one."""
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder.", autocompletion=verbs.complete_run)
]


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version.")] = False,
) -> None:
    if version:
        print(f"ssfl {__version__}")
        raise typer.Exit


@app.command()
def doctor(json_only: Json = False) -> None:
    """Say what this machine can do, and what to run first.

    Example: ssfl doctor"""
    from ssfl import doctor as examination

    found = examination.examine(Path())
    print(json.dumps(found) if json_only else "\n".join(examination.lines(found)))
    if found["broken"]:
        raise typer.Exit(SsflError.exit_code)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write ssfl.toml into.")],
    images: Annotated[
        Path | None, typer.Option(help="The folder of images, by itself DIR: a sub-folder for each class.")
    ] = None,
) -> None:
    """Write a commented config for a folder of images.

    Example: ssfl new mine --images scans"""
    from ssfl import new as writing

    print("\n".join(writing.project(folder, images)))


@app.command()
def run(
    config: ConfigName = None,
    sets: verbs.Sets = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to make.")] = None,
    code: With = None,
    quiet: Quiet = False,
    json_only: Json = False,
) -> None:
    """Train a federation.

    Example: ssfl run --set split.users=20 --set method.name=grouping"""
    from ssfl import outside
    from ssfl.config import PROJECT, load_config

    outside.supply(code or [])
    loaded = load_config(config, sets or [])  # before torch is imported, which takes seconds
    from ssfl import train
    from ssfl.runs import next_free

    named = Path(config or "quickstart").absolute()
    target = out or next_free(Path("runs") / (named.parent if named.name == PROJECT else named).stem)
    _carry_out(lambda report: train.run(loaded, target, report), quiet or json_only, json_only)


@app.command()
def resume(run: RunFolder, code: With = None, quiet: Quiet = False, json_only: Json = False) -> None:
    """Go on with a run that was stopped.

    Example: ssfl resume runs/quickstart"""
    from ssfl import outside, train

    outside.supply(code or [])

    def warn(message: str) -> None:
        print(f"ssfl: warning: {printable(str(message))}", file=sys.stderr)

    if not json_only and not quiet and train.finished(run):
        print(f"{run} is finished: all its rounds are played")
    _carry_out(lambda report: train.resume(run, report, warn), quiet or json_only, json_only)


@app.command()
def split(config: ConfigName = None, sets: verbs.Sets = None, json_only: Json = False) -> None:
    """Show who would get which images.

    Example: ssfl split --set split.skew=1"""
    from ssfl.config import load_config

    loaded = load_config(config, sets or [])  # before torch is imported
    from ssfl import text
    from ssfl.assemble import load_data, make_parts, resolve
    from ssfl.data.inventory import describe_split

    dataset = load_data(loaded)
    resolved = resolve(loaded, dataset)
    described = describe_split(dataset, *make_parts(resolved, dataset))
    told = text.split(resolved, described)
    print(json.dumps(described) if json_only else "\n".join(map(printable, told.splitlines())))


@app.command()
def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    code: With = None,
    json_only: Json = False,
) -> None:
    """Class and confidence of images.

    Example: ssfl predict runs/quickstart scan.png"""
    from ssfl import outside
    from ssfl.predict import predict as predicted

    outside.supply(code or [])
    broken: list[str] = []
    told = predicted(run, images, broken)
    if json_only:
        print(json.dumps(told))
    else:
        for row in told:
            print(printable(row["file"]), printable(row["class"]), f"{row['confidence']:.3f}", sep="\t")
    if broken:  # after what could be said of the others
        more = f" and {len(broken) - 20} more" if len(broken) > 20 else ""
        raise DataError("; ".join(broken[:20]) + more)


@app.command()
def export(
    run: RunFolder,
    file: Annotated[Path, typer.Argument(help="The name to write, without ending.")],
    code: With = None,
) -> None:
    """Write the model as safetensors, a JSON card and a torch.export program.

    Example: ssfl export runs/quickstart digits"""
    from ssfl import outside
    from ssfl.predict import export as exported

    outside.supply(code or [])
    for path in exported(run, file):
        print(printable(str(path)))


@app.command()
def compare(first: RunFolder, second: RunFolder) -> None:
    """Name the first round, user and quantity in which two runs differ. Exit code 1 if they do.

    Example: ssfl compare runs/a runs/b"""
    from ssfl import compare as comparison

    for line in comparison.settings(first, second):
        print(f"config  {printable(line)}"[:LINE])
    difference = comparison.first_difference(first, second)
    if difference is not None:
        print(f"first difference  {printable(difference)}"[:LINE])
        raise typer.Exit(1)
    print("the same events in every round")


@app.command()
def settings(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Only those that speak of it.")] = "",
) -> None:
    """List every setting, its default and what it does.  Example: ssfl settings threshold"""
    from ssfl import explain, outside

    if outside.is_path(word):
        outside.trust(word)
    print("\n".join(explain.lines(word)))


@app.command()
def check(
    method: Annotated[str, typer.Argument(help="A method's name, or FILE.py:NAME.")],
    model: Annotated[
        str | None, typer.Option(help="A network of your own: FILE.py:NAME, a function that makes it.")
    ] = None,
    json_only: Json = False,
) -> None:
    """Test a method, and a network, against the laws that every engine relies on.

    Example: ssfl check mine.py:Mine --model mine.py:make"""
    from ssfl.config import check_overrides

    check_overrides([f"method.name={method}"])  # before torch is imported
    from ssfl import laws

    found = laws.check(method, model)
    if json_only:
        print(json.dumps([law._asdict() for law in found]))
    else:
        print("\n".join(f"{'ok  ' if law.holds else 'FAIL'}  {law.name} ({law.told})" for law in found))
    if not all(law.holds for law in found):
        raise typer.Exit(SsflError.exit_code)


@app.command()
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
    sets: verbs.Sets = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the runs.")] = None,
    quiet: Quiet = False,
) -> None:
    """Methods side by side under one protocol.  Example: ssfl contest emnist-47 --methods grouping,semifl"""
    from ssfl.config import check_overrides

    names = [name.strip() for some in methods for name in some.split(",")]
    check_overrides(f"method.name={name}" for name in names)  # before torch is imported
    from ssfl import contest as contests
    from ssfl import standings
    from ssfl.errors import DivergedError
    from ssfl.report.plots import pyplot

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    pyplot()  # what the picture needs is missed now, not after hours
    target = out or Path("runs") / f"contest-{Path(config).stem}"
    found = contests.play(
        config, names, seeds, sets=sets or [], choose=choose or [], out=target, tell=tell, quiet=quiet
    )
    print(standings.table(found))
    standings.write(found, target, {"command": shlex.join(["ssfl", *sys.argv[1:]])})
    print(f"in {target}: contest.json, {', '.join(file.name for file in standings.draw(found, target))}")
    if all(one.mean is None for one in found):
        raise DivergedError("every method broke down: lower train.lr, or see contest.json")


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; by itself RUN/report.html, of several ./report.html.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every figure there, PNG and SVG.")
    ] = None,
    code: With = None,
) -> None:
    """Write one HTML file that explains a run or compares several.  Example: ssfl report runs/quickstart"""
    from ssfl import outside
    from ssfl.report import page

    outside.supply(code or [])
    for path in page.write(run, out, figures):
        print(path)


@app.command()
def board(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is any free one.")] = 8642,
) -> None:
    """Show the runs under a folder in a browser on this machine, live.

    Example: ssfl board runs"""
    from ssfl.board.app import serve

    serve(folder, port)


def _carry_out(start: Any, quiet: bool, json_only: bool) -> None:
    """Run with or without a progress display, then tell the result."""
    from ssfl import progress, runs
    from ssfl.engines import dist
    from ssfl.report import gather, verdict

    follower = dist.ranks() > 1 and dist.rank() > 0  # one of torchrun's processes speaks for all
    result = progress.watched(start, quiet or follower)
    if follower:
        return
    if json_only:
        print(json.dumps(runs.read_summary(result.path)))
    elif not quiet:
        print(f"{result.told}  in {result.path}")
        said = verdict.judge(gather.read(result.path, result.path.name))
        if said.bad:
            print(
                f"{said.head} {said.text} See `ssfl report {shlex.quote(str(result.path))}`", file=sys.stderr
            )


def _tell_warnings() -> None:
    """Our own warnings in one line; others as Python shows them."""
    # CPUs without bfloat16 take torch's other way to the same product, which it tells with a stack of C++
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS")
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, SsflWarning):
            print(f"ssfl: warning: {printable(str(message))}", file=sys.stderr)
        else:
            shown(message, category, *where, **more)

    warnings.showwarning = show


def main() -> None:
    """The `ssfl` command. Exit codes: 0 done, 1 `compare` found a difference, 2 something to mend in
    the input, 3 training diverged, 130 stopped by Ctrl-C, 143 stopped by SIGTERM."""
    # Threads that wait for work should sleep, not spin: on busy machines that is many times faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _tell_warnings()
    try:
        with signals.terminable():
            code = app(prog_name="ssfl", standalone_mode=False)
    except verbs.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # of newer versions of click
            print(error)
        else:
            print(f"ssfl: {verbs.explained(error)}", file=sys.stderr)
            sys.exit(SsflError.exit_code)
    except signals.Terminated:
        print("ssfl: stopped", file=sys.stderr)
        sys.exit(signals.exit_code(signal.SIGTERM))
    except SsflError as error:
        who = f"ssfl (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else "ssfl"
        print(f"{who}: {printable(' '.join(str(error).split()))}"[:LINE], file=sys.stderr)
        sys.exit(error.exit_code)
    except RecursionError:
        print("ssfl: a file is nested too deeply to be one that ssfl wrote", file=sys.stderr)
        sys.exit(SsflError.exit_code)
    except OSError as error:
        print(f"ssfl: {printable(f'{error.strerror}: {str(error.filename)[:200]}')}", file=sys.stderr)
        sys.exit(SsflError.exit_code)
    else:
        sys.exit(code if isinstance(code, int) else 0)
