"""A folder of images as a config: what is chosen, what is said, and what a stopped run can do."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import ssfl as package
from conftest import Call
from ssfl import methods
from ssfl.core.events import Event
from ssfl.core.fields import limits_of
from ssfl.data import folds
from ssfl.data.own import Files, sort_files
from ssfl.data.sources import load
from ssfl.errors import ConfigError, SsflWarning
from ssfl.runs import assemble, choose, display, forecast, predict, remaining, resolve, round_loop, train
from ssfl.runs.choose import Facts

SHORT = ("--set", "federation.rounds=2", "--set", "run.threads=1", "--set", "model.name=small")


def draw(folder: str | Path, count: int, side: int = 40, seed: int = 0, deep: bool = False) -> None:
    """Noise with a stripe at a place that depends on the seed."""
    rng = np.random.default_rng(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = rng.integers(0, 100, (side, side + number % 3), dtype=np.uint8)
        pixels[5 * seed % side : 5 * seed % side + 4] = 200
        Image.fromarray(pixels.astype(np.uint16) * 16 if deep else pixels).save(Path(folder, f"{number}.png"))


def scans(folder: str = "scans", deep: bool = False) -> None:
    for seed, name in enumerate(("left", "right", "unlabelled/a", "unlabelled/b")):
        draw(f"{folder}/{name}", 8 + seed, seed=seed, deep=deep)


def facts(labelled: int, unlabelled: list[int], side: int, one_size: bool = False) -> Facts:
    """Of a folder that nobody needs to write."""
    half = [Path(f"{n}.png") for n in range(labelled // 2)]
    train, test = {"a": half, "b": half}, {"a": half[:2], "b": half[:2]}
    homes = [f"site-{n}" for n, count in enumerate(unlabelled) for _ in range(count)]
    files = Files(train, [Path(f"{n}.png") for n in range(len(homes))], test, False, homes)
    sizes = Counter({(side, side): files.everything.__len__()})
    return Facts(Path("scans"), files, sizes if one_size else sizes + Counter({(side + 9, side): 1}), True)


def per_round(chosen: choose.Choice) -> int:
    steps, batch = chosen.settings["federation"]["period"], chosen.settings["train"]["batch_size"]
    return int(steps * batch)


@pytest.mark.parametrize(
    ("labelled", "unlabelled"), [(48, [207, 262, 147]), (8, [20, 30]), (400, [5000] * 20), (20, [3, 3, 3])]
)
def test_a_round_does_not_repeat_images_dozens_of_times(labelled: int, unlabelled: list[int]) -> None:
    chosen = choose.choose(facts(labelled, unlabelled, 256), 2, False, False)
    assert per_round(chosen) <= 8 * max(labelled, 2)
    assert per_round(chosen) <= max(2 * sorted(unlabelled)[len(unlabelled) // 2], 16)
    assert 20 <= chosen.settings["federation"]["rounds"] <= 100
    assert chosen.settings["split"]["users"] == len(unlabelled)


def test_the_network_depends_on_what_is_installed_and_on_the_device() -> None:
    few, many = facts(48, [200] * 3, 256), facts(400, [5000] * 20, 256)
    tiny = facts(48, [200] * 3, 28, one_size=True)

    def chosen(found: Facts, gpu: bool, pretrained: bool, **said: Any) -> tuple[str | None, int | None]:
        settings = choose.choose(found, 2, gpu, pretrained, said).settings
        return settings["model"].get("name"), settings["data"].get("size")

    assert chosen(few, False, True) == ("lite0", 224)
    assert chosen(few, True, True) == ("lite0", 224)
    assert chosen(few, False, False) == ("small", 64)
    assert chosen(many, False, True) == ("lite0", 128)  # 224 pixels would take hours
    assert chosen(many, True, True) == (None, 64)
    assert chosen(tiny, False, True) == ("cnn", None)
    assert chosen(few, False, True, model={"name": "small"}) == (None, 64)
    assert chosen(few, False, True, data={"size": 160}) == ("lite0", 160)


def patients_of(folder: str, *names: str) -> None:
    """Three images of each patient and class."""
    for name in names:
        draw(folder, 3, seed=int(name) % 7)
        for file in Path(folder).glob("?.png"):
            file.rename(file.with_name(f"{name}_{file.name}"))


def test_one_patient_is_never_in_training_and_in_testing(tmp_path: Path) -> None:
    for label, first in (("a", 100), ("b", 104)):  # the patients 104 to 107 have images of both classes
        patients_of(str(tmp_path / label), *(str(first + number) for number in range(8)))
    config = package.load_config("own", [f"data.path={tmp_path}", "data.size=8", "data.validation=0.2"])
    files = sort_files(tmp_path, 0.2)
    sides = [{file.name[:3] for each in part.values() for file in each} for part in (files.train, files.test)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == files.patients == 12
    for name in "ab":
        assert len(files.test[name]) in (3, 6)  # a fifth of 24 is not a multiple of three
    dataset = resolve.load_data(config)
    parts, validation = resolve.make_parts(resolve.resolve(config, dataset), dataset)
    assert dataset.groups is not None
    rest = np.concatenate([parts.server, *parts.users])
    assert not set(dataset.groups[validation]) & set(dataset.groups[rest])
    assert len(validation) + len(rest) == len(dataset.labels)
    assert min(np.bincount(dataset.labels.numpy()[validation])) > 0


def test_identical_files_are_never_in_training_and_in_testing(tmp_path: Path) -> None:
    for seed, label in enumerate("ab"):
        draw(tmp_path / label, 12, seed=seed)
        for number in range(6):  # the copies of three images of b are in a
            home = tmp_path / ("a" if number < 3 else label)
            shutil.copy(tmp_path / label / f"{number}.png", home / f"copy-{label}-{number}.png")
    files = sort_files(tmp_path, 0.25)
    train, test = ({f.read_bytes() for fs in part.values() for f in fs} for part in (files.train, files.test))
    assert not train & test
    assert min(len(fs) for fs in files.test.values()) >= 2
    dataset = load(path=str(tmp_path), root=Path(), size=8, test_fraction=0)
    folds_of = folds.assign(dataset.labels.numpy(), dataset.groups, 3, 1)
    seen: dict[bytes, int] = {}
    for file, fold in zip(sort_files(tmp_path, 0).everything, folds_of.tolist(), strict=True):
        assert seen.setdefault(file.read_bytes(), fold) == fold
    assert len(seen) == 24


def test_copies_in_every_patient_are_told_and_other_copies_stay_together(tmp_path: Path) -> None:
    for seed, label in enumerate("ab"):
        patients_of(str(tmp_path / label), *(str(100 * seed + 100 + number) for number in range(6)))
    pixels = np.random.default_rng(1)
    for file in tmp_path.rglob("*.png"):
        Image.fromarray(pixels.integers(0, 255, (8, 8), dtype=np.uint8)).save(file)
    for file in tmp_path.rglob("*_0.png"):  # of each patient
        file.write_bytes((tmp_path / "a" / "100_0.png").read_bytes())
    for name in ("a/100_1.png", "b/200_1.png"):
        shutil.copy(tmp_path / "a" / "101_2.png", tmp_path / name)
    for name in ("a/102_1.png", "a/103_1.png", "b/202_1.png", "b/203_1.png"):
        (tmp_path / name).write_bytes(b"")  # broken files have nothing to do with each other
    files = sort_files(tmp_path, 0.2)
    (common,) = files.divided
    assert common.name.endswith("_0.png")
    numbers = {f"{file.parent.name}/{file.name}": number for file, number in files.together.items()}
    assert numbers["a/100_2.png"] == numbers["b/200_2.png"] == numbers["a/101_1.png"]
    assert len(set(numbers.values())) == 12 - 2
    lines = warned(str(tmp_path))
    assert any(f"the copies of {common} " in line for line in lines)


@pytest.mark.parametrize("chain", [True, False])
def test_copies_never_take_a_class_out_of_the_test_images(tmp_path: Path, chain: bool) -> None:
    """Either all patients of a class have one image in common, or each has one in common with the next."""
    for label in "abcd":
        patients_of(str(tmp_path / label), *(str(100 + number) for number in range(8)))
    pixels = np.random.default_rng(1)
    for file in tmp_path.rglob("*.png"):
        Image.fromarray(pixels.integers(0, 255, (8, 8), dtype=np.uint8)).save(file)
        file.rename(file.with_name(f"{file.parent.name}{file.name}"))  # each class has its own patients
    for label in "abc":
        for number in range(101, 108):
            source = f"{label}{number - 1}_1.png" if chain else f"{label}100_0.png"
            shutil.copy(tmp_path / label / source, tmp_path / label / f"{label}{number}_0.png")
    files = sort_files(tmp_path, 0.2)
    assert all(3 <= len(part) <= 12 for part in files.test.values())
    assert {file.name[0] for file in files.divided} == set("abc")
    assert set(folds.assign(np.array(files.labels(files.train)), files.groups, 2, 1).tolist()) == {0, 1}
    alone = [file for part in (files.train, files.test) for file in part["d"]]
    assert len({files.together[file] for file in alone}) == 8


def test_a_class_of_one_patient_has_no_test_images(tmp_path: Path) -> None:
    for seed, label in enumerate("ab"):
        draw(tmp_path / label / f"images of {label}", 5, seed=seed)
    # a folder in which all images of every class lie is no patient
    assert list(map(len, sort_files(tmp_path, 0.2).test.values())) == [1, 1]
    draw(tmp_path / "a" / "another", 2, seed=2)
    assert list(map(len, sort_files(tmp_path, 0.2).test.values())) == [2, 0]


def warned(folder: str, test_fraction: float = 0.2) -> list[str]:
    """The warnings about a folder whose images are loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(path=folder, root=Path(), size=8, test_fraction=test_fraction)
    return [str(one.message) for one in caught if one.category is SsflWarning]


