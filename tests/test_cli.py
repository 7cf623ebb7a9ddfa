"""The command line as a person meets it: output, exit codes, one clear line for every mistake."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import Call
from ssfl.config.settings import SECTIONS

SHORT = [
    "--set", "federation.rounds=2", "--set", "federation.period=2", "--set", "train.batch_size=8",
    "--set", "run.threads=1",
]  # fmt: skip


def test_the_quickstart_writes_a_run_folder_and_plain_lines(ssfl: Call) -> None:
    code, out, err = ssfl("run", *SHORT)
    assert code == 0
    assert "accuracy" in out
    assert "runs/quickstart" in out
    assert "round 2/2" in err
    code, out, _ = ssfl("run", *SHORT, "--quiet")
    assert (code, out) == (0, "")
    assert Path("runs/quickstart-2/summary.json").is_file()


def test_a_run_that_went_wrong_says_so_in_its_last_line(ssfl: Call) -> None:
    """SHORT's two rounds are too early to tell, and nobody is 0.9999 sure in four."""
    code, _, err = ssfl("run", *SHORT)
    assert (code, "`ssfl report" in err) == (0, False)
    code, _, err = ssfl("run", *SHORT, "--set", "federation.rounds=4", "--set", "method.threshold=0.9999")
    assert code == 0
    told = err.splitlines()[-1]
    for part in (" 0.0 % ", "method.threshold", "`ssfl report runs/quickstart-2`"):
        assert part in told


def test_a_contests_methods_may_be_given_one_by_one(ssfl: Call) -> None:
    code, out, _ = ssfl("contest", "--no-tune", *SHORT, "--methods", "alternate",
                        "--methods", "server-only,alternate", "--seeds", "1", "--quiet")  # fmt: skip
    assert code == 0
    assert out.count("| alternate ") == out.count("| server-only ") == 1


def test_json_prints_the_summary_alone(ssfl: Call) -> None:
    code, out, err = ssfl("run", *SHORT, "--json", "--out", "a")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(Path("a/summary.json").read_text())
    code, again, _ = ssfl("resume", "a", "--json")
    assert (code, again) == (0, out)


