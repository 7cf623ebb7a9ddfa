"""`ssfl report`: what it says of real runs, whatever their folders hold; test_pages.py has the browser."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import ssfl
from ssfl.config.settings import Config
from ssfl.contest import standings
from ssfl.core.statistics import accuracy_interval
from ssfl.errors import RunError, SsflError
from ssfl.methods.grouping import Grouping
from ssfl.report import collapse, conclusion, costs, gather, page, several
from ssfl.runs import folder as runs
from ssfl.runs.round_loop import Interrupted
from ssfl.runs.text import interval

Block = dict[str, Any]
CLOCKS = ("phases", "memory", "seconds")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs: two seeds of grouping with diversity, and the server alone."""
    home = tmp_path_factory.mktemp("runs")
    short = [
        "federation.rounds=4",
        "federation.period=3",
        "run.threads=1",
        "run.device=cpu",
        "run.eval_every=1",
    ]
    grouping = ["method.name=grouping", "method.threshold=0.1"]  # so that users learn from the start
    for name, more in {
        "grouping-1": [*grouping, "run.diversity_every=1"],
        "grouping-2": [*grouping, "run.diversity_every=1", "run.seed=2"],
        "alone": ["method.name=server-only"],
    }.items():
        ssfl.run(ssfl.load_config("quickstart", [*short, *more]), home / name)
    return home


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssfl", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def blocks(told: dict[str, Any], kind: str = "") -> list[Block]:
    everything = [block for section in told["sections"] for block in section["blocks"]]
    return [block for block in everything if not kind or block["kind"] == kind]


def figure(told: dict[str, Any], name: str) -> Block:
    return next(block for block in blocks(told) if block.get("figure") == name)


def words(told: dict[str, Any]) -> str:
    return " ".join(f"{block.get('head', '')} {block['text']}" for block in blocks(told) if "text" in block)


def test_one_file_that_needs_no_other(folder: Path, tmp_path: Path) -> None:
    shown = report(folder / "grouping-1", "--out", tmp_path / "a.html", "--figures", tmp_path / "figures")
    assert shown.returncode == 0, shown.stderr
    whole = (tmp_path / "a.html").read_text()
    assert len(whole) < 300_000
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", whole))
    assert addresses == {"http://www.w3.org/2000/svg"}  # SVG's name, which nobody fetches
    assert not re.search(r"(src|href)=\"(?!data:|#)", whole)
    told = page.contents([folder / "grouping-1"])
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', whole, re.DOTALL)
    assert embedded
    assert json.loads(embedded[1]) == json.loads(json.dumps(told))
    names = {block["figure"] for block in blocks(told) if "figure" in block}
    assert {
        "accuracy",
        "diversity",
        "pseudo-labels",
        "who-has-what",
        "groups",
        "confusion",
        "views",
        "time",
    } <= names
    for name in names:
        assert (tmp_path / "figures" / f"{name}.svg").read_text().startswith("<?xml")
        with Image.open(tmp_path / "figures" / f"{name}.png") as picture:
            assert picture.size[0] > 300
    assert str(tmp_path / "a.html") in shown.stdout


def test_the_confusion_matrix_is_that_of_the_runs_own_evaluation(folder: Path) -> None:
    told = page.contents([folder / "grouping-1"])
    split = json.loads((folder / "grouping-1" / "split.json").read_text())
    evaluation = [e for e in runs.read_events(folder / "grouping-1") if e["event"] == "eval"][-1]
    shares = figure(told, "confusion")["values"]
    assert len(shares) == len(split["classes"])
    assert [row[k] for k, row in enumerate(shares)] == pytest.approx(evaluation["class_accuracy"], abs=0.03)
    assert figure(told, "who-has-what")["values"] == [split["server"], *split["user_classes"]]
    assert "0.4183" in words(told)  # the measured R
    mixes, classes = np.array(split["user_classes"]), np.array(evaluation["class_accuracy"])
    expected = (mixes * classes).sum(1) / mixes.sum(1)
    assert [one["value"] for one in figure(told, "accuracy-by-user")["items"]] == pytest.approx(expected)
    assert f"is {100 * expected.min():.1f} % to {100 * expected.max():.1f} %" in words(told)


