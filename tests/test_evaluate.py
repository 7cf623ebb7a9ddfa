"""`ssfl evaluate`: a model judged by a folder of labelled images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

import ssfl as library  # where the fixture of that name is the command
from conftest import Call
from image_files import refusal, write_image
from ssfl.errors import ConfigError
from ssfl.runs import evaluate, sheet
from ssfl.runs.predict import predict

DIGITS = load_digits()
X = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred digits in a folder for each class; class 9 has none."""
    folder = tmp_path_factory.mktemp("held")
    for number in range(1600, 1720):
        if DIGITS.target[number] < 9:
            write_image(folder / str(DIGITS.target[number]) / f"{number}.png", X[number])
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["federation.rounds=3", "federation.period=8", "run.threads=1", "run.device=cpu"]
    path = tmp_path_factory.mktemp("run") / "digits"
    library.run(library.load_config("quickstart", settings), path)
    return path


def test_the_numbers_are_those_of_predict(trained: Path, held: Path) -> None:
    judged = evaluate.evaluate(trained, held)
    told = predict(trained, [held])
    truth = [Path(row["file"]).parent.name for row in told]
    guesses = [row["class"] for row in told]
    assert judged.count == len(told) == len(judged.answers)
    assert judged.correct == sum(a == b for a, b in zip(truth, guesses, strict=True))
    assert judged.balanced_accuracy == pytest.approx(balanced_accuracy_score(truth, guesses))
    assert judged.interval.low < judged.accuracy < judged.interval.high
    assert judged.class_accuracy[9] is None
    assert [sum(row) for row in judged.confusion] == [truth.count(str(k)) for k in range(10)]
    wrong = [answer.confidence for answer in judged.mistakes]
    assert wrong == sorted(wrong, reverse=True)
    assert len(wrong) == judged.count - judged.correct > 0


def test_the_public_functions_take_a_path_paths_or_an_array(
    trained: Path, held: Path, tmp_path: Path
) -> None:
    files = sorted(held.rglob("*.png"))[:20]
    expected = predict(trained, files)
    one = library.predict(trained, str(files[0]))
    assert one == library.predict(trained, files[0]) == library.predict(trained, iter(files[:1]))
    assert one[0]["class"] == expected[0]["class"]
    assert one[0]["confidence"] == pytest.approx(expected[0]["confidence"], abs=1e-5)
    assert len(library.predict(trained, str(held / "0"))) == len(list((held / "0").iterdir()))
    pixels = np.stack([X[int(file.stem)] for file in files])
    given = torch.from_numpy(pixels)
    for images in (pixels, given, pixels / np.float32(255), list(pixels), list(given)):
        found = library.predict(trained, images)
        assert [row["image"] for row in found] == list(range(20))
        assert [row["class"] for row in found] == [row["class"] for row in expected]
    assert library.predict(trained, np.array(files)) == expected
    for wrong in (3, None, [3], [str(files[0]), pixels[0]], [Image.fromarray(pixels[0])]):
        refusal(lambda wrong=wrong: library.predict(trained, wrong), "images")  # type: ignore[misc]
    larger = np.kron(pixels, np.ones((2, 2), np.uint8))
    assert len(library.predict(trained, larger)) == 20  # resized
    refusal(lambda: library.predict(trained, np.zeros((2, 8, 8, 3), np.uint8)), "images", "1x8x8", "3x8x8")
    refusal(lambda: library.evaluate(trained, pixels), "folder", "(images, labels)")  # type: ignore[arg-type]
    assert library.evaluate(trained, str(held)).count == len(list(held.rglob("*.png")))
    exported = library.export(trained, str(tmp_path / "model"))
    assert library.predict(exported[0], files) == expected


def test_arrays_and_a_folder_are_evaluated_alike(trained: Path, held: Path) -> None:
    files = sorted(held.rglob("*.png"))
    pixels = np.stack([X[int(file.stem)] for file in files])
    names = [file.parent.name for file in files]
    by_folder = library.evaluate(trained, held)
    for labels in (names, [int(name) for name in names], np.array([int(name) for name in names])):
        judged = library.evaluate(trained, (pixels, labels))
        assert judged.confusion == by_folder.confusion
        assert str(judged) == str(by_folder)
        assert [files[one.number] for one in judged.mistakes] == [one.file for one in by_folder.mistakes]
        assert [row["image"] for row in judged.as_dict()["mistakes"]] == [
            one.number for one in judged.mistakes
        ]
    without = [None, *names[1:]]
    some = library.evaluate(trained, (torch.from_numpy(pixels), without))
    assert some.count == len(files) - 1
    assert {one.number for one in some.answers} == set(range(1, len(files)))
    refusal(lambda: library.evaluate(trained, (pixels, names[1:])), str(len(files)), "labels")
    refusal(lambda: library.evaluate(trained, (pixels, [None] * len(files))), "label")
    with pytest.raises(ConfigError, match="zebra"):
        library.evaluate(trained, (pixels, ["zebra", *names[1:]]))


