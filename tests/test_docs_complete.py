"""Everything that a person can set, type, read or import is documented on some page."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ssfl
from benchmarks import collapse, plots
from documents import PAGES, ROOT
from ssfl.cli import verbs
from ssfl.config.settings import SECTIONS
from ssfl.core.events import ROUND_FIELDS
from ssfl.core.fields import limits_of
from ssfl.methods import METHODS, find

SOURCES = [path.read_text("utf-8") for path in (ROOT / "src/ssfl").rglob("*.py")]
EVENTS = sorted({name for text in SOURCES for name in re.findall(r'"event": "(\w+)"', text)})
"""The types of events that some line of the package makes."""
QUICK = ["federation.rounds=2", "federation.period=1", "train.batch_size=8", "run.threads=1",
         "run.device=cpu", "run.eval_every=1"]  # fmt: skip


@cache
def hooks() -> Any:
    """docs/hooks.py, which writes the pages of commands, settings and public names."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(text: str, title: str) -> str:
    """Returns the part of a page below a heading, until the next heading of the same or a higher level."""
    start = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert start is not None, f"no heading {title!r}"
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def test_every_setting_is_documented() -> None:
    page = hooks().config_page()
    kinds = {f"[{name}]": kind for name, kind in SECTIONS.items()} | {name: find(name) for name in METHODS}
    for title, kind in kinds.items():
        text = section(page, title)
        for key in limits_of(kind):
            row = re.search(rf"^\| `{key}` \| .* \| (.*) \|$", text, re.MULTILINE)
            assert row is not None, f"{title} {key}"
            assert row[1].strip(), f"{title} {key} has no docstring"


def test_every_command_is_documented() -> None:
    page = hooks().cli_page()
    for name in (name for names in verbs.GROUPS.values() for name in names):
        assert section(page, f"ssfl {name}").strip(), name
    for option, about in re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE):
        assert about.strip(), f"{option} has no help"


def test_every_public_name_is_documented() -> None:
    page = hooks().api_page()
    for name in ssfl.__all__:
        if name != "__version__":
            assert section(page, f"ssfl.{name}").strip(), name


def test_every_type_of_event_is_documented() -> None:
    page = (ROOT / "docs/run-folder.md").read_text("utf-8")
    assert {"round", "eval", "diversity", "privacy", "refused"} <= set(EVENTS)
    for name in EVENTS:
        assert section(page, name).strip(), name


@pytest.mark.parametrize(
    "more",
    [
        ["federation.gate=true", "data.validation=0.1"],
        ["federation.local_epochs=1"],
        ["method.relative=true"],
        ["method.name=grouping", "federation.groups=2", "run.diversity_every=1"],
    ],
    ids=["gate", "local epochs", "relative", "grouping"],
)
def test_every_field_of_an_event_is_documented(more: list[str], tmp_path: Path) -> None:
    page = (ROOT / "docs/run-folder.md").read_text("utf-8")
    result = ssfl.run(ssfl.load_config("quickstart", [*QUICK, *more]), out=tmp_path / "run")
    for event in result.history:
        if event["event"] != "diversity":  # its fields are named by a rule
            for key in event.keys() - {"event", "round"}:
                assert f"`{key}`" in section(page, event["event"]), (event["event"], key)
    written = {path.name for path in (tmp_path / "run").iterdir()}
    for name in written - {".lock"}:
        assert f"`{name}" in page, name


def test_the_names_that_metrics_may_not_have_are_the_documented_fields() -> None:
    documented = section((ROOT / "docs/run-folder.md").read_text("utf-8"), "round")
    rows = re.findall(r"^\| (`.*?) \|", documented, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert names - {"alone", "labelled_confidence"} == {*ROUND_FIELDS} - {"event", "round", "memory"}


@pytest.mark.parametrize("name", ["api", "cli", "config"])
def test_links_into_generated_pages_lead_to_a_heading(name: str) -> None:
    headings = re.findall(r"^#+ (.+)$", getattr(hooks(), f"{name}_page")(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}
    for page in PAGES:
        for anchor in re.findall(rf"\((?:docs/)?{name}\.md#([^)]+)\)", page.read_text("utf-8")):
            assert anchor in anchors, f"{page.name}: {name}.md#{anchor}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_every_picture_is_small_and_shown_on_some_page() -> None:
    shown = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for picture in sorted((ROOT / "docs/images").iterdir()):
        assert f"images/{picture.name})" in shown, picture.name
        assert picture.stat().st_size < 200_000, picture.name


def test_the_picture_of_a_collapse_is_that_of_the_recorded_demo(tmp_path: Path) -> None:
    demo = plots.read(ROOT / "results/demo.json")
    runs = {run["title"]: run for run in demo["runs"] if run["seed"] == collapse.SEED}
    bad, good = (runs[title] for title in collapse.PANELS)
    assert max(accuracy for _, accuracy in bad["accuracy"][:2]) > 0.8
    assert bad["accuracy"][-1][1] < 0.3 < 0.7 < bad["mask_rate"][-1][1]
    assert good["accuracy"][-1][1] > 0.9
    drawn = plots.save(collapse.collapse(demo), tmp_path / "collapse.svg").read_text("utf-8")
    assert "mask rate" in drawn
