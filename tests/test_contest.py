"""The contest: one protocol for all methods, and what it tells."""

import json
from pathlib import Path

import pytest

from ssfl import contest, runs
from ssfl.errors import ConfigError

SHORT = ["federation.rounds=6", "federation.period=2", "train.batch_size=8"]


def played(out: Path, *methods: str, seeds: int = 2, choose: tuple[str, ...] = ()) -> list[contest.Standing]:
    told: list[str] = []
    found = contest.play(
        "quickstart", methods, seeds, sets=SHORT, choose=choose, out=out, tell=told.append, quiet=True
    )
    (out / "told.txt").write_text("\n".join(told))
    return found


def entry(method: str, *sets: str) -> contest.Entry:
    return contest.entry("emnist-47", method, 3, sets, (), Path("nowhere"))


def test_everything_but_the_method_is_the_same() -> None:
    one, two = entry("alternate").config, entry("semifl").config
    assert (one.split, one.model, one.train, one.data) == (two.split, two.model, two.train, two.data)
    assert one.data.validation == 0.05
    assert one.run.seed == two.run.seed == 3
    assert entry("supervised").config.model.norm == "none"  # the protocol's, not the row's


def test_users_pass_equally_many_images(tmp_path: Path) -> None:
    assert contest.passes(entry("alternate").config) == 1
    assert contest.passes(entry("semifl").config) == 2
    assert contest.passes(entry("server-only").config) == 0
    # 30 epochs of 65,536 images in rounds of 16 batches of 64; two passes of each image halve the rounds
    assert entry("semifl").config.federation.rounds == 30 * 64 / 2
    found = {one.method: one for one in played(tmp_path, "alternate", "semifl", "server-only", seeds=1)}
    assert found["alternate"].images == found["semifl"].images == 6 * 2 * 8 * 10
    assert found["semifl"].rounds == 3
    assert found["semifl"].megabytes == pytest.approx(found["alternate"].megabytes / 2)
    assert found["server-only"].images == found["server-only"].megabytes == 0
    assert found["alternate"].curve[-1][0] == found["alternate"].images


def test_table_file_and_picture(tmp_path: Path) -> None:
    found = played(tmp_path, "alternate", "server-only")
    assert (found[0].mean or 0) >= (found[1].mean or 0)
    told = contest.table(found)
    assert "± " in told
    assert told.count("\n") == 3
    file = contest.write(found, tmp_path, {"command": "ssfl contest"})
    whole = json.loads(file.read_text())
    assert [one["method"] for one in whole["standings"]] == [one.method for one in found]
    for picture in contest.draw(found, tmp_path):
        assert picture.stat().st_size > 5000
    # the last round's accuracy is the one that counts
    for one in whole["standings"]:
        paths = [tmp_path / f"{one['method']}-seed{seed}" for seed in (1, 2)]
        summaries = [runs.read_summary(path) or {} for path in paths]
        assert one["accuracies"] == [100 * summary["accuracy"] for summary in summaries]


def test_choices_are_made_by_validation_images_of_another_seed(tmp_path: Path) -> None:
    (one,) = played(tmp_path, "alternate", seeds=1, choose=("train.lr=0.000001,0.05",))
    assert one.options == ("train.lr=0.05",)
    assert (tmp_path / "alternate-lr0.000001-seed0").is_dir()
    assert (tmp_path / "alternate-lr0.05-seed1").is_dir()
    assert not (tmp_path / "alternate-lr0.000001-seed1").exists()
    assert "train.lr=0.05, by validation images" in (tmp_path / "told.txt").read_text()


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    first = played(tmp_path, "alternate", seeds=1)
    before = (tmp_path / "alternate-seed1" / "summary.json").stat().st_mtime_ns
    assert played(tmp_path, "alternate", seeds=1) == first
    assert (tmp_path / "alternate-seed1" / "summary.json").stat().st_mtime_ns == before
    assert "done before" in (tmp_path / "told.txt").read_text()


def test_another_protocol_needs_another_folder(tmp_path: Path) -> None:
    played(tmp_path, "server-only", seeds=1)
    with pytest.raises(ConfigError, match="choose another --out"):
        contest.play("quickstart", ["server-only"], 1, out=tmp_path, tell=print)


@pytest.mark.parametrize(
    ("methods", "sets", "choose", "says"),
    [
        (["semifi"], [], [], "no method 'semifi'"),
        (["semifl"], ["method.threshold=0.5"], [], "try values with --choose"),
        (["semifl"], [], ["threshold"], "write section.key=one,two"),
    ],
)
def test_bad_input_is_told_before_anything_runs(
    tmp_path: Path, methods: list[str], sets: list[str], choose: list[str], says: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=says):
        contest.play("quickstart", methods, 1, sets=sets, choose=choose, out=out, tell=print)
    assert not out.exists()
