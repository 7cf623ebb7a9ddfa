"""The help, error messages and shell completion of the command line. The help lists the commands in groups
with an example each, and every mistake gets a message of one line."""

import difflib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from ssfl.errors import SsflError

GROUPS = {
    "Start": ("doctor", "new", "settings"),
    "Train": ("split", "run", "resume", "cache"),
    "Inspect runs": ("report", "board", "compare"),
    "Use the model": ("predict", "evaluate", "export"),
    "Several machines": ("keys", "serve", "join"),
    "Experiments": ("paper", "contest", "check"),
}
"""The commands in the groups and the order in which `ssfl --help` lists them."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error that click raises for a mistyped command. The class is found through typer, because newer
versions of typer contain their own copy of click."""
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="FILE.py",
        help="A Python file of yours that the run or config names (network, data or method). No other file "
        "is imported. Repeatable.",
    ),
]


class Verbs(TyperGroup):
    """A group of commands, such as `ssfl` or `ssfl keys`. Its help lists the commands in groups with titles.
    Each command has a description and an example."""

    def list_commands(self, ctx: Any) -> list[str]:
        known = [name for names in GROUPS.values() for name in names]
        order = {name: place for place, name in enumerate(known)}
        return sorted(super().list_commands(ctx), key=lambda name: order.get(name, len(order)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        for parameter in getattr(command, "params", ()):
            if parameter.param_type_name == "argument" and not parameter.help:
                # with click 8.5, typer below 0.21 loses the help text
                hints = get_type_hints(getattr(command, "callback", None), include_extras=True)
                hint = hints[parameter.name]
                parameter.help = next((info.help for info in getattr(hint, "__metadata__", ())), None)
        if command is not None and not hasattr(command, "plain"):
            command.plain = command.get_help
            # the same versions list arguments twice, and escape brackets for a terminal that they do not use
            command.format_arguments = lambda ctx, formatter: None
            command.get_help = lambda ctx: command.plain(ctx).replace("\\[", "[")
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], names, 1)
            hint = f"did you mean {close[0]}?" if close else f"its commands are {', '.join(names)}"
            raise SsflError(f"{ctx.command_path} has no command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        groups = {} if ctx.parent else {t: [n for n in names if n in commands] for t, names in GROUPS.items()}
        grouped = [name for names in groups.values() for name in names]
        groups["Commands"] = [name for name in commands if name not in grouped]
        width = max(map(len, commands)) + 4
        for title, names in groups.items():
            if not names:
                continue
            with formatter.section(title):
                for name in names:
                    what, example = summary_and_example(commands[name])
                    formatter.write(f"  {name:{width - 2}}{what}\n")
                    formatter.write(f"{'':{width}}{example}\n" if example else "")


def summary_and_example(command: Any) -> tuple[str, str]:
    """Returns the first sentence of a command's help text, and the example in it ("" if there is none)."""
    text, _, example = " ".join(inspect.cleandoc(command.help or "").split()).partition("Example: ")
    return text.strip().partition(". ")[0].rstrip("."), example


def explained(error: Any) -> str:
    """Returns one line about a mistyped command: what is wrong, and how to write it correctly."""
    context = getattr(error, "ctx", None)
    what = " ".join(error.format_message().split()).rstrip(".")
    what = what[:1].lower() + what[1:]
    if hasattr(error, "possibilities"):
        known = [one for parameter in context.command.params for one in parameter.opts] if context else []
        what = f"there is no option {error.option_name}{_instead(error.option_name, known, context)}"
    if context is None:
        return f"{what}; see `ssfl --help`"
    _, example = summary_and_example(context.command)
    written = f"for example `{example}`; " if example else ""
    return f"{what}; {written}see `{context.command_path} --help`"


def _instead(option: str, known: Sequence[str], context: Any) -> str:
    """Returns a suggestion for an unknown option, to be added to the error message; "" if nothing is similar.
    `known` are the options of the command, and `context` is click's context, or None."""
    from ssfl.config.settings import SECTIONS
    from ssfl.contest.refused import REFUSED

    key = option.lstrip("-").replace("-", "_")
    homes = [section for section, kind in SECTIONS.items() if key in {field.name for field in fields(kind)}]
    refused = [REFUSED[f"{home}.{key}"] for home in homes if f"{home}.{key}" in REFUSED]
    if refused and context is not None and context.command.name == "contest":
        return f": {refused[0]}"
    if homes and "--set" in known:
        return f": write --set {homes[0]}.{key}=VALUE"
    if option == "--set":
        return " here: settings are chosen when a run starts, and this command reads them from the run"
    close = difflib.get_close_matches(option, known, 1, 0.75)
    return f", did you mean {close[0]}?" if close else ""


def complete_setting(incomplete: str) -> Iterator[str]:
    """Yields the shell's completions of the option --set: names of settings, such as "train.lr=". After "=",
    it yields the allowed values, if the setting has fixed choices."""
    from ssfl.config.settings import SECTIONS
    from ssfl.core.fields import limits_of

    limits = {f"{s}.{name}": one for s, kind in SECTIONS.items() for name, one in limits_of(kind).items()}
    key, equals, _ = incomplete.partition("=")
    if equals:
        words = [f"{key}={value}" for value in limits[key].choices] if key in limits else []
    else:
        words = [f"{key}=" for key in limits]
    yield from (word for word in words if word.startswith(incomplete))


def check_settings(context: typer.Context, sets: list[str] | None) -> list[str] | None:
    """Raises at once if one of the arguments KEY=VALUE of --set (`sets`) is wrong, and otherwise returns
    `sets` unchanged. The check runs before the command's imports, which may take seconds."""
    from ssfl.config.loading import check_overrides

    if not context.resilient_parsing:  # it is set while a shell completes an unfinished line
        check_overrides(sets or [])
    return sets


def complete_run(incomplete: str) -> Iterator[str]:
    """Yields the shell's completions of a run folder: run folders, and folders that may contain them."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return
    for entry in entries:
        word = str(entry) if (entry / "config.toml").is_file() else f"{entry}/"
        if word.startswith(incomplete):
            yield word


def complete_config(incomplete: str) -> Iterator[str]:
    """Yields the shell's completions of a config: presets, TOML files and folders."""
    from ssfl.config.sources import presets

    yield from (name for name in presets() if name.startswith(incomplete))
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        word = f"{entry}/" if entry.is_dir() else str(entry)
        if word.startswith(incomplete) and word.endswith(("/", ".toml")):
            yield word


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, such as train.lr=0.1. Repeatable.",
        autocompletion=complete_setting,
        callback=check_settings,
    ),
]
"""The option --set, which every command that takes settings has."""
