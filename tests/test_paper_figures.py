"""The paper's figures: what each draws, of which runs, under which name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from conftest import Call
from paper_results import fake
from ssfl.paper import drawing, figures, results, rows
from ssfl.paper.drawing import Drawing
from ssfl.paper.fidelity import actual
from ssfl.paper.results import PaperResult
from ssfl.paper.rows import PaperRun

NEEDS = {
    "2": "methods",
    "3": "methods",
    "4": "methods",
    "5": "3",
    "6": "16",
    "B.1": "4",
    "C.1": "15",
    "D.1": "16",
}
"""A row that each figure draws."""


class Kept(Drawing):
    """Keeps the figure in place of writing it."""

    def save(self, figure: Any, out: Path, name: str, title: str) -> list[Path]:
        super().save(figure, out, name, title)
        self.figure = figure
        return []


def drawn(
    monkeypatch: pytest.MonkeyPatch,
    number: str,
    given: list[PaperResult],
    fidelity: str = "paper",
    with_changes: bool = False,
) -> Any:
    """A figure, without files."""
    monkeypatch.setattr(drawing, "written", lambda *given: [])
    kept = Kept(given, fidelity, with_changes)
    figures.FIGURES[number](kept, Path())
    kept.plt.close(kept.figure)
    return kept.figure


def labels(axis: Any) -> list[str]:
    """The names of a panel's lines, published marks aside."""
    return [line.get_label() for line in axis.lines if not line.get_label().startswith("_")]


def found(folder: Path, runs: Iterable[PaperRun], **more: object) -> list[PaperResult]:
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
    chosen = Drawing(results.read([tmp_path]), "paper")
    most = chosen.of((first, second, third))
    assert {line.run: [one.scale for one in line.results] for line in most} == {
        first: [0.2], second: [0.2], third: [0.2]
    }  # fmt: skip
    assert [one.scale for one in chosen.of((second, third))[0].results] == [1.0]


def test_a_method_has_one_colour_in_every_panel_whatever_was_not_measured() -> None:
    panels = Drawing([], "paper")
    figure, axes = panels.plt.subplots(1, 2)
    for number in range(3):
        panels.line(axes[0], str(number), number, {1.0: [1.0]})
        panels.line(axes[1], str(number), number, {1.0: [1.0]} if number == 2 else {})
    assert axes[1].lines[0].get_color() == axes[0].lines[2].get_color() != axes[0].lines[0].get_color()
    panels.plt.close(figure)


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
        (("2", "--fidelity", "xyz"), "--fidelity xyz: use one of paper, reference, recommended"),
        (("lr", "--fidelity", "xyz"), "--fidelity xyz: use one of paper, reference, recommended"),
        (("7",), "there is no figure '7': use one of 2, 3, 4, 5, 6, B.1, C.1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_choices(
    ssfl: Call, words: tuple[str, ...], message: str
) -> None:
    Path("runs/paper").mkdir(parents=True)
    code, _, err = ssfl("paper", "figure", *words)
    assert code == 2
    assert message in err


def test_the_letter_d_is_all_four_figures_of_the_appendix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drawing, "written", lambda plt, figure, out, name: [plt.close(figure) or out / name])
    given = found(tmp_path, rows.row("21").runs)
    assert [path.name for path in figures.draw("d", given, tmp_path)] == ["D.1", "D.2", "D.3", "D.4"]


def test_titles_name_the_data_of_the_runs_and_say_if_there_were_no_pseudo_labels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = found(tmp_path / "trial", rows.row("21").runs, data="digits", mask_rate=0.0)
    for number in ("6", "D.1"):
        title = drawn(monkeypatch, number, trial).get_suptitle()
        assert "FedAvg and Grouping-based on digits" in title
        assert "EMNIST" not in title
        assert title.endswith("; no pseudo-label was made in any run")
    paper = found(tmp_path / "paper", rows.row("21").runs[:1], data="emnist", mask_rate=0.0)
    paper += found(tmp_path / "other", rows.row("21").runs[1:], data="emnist", mask_rate=0.2)
    title = drawn(monkeypatch, "6", paper).get_suptitle()
    assert "FedAvg and Grouping-based on EMNIST" in title
    assert title.endswith("; no pseudo-label was made in 1 of 2 runs")
    convergence = found(tmp_path / "svhn", rows.row("15").runs, data="digits")
    assert "SVHN" not in drawn(monkeypatch, "C.1", convergence).get_suptitle()
    few: dict[str, Any] = fake(rows.row("7").runs[0], 1)
    config = few["config"] | {"split": {"server_labels": 50}}
    labelled = found(tmp_path / "labels", rows.row("7").runs, data="digits", config=config)
    figure = drawn(monkeypatch, "5", labelled)
    assert list(figure.axes[2].get_xticks()) == [50]
    assert "\ndigits; 50 labels; " in figure.get_suptitle()
    every = found(tmp_path / "every", rows.row("7").runs)
    assert "; 1,000, 2,000, 3,000, 4,000, 5,000 labels; " in drawn(monkeypatch, "5", every).get_suptitle()


