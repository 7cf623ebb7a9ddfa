"""The contest: one protocol for all methods, and what it tells."""

import json
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import Call
from ssfl.config.loading import load_config
from ssfl.contest import play, protocol
from ssfl.contest.protocol import common
from ssfl.contest.standings import Differences, Standing, behind, differences, draw, gap, write
from ssfl.contest.texts import choice, conclusion, table
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
    assert gap(found[1], found[0]) == pytest.approx([mean, mean - half, mean + half])
    assert f"| {behind(found[1], found[0])} " in told
    assert told.splitlines()[4:5] == conclusion(found)
    assert re.findall(r"\d+", told.splitlines()[5]) == ["360", "70"]  # test and validation images
    assert "correct" not in told  # a mean count is that of no run
    file = write(found, tmp_path, {"command": "ssfl contest"})
    whole = json.loads(file.read_text())
    assert [one["method"] for one in whole["standings"]] == [one.method for one in found]
    assert whole["date"][:2] == "20"
    assert whole["versions"]["torch"]
    for one in whole["standings"]:
        assert one["config"]["method"]["name"] == one["method"]
        assert one["config"]["split"]["server_labels"] == 50  # resolved
        assert all(run["versions"] and run["date"] and run["classes"] == 10 for run in one["runs"])
        assert str(tmp_path) not in json.dumps(one)
        assert [len(curve) for curve in one["seed_validation_curves"]] == 2 * [len(one["validation_curve"])]
    for one in found:
        last = [run["last_validation"] for run in one.runs]
        assert [accuracies[-1] for accuracies in one.seed_curves] == last
        assert one.curve[-1][2] == pytest.approx(sum(last) / 2)
    for picture in draw(found, tmp_path):
        assert picture.stat().st_size > 5000
    drawn = (tmp_path / "contest.svg").read_text()
    assert "<!-- last validation accuracy, % -->" in drawn
    assert f"<!-- {found[0].method}: {found[0].curve[-1][2]:.1f} -->" in drawn
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


def standing(name: str, accuracies: list[float], diverged: int = 0, best: float = 90.0) -> Standing:
    """Results with these accuracies in percent. The seeds are 1, 2, ..., and the last ones diverged."""
    ran = [
        {
            "seed": seed, "accuracy": accuracy / 100, "test_images": 360, "validation_images": 70,
            "classes": 10, "best_validation": best, "commit": "a", "mask_rate": 0.5,
        }
        for seed, accuracy in enumerate(accuracies, 1)
    ]  # fmt: skip
    return Standing(name, (), accuracies, diverged, 1, 1.0, 1, runs=ran)


def test_who_broke_down_is_never_first() -> None:
    found = [standing("lucky", [95.0], 2), standing("sound", [94.5, 94.4, 94.6]), standing("lost", [], 3)]
    found = play.ranked(found)
    assert [one.method for one in found] == ["sound", "lucky", "lost"]
    told = table(found).splitlines()
    assert told[-2:] == [
        "lucky: 2 of 3 runs diverged. Its mean is only over the run that did not diverge, so methods without "
        "diverged runs come before it, whatever its mean is.",
        "lost: every run diverged, so it has no accuracy and comes last.",
    ]
    assert all(line.endswith(".") for line in told[5:])


def test_the_interval_of_several_seeds_is_over_the_seeds_and_counts_no_images() -> None:
    """Student's t of two degrees of freedom is 4.303."""
    one = standing("anchored", [95.3, 96.7, 89.7])
    half = 4.30265 * one.deviation / 3**0.5 if one.deviation else 0
    assert one.interval == pytest.approx((93.9 - half, 100))  # no accuracy is above 100 %
    assert (one.interval_kind, one.correct) == ("student", None)
    told = table([one])
    assert f"| {93.9 - half:.1f} to 100.0 " in told
    assert "of 360 " not in told
    assert standing("a", [95.0], 2).interval is None  # one seed is left
    assert standing("a", [95.0, 95.0, 95.0]).interval is None  # it would have no width


def test_with_one_seed_the_interval_is_over_the_test_images(tmp_path: Path) -> None:
    one = standing("anchored", [95.0])
    assert one.interval == pytest.approx((92.24, 96.81), abs=0.01)
    assert (one.interval_kind, one.correct) == ("wilson", 342)
    assert "| 342 of 360 | 92.2 to 96.8 " in table([one])
    (told,) = json.loads(write([one], tmp_path, {}).read_text())["standings"]
    assert told["interval_kind"] == "wilson"
    assert told["interval"] == pytest.approx(one.interval)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([[80, 81, 82], [70, 71, 73]], Differences(worse=["b", "c"])),
        ([[89, 93, 91], [99, 99, 99]], Differences(better=["c"], undecided=["b"])),
        ([[89, 91, 93]], Differences(undecided=["b"])),  # always one point: no interval
        ([[85, 91], [80], []], Differences(undecided=["b"], one_seed=["c"])),  # the rest diverged
        ([], Differences()),
    ],
)
def test_intervals_say_which_methods_differ(others: list[list[float]], expected: Differences) -> None:
    found = [standing(name, each, 3 - len(each)) for name, each in zip("bcd", others, strict=False)]
    first = standing("first", [90, 92, 94])
    assert differences([first, *found], first) == expected


