"""The contest: one protocol for all methods, and what it tells."""

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ssfl.config.loading import load_config
from ssfl.contest import play
from ssfl.contest.protocol import common
from ssfl.contest.standings import Standing, draw, table, write
from ssfl.core.schedule import head_start
from ssfl.errors import ConfigError, FolderInUse
from ssfl.federation import State
from ssfl.methods import DEFAULT, METHODS, alternate, find
from ssfl.models import networks
from ssfl.runs import checkpoints, round_loop, train
from ssfl.runs import folder as runs
from ssfl.simulate.simulation import Simulation

SHORT = ["federation.rounds=6", "federation.period=2", "train.batch_size=8"]


def played(out: Path, *methods: str, seeds: int = 2, choose: tuple[str, ...] = ()) -> list[Standing]:
    told: list[str] = []
    found = play.play(
        "quickstart", methods, seeds, sets=SHORT, choose=choose, out=out, tell=told.append, quiet=True
    )
    (out / "told.txt").write_text("\n".join(told))
    return found


def entry(method: str, *sets: str) -> play.Entry:
    return play.entry("emnist-47", method, 3, sets, (), Path("nowhere"))


def test_what_the_config_says_is_the_same_for_all_and_the_rest_is_the_methods_own() -> None:
    one, two = entry("alternate").config, entry("semifl").config
    assert (one.split, one.model, one.data) == (two.split, two.model, two.data)
    assert one.data.validation == 0.05
    assert one.run.seed == two.run.seed == 3
    assert one.split.seed == load_config("emnist-47").split.seed + 3  # every seed has a split of its own
    assert entry("supervised").config.model.norm == "none"  # the preset's, not the row's
    assert (one.train.clip, two.train.clip, two.train.weight_decay) == (0, 1, 5e-4)
    assert replace(two.train, clip=0, weight_decay=one.train.weight_decay) == one.train
    general = {f"{section}.{key}": value for (section, key), value in common().items()}
    for name in METHODS:  # every row as `ssfl run` has it, but for what is the same for all
        if name in ("fixmatch", "fedmatch"):
            continue
        sets = [f"method.name={name}", "data.validation=0.05", "run.seed=3", "split.seed=2022"]
        sets += ["run.test=last", "run.baseline=false"]
        sets += [f"{k}={v}" for k, v in general.items() if k != "model.norm"]
        config = entry(name).config
        rounds, epochs = config.federation.rounds, config.federation.epochs
        federation = replace(load_config("emnist-47", sets).federation, rounds=rounds, epochs=epochs)
        assert config == replace(load_config("emnist-47", sets), federation=federation)


def test_the_configs_own_method_does_not_count() -> None:
    """Settings of the protocol that it could not play with, and the contest's methods can."""
    assert entry("grouping", "federation.groups=3").config.federation.groups == 3
    alone = entry("fixmatch", "split.users=1", "split.labels_at=users", "federation.participants=1")
    assert alone.config.split.labels_at == "users"
    assert entry("crl-gn", "federation.groups=3").config.federation.groups == 3
    with pytest.raises(ConfigError, match=r"^easgd .*federation.groups"):
        entry("easgd", "federation.groups=3")
    with pytest.raises(ConfigError) as caught:
        entry("grouping", "split.user=3")
    assert (caught.value.key, caught.value.fix) == ("split.user", "split.users=3")


@pytest.mark.parametrize("method", ["anchored", "alternate", "semifl", "cbafed", "server-only", "crl-bn"])
def test_general_settings_are_the_same_for_all(method: str) -> None:
    config = play.entry("quickstart", method, 1, [], (), Path()).config
    own = find(DEFAULT).defaults
    assert config.model.norm == own["model"]["norm"]
    assert config.train.server_views == own["train"]["server_views"]
    assert config.federation.slow_average == own["federation"]["slow_average"]
    said = ["model.norm=none", "federation.slow_average=0"]
    config = play.entry("quickstart", method, 1, said, (), Path()).config
    assert (config.model.norm, config.federation.slow_average) == ("none", 0)


