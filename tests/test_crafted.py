"""Folders, models and images that somebody made to do harm: one clear line each, soon, in little memory."""

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import ssfl as library
from conftest import Call
from ssfl.config.loading import load_config
from ssfl.core.rows import layout_of
from ssfl.errors import DataError, RunError
from ssfl.runs import checkpoints, folder
from waiting import finished

DEEP = 100_000
ESCAPE = "\x1b]0;owned\x07\x1b[31mred"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    short = ["federation.rounds=2", "federation.period=2", "train.batch_size=8", "run.threads=1",
             "run.device=cpu", "split.users=3"]  # fmt: skip
    path = tmp_path_factory.mktemp("crafted") / "good"
    library.run(load_config("quickstart", short), path)
    return path


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    return Path(shutil.copytree(good, tmp_path / "run"))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image, beside a folder of labelled images."""
    Image.new("L", (8, 8), 100).save(tmp_path / "image.png")
    for name in "0123456789":
        (tmp_path / "labelled" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "image.png", tmp_path / "labelled" / name)
    return tmp_path / "image.png"


def one_line(code: int, err: str) -> str:
    """What was said, if it was one line and no traceback."""
    assert code == 2, err
    assert "Traceback" not in err
    assert err.count("\n") == 1, err
    assert err.isprintable() or err[:-1].isprintable()
    assert len(err) < 5000
    return err


def with_card(run: Path, **changes: Any) -> None:
    """Put a changed card into a run's model."""
    tensors, card = folder.read_model(run / "model.safetensors")
    save_file(tensors, run / "model.safetensors", {"card": json.dumps(card | changes)})


def commands(run: Path, image: Path, good: Path) -> dict[str, list[str]]:
    return {
        "predict": ["predict", str(run), str(image)],
        "export": ["export", str(run), str(run.parent / "exported")],
        "resume": ["resume", str(run)],
        "compare": ["compare", str(good), str(run)],
        "report": ["report", str(run)],
        "evaluate": ["evaluate", str(run), str(image.parent / "labelled")],
        "serve": ["serve", "--resume", str(run), "--insecure", "--sites", "2"],
    }


@pytest.mark.parametrize("verb", ["resume", "compare", "report", "serve"])
@pytest.mark.parametrize("what", ["arrays", "tables"])
def test_a_config_that_is_nested_too_deeply(
    verb: str, what: str, run: Path, good: Path, image: Path, ssfl: Call
) -> None:
    deep = "[" * DEEP + "]" * DEEP if what == "arrays" else "{a=" * DEEP + "1" + "}" * DEEP
    (run / "config.toml").write_text(f"[run]\nseed = {deep}\n")
    code, _, err = ssfl(*commands(run, image, good)[verb])
    assert "config.toml cannot be used" in one_line(code, err)


@pytest.mark.parametrize("file", ["events.jsonl", "summary.json", "split.json", "failed.json"])
def test_json_that_is_nested_too_deeply(file: str, run: Path, good: Path, image: Path, ssfl: Call) -> None:
    (run / file).write_text("[" * DEEP + "]" * DEEP + "\n")
    for verb in ("compare", "resume", "report", "predict", "evaluate", "serve"):
        code, _, err = ssfl(*commands(run, image, good)[verb])
        assert "Traceback" not in err
        assert code in (0, 1) or one_line(code, err)


@pytest.mark.parametrize("verb", ["predict", "export", "evaluate"])
def test_a_card_that_is_nested_too_deeply(verb: str, run: Path, good: Path, image: Path, ssfl: Call) -> None:
    tensors, _ = folder.read_model(run / "model.safetensors")
    save_file(tensors, run / "model.safetensors", {"card": "[" * DEEP + "]" * DEEP})
    code, _, err = ssfl(*commands(run, image, good)[verb])
    assert "nested too deeply" in one_line(code, err)


