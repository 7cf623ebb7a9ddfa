"""`ssfl report`: run folders in, one HTML file out that needs nothing else."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ssfl.errors import SsflError
from ssfl.report import gather, sections, several, words
from ssfl.runs import folder

MARK = "<!doctype html><!-- ssfl report -->"
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
<noscript>This report draws itself with JavaScript, which is switched off.</noscript>
<script type="application/json" id="data">{data}</script>
<script>
{charts}</script>
<script>
{page}</script>
</body>
</html>
"""


def contents(paths: Sequence[Path]) -> dict[str, Any]:
    """All that a report of these runs says, as plain data."""
    names = several.distinct(paths)
    found = [gather.read(path, name) for path, name in names.items()]
    title = f"Run {found[0].name}" if len(found) == 1 else f"{len(found)} runs compared"
    states = {
        run.name: "finished" if run.finished else f"round {run.played:,} of {run.planned:,}" for run in found
    }
    told = f"{found[0].config.method.name} on {words.data_name(found[0])}, {states[found[0].name]}"
    if len(found) > 1:
        told = ", ".join(
            f"{name} ({state})" if state != "finished" else name for name, state in states.items()
        )
    version = folder.versions()["ssfl"]
    return {
        "title": title,
        "subtitle": told if len(told) < 400 else told[:397] + "...",
        "sections": sections.make(found),
        "footer": f"Made by ssfl {version}. Charts are read by hovering, by touch or with the "
        "arrow keys; each has its data as a table.",
    }


def html(told: dict[str, Any]) -> str:
    """The page. What is embedded holds no < > or &, so that no name or value of a run can end the script."""
    data = json.dumps(told, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return _PAGE.format(
        mark=MARK, css=asset("report.css"), charts=asset("charts.js"), page=asset("page.js"), data=data
    )


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def write(paths: Sequence[Path], out: Path | None = None, figures: Path | None = None) -> list[Path]:
    """Write the report (by itself RUN/report.html, of several ./report.html) and, if wanted, its figures."""
    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    told = contents(paths)
    _require_ours(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.write_atomic(target, html(told).encode())
    if figures is None:
        return [target]
    from ssfl.report.figures import draw

    return [target, *draw(told["sections"], figures)]


def _require_ours(target: Path) -> None:
    """An earlier report may be replaced, and nothing else."""
    if target.is_dir():
        raise SsflError(f"--out {target} is a folder: name a file in it, such as {target / 'report.html'}")
    if target.exists():
        with target.open("rb") as file:
            if file.read(len(MARK)) != MARK.encode():
                raise SsflError(f"{target} is not a report and is not overwritten: choose another --out")