def test_users_train_on_equally_many_images(tmp_path: Path) -> None:
    assert play.passes(entry("alternate").config) == 1
    assert play.passes(entry("semifl").config) == 2
    assert play.passes(entry("server-only").config) == 0
    assert entry("semifl").config.federation == entry("alternate").config.federation
    # 30 epochs of 65,536 images in rounds of 16 batches of 64; where passes are equal, two halve the rounds
    less = play.entry("emnist-47", "semifl", 3, (), (), Path(), equal="passes")
    assert less.config.federation.rounds == 30 * 64 / 2
    found = {one.method: one for one in played(tmp_path, "alternate", "semifl", "server-only", seeds=1)}
    assert found["alternate"].images == found["semifl"].images == 6 * 2 * 8 * 10
    assert found["semifl"].rounds == 6
    assert found["alternate"].passes == found["alternate"].images
    assert found["semifl"].passes <= 2 * found["semifl"].images  # only confident images are trained on
    assert found["semifl"].server_images == found["alternate"].server_images == 6 * 2 * 8
    assert found["server-only"].images == found["server-only"].megabytes == 0
    assert found["alternate"].curve[-1][0] == found["alternate"].images


def test_table_file_and_picture(tmp_path: Path) -> None:
    found = played(tmp_path, "alternate", "server-only")
    assert (found[0].mean or 0) >= (found[1].mean or 0)
    told = table(found)
    assert "± " in told
    apart = [a - b for a, b in zip(found[0].accuracies, found[1].accuracies, strict=True)]
    mean, half = sum(apart) / 2, 12.7062 * abs(apart[0] - apart[1]) / 2  # Student's t of one degree
    assert f"| {mean:.2f} [{mean - half:.2f}, {mean + half:.2f}] " in told
    below = "accuracy on 360 test images; the curves use 70 validation images"
    assert told.splitlines()[4] == below
    file = write(found, tmp_path, {"command": "ssfl contest"})
    whole = json.loads(file.read_text())
    assert [one["method"] for one in whole["standings"]] == [one.method for one in found]
    assert whole["date"][:2] == "20"
    assert whole["versions"]["torch"]
    for one in whole["standings"]:
        assert one["config"]["method"]["name"] == one["method"]
        assert one["config"]["split"]["server_labels"] == 50  # resolved
        assert all(run["versions"] and run["date"] for run in one["runs"])
        assert str(tmp_path) not in json.dumps(one)
    for picture in draw(found, tmp_path):
        assert picture.stat().st_size > 5000
    # the last round's accuracy is the one that counts
    for one in whole["standings"]:
        paths = [tmp_path / f"{one['method']}-seed{seed}" for seed in (1, 2)]
        summaries = [runs.read_summary(path) or {} for path in paths]
        assert one["accuracies"] == [100 * summary["accuracy"] for summary in summaries]


def test_test_images_are_looked_at_in_the_last_round_alone(tmp_path: Path) -> None:
    (one,) = play.play(
        "quickstart", ["grouping"], 1, sets=[*SHORT, "run.eval_every=2"], out=tmp_path, tell=print, quiet=True
    )
    events = list(runs.read_events(tmp_path / "grouping-seed1"))
    told = [event for event in events if event["event"] == "eval"]
    assert [event["round"] for event in told] == [2, 4, 6]
    assert all("validation_accuracy" in event for event in told)
    for key in ("accuracy", "loss", "class_accuracy", "stream_accuracy"):
        assert [key in event for event in told] == [False, False, True]
    assert one.accuracies == [100 * told[-1]["accuracy"]]


def test_choices_are_made_by_validation_images_of_another_seed(tmp_path: Path) -> None:
    (one,) = played(tmp_path, "alternate", seeds=1, choose=("train.lr=0.000001,0.05",))
    assert one.options == ("train.lr=0.05",)
    assert (tmp_path / "alternate-lr0.000001-seed0").is_dir()
    assert (tmp_path / "alternate-lr0.05-seed1").is_dir()
    assert not (tmp_path / "alternate-lr0.000001-seed1").exists()
    assert "validation accuracy " in (tmp_path / "told.txt").read_text()
    assert [try_["options"] for try_ in one.tries] == [("train.lr=0.000001",), ("train.lr=0.05",)]
    assert one.tries[1]["validation_accuracy"] > one.tries[0]["validation_accuracy"]
    chosen, played_then = (runs.read_events(tmp_path / f"alternate-lr0.05-seed{seed}") for seed in (0, 1))
    assert not any("accuracy" in event for event in chosen)  # test images choose nothing, and are not seen
    assert sum("accuracy" in event for event in played_then) == 1


