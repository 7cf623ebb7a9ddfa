"""The leaderboard: a page made from files, up to date, and only of files that say how they came about."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import leaderboard
from ssfl.config.loading import load_config
from ssfl.config.writing import as_dict
from ssfl.contest import texts
from ssfl.core.statistics import wilson


def standing(method: str, accuracies: list[float], commit: str = "1234567890") -> dict[str, Any]:
    config = as_dict(load_config("quickstart", [f"method.name={method}", "federation.participants=10"]))
    runs = [
        {"seed": seed, "accuracy": value / 100, "device": "cpu", "commit": commit, "mask_rate": 0.5,
         "validation_images": 143}
        for seed, value in enumerate(accuracies, 1)
    ]  # fmt: skip
    tries = [(["train.lr=0.01"], 0.90), (["train.lr=0.03"], 0.92), (["train.lr=0.09"], None),
             (["train.lr=0.03", "method.threshold=0.8"], 0.93)]  # fmt: skip
    return {
        "tries": [{"options": options, "validation_accuracy": score} for options, score in tries],
        "method": method, "mean": sum(accuracies) / len(accuracies), "deviation": 0.5, "diverged": 0,
        "collapsed": 1, "images": 2_000_000, "passes": 3_000_000, "server_images": 400_000, "runs": runs,
        "options": ["train.lr=0.03", "method.threshold=0.8"], "config": config,
    }  # fmt: skip


def contest(*standings: dict[str, Any], **other: Any) -> dict[str, Any]:
    known = {"command": "ssfl contest", "date": "2026-11-17T09:00:00+00:00", "tuned": True}
    return known | {"versions": {"ssfl": "0.2.0", "torch": "2.13.0"}, "standings": list(standings)} | other


def written(folder: Path, **contests: dict[str, Any]) -> list[Path]:
    for name, told in contests.items():
        (folder / f"{name}.json").write_text(json.dumps(told))
    return sorted(folder.glob("*.json"))


def test_the_page_is_up_to_date() -> None:
    assert leaderboard.main(["--check"]) == 0


def test_files_of_one_protocol_share_a_table_and_are_compared_by_seed(tmp_path: Path) -> None:
    files = written(
        tmp_path,
        one=contest(standing("anchored", [90, 92, 94]), standing("server-only", [80, 81, 82])),
        two=contest(standing("semifl", [89, 93, 91])),
    )
    page = leaderboard.page(files)
    assert page.count("\n## digits: 50 labels") == 1
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == 2 * ["anchored", "semifl", "server-only"]
    # 1, -1 and 3 points: mean 1, standard error 2 / √3, and Student's t of two degrees is 4.303
    assert rows[1][2] == "1.00 (−3.97 to 5.97)"
    assert [cell.strip(" |") for cell in rows[0][3:]] == ["3", "1", "50"]
    assert rows[3][1:5] == ["2", "3", "0.4", "lr=0.03, threshold=0.8"]
    assert "one.json" in rows[3][5]
    assert "two.json" in rows[4][5]
    assert "torch 2.13.0" in page


def test_the_page_says_why_a_method_with_a_diverged_run_comes_last(tmp_path: Path) -> None:
    lucky = standing("semifl", [95, 96]) | {"diverged": 1, "collapsed": 0}
    sound = standing("anchored", [90, 92, 94]) | {"collapsed": 0}
    page = leaderboard.page(written(tmp_path, one=contest(lucky, sound)))
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert rows == 2 * ["| `anchored`", "| `semifl`"]
    (line,) = (line for line in page.splitlines() if line.startswith("- `"))
    assert line == f"- {texts.diverged('`semifl`', 1, 3)[0]}"


@pytest.mark.parametrize("recorded", [True, False])
def test_the_page_names_methods_with_runs_that_stayed_near_guessing(tmp_path: Path, recorded: bool) -> None:
    """Older files do not have the number of classes."""
    one, two = standing("flexmatch", [90, 10, 50]), standing("anchored", [90, 92, 94])
    for run, best in zip((*one["runs"], *two["runs"]), (90, 19.9, 20.1, 92, 92, 92), strict=True):
        run |= {"best_validation": best} | ({"classes": 10} if recorded else {})
    two |= {"collapsed": 0}
    page = leaderboard.page(written(tmp_path, one=contest(one, two)))
    (guessed,) = texts.guessed("`flexmatch`", one["runs"], 3, 10)
    (collapsed,) = texts.collapsed("`flexmatch`", 1, 3, tuned=True)
    assert "1 of 3 runs" in guessed
    lines = [line for line in page.splitlines() if line.startswith("- `")]
    assert lines == [f"- {collapsed}", f"- {guessed}"]


def test_a_method_has_one_row_its_newest(tmp_path: Path) -> None:
    files = written(
        tmp_path,
        alpha=contest(standing("fl2", [88, 87, 85]), date="2026-11-18T09:00:00+00:00"),
        one=contest(standing("anchored", [90, 92, 94]), standing("semifl", [89, 93, 91])),
        two=contest(standing("anchored", [90, 92, 94]), standing("fl2", [88, 87, 86])),
    )
    rows = [line for line in leaderboard.page(files).splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == 2 * ["anchored", "semifl", "fl2"]
    assert "one.json" in rows[3]
    assert "two.json" in rows[3]
    assert "alpha.json" in rows[5]
    assert "two.json" not in rows[5]


def test_files_that_do_not_say_how_they_came_about_are_refused(tmp_path: Path) -> None:
    good = standing("anchored", [90, 92, 94])
    bad = {
        "untuned": contest(good, tuned=False),
        "undated": contest(good, date=None),
        "unresolved": contest(good | {"config": {}}),
        "uncommitted": contest(standing("anchored", [90.0], commit="1234567+")),
    }
    for name, told in bad.items():
        (tmp_path / name).mkdir()
        files = written(tmp_path / name, **{name: told})
        with pytest.raises(leaderboard.Unfit, match=name):
            leaderboard.page(files)


def test_the_page_says_which_choices_are_at_the_end_of_the_tried_values_and_on_how_many_images(
    tmp_path: Path,
) -> None:
    inside, outside = standing("anchored", [90, 92, 94]), standing("semifl", [89, 93, 91])
    outside["options"] = ["train.lr=0.09"]
    page = leaderboard.page(written(tmp_path, one=contest(inside, outside)))
    work = [line.split(" | ")[4] for line in page.splitlines() if line.startswith("| `")][2:]
    assert work == ["lr=0.03, threshold=0.8", "lr=0.09 (largest tried)"]
    low, high = wilson(0.93 * 143, 143)
    assert "chosen on 143 validation images" in page
    assert f"93.0 %, with a 95 % interval of {100 * low:.1f} to {100 * high:.1f} %" in page