def test_methods_without_a_common_seed_are_not_compared() -> None:
    one, two = standing("one", [90, 92], 1), standing("two", [80], 2)
    two.runs[0]["seed"] = 3
    assert differences([one, two], one) == Differences(no_seed=["two"])
    assert gap(two, one) is None
    assert differences([standing("none", [], 3), one], standing("none", [], 3)).undecided == []


def test_sentences_say_which_methods_differ_from_the_first() -> None:
    first, b, c = standing("first", [90, 92, 94]), standing("b", [89, 93, 91]), standing("c", [80, 81, 82])
    lost, last = standing("lost", [80], 2), standing("last", [], 3)
    found = [first, b, c, lost, last]
    assert conclusion(found) == [
        "With these 3 seeds, first is better than c.",
        "With these 3 seeds, b cannot be distinguished from first (the first).",
        "lost has only one seed in common with first (the first), and one seed gives no interval.",
    ]
    assert set(conclusion(found)) <= set(table(found).splitlines())
    assert conclusion([first, c, replace(c, method="d")]) == [
        "With these 3 seeds, first is better than all others."
    ]
    lost.runs[0]["seed"] = 4
    assert conclusion([first, lost]) == [
        "lost has no seed in common with first (the first), so there is no comparison."
    ]
    assert conclusion([last, first]) == conclusion([first, last]) == []


def test_one_seed_distinguishes_no_methods() -> None:
    found = [standing("first", [90]), standing("b", [80]), standing("c", [70])]
    assert differences(found, found[0]) == Differences(one_seed=["b", "c"])
    assert conclusion(found) == [
        "With one seed, no method can be distinguished from first (the first): an interval needs at least "
        "two seeds."
    ]


def test_methods_can_be_compared_with_another_than_the_first(tmp_path: Path) -> None:
    found = [standing("first", [90, 92, 94]), standing("b", [89, 93, 91]), standing("c", [80, 81, 82])]
    assert differences(found, found[2]) == Differences(better=["first", "b"])
    (sentence,) = conclusion(found, "c")
    assert "(the first)" not in sentence
    told = table(found, "c").splitlines()
    assert "| behind c (95 % interval) " in told[0]
    assert "| −11.00 (−13.48 to −8.52) " in told[2]
    assert sentence in told
    whole = json.loads(write(found, tmp_path, {}, "c").read_text())
    assert whole["against"] == "c"
    assert [one["against_minus_this"] for one in whole["standings"]] == [
        gap(found[0], found[2]), gap(found[1], found[2]), None
    ]  # fmt: skip
    assert whole["standings"][0]["first_minus_this"] is None
    assert whole["standings"][2]["first_minus_this"][0] == pytest.approx(11)


def test_a_setting_of_one_method_is_chosen_and_not_set(ssfl: Call) -> None:
    code, _, err = ssfl("contest", "--methods", "anchored,semifl", "--set", "method.momentum=0.2")
    assert code == 2
    assert "--choose method.momentum=0.2" in err
    assert err.count("\n") == 1


def test_a_method_to_compare_with_must_take_part(ssfl: Call) -> None:
    code, _, err = ssfl("contest", "--methods", "anchored,semifl", "--against", "server-only")
    assert code == 2
    assert "--against server-only: " in err
    assert "anchored, semifl" in err
    assert err.count("\n") == 1


def test_runs_that_stayed_near_guessing_are_named() -> None:
    found = [standing("sound", [95.0] * 3), standing("lost", [10.0] * 3, best=12.0)]
    assert [line for line in table(found).splitlines() if "guessing" in line] == [
        "lost: 3 of 3 runs stayed near guessing. Their best validation accuracy is below 20 %; "
        "guessing has 10 %."
    ]


def test_runs_that_collapsed_are_counted_and_say_if_their_settings_come_from_shorter_runs() -> None:
    sound, lost = standing("sound", [95.0] * 3), replace(standing("lost", [40.0] * 3), collapsed=2)
    for tuned in (False, True):
        (line,) = [
            line for line in table([sound, replace(lost, tuned=tuned)]).splitlines() if "collapsed:" in line
        ]
        assert line.startswith("lost: 2 of 3 runs collapsed")
        assert ("half the length" in line) == tuned