def test_groups_and_costs_are_those_of_the_events(folder: Path) -> None:
    told = page.contents([folder / "grouping-1"])
    rounds = [e for e in runs.read_events(folder / "grouping-1") if e["event"] == "round"]
    shown = figure(told, "groups")["values"]
    for at, event in enumerate(rounds):
        for place, group in enumerate(event["groups"], 1):
            assert {user for user, row in enumerate(shown) if row[at] == place} == set(group)
    run = gather.read(folder / "grouping-1", "g")
    spent = costs.phases(run)
    assert {"users", "server", "diversity", "other", "evaluation"} <= set(spent)
    everything = sum(e.get("seconds", 0) for e in run.events)
    assert sum(spent.values()) - spent.get("checkpoint", 0) == pytest.approx(everything)
    assert costs.totals(run)["bytes_up"] == sum(e["bytes_up"] for e in rounds)


def test_several_runs_are_laid_over_each_other(folder: Path) -> None:
    told = page.contents([folder / "grouping-1", folder / "alone", folder / "grouping-2"])
    series = figure(told, "accuracy")["series"]
    assert [one["name"] for one in series] == ["grouping, 2 seeds", "alone"]
    ends = [gather.read(folder / name, name).accuracy[-1][1] for name in ("grouping-1", "grouping-2")]
    at, low, high = series[0]["band"][-1]
    assert series[0]["points"][-1] == [at, pytest.approx(sum(ends) / 2, abs=1e-4)]
    assert (high - low) / 2 == pytest.approx(stdev(ends), abs=1e-4)
    table = next(s for s in told["sections"] if s["id"] == "differences")["blocks"][1]
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert rows["run.seed"] == ["1", "1", "2"]
    assert rows["method.name"] == ["grouping", "server-only", "grouping"]
    assert "split.users" not in rows
    names = [block["figure"] for block in blocks(told) if "figure" in block]
    assert len(names) == len(set(names))