def test_appendix_d_has_the_papers_arrangement_and_both_normalisations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = {}
    for number in ("D.1", "D.2", "D.3", "D.4"):
        figure = drawn(monkeypatch, number, found(tmp_path, rows.row("16").runs))
        panels = figure.axes
        assert [axis.get_title() for axis in panels] == ["C = 10", "C = 30", "C = 47", *[""] * 12]
        assert [len(labels(axis)) for axis in panels[:3]] == [2, 2, 2]
        curves = [line for axis in panels[3:] for line in axis.lines if len(line.get_xdata())]
        assert len(curves) == 12 * 4  # FedAvg and grouping, each twice
        assert {(line.get_linestyle(), *line.get_ydata()) for line in curves} == {
            ("-", 0.5, 0.5), ("--", 4.0, 4.0)
        }  # fmt: skip
        shown[number] = [figure.get_suptitle().split(":")[0], *(axis.get_ylabel() for axis in panels[3::3])]
    assert shown["D.1"] == [
        "Diversity of gradients by the ℓ2 norm", "ℓ2 squared\nusers", "ℓ2\nusers",
        "ℓ2 squared\nusers and server", "ℓ2\nusers and server",
    ]  # fmt: skip
    assert shown["D.4"][:2] == ["Diversity of updates by the ℓ1 norm", "ℓ1 squared\nusers"]


@pytest.mark.parametrize("number", NEEDS)
def test_what_we_recommend_is_drawn_once_and_named_by_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: str
) -> None:
    runs = {one.name: one for one in (actual(run, "recommended") for run in rows.row(NEEDS[number]).runs)}
    given = found(tmp_path, runs.values(), fidelity="recommended")
    figure = drawn(monkeypatch, number, given, "recommended")
    assert "not run" not in figure.get_suptitle() or number in ("5", "C.1")  # these need other rows besides
    first = figure.axes[0]
    if number == "2":
        names = ["Self-training", "CRL with BN", "Anchored", "Supervised FedAvg"]
        assert [label.get_text() for label in first.get_xticklabels()] == names
        assert len(first.patches) == 4
    elif number in ("3", "4"):
        assert labels(first) == ["Self-training", "CRL with BN", "Anchored", "Supervised FedAvg"]
    elif number in ("6", "D.1"):
        assert labels(first) == ["Anchored"]
        assert figure.get_suptitle().count("Anchored") == 1
    elif number == "5":
        assert labels(first) == ["EMNIST"]
        assert len(first.lines) == 1  # what is published is another method's
    else:  # of row 15 two runs have K = C
        assert len(labels(first)) == (2 if number == "C.1" else len(runs))
        assert "Anchored" in figure.get_suptitle()


def test_lines_of_different_scales_say_theirs_and_a_single_value_is_the_one_tick(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = found(tmp_path, rows.row("6").runs, scale=0.2)
    assert labels(drawn(monkeypatch, "5", one).axes[1]) == ["EMNIST"]
    several = found(tmp_path, rows.row("7").runs[:1], scale=0.02)
    skew, period, labelled = drawn(monkeypatch, "5", several).axes
    assert labels(skew) == labels(period) == ["CIFAR-10, scale 0.02", "EMNIST, scale 0.2"]
    assert [text.get_text() for text in period.get_legend().get_texts()] == labels(period)
    assert [text.get_text() for text in period.get_xticklabels()] == ["2", "4", "8", "16", "32"]
    assert labels(labelled) == ["CIFAR-10, scale 0.02"]
    assert list(labelled.get_xticks()) == [1000]
    assert any(line.get_fillstyle() == "none" for line in labelled.lines)  # published


def test_changed_runs_are_lines_of_their_own_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs, changes = rows.row("16").runs, ["method.server_weight=0.1"]
    found(tmp_path, runs)
    found(tmp_path, runs[2:3], scale=1.0, changes=changes)  # of another scale than what it would stand beside
    given = found(tmp_path, runs[2:3], changes=changes)
    plain = ["FedAvg", "Grouping-based"]
    assert labels(drawn(monkeypatch, "6", given).axes[2]) == plain
    few, _, all_users, *_ = drawn(monkeypatch, "6", given, with_changes=True).axes
    assert labels(few) == plain
    assert labels(all_users) == [*plain, "FedAvg, server_weight=0.1"]
    assert [line.get_color() for line in few.lines] == [line.get_color() for line in all_users.lines[:2]]


@pytest.mark.parametrize("number", NEEDS)
def test_every_figure_takes_changed_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: str
) -> None:
    runs = rows.row(NEEDS[number]).runs
    found(tmp_path, runs)
    given = found(tmp_path, runs, changes=["train.lr=0.1"])
    first = drawn(monkeypatch, number, given, with_changes=True).axes[0]
    names = [label.get_text() for label in first.get_xticklabels()] if number == "2" else labels(first)
    assert 2 * sum(name.endswith("lr=0.1") for name in names) == len(names) > 0


def test_a_run_that_lies_in_two_places_is_drawn_as_one(tmp_path: Path) -> None:
    runs = rows.row("21").runs
    given = found(tmp_path / "one", runs) + found(tmp_path / "two", runs)
    assert [len(line.results) for line in Drawing(given, "paper").of(runs)] == [1, 1]
