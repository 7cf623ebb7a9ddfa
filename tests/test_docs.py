"""Documentation is true: links lead somewhere, commands exist and run, the pages build, the notebook runs."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

import ssfl as ssfl_package
from conftest import Call
from documents import FENCE, PAGES, ROOT, Command, commands, mentioned
from ssfl.cli import main, verbs
from ssfl.cli.deploy import serve
from ssfl.config import loading as configs
from ssfl.config.settings import NAMES, SECTIONS
from ssfl.core.fields import limits_of
from ssfl.methods import METHODS, find
from stage import Stage, free_port
from waiting import ended

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

EVERY = [command for page in PAGES for command in commands(page)]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BESIDE = ("CONTRIBUTING", "CHANGELOG", "SECURITY", "benchmarks/README")
SERVE_PORT = inspect.signature(serve).parameters["port"].default
GENERATED = {"docs/api.md", "docs/cli.md", "docs/config.md", "docs/changelog.md", "docs/contributing.md"}


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs make them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / f"{name}.md" for name in BESIDE)],
    ids=lambda page: str(page.relative_to(ROOT)),
)  # fmt: skip
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        name = target.relative_to(ROOT).as_posix()
        if name in GENERATED:
            continue
        assert target.is_file(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.fixture
def any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages say `--set method.name=NAME`, and name methods that a reader has yet to write."""
    monkeypatch.setattr(configs, "check_overrides", lambda overrides: None)


def parsed(words: list[str], complete: bool) -> None:
    """Read a command as `ssfl` would, without carrying it out; where `complete`, nothing may be missing."""
    command: Any = typer.main.get_command(main.app)
    context = None
    rest = words[1:]
    name: str | None = "ssfl"
    while True:
        try:
            context = command.make_context(name, list(rest), parent=context)
        except verbs.UsageError as error:
            if not complete and type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError"):
                return
            raise AssertionError(f"{' '.join(words)}: {verbs.explained(error)}") from error
        if not hasattr(command, "resolve_command"):
            break
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
    for setting in context.params.get("sets") or ():
        section, _, key = setting.partition("=")[0].partition(".")
        assert section in NAMES, setting
        assert key in keys_of(section), setting


@cache
def keys_of(section: str) -> set[str]:
    """The settings of a section; of [method], those of any method."""
    if section != "method":
        return set(limits_of(SECTIONS[section]))
    return {"name"}.union(*(limits_of(find(name)) for name in METHODS))


@pytest.mark.usefixtures("any_value")
@pytest.mark.parametrize("command", EVERY, ids=str)
def test_every_command_exists(command: Command) -> None:
    if command.python:
        compile(command.text, str(command), "exec")
        return
    words = command.words
    if words[0] == "ssfl":
        parsed(words[: words.index(">")] if ">" in words else words, complete=True)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    else:
        assert command.not_run, f"{command}: mark what a test cannot run"


@pytest.mark.usefixtures("any_value")
def test_commands_in_sentences_exist() -> None:
    for page in PAGES:
        for command in mentioned(page):
            if "..." not in command.text and "|" not in command.text and "$(" not in command.text:
                parsed(command.words, complete=False)