def copy(
    run: Path, to: Path, seed: int, correct: int, method: str = "", split: dict[str, Any] | None = None
) -> Path:
    """A copy of a run that has another seed and another accuracy, and possibly another method and split."""
    shutil.copytree(run, to)
    config = re.sub(
        r"(?m)^seed = [0-9]+$(?![\s\S]*^seed = )", f"seed = {seed}", (to / "config.toml").read_text()
    )
    if method:
        config = re.sub(r"(?m)(\[method\]\n)[\s\S]*?\n\n", rf'\1name = "{method}"\n\n', config)
    (to / "config.toml").write_text(config)
    events = list(runs.read_events(to))
    last = [event for event in events if event["event"] == "eval"][-1]
    last |= {"accuracy": correct / 360, "correct": correct}
    (to / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = json.loads((to / "summary.json").read_text()) | {"accuracy": correct / 360, "correct": correct}
    (to / "summary.json").write_text(json.dumps(summary))
    if split:
        known = json.loads((to / "split.json").read_text())
        (to / "split.json").write_text(json.dumps(known | split))
    return to


def verdict(paths: list[Path]) -> str:
    first = page.contents(paths)["sections"][0]
    assert first["id"] == "verdict"
    return " ".join(
        block["text"] for block in first["blocks"] if block["kind"] == "say" and not block["head"]
    )


def test_the_verdict_compares_all_seeds_as_a_contest_does(folder: Path, tmp_path: Path) -> None:
    scores = {"one": (300, 340, 345), "two": (310, 320, 318)}
    paths = []
    for method, name in (("fedprox", "one"), ("rscfed", "two")):
        for seed, correct in enumerate(scores[name], 1):
            where = tmp_path / f"{name}-lr0.09-seed{seed}"
            paths.append(copy(folder / "grouping-1", where, seed, correct, method))
    played = [
        standings.Standing(
            name, (), [100 * c / 360 for c in ones], 0, 0, 0.0, 4,
            runs=[{"seed": s, "accuracy": c / 360, "test_images": 360, "validation_images": 0, "commit": ""}
                  for s, c in enumerate(ones, 1)],
        )
        for name, ones in scores.items()
    ]  # fmt: skip
    mean, between = standings.behind(played[1], played[0]).rstrip(")").split(" (")
    told = verdict(paths)
    assert told.startswith("The best two do not clearly differ: over 3 common seeds, ")
    assert f"of one-lr0.09 is {mean} percentage points higher than that of two-lr0.09" in told
    assert f"over the seeds: {between} percentage points)" in told
    table = blocks(page.contents(paths), "table")[0]
    assert [row[0] for row in table["rows"]] == ["one-lr0.09, 3 seeds", "two-lr0.09, 3 seeds"]
    better = [copy(paths[5], tmp_path / f"three-seed{k}", k, 200 + k, "semifl") for k in (1, 2, 3)]
    clear = verdict([*better, *paths[3:]])
    assert clear.startswith("two-lr0.09 is better than three: over 3 common seeds")
    assert "same split" in clear  # split.seed is that of the run that was copied
    four = [
        copy(paths[5], tmp_path / f"{name}-seed1", 1, 100, name) for name in ("crl-bn", "flexmatch", "fl2")
    ]
    assert verdict([*better, *four, *paths[3:]]) == clear  # also if the best one is listed late


def best_two(*paths: Path) -> conclusion.BestTwo:
    found = conclusion.best_two(several.families([gather.read(path, path.name) for path in paths]))
    assert found
    return found


def test_equal_differences_decide_nothing(folder: Path, tmp_path: Path) -> None:
    """With both seeds, one experiment has one image more than the other, so there is no interval."""
    paths = [
        copy(folder / "alone", tmp_path / f"{name}-seed{seed}", seed, correct + (name == "one"), method)
        for name, method in (("one", "fedprox"), ("two", "rscfed"))
        for seed, correct in ((1, 300), (2, 320))
    ]
    found = best_two(*paths)
    assert found.difference
    assert found.difference.mean == pytest.approx(100 / 360)
    assert found.difference.interval is None
    assert (found.first.label, len(found.seeds), found.is_decided) == ("one", 2, False)
    assert verdict(paths) == (
        "The best two do not clearly differ: over 2 common seeds, the mean accuracy of one is 0.28 "
        "percentage points higher than that of two. All seeds have the same difference, so there is "
        "no interval. All these seeds have the same split, so other splits may give another result."
    )


def test_the_verdict_says_if_it_compares_one_seed(folder: Path, tmp_path: Path) -> None:
    one, two, alone = (folder / name for name in ("grouping-1", "grouping-2", "alone"))
    second = copy(alone, tmp_path / "alone-2", 2, 300)
    for paths, seeds in (
        ([one, alone], 1),
        ([one, two, alone], 1),
        ([two, alone], 0),
        ([two, alone, second], 1),
    ):
        assert len(best_two(*paths).seeds) == seeds
    names = {run.name for run in best_two(two, alone, second).pair}
    assert names == {"grouping-2", "alone-2"}
    assert "This compares one seed (run.seed = 1). Another seed may give another result." in verdict(
        [one, alone]
    )
    common = verdict([one, two, alone])
    assert "alone and grouping have only one seed in common, and this compares only that seed" in common
    assert re.search(r"alone has \d+ correct, grouping-1 \d+", common)
    other = verdict([two, alone])
    assert "alone and grouping-2 have no seed in common, so this compares one run of each." in other


def diverge(path: Path) -> None:
    """Turns a finished run into one whose training diverged."""
    failure = {"kind": "DivergedError", "error": "training diverged in round 1"}
    (path / runs.FAILURE).write_text(json.dumps(failure))
    (path / "summary.json").unlink()


def test_notes_are_given_without_predictions(folder: Path, tmp_path: Path) -> None:
    """The images may be passed from Python, moved or changed; then no run can be compared image by image."""
    paths = [copy(folder / "alone", tmp_path / "one", 1, 324, "fedprox")]
    paths += [copy(folder / "alone", tmp_path / f"two-seed{k}", k, 288, "rscfed") for k in (1, 2)]
    diverge(tmp_path / "two-seed2")
    (paths[1] / "model.safetensors").unlink()
    elsewhere = {"fingerprint": "other"}
    paths.append(copy(folder / "alone", tmp_path / "strange", 1, 300, "semifl", elsewhere))
    told = verdict(paths)
    assert (
        "The accuracy of one is 90.0 %, and that of two-seed1 80.0 %. The difference has no interval" in told
    )
    assert "two: training diverged in 1 of 2 runs, which its mean leaves out." in told
    assert "Not compared, because no run is finished on the same images: strange." in told
    diverged = verdict(paths[1:3])  # a single experiment
    assert diverged == "two: training diverged in 1 of 2 runs, which its mean leaves out."


def test_an_experiment_with_a_diverged_run_is_ranked_after_sound_ones_only(
    folder: Path, tmp_path: Path
) -> None:
    paths = [
        copy(folder / "alone", tmp_path / f"{name}-seed{seed}", seed, correct + seed * seed, method)
        for name, method, correct in (
            ("one", "fedprox", 320),
            ("two", "rscfed", 310),
            ("three", "semifl", 300),
        )
        for seed in (1, 2, 3)
    ]
    for path in (paths[2], paths[5]):
        diverge(path)
    assert {best_two(*paths).first.label, best_two(*paths).second.label} == {"three", "one"}
    assert verdict(paths).count("It is ranked after the experiments without a diverged run.") == 2
    assert "ranked" not in verdict(paths[:6])


def test_the_interval_of_several_seeds_is_over_the_seeds(folder: Path, tmp_path: Path) -> None:
    def rows(*paths: Path) -> dict[str, list[str]]:
        table = blocks(page.contents(list(paths)), "table")[0]
        return {row[0]: [cell["text"] for cell in row[1:]] for row in table["rows"]}

    corrects = (340, 320, 310)
    paths = [
        copy(folder / "alone", tmp_path / f"two-seed{k}", k, n, "rscfed") for k, n in enumerate(corrects, 1)
    ]
    low, high = accuracy_interval([100 * correct / 360 for correct in corrects]) or (0, 0)
    found = rows(*paths, folder / "alone")
    assert found["two, 3 seeds"][2:4] == ["–", f"{low:.1f} to {high:.1f} %"]
    (family,) = several.families([gather.read(folder / "alone", "alone")])
    score = family.counted[0].score
    assert score
    assert found["alone"][2:4] == [f"{score.correct} of 360", interval(score.correct, 360)]
    heads = blocks(page.contents(paths), "table")[0]["head"]
    assert "correct" not in [head if isinstance(head, str) else head["text"] for head in heads]


def test_what_is_of_the_first_seed_only_says_so(folder: Path, tmp_path: Path) -> None:
    paths = [folder / "grouping-1"]
    split = {"measured_skew": 0.5, "size_quartiles": [90, 100, 110, 120, 150]}
    paths.append(copy(folder / "grouping-1", tmp_path / "grouping-2", 2, 300, split=split))
    for told in (page.contents(paths), page.contents([*paths, folder / "alone"])):
        owners = next(section for section in told["sections"] if section["id"] == "owners")["blocks"]
        said = next(block["text"] for block in owners if block["kind"] == "text")
        assert said.startswith(
            "Numbers and charts below are only of grouping-1 (run.seed = 1), the first of 2 seeds."
        )
        assert "the users have 90 to 150 images each, the measured R is 0.4183 to 0.5000, and" in said
        mistakes = next(section for section in told["sections"] if section["id"] == "mistakes")["blocks"]
        assert mistakes[0]["text"] == "grouping-1 (run.seed = 1), the first of 2 seeds"
    alone = words(page.contents(paths[:1]))
    assert "Numbers and charts below" not in alone


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["anchored-lr0.09-seed1", "anchored-lr0.09-seed2"], "anchored-lr0.09"),
        (["anchored-lr0.09-1", "anchored-lr0.09-2"], "anchored-lr0.09"),
        (["anchored_seed_10", "anchored_seed_11"], "anchored"),
        (["anchored/seed1", "anchored/seed2", "anchored/seed10"], "anchored"),
        (["run1", "run10"], "run"),
        (["seed1", "seed2"], "grouping"),  # the method
        (["seed1-a", "b"], "grouping"),
    ],
)
def test_an_experiment_is_named_by_what_its_runs_have_in_common(
    folder: Path, names: list[str], label: str
) -> None:
    (family,) = several.families([gather.read(folder / "grouping-1", name) for name in names])
    assert (family.label, family.name) == (label, f"{label}, {len(names)} runs")