def test_given_users_are_one_split_and_a_warning_is_told_once(ssfl: Call) -> None:
    rng = np.random.default_rng(3)
    for name, count in [("a", 20), ("b", 20), ("unlabelled/x", 9), ("unlabelled/y", 9)]:
        (Path("mine") / name).mkdir(parents=True)
        for number in range(count):
            bright = 200 * (name == "a") + rng.integers(0, 50, (8, 8), np.uint8)
            Image.fromarray(bright.astype(np.uint8)).save(Path("mine", name, f"{number}.png"))
    sets = [word for one in [*SHORT, "run.threads=1"] for word in ("--set", one)]
    contest = ["contest", "own", "--set", "data.path=mine", "--no-tune", "--quiet", *sets]
    names = ["--methods", "alternate,server-only", "--set", "data.validation=0.2"]
    code, out, err = ssfl(*contest, *names, "--seeds", "2")
    assert code == 0, err
    assert "All seeds have the same users' images, so the ± and the intervals leave out " in out
    assert err.count("test images are few") == 1
    assert "--folds" not in err
    assert "All seeds" not in ssfl(*contest, *names, "--seeds", "1")[1]


@pytest.mark.parametrize("words", [["--folds", "5"], ["--set", "run.folds=5"]])
def test_a_contest_refuses_folds_and_says_why(ssfl: Call, words: list[str]) -> None:
    code, out, err = ssfl("contest", *words)
    assert (code, out) == (2, "")
    assert "a contest compares methods on held-out test images, so it does not cross-validate" in err
    assert len(err.splitlines()) == 1
    assert "=VALUE" not in err


def test_folds_of_a_config_are_refused_and_no_folds_are_not() -> None:
    with pytest.raises(ConfigError) as caught:
        entry("alternate", "run.folds=5")
    assert (caught.value.key, caught.value.value, caught.value.fix) == ("run.folds", 5, "run.folds=0")
    assert entry("alternate", "run.folds=0").config.run.folds == 0


def tried(*scores: tuple[float, str], default: str = "") -> str:
    """The line about a choice among settings with these scores, on 100 images."""
    return choice("m", [(score, tuple(words.split())) for score, words in scores], 100, default)


def test_a_line_names_every_value_with_its_score() -> None:
    assert tried((0.9, "train.lr=0.03"), (1.0, "train.lr=0.01"), (0.99, "train.lr=0.09")) == (
        "m: chose train.lr=0.01 (validation accuracy 100.0 % on 100 images; 0.03: 90.0 %, 0.09: 99.0 %); "
        "0.01 is the smallest value that was tried; 0.09 is at most one image behind"
    )
    between = tried((0.95, "train.lr=0.03"), (0.9, "train.lr=0.01"), (-1, "train.lr=0.09"))
    assert "0.09: diverged" in between
    assert "value that was tried" not in between
    pair = tried(
        (0.9, "method.threshold=0.8"), (0.85, "method.threshold=0.95"), default="method.threshold=0.8"
    )
    assert "chose method.threshold=0.8, its default (" in pair
    assert ";" not in pair.partition("95: ")[2]  # of two values, none is named the smallest
    both = tried((0.5, "train.lr=1 method.threshold=0.8"), (0.9, "train.lr=1 method.threshold=0.9"))
    assert "train.lr=1 method.threshold=0.8: 50.0 %" in both
    assert tried((-1, "train.lr=3"), (-1, "train.lr=1")).endswith("; it uses train.lr=3")


