"""The paper's figures: what each draws, of which runs, under which name."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from conftest import Call
from paper_results import fake
from ssfl.paper import results, rows
from ssfl.paper.drawing import Drawing
from ssfl.paper.results import Result
from ssfl.paper.rows import Run

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


def found(folder: Path, runs: Iterable[Run], **more: object) -> list[Result]:
    """A made-up result of each run, as files."""
    folder.mkdir(exist_ok=True)
    for place, run in enumerate(runs, len(list(folder.iterdir()))):
        (folder / f"{place}.json").write_text(json.dumps(fake(run, 1, **more)))
    return results.read([folder])


@pytest.mark.parametrize("number", NEEDS)
def test_every_figure_is_drawn_from_what_there_is(ssfl: Call, number: str) -> None:
    found(Path("found"), rows.row(NEEDS[number]).runs[1:])  # the first one was not run
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


@pytest.mark.parametrize(("name", "file"), [("b", "B.1"), ("c.1", "C.1"), ("LR", "lr")])
def test_a_figure_may_be_named_in_any_case_and_by_its_letter_alone(ssfl: Call, name: str, file: str) -> None:
    found(Path("found"), (*rows.row("4").runs, *rows.row("15").runs))
    code, out, _ = ssfl("paper", "figure", name, "--from", "found")
    assert code == 0
    assert out.split() == [f"figures/figure-{file}.png", f"figures/figure-{file}.svg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("2", "--fidelity", "xyz"), "fidelity 'xyz' is not one of paper, reference, recommended"),
        (("lr", "--fidelity", "xyz"), "fidelity 'xyz' is not one of paper, reference, recommended"),
        (("7",), "there is no figure '7' to draw: choose from 2, 3, 4, 5, 6, B.1, C.1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_choices(
    ssfl: Call, words: tuple[str, ...], message: str
) -> None:
    Path("runs/paper").mkdir(parents=True)
    code, _, err = ssfl("paper", "figure", *words)
    assert code == 2
    assert message in err