def test_files_that_are_no_images_are_counted_in_one_line(ssfl: Call) -> None:
    scans()
    assert warned("scans") == []
    for name in (".DS_Store", "Thumbs.db", "left/._0.png", "ssfl.toml"):
        Path("scans", name).write_text("")
    assert warned("scans") == []
    for name in ("left/1.dcm", "unlabelled/a/2.DCM", "right/notes.txt"):
        Path("scans", name).write_text("")
    (line,) = warned("scans")
    assert all(word in line for word in ("3 files", "2 .dcm", "DICOM", "PNG", "1 .txt"))
    Path("scans/ssfl.toml").unlink()  # it would be read as the config
    Path("scans/unlabelled/c").mkdir()
    Path("scans/unlabelled/c/1.dcm").write_text("")
    code, _, err = ssfl("split", "scans")
    assert (code, err.count("\n"), "1 .dcm" in err, "unlabelled/c" in err) == (2, 1, True, True)
    Path("scans/unlabelled/c").rename("scans/third")
    code, _, err = ssfl("split", "scans")
    assert (code, err.count("\n"), "1 .dcm" in err, "third" in err) == (2, 1, True, True)


def test_identical_files_are_told_if_labels_or_test_images_suffer(ssfl: Call) -> None:
    for seed, name in enumerate(("train/a", "train/b", "test/a", "test/b")):
        draw(f"scans/{name}", 3, seed=seed)
    shutil.copy("scans/train/a/0.png", "scans/train/a/copy.png")  # harmless
    assert warned("scans") == []
    shutil.copy("scans/train/a/1.png", "scans/train/b/other.png")
    (line,) = warned("scans")
    assert "train/a/1.png" in line
    assert "train/b/other.png" in line
    shutil.copy("scans/train/b/2.png", "scans/test/b/known.png")
    labels, leak = warned("scans")
    assert labels == line
    assert "test/b/known.png" in leak
    assert "train/b/2.png" in leak
    Path("scans/unlabelled").mkdir()
    shutil.copy("scans/test/a/0.png", "scans/unlabelled/seen.png")
    shutil.copy("scans/train/a/0.png", "scans/unlabelled/harmless.png")
    *others, seen = warned("scans")
    assert others == [labels, leak]
    assert "unlabelled/seen.png" in seen
    assert "test/a/0.png" in seen
    assert "harmless" not in seen
    shutil.rmtree("scans/test")
    assert any("harmless" in line for line in warned("scans", test_fraction=0))  # as in a cross-validation


