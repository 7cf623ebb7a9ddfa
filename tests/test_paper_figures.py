"""The paper's figures: what each draws, of which runs, under which name."""

import json
from pathlib import Path

import pytest

from conftest import Call
from paper_results import fake
from ssfl.paper import results, rows
from ssfl.paper.drawing import Drawing

NEEDS = {
    "2": "methods",
    "3": "methods",
    "4": "methods",
    "5": "3",
    "6": "16",
    "B.1": "4",
    "C.1": "15",
    "D": "21",
}


@pytest.mark.parametrize("number", NEEDS)
def test_every_figure_is_drawn_from_what_there_is(ssfl: Call, number: str) -> None:
    Path("found").mkdir()
    for place, run in enumerate(rows.row(NEEDS[number]).runs[1:]):  # the first one was not run
        Path(f"found/{place}.json").write_text(json.dumps(fake(run, 1)))
    code, out, _ = ssfl("paper", "figure", number, "--from", "found", "--out", "drawn")
    assert code == 0
    png, svg = out.split()
    assert Path(png).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path(svg).read_text("utf-8")[:2000]


def test_what_is_compared_in_a_figure_is_of_one_scale(tmp_path: Path) -> None:
    first, second, third, *_ = rows.row("3").runs
    scales = [(first, 0.2), (second, 0.2), (second, 1.0), (third, 1.0), (third, 0.2)]
    for place, (run, scale) in enumerate(scales):
        (tmp_path / f"{place}.json").write_text(json.dumps(fake(run, 1, scale=scale)))
    drawing = Drawing(results.read([tmp_path]), "paper")
    most = drawing.of((first, second, third))
    assert {run: [one.scale for one in seeds] for run, seeds in most.items()} == {
        first: [0.2], second: [0.2], third: [0.2]
    }  # fmt: skip
    assert [one.scale for one in drawing.of((second, third))[second]] == [1.0]


def test_a_method_has_one_colour_in_every_panel_whatever_was_not_measured() -> None:
    drawing = Drawing([], "paper")
    figure, axes = drawing.plt.subplots(1, 2)
    for number in range(3):
        drawing.line(axes[0], str(number), number, {1.0: [1.0]})
        drawing.line(axes[1], str(number), number, {1.0: [1.0]} if number == 2 else {})
    assert axes[1].lines[0].get_color() == axes[0].lines[2].get_color() != axes[0].lines[0].get_color()
    drawing.plt.close(figure)


def test_the_learning_rates_are_drawn_without_any_run(ssfl: Call) -> None:
    code, out, _ = ssfl("paper", "figure", "lr")
    assert code == 0
    assert [Path(path).stat().st_size > 5000 for path in out.split()] == [True, True]
