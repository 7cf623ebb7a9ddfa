"""Collects all commands into the program `ssfl`. Each command has its own file in this package."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ssfl import signals
from ssfl.cli import cache, deploy, paper, verbs
from ssfl.cli.board import board
from ssfl.cli.check import check
from ssfl.cli.compare import compare
from ssfl.cli.contest import contest
from ssfl.cli.doctor import doctor
from ssfl.cli.evaluate import evaluate
from ssfl.cli.export import export
from ssfl.cli.new import new
from ssfl.cli.options import LINE
from ssfl.cli.predict import predict
from ssfl.cli.report import report
from ssfl.cli.resume import resume
from ssfl.cli.run import run
from ssfl.cli.settings import settings
from ssfl.cli.split import split
from ssfl.core.version import VERSION
from ssfl.errors import SsflError, SsflWarning, one_line
from ssfl.runs.text import printable

app = typer.Typer(
    name="ssfl",
    help="Semi-supervised federated learning: train one classifier from a few labelled images at a server "
    "and the unlabelled images of many users. No image leaves its owner.",
    cls=verbs.Verbs,
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(paper.app)
app.add_typer(deploy.app)
app.add_typer(cache.app)
COMMANDS: tuple[Callable[..., Any], ...] = (
    doctor, new, run, resume, split, predict, evaluate, export, compare, settings, check, contest, report,
    board,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version.")] = False,
) -> None:
    if version:
        print(f"ssfl {VERSION}")
        raise typer.Exit


def _tell_warnings() -> None:
    """Makes Python show each warning of ssfl as one line, without file names. Other warnings are shown as
    usual."""
    # on CPUs without bfloat16 torch falls back to BLAS, and warns about it with a C++ stack trace
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS")
    warnings.filterwarnings("ignore", "Image size .* could be decompression bomb")  # refused by ssfl itself
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, SsflWarning):
            print(f"ssfl: warning: {printable(str(message))}", file=sys.stderr)
        else:
            shown(message, category, *where, **options)

    warnings.showwarning = show


def main() -> None:
    """The entry point of the program `ssfl`. It runs a command and exits.

    Exit codes: 0 success, 1 `compare` found a difference, 3 training diverged, 130 stopped by Ctrl-C, 143
    stopped by SIGTERM. The code is 2 for every other error that ssfl reports, and if `check` or `doctor`
    found a problem.
    """
    # Threads that wait for work should sleep instead of spinning: on busy machines training is much faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _tell_warnings()
    try:
        with signals.terminable():
            code = app(prog_name="ssfl", standalone_mode=False)
    except verbs.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # newer versions of click raise this
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
        print(
            "ssfl: too many nested calls: a file is nested too deeply, or a function of your own calls "
            "itself without end",
            file=sys.stderr,
        )
        sys.exit(SsflError.exit_code)
    except OSError as error:
        where = f": {str(error.filename)[:200]}" if error.filename else ""
        print(f"ssfl: {printable((error.strerror or one_line(error)) + where)}", file=sys.stderr)
        sys.exit(SsflError.exit_code)
    else:
        sys.exit(code if isinstance(code, int) else 0)