def test_classes_whose_names_look_the_same_are_told(ssfl: Call) -> None:
    for seed, name in enumerate(("AP", "AP ", "ap", "side")):
        draw(f"scans/{name}", 3, seed=seed)
    (line,) = warned("scans")
    assert all(name in line for name in ('"AP"', '"AP "', '"ap"', "one folder"))
    assert "side" not in line


@pytest.mark.parametrize("inside", [(), ("one.dcm",)])
def test_unlabelled_without_images_is_refused(ssfl: Call, inside: tuple[str, ...]) -> None:
    draw("scans/left", 8)
    draw("scans/right", 8, seed=1)
    Path("scans/unlabelled").mkdir()
    for name in inside:
        Path("scans/unlabelled", name).write_bytes(b"DICM")
    code, _, err = ssfl("split", "scans")
    assert code == 2
    assert err.count("\n") == 1
    assert "scans/unlabelled: holds no images" in err


def test_a_run_without_unlabelled_says_whose_labels_are_dropped(ssfl: Call) -> None:
    for seed, name in enumerate(("left", "right")):
        draw(f"scans/{name}", 15, seed=seed)
    sim = assemble.make(choose.load_config("scans", ["model.name=small", "data.size=8"]))
    free = sum(map(len, sim.parts.users))
    assert any("unlabelled/" in line and f"{free} of 24 " in line for line in forecast.lines(sim, None))
    draw("scans/unlabelled", 20, seed=3)
    sim = assemble.make(choose.load_config("scans", ["model.name=small", "data.size=8"]))
    assert not any("unlabelled/" in line for line in forecast.lines(sim, None))