def test_who_never_looks_at_a_threshold_does_not_choose_one(tmp_path: Path) -> None:
    found = played(tmp_path, "freematch", "server-only", seeds=1, choose=("method.threshold=0.5,0.9",))
    assert [one.options for one in found] == [(), ()]
    assert not list(tmp_path.glob("*-seed0"))


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    first = played(tmp_path, "alternate", seeds=1)
    before = (tmp_path / "alternate-seed1" / "summary.json").stat().st_mtime_ns
    assert played(tmp_path, "alternate", seeds=1) == first
    assert (tmp_path / "alternate-seed1" / "summary.json").stat().st_mtime_ns == before
    assert "already finished" in (tmp_path / "told.txt").read_text()


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_of_a_method_that_has_changed_since_is_not_taken_for_this_contests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    played(tmp_path, "alternate", seeds=1)
    if not ended:
        (tmp_path / "alternate-seed1" / "summary.json").unlink()

    @dataclass(frozen=True)
    class Changed(alternate.Alternate):
        threshold: float = 0.5

    monkeypatch.setattr(alternate, "Alternate", Changed)
    with pytest.raises(ConfigError, match="alternate-seed1") as caught:
        played(tmp_path, "alternate", seeds=1)
    assert (caught.value.key, caught.value.value) == ("method.threshold", 0.5)


def test_who_broke_down_is_never_first() -> None:
    def standing(name: str, accuracies: list[float], diverged: int) -> Standing:
        return Standing(name, (), accuracies, diverged, 1, 1.0, 1)

    found = [standing("lucky", [95.0], 2), standing("sound", [94.5, 94.4, 94.6], 0), standing("lost", [], 3)]
    assert [one.method for one in play.ranked(found)] == ["sound", "lucky", "lost"]


def test_a_contest_says_which_methods_hardly_used_the_unlabelled_images(tmp_path: Path) -> None:
    (one, two) = play.play(
        "quickstart", ["anchored", "server-only"], 1, sets=[*SHORT, "federation.rounds=1"], out=tmp_path,
        tell=lambda _: None, quiet=True,
    )  # fmt: skip
    masked = {each.method: each.mask_rate for each in (one, two)}
    assert masked["anchored"] == 0  # the first model is not confident
    assert masked["server-only"] is None
    lines = table([one, two]).splitlines()
    assert [line.partition(":")[0] for line in lines if "pseudo-labels for only" in line] == ["anchored"]


@pytest.mark.filterwarnings("error")
def test_a_run_that_broke_down_is_a_result_and_is_not_run_again(tmp_path: Path) -> None:
    sets = [*SHORT, "train.lr=1000", "train.warmup=0", "federation.period=16", "model.norm=none"]
    for _ in range(2):
        told: list[str] = []
        (one,) = play.play(
            "quickstart", ["alternate"], 1, sets=sets, out=tmp_path, tell=told.append, quiet=True
        )
        assert (one.diverged, one.accuracies) == (1, [])
    assert one.diverged == 1
    assert "diverged" in told[0]
    draw([one], tmp_path)


def test_another_protocol_needs_another_folder(tmp_path: Path) -> None:
    played(tmp_path, "server-only", seeds=1)
    with pytest.raises(ConfigError) as caught:
        play.play("quickstart", ["server-only"], 1, out=tmp_path, tell=print)
    assert (caught.value.key, caught.value.value) == ("federation.period", 16)
    with pytest.raises(ConfigError) as caught:
        play.play(
            "quickstart", ["server-only"], 1, sets=[*SHORT, "model.norm=group"], out=tmp_path, tell=print
        )
    assert (caught.value.key, caught.value.value) == ("model.norm", "group")
    how = ["run.threads=1", "run.eval_every=3", "data.root=elsewhere"]  # how it is carried out is none of it
    sets = [*SHORT, *how]
    (found,) = play.play("quickstart", ["server-only"], 2, sets=sets, out=tmp_path, tell=print, quiet=True)
    assert len(found.curve) == 1  # evaluations that both seeds have
    with pytest.raises(ConfigError) as caught:
        play.play("quickstart", ["server-only"], 1, out=tmp_path / "server-only-seed1", tell=print)
    assert caught.value.key == "--out"
    (tmp_path / "protocol.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        played(tmp_path, "server-only", seeds=1)
    assert (caught.value.key, caught.value.value) == ("--out", str(tmp_path))


def test_a_machine_that_would_choose_another_network_needs_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(tmp_path, "server-only", seeds=1)
    monkeypatch.setattr(networks, "suited", lambda shape, gpu: "cnn")
    with pytest.raises(ConfigError) as caught:
        played(tmp_path, "alternate", seeds=1)
    assert (caught.value.key, caught.value.value) == ("model.name", "cnn")
    sets = [*SHORT, "model.name=small"]
    play.play("quickstart", ["alternate"], 1, sets=sets, out=tmp_path, tell=print, quiet=True)


def test_a_stopped_contest_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise round_loop.Interrupted(tmp_path, 3, "ssfl resume")

    with monkeypatch.context() as patch:
        patch.setattr(train, "begin_or_resume", stop)
        with pytest.raises(round_loop.SweepInterrupted):
            played(tmp_path, "server-only", seeds=1)
    played(tmp_path, "server-only", "server-only", seeds=1)
    folder = tmp_path / "server-only-seed1"
    (folder / "summary.json").unlink()
    with runs.locked(folder), pytest.raises(FolderInUse):
        played(tmp_path, "server-only", seeds=1)


def test_a_seed_whose_split_cannot_be_dealt_is_found_before_anything_runs(tmp_path: Path) -> None:
    sets = [*SHORT, "split.scheme=dirichlet", "split.alpha=0.05", "split.users=40"]
    with pytest.raises(ConfigError, match="seed 6") as caught:
        play.play("quickstart", ["server-only"], 6, sets=sets, out=tmp_path, tell=print, quiet=True)
    assert (caught.value.key, caught.value.value) == ("split.alpha", 0.05)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["played", "saved"])