def test_training_views_name_the_threshold_of_each_method(
    folder: Path, quick: Callable[..., Config], tmp_path: Path
) -> None:
    def views(*paths: Path) -> tuple[str, Block]:
        section = next(s for s in page.contents(list(paths))["sections"] if s["id"] == "views")
        return section["blocks"][0]["text"], section["blocks"][1]

    for name in ("semifl", "flexmatch", "freematch"):
        ssfl.run(quick(f"method.name={name}", "federation.rounds=1", "federation.period=2"), tmp_path / name)
    told, shown = views(folder / "grouping-1")
    assert "is the pseudo-label of a strong view if its confidence is at least 0.1." in told
    assert all(item["counts"] for item in shown["items"])
    told, _ = views(tmp_path / "semifl")
    assert "if its confidence is at least 0.95." in told
    told, _ = views(folder / "grouping-1", tmp_path / "semifl")
    assert "The images and predictions are those of grouping-1. There, the prediction" in told
    assert told.endswith("at least 0.1. With semifl, it must be at least 0.95.")
    for name in ("freematch", "alone"):  # without a threshold
        first = tmp_path / name if name == "freematch" else folder / name
        told, _ = views(first, tmp_path / "semifl")
        assert told.endswith(
            f"are those of {name}. With semifl, the prediction for a weak view becomes a pseudo-label if its "
            "confidence is at least 0.95."
        )
    told, shown = views(tmp_path / "flexmatch")
    assert "at least the threshold of its class" in told
    assert [item["counts"] for item in shown["items"]] == [None] * len(shown["items"])
    told, _ = views(tmp_path / "freematch")  # it has no setting `threshold`
    assert "confidence" not in told