def test_every_method_is_described_and_chosen() -> None:
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("methods.md", "choosing.md")]
    described, choosing = pages
    for name in METHODS:
        assert f"### {name}\n" in described, name
        assert f"`{name}`" in choosing, name


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in EVERY if command.not_run], ids=str)
def test_not_run(command: Command) -> None:
    """The list of what no test here runs."""
    pytest.skip(f"{command}: {command.not_run}")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run_in_the_order_of_the_page(page: Path, ssfl: Call, folders: Path, stage: Stage) -> None:
    """In a scratch folder with images: scans/, labelled/, site-a/, site-b/ and scan.png. Centre and sites run
    beside each other."""
    shutil.copytree(folders / "labelled", "labelled")
    shutil.copytree(folders / "labelled", "scans")
    shutil.copytree(folders / "aachen", "scans/unlabelled")
    for site, name in (("site-a", "bonn"), ("site-b", "calais")):
        shutil.copytree(folders / name, site)
    shutil.copy(next((folders / "bonn").iterdir()), "scan.png")
    for name in ("results", "examples"):
        Path(name).symlink_to(ROOT / name)
    Path("runs/paper").mkdir(parents=True)
    if page.name == "report.md":
        for name in ("mine", "other"):
            assert ssfl("run", "--set", "federation.rounds=5", "--out", f"runs/{name}")[0] == 0
    waiting: list[Command] = []
    port = free_port()
    for command in commands(page):
        if command.not_run:
            continue
        if command.python:
            exec(compile(command.text, str(command), "exec"), {"__name__": "__main__"})
            continue
        words = command.words
        if words[:2] == ["ssfl", "board"]:
            opened(words)
            continue
        if words[1] in ("serve", "join"):  # any port: others may use the one that the pages name
            if words[1] == "serve":
                assert "--port" not in words
                words = [*words, "--port", str(port)]
            else:
                words[2] = re.sub(f":{SERVE_PORT}$", f":{port}", words[2])
                assert words[2].endswith(f":{port}"), command
            stage.ssfl(str(command.line), *words[1:])
            waiting.append(command)
            continue
        target = None
        if ">" in words:
            words, target = words[: words.index(">")], words[-1]
        code, out, err = ssfl(*words[1:])
        assert code == 0 or (words[1] == "compare" and code == 1), f"{command}: {err}"
        if target is not None:
            Path(target).write_text(out, "utf-8")
    for command, process in zip(waiting, stage.started, strict=True):
        assert stage.ended(process) == 0, f"{command}: {stage.said(str(command.line))}"


def opened(words: list[str]) -> None:
    """Start what does not end by itself, and stop it when it says where it is to be seen."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words, *([] if "--port" in words else ["--port", "0"])],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "http://127.0.0.1:" in line:
            break
    process.terminate()
    ended(process)
    process.stdout.close()
    assert "http://127.0.0.1:" in said, said


def test_own_code_is_short() -> None:
    """A network, data and a method of one's own take at most 15 lines each."""
    blocks = [command for command in commands(ROOT / "docs/bring-your-own.md") if command.python]
    assert len(blocks) >= 3
    for block in blocks[:3]:
        lines = [line for line in block.text.splitlines() if line.strip()]
        assert len(lines) <= 15, block


@pytest.mark.slow
def test_the_worked_example_works(tmp_path: Path) -> None:
    """Write the files of docs/add-a-method.md, run its test and its commands."""
    page = ROOT / "docs/add-a-method.md"
    found = commands(page)
    method, test = (command.text for command in found if command.python)
    (tmp_path / "rfa.py").write_text(method, "utf-8")
    (tmp_path / "test_rfa.py").write_text(test, "utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    lines = [command.words for command in found if not command.python]
    assert len(lines) == 4
    for words in lines:
        module = words[2:] if words[:2] == ["python", "-m"] else words
        done = subprocess.run(
            [sys.executable, "-m", *module], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "rfa.py:Rfa" in done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "true"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_references_have_every_verb_and_setting(site: Path) -> None:
    told = (site / "cli.html").read_text("utf-8")
    for names in verbs.GROUPS.values():
        assert all(f"ssfl {name}" in told for name in names)
    told = (site / "config.html").read_text("utf-8")
    for section, kind in SECTIONS.items():
        assert f"[{section}]" in told
        assert all(f"<code>{key}</code>" in told for key in limits_of(kind))
    assert all(f"<code>{key}</code>" in told for name in METHODS for key in limits_of(find(name)))


@pytest.mark.slow
def test_the_api_page_has_every_public_name(site: Path) -> None:
    told = (site / "api.html").read_text("utf-8")
    assert f"ssfl {ssfl_package.__version__}" in told
    for name in ssfl_package.__all__:
        if name == "__version__":
            continue
        assert f"ssfl.{name}<" in told, name
        value = getattr(ssfl_package, name)
        assert (value.__doc__ or "").strip(), name


@pytest.mark.slow
def test_pages_need_no_network(site: Path, browser: "Chrome") -> None:
    """Nothing is fetched from elsewhere, and nothing is complained of."""
    for page in sorted(site.glob("*.html")):
        text = page.read_text("utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=\"?https?:", text), page.name
        assert not re.search(r"<link[^>]+rel=\"?stylesheet\"?[^>]+href=\"?https?:", text), page.name
    browser.get_log("browser")
    for name in ("index", "concepts", "cli"):
        browser.get((site / f"{name}.html").as_uri())
        pictures = browser.execute_script(
            "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
        )
        assert pictures == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=540, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    assert "anchored" in printed
    assert "tour.html" in printed