def test_ctrl_c_in_the_last_round_of_a_run_stops_the_contest_too(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_round, written = Simulation.play, checkpoints.write

    def stopped(self: Simulation, state: State) -> tuple[State, list[dict[str, object]]]:
        if state.round == self.rounds - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return played_round(self, state)

    def cut(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        written(path, checkpoint)
        if checkpoint.state.round == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        if when == "played":
            patch.setattr(Simulation, "play", stopped)
        else:
            patch.setattr(checkpoints, "write", cut)
        with pytest.raises(round_loop.SweepInterrupted) as interrupted:
            played(tmp_path, "server-only", seeds=2)
        assert interrupted.value.round == 6
    assert runs.read_summary(tmp_path / "server-only-seed1") is not None
    assert not (tmp_path / "server-only-seed2").exists()
    (found,) = played(tmp_path, "server-only", seeds=2)
    assert len(found.accuracies) == 2


@pytest.mark.parametrize(
    ("methods", "sets", "choose", "key", "value"),
    [
        (["semifi"], [], [], "method.name", "semifi"),
        (["semifl"], ["method.threshold=0.5"], [], "method.threshold", "0.5"),
        (["semifl"], ["run.test=every"], [], "run.test", "every"),
        (["semifl"], ["run.test = every"], [], "run.test", "every"),
        (["semifl"], ["run.seed=3"], [], "run.seed", "3"),
        (["semifl"], ["run.seed = 3"], [], "run.seed", "3"),
        (["semifl"], [], ["threshold"], "--choose", "threshold"),
        (["semifl"], [], ["method.name=grouping,semifl"], "method.name", "grouping,semifl"),
        (["semifl"], [], ["method.name =grouping,semifl"], "method.name", "grouping,semifl"),
        (["semifl"], [], ["run.seed=7,8"], "run.seed", "7,8"),
        (["semifl"], [], ["federation.rounds=2,8"], "federation.rounds", "2,8"),
        (["semifl"], [], ["method.treshold=0.5,0.9"], "method.treshold", None),
        (["semifl"], [], ["method.server=none,parallel"], "method.server", None),
        (["semifl"], [f"split.seed={2**63 - 1}"], [], "split.seed", 2**63),
        (["semifl"], ["data.validation=0.0001"], [], "data.validation", 0.0001),
        (["fixmatch"], [], [], "split.users", 10),
        (
            ["crl-bn", "data-sharing"],
            ["model.norm_statistics=server"],
            [],
            "model.norm_statistics",
            "server",
        ),
        (["supervised", "server-only"], ["split.server_labels=0"], [], "split.server_labels", 0),
    ],
)
def test_bad_input_is_told_before_anything_runs(
    tmp_path: Path, methods: list[str], sets: list[str], choose: list[str], key: str, value: object
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError) as caught:
        play.play("quickstart", methods, 1, sets=sets, choose=choose, out=out, tell=print)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert not out.exists()


def test_what_a_method_has_that_a_federation_could_not_give_it_stands_below_the_table(tmp_path: Path) -> None:
    found = played(tmp_path, "supervised", "alternate", seeds=1)
    told = table(found)
    assert "| supervised *" in told
    assert told.endswith("\n* supervised: users know the labels of their images")
    file = write(found, tmp_path, {})
    flags = {one["method"]: one["flag"] for one in json.loads(file.read_text())["standings"]}
    assert flags["alternate"] is None
    assert flags["supervised"]


def test_costs_are_means_over_seeds_where_users_drop_out(tmp_path: Path) -> None:
    how = [*SHORT, "federation.dropout=0.5"]
    (found,) = play.play(
        "quickstart", ["alternate"], 2, sets=how, out=tmp_path, tell=lambda line: None, quiet=True
    )
    sent = []
    for seed in (1, 2):
        events = runs.read_events(tmp_path / f"alternate-seed{seed}")
        sent.append(sum(e["bytes_up"] + e["bytes_down"] for e in events if e["event"] == "round") / 1e6)
    assert sent[0] != sent[1]
    assert found.megabytes == pytest.approx(sum(sent) / 2)
    assert found.curve[-1][1] == pytest.approx(sum(sent) / 2)


def test_work_that_cannot_be_made_equal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fl2 .*\b3\b.*\b15\b") as caught:
        play.entry("quickstart", "fl2", 1, ["federation.rounds=4"], (), tmp_path, equal="passes")
    assert (caught.value.key, caught.value.value) == ("federation.rounds", 4)


def test_what_is_said_about_equal_work_also_holds_while_a_method_is_tuned(tmp_path: Path) -> None:
    def entry(rounds: int) -> play.Entry:
        sets = [f"federation.rounds={rounds}"]
        return play.entry("quickstart", "semifl", 1, sets, (), tmp_path, equal="passes", half=True)

    with pytest.raises(ConfigError, match=r"semifl .*\b4\b.*\b20\b.*--no-tune") as caught:
        entry(6)  # two passes in a step, and half of the rounds: 1.5 of them
    assert (caught.value.key, caught.value.value) == ("federation.rounds", 6)
    for rounds in (4, 8, 20, 21, 23):
        assert entry(rounds).config.federation.rounds == round(rounds / 4)


def test_methods_choose_their_learning_rate_and_threshold_in_half_of_the_rounds(tmp_path: Path) -> None:
    told: list[str] = []
    found = play.play(
        "quickstart", ["alternate", "server-only"], 1, sets=SHORT, tune=True, out=tmp_path,
        tell=told.append, quiet=True,
    )  # fmt: skip
    by_name = {one.method: one for one in found}
    tries = by_name["alternate"].tries
    rates = ["train.lr=0.03", "train.lr=0.01", "train.lr=0.09"]
    assert [list(one["options"]) for one in tries[:3]] == [[rate] for rate in rates]
    assert len(tries) == 4  # its own threshold is one of the two that all try
    best = max(tries[:3], key=lambda one: one["validation_accuracy"])
    assert tries[3]["options"] == (*best["options"], "method.threshold=0.8")
    assert len(by_name["server-only"].tries) == 3
    chosen = max(tries, key=lambda one: one["validation_accuracy"])
    assert by_name["alternate"].options == chosen["options"]
    halves = list(tmp_path.glob("*-half-seed0"))
    assert len(halves) == 7
    for path in halves:
        assert runs.read_config(path).federation.rounds == 3
        assert not any("accuracy" in event for event in runs.read_events(path))
    assert runs.read_config(next(tmp_path.glob("alternate-*-seed1"))).federation.rounds == 6


def test_a_run_that_ends_far_below_its_best_has_collapsed(tmp_path: Path) -> None:
    played(tmp_path, "alternate", seeds=1)
    file = tmp_path / "alternate-seed1" / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = next(line for line in reversed(lines) if line["event"] == "eval")
    better = last | {"round": 5, "validation_accuracy": last["validation_accuracy"] + 0.11}
    lines.insert(lines.index(last), better)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = played(tmp_path, "alternate", seeds=1)
    assert one.collapsed == 1


def test_one_setting_is_chosen_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        played(tmp_path, "alternate", seeds=1, choose=("method.threshold=0.5", "method.threshold=0.7,0.8"))
    assert (caught.value.key, caught.value.value) == ("--choose", "method.threshold")


@pytest.mark.parametrize("whole", [15, 30, 31, 640])
def test_a_head_start_comes_on_top_of_what_users_do(tmp_path: Path, whole: int) -> None:
    for name in ("anchored", "semifl", "fl2", "rscfed", "cbafed"):
        config = play.entry("quickstart", name, 1, [f"federation.rounds={whole}"], (), tmp_path).config
        assert config.federation.rounds is not None
        head = head_start(config.federation.head_start, config.federation.rounds)
        theirs = config.federation.rounds - head
        assert theirs == whole
        assert (head > 0) == (name in ("fl2", "rscfed", "cbafed")) or theirs < 9