def test_methods_that_trained_differently_are_not_compared_without_a_warning(
    folder: Path, tmp_path: Path
) -> None:
    sets = ["method.name=server-only", "federation.rounds=2", "federation.period=3", "run.device=cpu"]
    ssfl.run(ssfl.load_config("quickstart", sets), tmp_path / "short")
    fair = words(page.contents([folder / "grouping-1", folder / "alone"]))
    assert "federation.rounds" not in fair
    unfair = words(page.contents([folder / "grouping-1", tmp_path / "short"]))
    assert "federation.rounds (" in unfair
    lengths = words(
        page.contents([folder / "alone", tmp_path / "short"])
    )  # of one method: that is the question
    assert "federation.rounds (" not in lengths


def test_a_folder_given_twice_counts_once_and_equal_names_are_told_apart(
    folder: Path, tmp_path: Path
) -> None:
    for home in ("a", "b"):
        shutil.copytree(folder / "alone", tmp_path / home / "alone")
    one, other = tmp_path / "a" / "alone", tmp_path / "b" / "alone"
    assert list(several.distinct([one, other, one]).values()) == ["a/alone", "b/alone"]
    assert page.contents([one, one])["title"] == "Run alone"


def fake(
    folder: Path, tmp_path: Path, masks: list[float], right: list[float | None], scores: list[float]
) -> Path:
    """A run whose events are made up; diversity is low where the mask rate is high."""
    path = tmp_path / "made-up"
    shutil.copytree(folder / "grouping-1", path)
    lines: list[dict[str, Any]] = []
    for at, (mask, label, score) in enumerate(zip(masks, right, scores, strict=True), 1):
        lines.append({"event": "round", "round": at, "mask_rate": mask, "pseudo_accuracy": label})
        spread = {"definition": 0.1, "authors_groups": 1.2 if mask > 0.5 else 8.0}
        lines.append({"event": "diversity", "round": at, "gradient_l2_squared": spread})
        lines.append({"event": "eval", "round": at, "accuracy": score})
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("masks", "right", "scores", "head", "bad"),
    [
        ([0, 0, 1, 1, 1, 1], [None, None, *[0.1] * 4], [0.8, 0.9, *[0.1] * 4],
         "Collapse from round 3 on.", True),
        ([0, 0, 1, 1, 1, 1], [None, None, *[0.9] * 4], [0.8, *[0.9] * 5], "No collapse.", False),
        ([0.9] * 6, [0.1] * 6, [0.5] * 6, "Confident but mostly wrong pseudo-labels from round 1 on.", True),
        ([0.9] * 6, [0.1, 0.1, 0.1, 0.2, 0.9, 0.9], [0.5] * 6,
         "Recovered: pseudo-labels were mostly wrong for a time from round 1 on.", False),
        ([0.0] * 6, [None] * 6, [0.5] * 6, "The users hardly learn.", True),
        ([1.0] * 6, [None] * 6, [0.9, *[0.1] * 5], "Collapse from round 1 on.", True),  # real sites
        ([1.0] * 6, [None] * 6, [0.9] * 6, "No collapse.", False),
        ([1.0], [0.1], [0.1], "Too early.", False),
    ],
)  # fmt: skip
def test_a_collapse_is_told(
    folder: Path, tmp_path: Path, masks: list[float], right: list[float | None], scores: list[float],
    head: str, bad: bool,
) -> None:  # fmt: skip
    path = fake(folder, tmp_path, masks, right, scores)
    said = collapse.judge(gather.read(path, "made-up"))
    assert (said.head, said.bad) == (head, bad)
    assert ("parallel" in said.text) == (said.since is not None)
    assert head in words(page.contents([path]))