def test_bfloat16_is_quiet_on_a_cpu_without_it_and_little_is_imported(tmp_path: Path) -> None:
    """torch tells of its other way once a process, so this needs a process of its own.

    Importing torch's compiler or scikit-learn would double the time until the first round.
    """
    more = ["train.precision=bfloat16", "run.device=cpu", "train.batch_size=16"]
    sets = [word for setting in more for word in ("--set", setting)]
    code = """
import sys
from ssfl.cli.main import main
words = sys.argv
for engine in ("vmap", "loop"):
    sys.argv = [*words, "--set", f"run.engine={engine}", "--out", engine]
    try:
        main()
    except SystemExit as end:
        assert not end.code
print(*sorted({"torch._dynamo", "torch._inductor", "sklearn"} & sys.modules.keys()), end="")
"""
    command = [sys.executable, "-c", code, "run", *SHORT, *sets, "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for engine in ("vmap", "loop"):
        assert (tmp_path / engine / "model.safetensors").is_file()


def test_split_shows_who_gets_what(ssfl: Call) -> None:
    code, out, _ = ssfl("split", "--set", "split.skew=1")
    assert code == 0
    assert "R = 1.0000" in out
    assert "100 % are 0" in out
    assert out.count("user ") >= 10
    code, out, _ = ssfl("split", "--set", "split.users=40", "--json")
    assert len(json.loads(out)["sizes"]) == 40


def test_predict_and_export(ssfl: Call, tmp_path: Path) -> None:
    import torch

    import ssfl as library

    ssfl("run", *SHORT, "--out", "a", "--quiet")
    model = library.load_model("a")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    assert torch.allclose(model(pixels[None]), model(pixels[None] / np.float32(255)), atol=1e-5)
    with pytest.raises(ValueError, match=r"\b2\b.*\b255\b"):
        model(torch.tensor([0.0, 2.0]).repeat(32).reshape(1, 1, 8, 8))
    near = torch.full((1, 1, 8, 8), 1 + 1e-6, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(near).sum().backward()
    assert torch.func.vmap(model)(torch.rand(2, 1, 1, 8, 8)).shape == (2, 1, 10)
    Path("scans").mkdir()
    Image.fromarray(pixels).save("scans/one.png")
    Image.fromarray(pixels).resize((64, 64)).convert("RGB").save("scans/two.jpg")
    code, out, _ = ssfl("predict", "a", "scans", "--json")
    assert code == 0
    told = rows = json.loads(out)
    assert [Path(row["file"]).name for row in told] == ["one.png", "two.jpg"]
    shares = model(torch.from_numpy(pixels)[None, None]).detach().softmax(-1)[0]
    assert told[0]["class"] == model.classes[int(shares.argmax())]
    assert told[0]["confidence"] == pytest.approx(float(shares.max()), rel=1e-5)
    code, out, _ = ssfl("predict", "a", "scans/one.png")
    assert out.startswith("scans/one.png\t")
    Path("scans/broken.png").write_bytes(Path("scans/one.png").read_bytes()[:40])
    Path("scans/empty.png").write_bytes(b"")
    code, out, told = ssfl("predict", "a", "scans")
    assert code == 2
    assert out.count("\t") == 4  # the two others all the same
    assert "scans/broken.png: cannot be decoded" in told
    assert "scans/empty.png: cannot be decoded" in told

    code, out, _ = ssfl("export", "a", "out/digits")
    assert code == 0
    assert out.split() == ["out/digits.safetensors", "out/digits.json", "out/digits.pt2"]
    program = torch.export.load("out/digits.pt2").module()
    images = torch.from_numpy(np.stack([pixels] * 5))[:, None]
    torch.testing.assert_close(program(images), model(images))
    card = json.loads(Path("out/digits.json").read_text())
    assert card["classes"] == list("0123456789")
    assert "grey" in card["reading"]
    assert "stretched to width 8, height 8 (bilinear" in card["reading"]
    by_hand = Image.open("scans/two.jpg").convert("L").resize((8, 8), Image.Resampling.BILINEAR)
    scaled = (torch.from_numpy(np.array(by_hand)) / 255 - card["mean"][0]) / card["std"][0]
    sure = model.network(scaled[None, None]).detach().softmax(-1).max()
    assert rows[1]["confidence"] == pytest.approx(float(sure), rel=1e-4)
    assert library.load_model("out/digits.safetensors").classes == model.classes
    assert ssfl("export", "a", "out/digits.pt2")[0] == 2


def test_compare_tells_by_its_exit_code(ssfl: Call) -> None:
    for out in ("a", "b"):
        ssfl("run", *SHORT, "--quiet", "--out", out)
    ssfl("run", *SHORT, "--quiet", "--out", "c", "--set", "run.seed=2")
    assert ssfl("compare", "a", "b")[:2] == (
        0,
        "no difference: both runs have the same events in every round\n",
    )
    code, out, _ = ssfl("compare", "a", "c")
    assert code == 1
    assert "config  run.seed: 1 | 2" in out
    assert "first difference  round 1" in out


def npz(**changes: np.ndarray) -> None:
    arrays = {
        "x_train": np.zeros((8, 8, 8), np.uint8), "y_train": np.arange(8) % 2,
        "x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.arange(2),
    } | changes  # fmt: skip
    np.savez("bad.npz", **arrays)  # type: ignore[arg-type]


def mixed_sizes() -> None:
    for grey, (name, size) in enumerate((("a/1.png", 8), ("a/2.png", 9), ("b/1.png", 8), ("b/2.png", 8))):
        Path("images", name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (size, size), grey).save(Path("images", name))
    Path("images.toml").write_text("[federation]\nrounds = 1")


@pytest.mark.parametrize(
    ("words", "prepare", "told"),
    [
        (["run", "--set", "split.usrs=3"], None, "split.users"),
        (["run", "--set", "split.users=three"], None, "split.users = 'three'"),
        (["run", "--set", "federation.participants=11"], None, "federation.participants = 11"),
        (["run", "--set", "method.name=grouping", "--set", "federation.groups=11"], None, "groups = 11"),
        (["run", "--set", "split.skew=2"], None, "split.skew = 2"),
        (["run", "--set", "method.threshold=2"], None, "method.threshold = 2"),
        (["run", "--set", "split.server_labels=2000"], None, "split.server_labels = 2000"),
        (["run", "--set", "split.users=1400"], None, "split.users"),
        (["run", "--set", "run.device=cuda:7"], None, "run.device = 'cuda:7'"),
        (["run", "nothing"], None, "own, pictures, quickstart"),
        (["run", "--set", "data.name=cifar10"], None, "cifar-10-binary.tar.gz"),
        (["run", "--set", "data.path=no.npz"], None, "no.npz"),
        (["run", "--set", "data.path=bad.npz"], lambda: Path("bad.npz").write_bytes(b""), "bad.npz"),
        (["run", "--set", "data.path=bad.npz"], lambda: Path("bad.npz").write_bytes(b"PK\3\4"), "bad.npz"),
        (["run", "--set", "data.path=bad.npz"], lambda: npz(x_train=np.full((8, 8, 8), np.nan)), "x_train"),
        (["run", "--set", "data.path=bad.npz"],
         lambda: npz(y_train=np.zeros(8, int), y_test=np.zeros(2, int)),
         "bad.npz"),
        (["run", "--set", "data.path=images"], mixed_sizes, "images"),
        (["run", "images.toml", "--set", "data.path=images"], mixed_sizes, "data.size"),
        (["run", "--out", "."], None, "--out"),
        (["run", "--out", "A" * 300], None, "File name too long"),
        (["run", "--set", "run.device=meta"], None, "run.device = 'meta'"),
        (["resume", "nowhere"], None, "nowhere"),
        (["predict", "nowhere", "x.png"], None, "nowhere"),
        (["compare", "nowhere", "nowhere"], None, "nowhere"),
        (["run", "--set", "train.lr=1000", "--set", "model.norm=none", "--set", "train.cycles=0"], None,
         "train.lr"),
    ],
)  # fmt: skip
def test_every_mistake_gets_one_clear_line(
    ssfl: Call, words: list[str], prepare: Callable[[], object] | None, told: str
) -> None:
    if prepare is not None:
        prepare()
    before = sorted(Path().rglob("*"))
    code, out, err = ssfl(*words, *(["--quiet"] if words[0] == "run" else []))
    assert code == (3 if told == "train.lr" else 2)
    assert told in err
    assert err.startswith("ssfl: ")
    assert err.count("\n") == 1
    assert out == ""
    if code == 2:
        assert sorted(Path().rglob("*")) == before


def test_the_version_and_a_split_of_images_that_nobody_labelled(ssfl: Call, patterns: Path) -> None:
    code, out, _ = ssfl("--version")
    assert (code, out.split()[0]) == (0, "ssfl")
    arrays = dict(np.load(patterns))
    arrays["x_unlabelled"] = arrays["x_train"]
    np.savez("mine.npz", **arrays)
    code, out, _ = ssfl("split", "--set", "data.path=mine.npz", "--set", "split.users=3")
    assert code == 0
    assert "240 labelled images" in out
    assert "3 users with equal shares" in out
    assert "skew R is unknown" in out
    code, out, _ = ssfl(
        "split", "--set", "data.path=mine.npz", "--set", "split.users=3", "--set", "split.server_labels=40"
    )
    assert "by skew R = 0.4 (images without labels in equal shares)" in out
    assert "among the 200 images whose class is known" in out
    assert "of known class: " in out


def test_help_is_quick_and_lists_the_verbs() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ssfl", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for verb in ("run", "resume", "split", "predict", "export", "compare"):
        assert verb in shown.stdout
    assert " torch\n" not in shown.stderr


def test_settings_are_explained(ssfl: Call) -> None:
    code, out, _ = ssfl("settings", "threshold")
    assert code == 0
    assert "[method] method.name = anchored: " in out
    assert all(f"  method.threshold = {value}\n" in out for value in (0.8, 0.75, 0.84, 0.95))
    assert "train.lr" not in out
    everything = ssfl("settings")[1]
    assert all(
        f"  {name}.{field.name} = " in everything for name, kind in SECTIONS.items() for field in fields(kind)
    )
    code, _, err = ssfl("settings", "nothing-like-it")
    assert code == 2
    assert err.count("\n") == 1


TYPOS = [
    "run --set splt.users=3",
    "run --set method.name=xyz",
    "run quickstrt",
    "split --set split.skew=2",
    "contest --methods semifi",
    "contest --set train.rl=1",
    "paper show 21 --set splt.users=3",
    "serve --data images --set split.user=3",
]


def test_a_typo_does_not_wait_for_torch() -> None:
    """In one process of its own, because others have imported torch."""
    code = f"""
import sys
from ssfl.cli.main import main
for typo in {TYPOS}:
    sys.argv = ["ssfl", *typo.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, typo
    assert "torch" not in sys.modules, typo
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(TYPOS)