def test_one_image_is_not_called_images(ssfl: Call) -> None:
    scans()
    draw("scans/unlabelled/0", 1, seed=5)
    code, out, _ = ssfl("split", "scans")
    assert (code, " 1 images" in out, " 1 image " in out) == (0, False, True)


def test_what_a_person_sets_stays(ssfl: Call) -> None:
    scans()
    sets = ["split.server_labels=6", "train.batch_size=5", "federation.rounds=7", "data.size=24",
            "train.lr=0.5", "model.name=small", "federation.participants=1"]  # fmt: skip
    config = choose.load_config("scans", sets)
    assert config == package.load_config("scans", sets)
    assert (config.train.batch_size, config.federation.rounds, config.data.size) == (5, 7, 24)
    assert (config.train.lr, config.model.name, config.federation.participants) == (0.5, "small", 1)
    assert config.split.users == 2
    with pytest.raises(ConfigError) as caught:
        choose.load_config("scans", ["split.users=3"])
    assert (caught.value.key, caught.value.value, caught.value.fix) == ("split.users", 3, "split.users=2")


def test_a_folder_runs_and_says_what_was_chosen(ssfl: Call) -> None:
    scans()
    Path("scans/left/broken.png").write_bytes(b"no picture")
    code, out, err = ssfl("run", "scans", *SHORT, "--no-baseline")
    assert (code, Path("runs/scans/model.safetensors").is_file()) == (0, True)
    assert "accuracy" in out
    words = ("1 of 39 images cannot be read", "left/broken.png", "pixels", "2 rounds", "GB of memory",
             "38 of 38", "data.flip", "left")  # fmt: skip
    assert [word for word in words if word not in err] == []
    assert json.loads(Path("runs/scans/split.json").read_text())["broken"] == 1
    code, out, err = ssfl("split", "scans")
    assert (code, "2 users" in out) == (0, True)
    code, out, err = ssfl("run", "scans", *SHORT, "--no-baseline", "--quiet")
    assert (code, out, err.count("cannot be read")) == (0, "", 1)
    assert all(line.startswith("ssfl: warning: ") for line in err.splitlines())
    code, _, err = ssfl("run", "scans", *SHORT, "--set", "data.broken=stop")
    assert (code, err.count("\n")) == (2, 1)