@pytest.mark.parametrize("verb", ["predict", "export", "evaluate"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": [""] * 3_000_000}, "3,000,000 classes"),
        ({"classes": 7}, "class names"),
        ({"classes": [{}] * 10}, "class names"),
        ({"classes": ["x" * 10_000, *"123456789"]}, "a name of more than 1,000 letters"),
        ({"shape": [1, 10**9, 10**9]}, "says that images are"),
        ({"shape": [10**6, 8, 8]}, "says that images are"),
        ({"shape": "huge"}, "says that images are"),
        ({"mean": [float("nan")]}, "has no finite mean for each channel"),
        ({"mean": [10**400]}, "has no finite mean for each channel"),
        ({"std": []}, "has no finite std for each channel"),
        ({"std": [0]}, "a std of 0"),
        ({"std": [-0.3]}, "a std of -0.3"),
        ({"model": "cnn", "shape": [1, 1024, 1024]}, "2,130,759,626 numbers"),
        ({"test_views": 10**9}, "averaged over 1000000000 views"),
        ({"test_views": "all"}, "averaged over all views"),
        ({"model": ["small"]}, "names no network"),
        ({"model": "nobody's"}, "cannot be loaded into the network"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_card_that_no_run_writes(
    verb: str, changes: dict[str, Any], said: str, run: Path, good: Path, image: Path, ssfl: Call
) -> None:
    with_card(run, **changes)
    code, _, err = ssfl(*commands(run, image, good)[verb])
    assert said in one_line(code, err)


def test_an_image_of_very_many_pixels_is_refused(run: Path, tmp_path: Path, ssfl: Call) -> None:
    """A small file, which would need gigabytes."""
    for size, said in (
        (8193, "8,193 × 8,193 pixels"),
        (12_000, "12,000 × 12,000 pixels"),
        (20_000, "pixels"),
    ):
        file = tmp_path / f"{size}.png"
        Image.new("1", (size, size)).save(file)
        assert file.stat().st_size < 100_000
        code, _, err = ssfl("predict", str(run), str(file))
        assert said in one_line(code, err)
        assert "make it smaller" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [1, 9000, 9000]}, "says that images are"),
        ({"model": "cnn", "shape": [1, 1024, 1024]}, "2,130,759,626 numbers"),
        ({"std": [0]}, "a std of 0"),
        ({}, None),
    ],
)
def test_a_site_checks_the_card_before_it_builds_the_network(
    changes: dict[str, Any], said: str | None, good: Path, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    from ssfl.deploy import site, wire

    tensors, card = folder.read_model(good / "model.safetensors")
    layout = layout_of(library.load_model(good).network)
    content = wire.pack(layout.flatten(tensors))
    if said is None:
        written = site.keep_model(tmp_path / "kept", json.dumps(card), content)
        assert all(file.is_file() for file in written)
        return
    with pytest.raises(DataError) as caught:
        site.keep_model(tmp_path / "kept", json.dumps(card | changes), content)
    assert said in str(caught.value)
    assert not list(tmp_path.glob("kept*"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("verb", ["predict", "export", "evaluate"])
def test_a_model_that_is_not_finite_says_nothing_about_images(
    verb: str, bad: float, run: Path, good: Path, image: Path, ssfl: Call
) -> None:
    tensors, card = folder.read_model(run / "model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = bad
    save_file(tensors, run / "model.safetensors", {"card": json.dumps(card)})
    code, out, err = ssfl(*commands(run, image, good)[verb])
    assert "not finite" in one_line(code, err)
    assert out == ""
    assert not list(run.parent.glob("exported*"))


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_a_model_whose_output_is_not_finite_says_nothing_about_images(
    verb: str, run: Path, good: Path, image: Path, ssfl: Call
) -> None:
    """All weights are finite, but their products are not."""
    tensors, card = folder.read_model(run / "model.safetensors")
    for tensor in tensors.values():
        tensor.fill_(3e38)
    save_file(tensors, run / "model.safetensors", {"card": json.dumps(card)})
    code, out, err = ssfl(*commands(run, image, good)[verb])
    assert "not finite" in one_line(code, err)
    assert out == ""


def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from(run: Path) -> None:
    saved = checkpoints.newest(run, torch.device("cpu"))
    assert saved is not None
    saved.state.average.fill_(float("nan"))
    for old in (run / "checkpoints").iterdir():
        old.unlink()
    checkpoints.write(run, saved)
    with pytest.raises(RunError) as caught:
        checkpoints.newest(run, torch.device("cpu"))
    assert caught.value.key == "checkpoints"


def test_names_reach_the_terminal_without_orders_to_it(
    run: Path, good: Path, image: Path, ssfl: Call
) -> None:
    with_card(run, classes=[f"{ESCAPE}{number}" for number in range(10)])
    file = image.rename(image.with_name(f"{ESCAPE}.png"))
    code, out, _ = ssfl("predict", str(run), str(file))
    assert code == 0
    assert "\x1b" not in out
    assert "red" in out
    missing = image.with_name(f"{ESCAPE}-missing.png")
    assert "\x1b" not in one_line(*ssfl("predict", str(run), str(missing))[::2])
    events = (run / "events.jsonl").read_text().splitlines()
    changed = json.dumps(json.loads(events[0]) | {"loss": ESCAPE + "x" * 10**6})
    (run / "events.jsonl").write_text("\n".join([changed, *events[1:]]) + "\n")
    code, out, _ = ssfl("compare", str(good), str(run))
    assert code == 1
    assert "\x1b" not in out
    assert len(out) < 10_000


def test_a_run_folder_is_for_its_owner_alone(good: Path) -> None:
    assert stat.S_IMODE(good.stat().st_mode) == 0o700


def limited() -> None:
    """As little memory as predict needs, torch included."""
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from ssfl.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv, code, err = ["ssfl", *words], 0, io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, err.getvalue()]), flush=True)
"""


@pytest.fixture
def carried_out() -> Iterator[Callable[[list[list[str]]], list[tuple[int, str]]]]:
    """Commands in a process of their own, which ends with the test: exit codes and what was said."""
    processes: list[subprocess.Popen[str]] = []

    def call(commands: list[list[str]]) -> list[tuple[int, str]]:
        words = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)]
        processes.append(
            subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limited
            )
        )
        out, err = finished(processes[-1])
        answers = [tuple(json.loads(line)) for line in out.splitlines()]
        assert len(answers) == len(commands), err
        return answers

    yield call
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_fifo_instead_of_a_file_does_not_block(
    run: Path,
    good: Path,
    tmp_path: Path,
    carried_out: Callable[[list[list[str]]], list[tuple[int, str]]],
) -> None:
    """In a process of its own: what blocks would block the test as well."""
    (tmp_path / "pictures").mkdir()
    os.mkfifo(tmp_path / "pictures" / "scan.png")
    asked = {
        "predict": ["predict", str(run), str(tmp_path / "pictures")],
        "weights": ["run", "--set", f"model.weights={tmp_path / 'pictures' / 'scan.png'}"],
    }
    for file in ("events.jsonl", "summary.json", "split.json"):
        other = Path(shutil.copytree(good, tmp_path / file.replace(".", "-")))
        (other / file).unlink()
        os.mkfifo(other / file)
        asked[file] = ["compare", str(good), str(other)] if file == "events.jsonl" else ["resume", str(other)]
    said = dict(zip(asked, carried_out(list(asked.values())), strict=True))
    assert not any("Traceback" in err for _, err in said.values()), said
    for name, file in (("predict", "scan.png"), ("weights", "scan.png"), ("events.jsonl", "events.jsonl")):
        assert file in one_line(*said[name])
        assert "it is not a regular file" in said[name][1]
    assert said["split.json"][0] == 0  # it is finished, and its split is not needed