def test_folders_of_earlier_versions_and_without_diversity(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(folder / "grouping-1", old)
    events = [e for e in runs.read_events(old) if e["event"] != "diversity"]
    lines = [json.dumps({k: v for k, v in e.items() if k not in CLOCKS}) for e in events]
    (old / "events.jsonl").write_text("\n".join(lines) + "\n")
    split = json.loads((old / "split.json").read_text())
    for key in ("listed", "size_quartiles", "class_totals", "users"):
        split.pop(key)
    (old / "split.json").write_text(json.dumps(split))
    config = (old / "config.toml").read_text().splitlines()
    newer = ("gate", "combine", "attackers", "attack", "compile", "precision")
    (old / "config.toml").write_text("\n".join(line for line in config if line.split(" = ")[0] not in newer))
    told = page.contents([old])
    assert not any(block.get("figure") == "diversity" for s in told["sections"] for block in s["blocks"])
    assert "did not record the time" in words(told)
    assert figure(told, "confusion")
    page.contents([old, folder / "alone"])


def test_a_method_is_told_in_its_own_words(folder: Path) -> None:
    told = words(page.contents([folder / "grouping-1"]))
    assert f"The method is grouping: {Grouping.__doc__}" in told
    assert "A pseudo-label is used if its confidence is at least " in told


def test_unfinished_runs(quick: Callable[..., Config], tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise Interrupted(tmp_path / "run", 2, "")

    with pytest.raises(Interrupted):
        ssfl.run(quick("run.checkpoint_every=1", "run.eval_every=1"), tmp_path / "run", stop)
    told = page.contents([tmp_path / "run"])
    assert "round 2 of 4" in told["subtitle"]
    assert "The run is not finished." in words(told)
    assert "model of round 1 " in words(told)  # of the last checkpoint
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.unlink()
    assert "no model is saved yet" in words(page.contents([tmp_path / "run"]))
    (tmp_path / "run" / "events.jsonl").write_text("")
    assert "No evaluation yet" in words(page.contents([tmp_path / "run"]))


def test_runs_that_look_at_test_images_last(quick: Callable[..., Config], tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise Interrupted(tmp_path / "stopped", 3, "")

    late = quick("run.checkpoint_every=1", "run.eval_every=1", "data.validation=0.1", "run.test=last")
    with pytest.raises(Interrupted):
        ssfl.run(late, tmp_path / "stopped", stop)
    told = page.contents([tmp_path / "stopped"])
    assert "The test images are used in the last round: 3 of 4 rounds" in words(told)
    assert "no confusion matrix: the test images are not yet used" in words(told)
    assert "not recorded" not in str(blocks(told, "table"))  # its memory
    assert [one["name"] for one in figure(told, "accuracy")["series"]] == ["validation images"]
    ssfl.run(late, tmp_path / "run")
    told = page.contents([tmp_path / "run", tmp_path / "stopped"])
    assert figure(told, "accuracy")["title"] == "Accuracy on the validation images"
    assert [len(one["points"]) for one in figure(told, "accuracy")["series"]] == [4]  # two of a kind
    ssfl.run(quick("run.eval_every=1", "data.validation=0.1"), tmp_path / "every")
    ssfl.run(quick("run.eval_every=1"), tmp_path / "none")
    told = page.contents([tmp_path / "run", tmp_path / "every", tmp_path / "none"])
    assert figure(told, "accuracy")["title"] == "Accuracy on the test or validation images"
    family, _ = figure(told, "accuracy")["series"]
    assert all(low == high for _, low, high in family["band"])  # the same run, seen by the same images


def test_a_run_that_never_looks_at_test_images(quick: Callable[..., Config], tmp_path: Path) -> None:
    ssfl.run(quick("run.test=never", "data.validation=0.1"), tmp_path / "run")
    told = page.contents([tmp_path / "run"])
    said = words(told)
    assert "of 143 validation images correctly" in said
    assert "The test images are never used." in said
    assert "no confusion matrix: the test images are never used" in said
    assert "accuracy on validation images" in str(told)
    assert "accuracy on test images" not in str(told)
    assert [one["figure"] for one in blocks(told, "matrix")] == ["who-has-what"]
    page.write([tmp_path / "run"], tmp_path / "run.html", tmp_path / "figures")
    ssfl.run(quick("run.test=never", "data.validation=0.1", "train.lr=0.01"), tmp_path / "slower")
    told = page.contents([tmp_path / "run", tmp_path / "slower"])
    assert len(figure(told, "final")["items"]) == 2
    assert "For all runs, the accuracy is on validation images: test images are never used there." in words(
        told
    )
    ssfl.run(quick("data.validation=0.1"), tmp_path / "every")
    told = page.contents([tmp_path / "run", tmp_path / "every"])
    assert "For run, the accuracy is on validation images: test images are never used there." in words(told)


def test_rounds_without_users(quick: Callable[..., Config], tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise Interrupted(tmp_path / "stopped", 2, "")

    config = quick("federation.head_start=0.5", "run.checkpoint_every=1", "run.eval_every=1")
    with pytest.raises(Interrupted):
        ssfl.run(config, tmp_path / "stopped", stop)
    page.write([tmp_path / "stopped"], tmp_path / "stopped.html", tmp_path / "figures")
    assert "sent an update" not in words(page.contents([tmp_path / "stopped"]))
    ssfl.run(config, tmp_path / "run")
    told = words(page.contents([tmp_path / "run"]))
    assert "In the first 2 rounds, only the server trains. In each of 2 further rounds" in told
    assert "all users took part in each of the 2 rounds" in told


@pytest.mark.parametrize(
    "settings",
    [
        ["method.name=fedmatch", "train.momentum_policy=reset"],
        ["method.name=easgd"],
        ["method.name=supervised", "data.validation=0.1"],
        ["method.name=fixmatch", "split.users=1"],
        ["method.name=semifl", "federation.slow_average=0.5"],
        ["privacy.clip=0.5", "privacy.noise=1"],
        ["federation.gate=true", "federation.attackers=0.3", "federation.dropout=0.2"],
    ],
)
def test_every_kind_of_method(quick: Callable[..., Config], tmp_path: Path, settings: list[str]) -> None:
    ssfl.run(quick("federation.rounds=2", *settings), tmp_path / "run")
    told = page.contents([tmp_path / "run"])
    assert figure(told, "accuracy")["series"][0]["points"]
    assert figure(told, "confusion")
    assert ("ε = " in words(told)) == ("privacy.clip=0.5" in settings)
    page.html(told)


def test_a_hundred_thousand_users_stay_readable_and_small(folder: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    shutil.copytree(folder / "grouping-1", many)
    split = json.loads((many / "split.json").read_text())
    rows = [[k % 3, 0, 5, *[k % 2] * 7] for k in range(5000)]
    split |= {"users": 100_000, "listed": 5000, "user_classes": rows, "sizes": [sum(row) for row in rows]}
    (many / "split.json").write_text(json.dumps(split))
    config = (many / "config.toml").read_text().replace("users = 10\n", "users = 100000\n")
    (many / "config.toml").write_text(config)
    told = page.contents([many])
    assert len(page.html(told)) < 300_000
    assert len(figure(told, "who-has-what")["rows"]) == 51
    assert sum(item["value"] for item in figure(told, "classes-per-user")["items"]) == 5000
    assert "100,000 users" in words(told)


def test_very_many_rounds_stay_small(folder: Path, tmp_path: Path) -> None:
    path = fake(folder, tmp_path, [0.9] * 20_000, [0.9] * 20_000, [0.9] * 20_000)
    told = page.contents([path])
    assert len(page.html(told)) < 300_000
    points = figure(told, "accuracy")["series"][0]["points"]
    assert (points[0][0], points[-1][0]) == (1, 20_000)


def test_a_damaged_folder_gets_one_clear_line(folder: Path, tmp_path: Path) -> None:
    for number, (name, content) in enumerate(
        [("config.toml", "[data"), ("config.toml", None), ("events.jsonl", None)]
    ):
        broken = tmp_path / str(number)
        shutil.copytree(folder / "alone", broken)
        if content is None:
            (broken / name).unlink()
        else:
            (broken / name).write_text(content)
        with pytest.raises(RunError, match=name):
            page.contents([broken])
    shown = report(tmp_path / "nothing")
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert "there is no folder" in shown.stderr


def test_what_is_damaged_in_part_is_told_in_the_report(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "grouping-1", run)
    (run / "model.safetensors").write_bytes(b"no model")
    assert "model.safetensors cannot be read" in words(page.contents([run]))
    (run / "split.json").write_text("[1")
    told = words(page.contents([run]))
    assert "split.json is missing or damaged" in told
    assert "have changed since the run" in told


def test_only_reports_are_overwritten(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.html"
    page.write([folder / "alone"], target)
    page.write([folder / "alone"], target)
    target.write_text("precious")
    for place in (target, tmp_path):
        with pytest.raises(SsflError) as caught:
            page.write([folder / "alone"], place)
        assert (caught.value.key, caught.value.value) == ("--out", str(place))
    assert target.read_text() == "precious"


def test_the_verdict_comes_first_and_no_picture_twice(tmp_path: Path) -> None:
    pixels = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    labels = load_digits().target
    np.savez(
        tmp_path / "own.npz", x_train=pixels[:200], y_train=labels[:200], x_unlabelled=pixels[200:400],
        x_test=pixels[400:440], y_test=labels[400:440],
    )  # fmt: skip
    sets = [f"data.path={tmp_path / 'own.npz'}", "federation.rounds=4", "federation.period=4",
            "split.users=2", "run.threads=1", "run.device=cpu", "model.name=small"]  # fmt: skip
    result = ssfl.run(ssfl.load_config("own", sets), tmp_path / "run")
    told = page.contents([tmp_path / "run"])
    first, second, *rest = told["sections"]
    assert (first["id"], second["id"]) == ("verdict", "accuracy")
    assert first["blocks"][0]["text"] == result.verdict
    [tile] = [item for block in first["blocks"] if block["kind"] == "tiles" for item in block["items"][:1]]
    assert tile[2] == f"{result.summary['correct']} of 40"
    assert "diversity" not in [block.get("figure") for section in rest for block in section["blocks"]]
    both = page.contents([tmp_path / "run", tmp_path / "run" / "baseline"])
    assert [section["id"] for section in both["sections"]][:3] == ["verdict", "accuracy", "differences"]
    assert "40 test images are too few" in both["sections"][0]["blocks"][0]["text"]
    for page_of in (told, both):
        shown = [
            item["image"]
            for section in page_of["sections"]
            for block in section["blocks"]
            if block["kind"] == "images"
            for item in block["items"]
        ]
        assert shown
        assert len(shown) == len(set(shown))
