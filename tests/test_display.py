"""What a run shows on a terminal."""

import io

import pytest
from rich.console import Console

from ssfl.runs.display import Reporter


@pytest.mark.parametrize("width", [80, 134, 135, 200])
@pytest.mark.parametrize("alone", [False, True], ids=["users", "server only"])
def test_progress_fits_on_one_line(width: int, alone: bool) -> None:
    what = {"what": "server-only model"} if alone else {}
    mask = {} if alone else {"mask_rate": 0.655}
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with Reporter(console) as report:
        report({"event": "start", "round": 0, "rounds": 1250, **what})
        report({"event": "round", "round": 1205, "seconds": 101.25, "left": 4000.0, **mask})
        report({"event": "eval", "round": 1205, "accuracy": 0.9, "correct": 9000, "count": 10_000})
        report.bar.refresh()
        measured = console.measure(report.bar.get_renderable())
        (line,) = console.render_lines(report.bar.get_renderable(), pad=False)
    text = "".join(segment.text for segment in line)
    assert measured.maximum <= width
    for value in ("1205/1250", "90.0 %", "left", "server-only model" if alone else "0.66"):
        assert value in text
