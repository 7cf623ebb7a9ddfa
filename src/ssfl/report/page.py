"""Writes a report on run folders as a single HTML file, which needs no other file and no network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ssfl.errors import SsflError
from ssfl.report import gather, sections, several, words
from ssfl.runs import folder

MARK = "<!doctype html><!-- ssfl report -->"
"""The first line of every report. A file that does not begin with it is not overwritten."""
_PAGE = """{mark}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; base-uri 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; form-action 'none'">
<title>ssfl report</title>
<style>
{css}</style>
</head>
<body>
<main></main>
<noscript>This report needs JavaScript, which is switched off in this browser.</noscript>
<script type="application/json" id="data">{data}</script>
<script>
{charts}</script>
<script>
{page}</script>
</body>
</html>
"""


def contents(paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the content of a report on these run folders as plain data: title, subtitle, sections and
    footer."""
    names = several.distinct(paths)
    runs = [gather.read(path, name) for path, name in names.items()]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs compared"
    states = {
        run.name: "finished" if run.finished else f"round {run.played:,} of {run.planned:,}" for run in runs
    }
    subtitle = f"{runs[0].config.method.name} on {words.data_name(runs[0])}, {states[runs[0].name]}"
    if len(runs) > 1:
        subtitle = ", ".join(
            f"{name} ({state})" if state != "finished" else name for name, state in states.items()
        )
    version = folder.versions()["ssfl"]
    return {
        "title": title,
        "subtitle": subtitle if len(subtitle) < 400 else subtitle[:397] + "...",
        "sections": sections.make(runs),
        "footer": f"Made by ssfl {version}. To read values from a chart, hover over it, touch it or use the "
        "arrow keys. Each chart also has its data as a table.",
    }


def html(content: dict[str, Any]) -> str:
    """Returns the report as an HTML page, with `content` embedded as JSON. The characters < > and & are
    escaped in the JSON, so that no name or value from a run folder can end the script element."""
    data = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return _PAGE.format(
        mark=MARK, css=asset("report.css"), charts=asset("charts.js"), page=asset("page.js"), data=data
    )


def asset(name: str) -> str:
    """Returns the text of a file of this package, such as report.css."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def write(paths: Sequence[Path], out: Path | None = None, figures: Path | None = None) -> list[Path]:
    """Writes the report on these run folders and returns the written files.

    The default file is RUN/report.html for one run, and ./report.html for several. If `figures` is a folder,
    the figures are also drawn there.
    """
    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    content = contents(paths)
    _require_ours(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.write_atomic(target, html(content).encode())
    if figures is None:
        return [target]
    from ssfl.report.figures import draw

    return [target, *draw(content["sections"], figures)]


def _require_ours(target: Path) -> None:
    """Raises if the file exists and is not an earlier report, so that no other file is overwritten."""
    if target.is_dir():
        example = target / "report.html"
        raise SsflError(
            f"--out {target} is a folder: name a file in it, such as {example}",
            key="--out",
            value=str(target),
            fix=f"--out {example}",
        )
    if target.exists():
        with target.open("rb") as file:
            if file.read(len(MARK)) != MARK.encode():
                raise SsflError(
                    f"{target} is not a report and is not overwritten: choose another --out",
                    key="--out",
                    value=str(target),
                )