def test_two_classes_have_an_area_under_roc(trained: Path, held: Path) -> None:
    """Confident predictions are told apart: float32 probabilities near 1 would all be equal."""
    logits = torch.tensor([[0.0, 25.0], [0.0, 28.0], [0.0, 26.0], [25.0, 0.0], [30.0, 0.0]])
    labels = [0, 1, 1, 0, 1]
    answers = [
        evaluate.Answer.of(label, row.softmax(0), number)
        for number, (label, row) in enumerate(zip(labels, logits, strict=True))
    ]
    judged = evaluate.Evaluation("run", None, ("ill", "well"), answers, [])
    assert judged.auroc is not None
    assert judged.auroc[0] == pytest.approx(roc_auc_score(labels, (logits[:, 1] - logits[:, 0]).numpy()))
    assert judged.as_dict()["auroc"] == judged.auroc[0]
    assert "area under ROC     0.667" in str(judged)
    ten = library.evaluate(trained, held)
    assert ten.auroc is None
    assert ten.as_dict()["auroc"] is None
    assert "ROC" not in str(ten)


def test_a_result_can_be_used_in_place_of_its_folder(tmp_path: Path, held: Path) -> None:
    settings = ["federation.rounds=1", "federation.period=1", "run.threads=1", "run.device=cpu"]
    result = library.run(library.load_config("quickstart", settings), tmp_path / "run")
    assert library.evaluate(result, held) == library.evaluate(tmp_path / "run", held)
    assert library.predict(result, held / "0") == library.predict(tmp_path / "run", held / "0")
    assert library.export(result, tmp_path / "model")[0].is_file()
    assert library.resume(result).accuracy == result.accuracy


def test_the_probability_of_every_class_is_shown(ssfl: Call, trained: Path, held: Path) -> None:
    plain, whole = (library.predict(trained, held / "1", every_class=each) for each in (False, True))
    for one, other in zip(plain, whole, strict=True):
        shares = other.pop("probabilities")
        assert one == other
        assert list(shares) == [str(k) for k in range(10)]
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        assert shares[one["class"]] == max(shares.values()) == one["confidence"]
    code, out, _ = ssfl("predict", str(trained), str(held / "1"), "--every-class")
    assert (code, [len(line.split("\t")) for line in out.splitlines()]) == (0, [13] * len(plain))
    code, out, _ = ssfl("predict", str(trained), str(held / "1"), "--every-class", "--json")
    assert json.loads(out) == library.predict(trained, [held / "1"], every_class=True)


def test_the_command_prints_json_and_a_contact_sheet(ssfl: Call, trained: Path, held: Path) -> None:
    code, out, err = ssfl("evaluate", str(trained), str(held), "--json", "--sheet", "worst.png")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["accuracy"] == told["correct"] / told["count"]
    assert set(told) >= {"balanced_accuracy", "interval", "confusion", "class_accuracy"}
    assert sum(one["count"] for one in told["calibration"]["bins"]) == told["count"]
    assert told["class_accuracy"]["9"] == {"accuracy": None, "correct": 0, "count": 0, "interval": [0, 1]}
    with Image.open("worst.png") as image:
        assert image.width > sheet.SIDE
    code, out, _ = ssfl("evaluate", str(trained), str(held), "--sheet", "worst.png")  # its own is replaced
    assert code == 0
    assert f"{told['correct']} of {told['count']}" in out
    Path("photo.png").write_bytes(
        (held / "1" / sorted(p.name for p in (held / "1").iterdir())[0]).read_bytes()
    )
    assert ssfl("evaluate", str(trained), str(held), "--sheet", "photo.png")[0] == 2


def test_broken_files_are_listed_and_skipped(ssfl: Call, trained: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "more" / "1" / "good.png", X[1])
    (tmp_path / "more" / "1" / "bad.png").write_bytes(b"no image")
    code, out, err = ssfl("evaluate", str(trained), "more", "--json")
    assert code == 0
    assert json.loads(out)["count"] == 1
    assert "bad.png" in err
    assert len(json.loads(out)["skipped"]) == 1
    (tmp_path / "more" / "1" / "good.png").unlink()
    refusal(lambda: evaluate.evaluate(trained, "more"), "bad.png")


def test_folders_that_make_no_sense_get_one_line(trained: Path, tmp_path: Path) -> None:
    refusal(lambda: evaluate.evaluate(trained, tmp_path / "nowhere"), "nowhere")
    write_image(tmp_path / "flat" / "a.png")
    refusal(lambda: evaluate.evaluate(trained, tmp_path / "flat"), "flat")
    write_image(tmp_path / "strange" / "zebra" / "a.png")
    refusal(lambda: evaluate.evaluate(trained, tmp_path / "strange"), "zebra")
    (tmp_path / "empty" / "3").mkdir(parents=True)
    refusal(lambda: evaluate.evaluate(trained, tmp_path / "empty"), tmp_path / "empty" / "3")
    write_image(tmp_path / "whole" / "test" / "3" / "a.png")
    refusal(lambda: evaluate.evaluate(trained, tmp_path / "whole"), tmp_path / "whole" / "test")


def test_images_outside_class_folders_are_left_out_with_a_warning(trained: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "more" / "1" / "a.png", X[1])
    write_image(tmp_path / "more" / "loose.png", X[1])
    with pytest.warns(library.errors.SsflWarning):
        assert evaluate.evaluate(trained, tmp_path / "more").count == 1


def test_no_mistake_no_sheet(trained: Path, tmp_path: Path, held: Path) -> None:
    judged = evaluate.evaluate(trained, held)
    correct = next(answer for answer in judged.answers if answer.correct)
    one = evaluate.Evaluation("run", "folder", judged.classes, [correct], [])
    assert sheet.write(one, tmp_path / "sheet.png") is None
    assert one.balanced_accuracy == one.accuracy == 1
