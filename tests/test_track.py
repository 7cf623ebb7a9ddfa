"""Trackers: what their own readers find after a run, a crash and a resumed run is what events.jsonl holds."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ssfl
from ssfl.config.loading import Config
from ssfl.errors import ConfigError, SsflWarning
from ssfl.runs import folder, track

Points = dict[str, list[tuple[int, float]]]
EVERY = ("federation.rounds=6", "run.eval_every=2", "run.checkpoint_every=4", "run.diversity_every=3")


def expected(path: Path) -> Points:
    found: Points = {}
    for event in folder.read_events(path):
        for name, value in track.numbers(event).items():
            found.setdefault(name, []).append((event["round"], value))
    return found


def written(path: Path) -> Points:
    """The scalars of a run's event files, every one of them, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path / "tensorboard"), {"scalars": 0}, purge_orphaned_data=False)
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}


def measured(points: Points) -> Points:
    """Without what a clock or a meter said: a round that was played twice was measured twice."""
    return {name: row for name, row in points.items() if not re.search("seconds|phases|memory", name)}


def same(found: Points, wanted: Points) -> None:
    found, wanted = measured(found), measured(wanted)
    assert set(found) == set(wanted)
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        for (_, ours), (_, theirs) in zip(points, found[name], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-6, abs=1e-30)


class Crash(Exception):
    pass


def crash_at(round: int) -> Callable[[dict[str, Any]], None]:
    def report(event: dict[str, Any]) -> None:
        if event["round"] == round and event["event"] == "round":
            raise Crash

    return report


def crashed(config: Config, path: Path, round: int) -> None:
    with pytest.raises(Crash):
        ssfl.run(config, path, crash_at(round))


def test_tensorboard_reads_what_the_run_folder_holds(quick: Callable[..., Config], tmp_path: Path) -> None:
    ssfl.run(quick(*EVERY, "run.track=tensorboard"), tmp_path / "a")
    wanted = expected(tmp_path / "a")
    assert [step for step, _ in wanted["eval/accuracy"]] == [2, 4, 6]
    assert "diversity/gradient_l2_squared/definition" in wanted
    same(written(tmp_path / "a"), wanted)


def test_a_crashed_and_resumed_run_has_no_point_twice(quick: Callable[..., Config], tmp_path: Path) -> None:
    crashed(quick(*EVERY, "run.track=tensorboard"), tmp_path / "a", 5)
    assert max(step for step, _ in written(tmp_path / "a")["round/loss"]) == 5
    ssfl.resume(tmp_path / "a")
    same(written(tmp_path / "a"), expected(tmp_path / "a"))


def test_a_tracker_that_fails_is_told_of_once_and_stops_nothing(
    quick: Callable[..., Config], tmp_path: Path
) -> None:
    path = tmp_path / "a"
    crashed(quick(*EVERY, "run.track=tensorboard"), path, 5)
    for file in (path / "tensorboard").iterdir():
        file.unlink()
    (path / "tensorboard").rmdir()
    (path / "tensorboard").write_text("in the way")
    with pytest.warns(SsflWarning, match=r"run\.track") as told:
        result = ssfl.resume(path)
    assert len([warning for warning in told if warning.category is SsflWarning]) == 1
    assert result.history[-1]["round"] == 6
    plain = ssfl.run(quick(*EVERY), tmp_path / "b")
    assert plain.accuracy == result.accuracy


def test_a_tracker_that_is_not_installed_gets_one_line(
    quick: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(track.PACKAGES, "wandb", "no_such_package")
    with pytest.raises(ConfigError) as caught:
        ssfl.run(quick("run.track=wandb"), tmp_path / "a")
    assert (caught.value.key, caught.value.fix) == ("run.track", "pip install no_such_package")
    assert not (tmp_path / "a").exists()


def test_nothing_but_plain_finite_numbers_is_told() -> None:
    event = {"event": "eval", "round": 3, "a": 1, "b": float("nan"), "c": [1, 2], "d": {"e": 0.5, "f": None},
             "g": True, "h": "x"}  # fmt: skip
    assert track.numbers(event) == {"eval/a": 1.0, "eval/d/e": 0.5}


def test_mlflow_holds_every_point_once_after_a_crash(
    quick: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    path = tmp_path / "a"
    crashed(quick(*EVERY, "run.track=mlflow"), path, 5)
    client = mlflow.MlflowClient()
    opened = json.loads((path / "track.json").read_text())["id"]
    assert client.get_run(opened).info.status == "KILLED"
    ssfl.resume(path)
    found = client.get_run(opened)
    assert found.info.status == "FINISHED"
    assert found.data.params["federation.rounds"] == "6"
    wanted = expected(path)
    same({n: [(p.step, p.value) for p in client.get_metric_history(opened, n)] for n in wanted}, wanted)
    [experiment] = [e for e in client.search_experiments() if e.name == "ssfl"]
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_an_mlflow_that_goes_away_in_the_middle_stops_nothing(
    quick: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "store"
    mlflow.set_tracking_uri(store.as_uri())

    def lose(event: dict[str, Any]) -> None:
        if event["round"] == 2 and store.is_dir():
            store.rename(tmp_path / "away")
            store.write_text("")

    with pytest.warns(SsflWarning, match="mlflow"):
        result = ssfl.run(quick(*EVERY, "run.track=mlflow"), tmp_path / "a", lose)
    assert result.history[-1]["round"] == 6


def test_wandb_offline_holds_every_point_once_after_a_crash(
    quick: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    path = tmp_path / "a"
    crashed(quick(*EVERY, "run.track=wandb"), path, 5)
    ssfl.resume(path)
    found: Points = {}
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
        for name, points in wandb_points(file).items():
            found.setdefault(name, []).extend(points)
    same(found, expected(path))


def wandb_points(file: Path) -> Points:
    """The history in an offline run's file: blocks of 32 KiB, in them pieces of records, each with checksum,
    length and whether the record goes on (a LevelDB log after 7 bytes)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = file.read_bytes(), 7, b""
    found: Points = {}
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            read = Record.FromString(record)
            row = {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in read.history.item}
            for name in row:
                if "/" in name:
                    found.setdefault(name, []).append((row["round_number"], row[name]))
            record = b""
    return found
