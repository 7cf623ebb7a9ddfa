"""What mkdocs writes by itself: the references from the code, and copies of what pages link to outside docs/.

Nothing of it is kept in the repository.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from numpy.typing import ArrayLike

import ssfl
from ssfl import methods
from ssfl.cli import explain, main
from ssfl.cli.verbs import GROUPS
from ssfl.config import settings

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages that lie outside docs/."""
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
"""A link to a file of the repository that is no page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and every file that some page links to."""
    pages = {"cli.md": cli_page(), "config.md": config_page(), "api.md": api_page()}
    for name, source in BESIDE.items():
        pages[name] = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    texts = [file.content_string for file in files.documentation_pages()]
    for target in sorted({found for text in texts for found, _ in OUTSIDE.findall(text)}):
        # a missing one stays, and the link is warned of
        if target not in BESIDE.values() and (ROOT / target).is_file():
            copy = File.generated(config, _copied(target), abs_src_path=str(ROOT / target))
            files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ at the copies."""

    def pointed(found: re.Match[str]) -> str:
        for page_name, source in BESIDE.items():
            if source == found[1]:
                return f"]({page_name}{found[2] or ''})"
        copied = _copied(found[1])
        return f"]({copied})" if files.get_file_from_path(copied) else found[0]

    return OUTSIDE.sub(pointed, markdown)


def _copied(target: str) -> str:
    """Where a copy lies; code as text, which browsers show instead of saving it."""
    return (
        f"files/{target}" if target.endswith((".json", ".ipynb", ".png", ".svg")) else f"files/{target}.txt"
    )


def cli_page() -> str:
    """Every verb with its arguments and options, in the order of `ssfl --help`."""
    group: Any = typer.main.get_command(main.app)
    context = typer.Context(group, info_name="ssfl")
    lines = [
        "# Commands",
        "",
        "This page lists every command with its arguments and options, for looking things up."
        " `ssfl --help` and the option `--help` of each command show the same. A default is in [brackets].",
    ]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += _command(group.get_command(context, name), context, name)
    lines += ["", "[Run folders and events](run-folder.md) describes what a run writes, and the exit codes."]
    return "\n".join(lines) + "\n"


def _command(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = typer.Context(command, parent=parent, info_name=name)
    text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    yield from ("", f"### {context.command_path}", "", " ".join(text.split()))
    if hasattr(command, "list_commands"):
        for inner in command.list_commands(context):
            yield from _command(command.get_command(context, inner), context, inner)
        return
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from ("", "```text", usage, "```", "")
    yield from ("| argument or option | |", "|---|---|")
    for parameter in command.get_params(context):
        if "--help" in parameter.opts:
            continue
        if parameter.param_type_name == "argument":
            called = parameter.make_metavar(context)
        else:
            flags = ", ".join(parameter.opts)
            called = flags if parameter.is_flag else f"{flags} {parameter.make_metavar(context)}"
        default = parameter.default
        shown = ",".join(default) if parameter.multiple and default else default
        told = "" if shown in (None, False) else f" [{shown}]"
        yield f"| `{_cell(called)}` | {_cell(parameter.help or '')}{_cell(told)} |"
    if example:
        yield from ("", f"For example `{' '.join(example.split())}`.")


def config_page() -> str:
    """Every setting: default, what it may be, and its docstring."""
    lines = [
        "# Settings",
        "",
        "This page lists every setting with its default, for looking things up."
        " `ssfl settings` shows the same.",
        "",
        "- A config is a TOML file with these sections."
        " `--set section.key=value` changes one key on the command line.",
        "- A default of – is chosen when the data are known."
        " The `config.toml` of a run shows the chosen value.",
        "- Some defaults come from the [method](methods.md). Keys that you set have priority.",
    ]
    for section, kind in settings.SECTIONS.items():
        lines += ["", f"## [{section}]", "", *_settings(section, kind)]
    lines += ["", "## [method]", "", "`name`, and the settings of that method:"]
    for name in methods.METHODS:
        lines += ["", f"### {name}", "", *_settings("method", methods.find(name))]
    return "\n".join(lines) + "\n"


def _settings(section: str, kind: type) -> Iterator[str]:
    """What a section or a method is about, and the table of its settings."""
    about, found = explain.section(section, kind)
    yield about
    if found:
        yield from ("", "| key | default | what it is |", "|---|---|---|")
    for one in found:
        default = one.default if one.default == "–" else f"`{one.default}`"
        yield f"| `{one.key.partition('.')[2]}` | {default} | {_cell(one.about)} |"


API = {
    "Train and use": (
        "run", "resume", "Result", "load_config", "Config", "load_model", "predict", "evaluate", "export",
        "SsflError",
    ),
    "Your own data, round by round": ("Data", "Federation"),
    "Your own method": (
        "Method", "check", "setting", "Look", "Labels", "Step", "Losses", "State", "Fed", "Users", "parts",
        "losses", "draws",
    ),
    "Formulas and data": ("split", "augment", "averaging", "diversity", "schedule"),
}  # fmt: skip
"""The public names in the order of the page; together all of `ssfl.__all__`."""
PROMISED = {
    "split": ("skewed", "measured_skew"),
    "augment": ("weak", "strong", "uniform", "below"),
    "averaging": ("fedavg", "grouping"),
    "draws": ("bits", "uniform", "below", "normal", "fold"),
    "diversity": ("gradient_diversity",),
    "schedule": ("learning_rate",),
}
"""Of modules that hold more than is promised: what is."""
MADE = ("Data", "Federation", "Labels", "Losses")
"""The classes whose objects a person makes by calling them."""


def api_page() -> str:
    """Every public name with its signature and docstring."""
    left = set(ssfl.__all__) - {"__version__"} - {name for names in API.values() for name in names}
    assert not left, f"public names that the page of the API lacks: {left}"
    lines = [
        "# Python API",
        "",
        "This page lists every public name of the package, for people who use it from Python."
        f" It is made from the docstrings of ssfl {ssfl.__version__} (`ssfl.__version__`).",
        "",
        "**What is stable:** the names on this page, the commands, the settings and the files of a run folder"
        " keep their meaning within a minor version (0.2.x). All other names may change at any time.",
    ]
    for title, names in API.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += _api(name, getattr(ssfl, name))
    return "\n".join(lines) + "\n"


def _api(name: str, value: Any) -> Iterator[str]:
    """A public name: a function, a class with its members, or a module with its functions."""
    yield from ("", f"### ssfl.{name}")
    if inspect.ismodule(value):
        yield from ("", _text(value))
        own = {name: one for name, one in vars(value).items() if inspect.isfunction(one) and name[0] != "_"}
        written = [name for name, one in own.items() if one.__module__ == value.__name__]
        members: dict[str, Any] = {member: own[member] for member in PROMISED.get(name, written)}
    else:
        yield from _signed(name, value)
        members = _members(value) if inspect.isclass(value) else {}
        told = explain.docstrings(value) if inspect.isclass(value) else {}
        if told:
            yield ""
        yield from (f"- `{field}`: {text}" for field, text in told.items() if field[0] != "_")
    for member, found in members.items():
        if isinstance(found, property):
            yield from ("", f"**`{member}`** {_text(found)}")
        else:
            yield from ("", f"**`{member}{_signature(found)}`**", "", _text(found))


def _members(kind: type) -> dict[str, Any]:
    """The public methods and properties that a class defines itself."""
    found = {
        name: getattr(kind, name) if isinstance(one, classmethod | staticmethod) else one
        for name, one in vars(kind).items()
        if name[0] != "_"
    }
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, property) or inspect.isfunction(one) or inspect.ismethod(one)
    }


def _signed(name: str, value: Any) -> Iterator[str]:
    if name in MADE or not inspect.isclass(value):
        yield from ("", "```text", f"ssfl.{name}{_signature(value)}", "```")
    yield from ("", _text(value))


def _signature(value: Any) -> str:
    """How it is called, without the homes of types and without `self`."""
    text = str(inspect.signature(value))
    for long in (repr(ArrayLike), inspect.formatannotation(ArrayLike)):
        text = text.replace(long, "ArrayLike")
    text = text.replace("~", "")  # of type variables
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
    text = re.sub(r"<factory>|<[^<>]*>", "...", text)
    return re.sub(r"\((?:self|cls)(?:, )?", "(", text)


def _text(value: Any) -> str:
    """A docstring as paragraphs; code in it stays as it is."""
    return inspect.cleandoc(value.__doc__ or "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