EARLY = """
import sys
sys.argv = ["ssfl", *sys.argv[1:]]
from ssfl.cli.main import main
try:
    main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "scans", "--set", "method.treshold=0.5"),
        ("run", "scans", "--set", "trian.lr=1"),
        ("run", "--set", "method.threshold=3"),
        ("split", "scans", "--set", "method.name=semifl", "--set", "method.guard=true"),
    ],
)
def test_typing_mistakes_are_told_before_torch_is_imported(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "scans" / "a").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", EARLY, *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.count("\n") == 1


def test_settings_read_from_a_methods_file_are_those_of_its_class() -> None:
    for name in methods.METHODS:
        light, real = methods.settings_of(name), methods.find(name)
        assert light is not None
        assert limits_of(light) == limits_of(real)
        defaults = {one.name: one.default for one in fields(real) if one.name in limits_of(real)}
        assert {one.name: one.default for one in fields(light)} == defaults


def test_a_forecast_says_time_and_memory_and_changes_nothing(quick: Any, tmp_path: Path) -> None:
    told: list[Event] = []
    config = quick("federation.rounds=2")
    with_it = train.run(config, tmp_path / "with", told.append, forecast=True)
    without = train.run(config, tmp_path / "without")
    assert told[0]["event"] == "forecast"
    assert any("GB of memory" in line for line in told[0]["lines"])
    assert with_it.accuracy == without.accuracy
    bytes_of = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert bytes_of[0] == bytes_of[1]


def test_every_method_has_a_forecast_or_none_but_no_error(quick: Any) -> None:
    for name in ("anchored", "semifl", "fedmatch", "server-only", "easgd", "cbafed"):
        sim = assemble.make(quick(f"method.name={name}", "federation.rounds=2"))
        expected = forecast.measure(sim, sim.initial())
        assert expected is None or (expected.seconds > 0 and expected.memory > 0)
        assert len(forecast.lines(sim, expected)) >= 2


def stopped(path: Path, config: package.Config, after: int) -> None:
    """A run that somebody stops with Ctrl-C."""

    def report(event: Event) -> None:
        if event["event"] == "round" and event["round"] == after:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(round_loop.Interrupted):
        train.run(config, path, report)


def test_a_stopped_run_predicts_and_exports_from_its_last_checkpoint(
    ssfl: Call, quick: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    stopped(path, quick("federation.rounds=6"), after=2)
    train.run(quick("federation.rounds=2", "train.horizon=3"), tmp_path / "short")
    draw("pictures", 3, side=8)
    code, out, err = ssfl("predict", str(path), "pictures")
    assert (code, out.count("\n"), err.count("\n")) == (0, 3, 1)
    assert "round 2 of 6" in err
    assert f"ssfl resume {path}" in err
    with pytest.warns(SsflWarning):
        early, short = predict.load_model(path), predict.load_model(tmp_path / "short")
    for one, other in zip(early.parameters(), short.parameters(), strict=True):
        assert torch.equal(one, other)  # the model of two rounds
    assert ssfl("export", str(path), "early")[0] == 0
    assert ssfl("resume", str(path), "--quiet")[0] == 0
    assert not (path / "unfinished.safetensors").exists()
    assert ssfl("predict", str(path), "pictures")[2] == ""
    Path("scan.dcm").write_bytes(bytes(128) + b"DICM")
    code, _, err = ssfl("predict", str(path), "scan.dcm", "pictures")
    assert (code, err.count("\n"), "DICOM" in err, ".png" in err, "damaged" in err) == (
        2,
        1,
        True,
        True,
        False,
    )
    code, _, err = ssfl("predict", str(path), "https://example.org/a.png")
    assert (code, err.count("\n"), "https://example.org/a.png" in err) == (2, 1, True)
    assert "download" in err


@pytest.mark.parametrize("deep", [False, True])
def test_an_export_works_in_plain_pytorch_and_its_card_says_how_files_are_read(
    ssfl: Call, deep: bool
) -> None:
    scans(deep=deep)
    sets = [word for word in SHORT if word != "--set"]
    result = package.run(choose.load_config("scans", [*sets, "data.size=20", "run.baseline=false"]), "run")
    predict.export(result.path, "model")
    card = json.loads(Path("model.json").read_text())
    assert card.get("white") == (4095 if deep else None)
    assert ("4095" in card["reading"]) == deep
    # the lines of docs/own-images.md
    model = torch.export.load("model.pt2").module()
    file = next(Path("scans/unlabelled/a").iterdir())
    if deep:
        values = (np.asarray(Image.open(file)).astype(np.int64) * 255 + 2047) // 4095
        image = Image.fromarray(values.astype(np.uint8))
    else:
        image = Image.open(file).convert("L" if card["shape"][0] == 1 else "RGB")
    image = image.resize(card["shape"][:0:-1], Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).reshape(1, *card["shape"][1:], -1).permute(0, 3, 1, 2)
    (known,) = predict.predict(result.path, [file])
    shares = model(pixels).softmax(-1)[0]
    assert card["classes"][int(shares.argmax())] == known["class"]
    assert float(shares.max()) == pytest.approx(known["confidence"], abs=1e-5)


def test_a_run_says_which_value_of_deep_images_becomes_white(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(12):
        pixels = generator.integers(0, 4000, (12, 12), dtype=np.uint16)
        file = tmp_path / "deep" / ("a", "b")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    config = choose.load_config(tmp_path / "deep", ["model.name=small", "split.users=1"])
    assert any("4,095" in line for line in forecast.lines(assemble.make(config), None))


def test_views_that_are_computed_in_a_round_do_not_count_for_later_rounds(quick: Any) -> None:
    config = quick("federation.rounds=100", "run.baseline=false")
    left = []
    for phases in ({}, {"features": 1000.0}):
        clock = remaining.Clock(config, 0)
        clock.began -= 1000.0  # as if the first round had taken so long
        left.append(clock.left({"event": "round", "round": 1, "phases": phases}))
    assert left[0] >= 99_000
    assert left[1] < left[0] / 10


def test_the_terminal_shows_the_remaining_time_of_the_events_which_the_board_shows_too() -> None:
    shown = io.StringIO()
    with display.Reporter(Console(file=shown, width=200)) as reporter:
        reporter({"event": "start", "round": 0, "rounds": 4})
        reporter({"event": "round", "round": 1, "seconds": 1.0, "left": 36_000.0})
        reporter({"event": "eval", "round": 1, "accuracy": 0.5, "correct": 1, "count": 2})
    assert "10 h left" in shown.getvalue()
