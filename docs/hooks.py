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

from ssfl import cli, explain, settings
from ssfl.verbs import GROUPS

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages that lie outside docs/."""
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
"""A link to a file of the repository that is no page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and every file that some page links to."""
    pages = {"cli.md": cli_page(), "config.md": config_page()}
    for name, source in BESIDE.items():
        pages[name] = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    texts = [file.content_string for file in files.documentation_pages()]
    for target in sorted({found for text in texts for found, _ in OUTSIDE.findall(text)}):
        if (ROOT / target).is_file():  # a missing one stays, and the link is warned of
            copy = File.generated(config, _copied(target), abs_src_path=str(ROOT / target))
            files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ at the copies."""

    def pointed(found: re.Match[str]) -> str:
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
    group: Any = typer.main.get_command(cli.app)
    context = typer.Context(group, info_name="ssfl")
    lines = ["# Commands", "", "From the code's docstrings; `ssfl VERB --help` says the same."]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += _command(group.get_command(context, name), context, name)
    lines += ["", "Exit codes and what a run folder holds: [Design](design.md#exit-codes)."]
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
        "A config is a TOML file with these sections; `--set section.key=value` overrides one key."
        " What stands as – is chosen when the data are known: the `config.toml` of a run shows it."
        " Some defaults come from the [method](methods.md); keys that you set win.",
    ]
    for section, kind in settings.SECTIONS.items():
        about, found = explain.section(section, kind)
        lines += ["", f"## [{section}]", "", about, "", "| key | default | what it is |", "|---|---|---|"]
        for one in found:
            default = one.default if one.default == "–" else f"`{one.default}`"
            lines.append(f"| `{one.key.partition('.')[2]}` | {default} | {_cell(one.about)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