def test_a_contest_says_which_methods_hardly_used_the_unlabelled_images(tmp_path: Path) -> None:
    (one, two) = play.play(
        "quickstart", ["anchored", "server-only"], 1, sets=[*SHORT, "federation.rounds=1"], out=tmp_path,
        tell=lambda _: None, quiet=True,
    )  # fmt: skip
    masked = {each.method: each.mask_rate for each in (one, two)}
    assert masked["anchored"] == 0  # the first model is not confident
    assert masked["server-only"] is None
    lines = table([one, two]).splitlines()
    assert [line.partition(",")[0] for line in lines if "unlabelled images" in line] == [
        "anchored: its users made no pseudo-labels"
    ]
    one.runs[0]["mask_rate"] = 0.00012
    assert "anchored: its users made pseudo-labels for only 0.012 % of their images" in table([one])


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
    assert told.endswith("\n* supervised: users know the labels of their images.")
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
    sets = [*SHORT, "data.validation=0.4"]
    found = play.play(
        "quickstart", ["alternate", "server-only"], 1, sets=sets, tune=True, out=tmp_path,
        tell=told.append, quiet=True,
    )  # fmt: skip
    by_name = {one.method: one for one in found}
    tries = by_name["alternate"].tries
    rates = ["train.lr=0.03", "train.lr=0.01", "train.lr=0.09"]
    assert [list(one["options"]) for one in tries[:3]] == [[rate] for rate in rates]
    alone = [one for one in tries if len(one["options"]) == 1]
    assert len(tries) == len(alone) + 1  # its own threshold is one of the two that all try
    chose = [line for line in told if " chose " in line]
    assert [line.partition("=")[0] for line in chose] == [
        "alternate: chose train.lr", "alternate: chose method.threshold", "server-only: chose train.lr"
    ]  # fmt: skip

    def summary(run: str) -> dict[str, Any]:
        found = runs.read_summary(tmp_path / run)
        assert found is not None
        return found

    held = summary("server-only-lr0.03-half-seed0")["validation_count"]
    assert 500 <= held < 1000  # so each value has two runs
    assert all(f" % on {2 * held:,} images; " in line for line in chose)
    best = max(alone, key=lambda one: one["validation_accuracy"])
    assert tries[-1]["options"] == (*best["options"], "method.threshold=0.8")
    for few in (alone, by_name["server-only"].tries):
        values = [float(one["options"][0].partition("=")[2]) for one in few]
        best = max(few, key=lambda one: one["validation_accuracy"])
        value = float(best["options"][0].partition("=")[2])
        assert min(values) < value < max(values) or len(few) == 5
    chosen = max(tries, key=lambda one: one["validation_accuracy"])
    assert by_name["alternate"].options == chosen["options"]
    halves = list(tmp_path.glob("*-half-seed*"))
    count = len(tries) + len(by_name["server-only"].tries)
    assert sorted(path.name.rpartition("seed")[2] for path in halves) == ["0"] * count + ["1000000"] * count
    for path in halves:
        assert runs.read_config(path).federation.rounds == 3
        assert not any("accuracy" in event for event in runs.read_events(path))
    for one in by_name["server-only"].tries:
        rate = one["options"][0].partition(".")[2].replace("=", "")
        ends = [
            summary(f"server-only-{rate}-half-seed{seed}")["validation_accuracy"] for seed in (0, 1_000_000)
        ]
        assert one["validation_accuracy"] == sum(ends) / 2
        assert one["images"] == 2 * held
    assert runs.read_config(next(tmp_path.glob("alternate-*-seed1"))).federation.rounds == 6


@pytest.mark.parametrize(("images", "splits"), [(1, 5), (143, 5), (250, 4), (399, 3), (999, 2), (1000, 1)])
def test_few_validation_images_are_those_of_several_splits(images: int, splits: int) -> None:
    seeds = protocol.choosing_seeds(images)
    assert len(seeds) == len(set(seeds)) == splits
    assert not set(seeds) & set(range(1, 1000))  # the seeds of the contest itself


def test_the_next_learning_rate_lies_beyond_the_best_one_at_an_end() -> None:
    def order(accuracy: dict[int, float | None]) -> list[int]:
        scores: dict[int, float | None] = {}
        while (power := protocol.next_power(scores)) is not None:
            scores[power] = accuracy.get(power, 0.1)
        return list(scores)

    assert order({0: 0.9}) == [0, -1, 1]
    assert order({1: 0.9}) == [0, -1, 1, 2]
    assert order({-1: 0.8, -2: 0.9, -3: 0.95}) == [0, -1, 1, -2, -3]  # not more than five
    assert order({1: None, 0: 0.9}) == [0, -1, 1]  # what is refused is not tried again
    assert order({0: -1, -1: -1, 1: -1}) == [0, -1, 1]  # all of them diverged
    assert order({1: -1, 0: 0.9}) == [0, -1, 1]


def test_a_method_whose_best_learning_rate_is_at_the_end_tries_the_next(tmp_path: Path) -> None:
    few = [*SHORT, "data.validation=0.5", "train.lr=0.001"]  # too small, so the largest is best
    (found,) = play.play(
        "quickstart", ["server-only"], 1, sets=few, tune=True, out=tmp_path, tell=lambda line: None,
        quiet=True,
    )  # fmt: skip
    tried = [one["options"][0] for one in found.tries]
    assert tried[:3] == ["train.lr=0.001", "train.lr=0.00033", "train.lr=0.003"]
    scores = [one["validation_accuracy"] for one in found.tries]
    assert scores[2] == max(scores[:3]) > scores[0]
    assert tried[3] == "train.lr=0.009"
    assert found.options == (tried[scores.index(max(scores))],)


def test_a_learning_rate_that_a_method_refuses_is_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    sets = [*SHORT, "data.validation=0.5", "train.lr=0.05"]
    (found,) = play.play(
        "quickstart", ["fedmatch"], 1, sets=sets, tune=True, out=tmp_path,
        tell=told.append, quiet=True,
    )  # fmt: skip
    rates = {one["options"][0] for one in found.tries}
    assert {"train.lr=0.05", "train.lr=0.017"} <= rates
    assert "train.lr=0.15" not in rates
    (line,) = [line for line in told if "left out" in line]
    assert "train.lr=0.15" in line
    assert "fedmatch" in line


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
