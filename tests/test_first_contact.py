"""What a newcomer meets: help, doctor, a config for a folder of images, completion, mistakes."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Call
from ssfl.cli import verbs
from ssfl.config.loading import load_config
from ssfl.runs import choose

SHORT = ["--set", "federation.rounds=1", "--set", "federation.period=1", "--set", "run.threads=1", "--quiet"]


def draw(folder: str, count: int, size: tuple[int, int] = (12, 12), seed: int = 0) -> None:
    """Noisy grey images; folders called stripes have stripes."""
    generator = np.random.default_rng(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = generator.integers(0, 90, size[::-1], dtype=np.uint8)
        pixels[::3] += 150 * folder.endswith("stripes")
        Image.fromarray(pixels).save(Path(folder, f"{number}.png"))


def test_help_shows_every_verb_in_order_with_an_example(ssfl: Call) -> None:
    code, out, _ = ssfl("--help")
    assert code == 0
    words = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    shown = [word for word in words if word.isalpha()]
    known = [name for names in verbs.GROUPS.values() for name in names]
    assert "Commands:" not in out, "a verb without a group"
    order = [name for name in known if name in shown]
    assert [word for word in shown if word in known] == order
    for verb in order:
        assert f" ssfl {verb}" in out
    assert max(map(len, out.splitlines())) <= 100
    assert ssfl() == (0, out, "")
    assert "preset" in ssfl("run", "--help")[1]
    assert "ssfl paper ls" in ssfl("paper", "--help")[1]


@pytest.mark.parametrize("verb", [["run"], ["board"], ["join"], ["keys", "add"], ["paper", "run"]])
def test_help_of_a_verb_is_plain(ssfl: Call, verb: list[str]) -> None:
    code, out, _ = ssfl(*verb, "--help")
    assert code == 0
    assert out.count("rguments:") == 1
    assert "\\[" not in out
    assert "Example: " in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rnu"], "ssfl has no command 'rnu': did you mean run?"),
        (["dance"], "its commands are doctor, new, "),
        (["paper", "tabel"], "did you mean table?"),
        (["run", "--sett", "a"], "no option --sett, did you mean --set?"),
        (["resume"], "missing argument 'RUN'; for example `ssfl resume runs/quickstart`"),
        (["run", "--out"], "option '--out' requires an argument"),
        (["serve", "--port", "x"], "see `ssfl serve --help`"),
        (["run", "empty"], "empty has neither ssfl.toml nor sub-folders"),
        (["run", "runs/two"], "`ssfl resume runs/two`"),
        (["run", "--set", "users=3"], "such as split.users=3"),
        (["resume", "runs/tow"], "there is no folder runs/tow; the runs here are runs/two"),
        (["resume", "empty"], "empty is not a run folder: it has no config.toml; the runs here are runs/two"),
        (["run", "--rounds", "5"], "no option --rounds: write --set federation.rounds=VALUE"),
        (["resume", "runs/two", "--set", "train.lr=1"], "no option --set"),
        (["contest", "--methods", "sever-only"], "id you mean server-only?"),
        (["run", "sfl.toml"], "did you mean ssfl.toml?"),
        (["new", "mine"], "there is no folder mine: use --images FOLDER"),
        (["new", "empty"], "empty holds no images"),
        (["new", "mine", "--images", "nowhere"], "there is no folder nowhere: check its name"),
        (["new", "mine", "--images", "ssfl.toml"], "ssfl.toml is a file"),
        (["new", ".", "--images", "empty"], "already exists and is not overwritten"),
        (["run", "broken", "--set", "data.broken=stop"], "broken/a/1.png: cannot be decoded"),
        (["new", "mine", "--images", "few"], "2 training images cannot be split"),
        (["new", "ssfl.toml/x", "--images", "good"], "cannot write"),
    ],
)
def test_every_first_mistake_gets_one_clear_line(ssfl: Call, words: list[str], told: str) -> None:
    Path("empty").mkdir()
    Path("runs/two").mkdir(parents=True)
    Path("runs/two/config.toml").write_text("")
    Path("ssfl.toml").write_text("")
    for name in ("a", "b"):
        draw(f"broken/{name}", 3)
        draw(f"few/{name}", 2)
        draw(f"good/{name}", 8)
    Path("broken/a/1.png").write_bytes(b"no image")
    before = sorted(Path().rglob("*"))
    code, out, err = ssfl(*words)
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("ssfl: ")
    assert err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


def test_new_writes_a_config_that_runs_as_it_is(ssfl: Call) -> None:
    draw("scans/train/stripes", 9)
    draw("scans/train/plain", 8, seed=1)
    draw("scans/unlabelled", 25, seed=2)
    draw("scans/test/stripes", 3, seed=3)
    draw("scans/test/plain", 3, seed=4)
    code, out, _ = ssfl("new", "mine", "--images", "scans")
    assert code == 0
    assert "2 classes (plain, stripes)" in out
    assert "17 labelled images, 25 without labels, 6 test images\n" in out
    assert "stored as grey, 12x12 pixels\n" in out
    assert "no patients" in out
    written = Path("mine/ssfl.toml").read_text()
    given = tomllib.loads(written)
    assert given["data"]["path"] == str(Path("scans").absolute())
    assert "size" not in given["data"]
    assert written.count("#") > 15
    assert ssfl("run", "mine", *SHORT)[0] == 0
    assert Path("runs/mine/summary.json").is_file()
    assert ssfl("run", "mine/ssfl.toml", *SHORT)[0] == 0
    assert Path("runs/mine-2/summary.json").is_file()
    assert json.loads(Path("runs/mine/split.json").read_text())["test"] == 6


def test_commands_with_spaces_in_a_path_work_as_they_are_printed(ssfl: Call) -> None:
    for name in ("stripes", "plain"):
        draw(f"my scans/{name}", 9)
    draw("my scans/unlabelled", 25, seed=2)
    code, out, _ = ssfl("new", "my study", "--images", "my scans")
    commands = [shlex.split(line.split("  ")[1]) for line in out.splitlines() if line.startswith("  ssfl ")]
    assert (code, [words[1] for words in commands]) == (0, ["split", "run"])
    assert ssfl(*commands[0][1:])[0] == 0
    assert ssfl(*commands[1][1:], *SHORT, "--out", "a run")[0] == 0
    code, _, err = ssfl("run", "a run")  # a run folder is no config, but has one
    commands = [shlex.split(command) for command in re.findall("`([^`]*)`", err)]
    assert (code, [words[1] for words in commands]) == (2, ["resume", "run"])
    assert ssfl(*commands[0][1:])[0] == 0
    assert ssfl(*commands[1][1:], "--out", "repeated", "--quiet")[0] == 0
    assert Path("repeated/model.safetensors").read_bytes() == Path("a run/model.safetensors").read_bytes()


def test_a_name_that_is_not_utf8_is_what_must_be_changed(ssfl: Call) -> None:
    images = os.fsdecode(b"caf\xe9")
    try:
        draw(f"{images}/stripes", 9)
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    draw(f"{images}/plain", 9)
    code, _, err = ssfl("new", "mine", "--images", images)
    assert (code, err.count("\n")) == (2, 1)
    assert "UTF-8" in err
    assert "another DIR" not in err


def test_a_class_without_test_images_is_told_wherever_images_are_counted(ssfl: Call) -> None:
    for seed, name in enumerate(("plain", "stripes", "rare")):
        draw(f"scans/train/{name}", 8, seed=seed)
    for name in ("plain", "stripes"):
        draw(f"scans/test/{name}", 2, seed=3)
    told = "1 of 3 classes have no test images (rare), so the accuracy does not include these classes"
    assert f"  {told}\n" in ssfl("new", "mine", "--images", "scans")[1]
    assert f"\n{told}\n" in ssfl("split", "mine")[1]
    code, _, err = ssfl("run", "mine", *SHORT, "--set", "train.warmup=0")
    assert code == 0
    assert f"ssfl: warning: {told}; add test images\n" in err
    assert ssfl("report", "runs/mine")[0] == 0
    assert f"{told}." in Path("runs/mine/report.html").read_text()


def test_sub_folders_of_unlabelled_are_users_and_loose_files_one_more(ssfl: Call) -> None:
    for seed, name in enumerate(("plain", "stripes", "unlabelled/a", "unlabelled/b/c", "unlabelled")):
        draw(f"scans/{name}", 8 + seed, seed=seed)
    told = (
        "12 images are in unlabelled/ itself, not in one of its sub-folders; together they form one more user"
    )
    out = ssfl("new", "mine", "--images", "scans")[1]
    assert "3 users, one for each sub-folder of unlabelled/ (a, b, loose files)" in out
    assert f"  {told}\n" in out
    assert load_config("mine").split.users == 3
    code, out, _ = ssfl("split", "mine")
    assert code == 0
    assert "3 users" in out
    assert [line.split()[2] for line in out.splitlines() if line.startswith("user ")][:3] == [
        "10",
        "11",
        "12",
    ]
    code, _, err = ssfl("run", "mine", *SHORT, "--set", "train.warmup=0")
    assert code == 0
    assert f"ssfl: warning: {told}\n" in err
    described = json.loads(Path("runs/mine/split.json").read_text())
    assert described["names"] == ["a", "b", "loose files"]
    assert described["sizes"] == [10, 11, 12]
    assert ssfl("report", "runs/mine")[0] == 0
    page = Path("runs/mine/report.html").read_text()
    assert "The 3 users (a, b, loose files) have 10 to 12 images each" in page
    assert "The 3 users have their own images." in page


def test_users_that_contradict_the_sub_folders_are_refused(ssfl: Call) -> None:
    for seed, name in enumerate(("plain", "stripes", "unlabelled/a", "unlabelled/b")):
        draw(f"scans/{name}", 8, seed=seed)
    code, _, err = ssfl("split", "own", "--set", "data.path=scans", "--set", "split.users=5")
    assert (code, err.count("\n")) == (2, 1)
    assert "split.users = 5, but unlabelled/ has a sub-folder for each of 2 users" in err
    assert ssfl("split", "own", "--set", "data.path=scans", "--set", "split.users=2")[0] == 0
    code, _, err = ssfl("run", "own", "--set", "data.path=scans", "--set", "federation.participants=3")
    assert (code, err.count("\n")) == (2, 1)
    assert "federation.participants = 3" in err
    assert "split.users = 2" in err
    Path("scans/unlabelled/empty").mkdir()
    code, _, err = ssfl("split", "own", "--set", "data.path=scans")
    assert (code, err) == (
        2,
        "ssfl: scans/unlabelled/empty: holds no images; add some or remove the folder\n",
    )


def test_new_fits_users_and_size_to_the_images(ssfl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_pretrained", lambda: False)
    draw("odd/stripes", 3, (40, 30))
    draw("odd/pla\nin", 4, (90, 80), seed=1)
    code, out, _ = ssfl("new", "odd")
    assert code == 0
    assert "pla?in" in out
    assert "40x30 to 90x80 pixels\n" in out
    assert "images of 64x64 pixels (40x30 to 90x80 in the files)" in out
    config = load_config("odd")
    assert config.data.size == 64
    assert config.split.users < 10
    if not torch.cuda.is_available():  # a round that a CPU plays in seconds
        assert config.model.name == "small"
        assert (config.federation.period, config.train.batch_size) == (2, 8)
    assert ssfl("split", "odd")[0] == 0
    assert ssfl("new", "odd")[0] == 2


def test_commented_settings_of_a_new_config_are_true(ssfl: Call) -> None:
    """Taking the # away from a line gives a setting that exists."""
    draw("scans/a", 8)
    draw("scans/b", 8)
    assert ssfl("new", "scans")[0] == 0
    lines = Path("scans/ssfl.toml").read_text().splitlines()
    found = 0
    for place, line in enumerate(lines):
        if line.startswith("# ") and " = " in line:
            found += 1
            changed = [*lines[:place], line[2:], *lines[place + 1 :]]
            Path("changed.toml").write_text("\n".join(changed))
            load_config("changed.toml")
    assert found >= 6


def test_doctor_says_what_is_here_and_what_to_run_first(ssfl: Call) -> None:
    Path("data/cifar10").mkdir(parents=True)
    Path("data/cifar10/cifar-10-binary.tar.gz").write_bytes(b"")
    np.savez("data/mine.npz", x=np.zeros(1))
    code, out, _ = ssfl("doctor")
    assert code == 0
    assert "GiB memory free" in out
    assert "cifar10  found in data/cifar10/cifar-10-binary.tar.gz" in out
    assert "--set data.name=svhn --set data.download=true" in out
    assert "ssfl run --set data.path=data/mine.npz" in out
    assert "run first\n  ssfl run " in out
    assert "delete it with `rm -r " in out
    code, out, _ = ssfl("doctor", "--json")
    told = json.loads(out)
    assert (code, told["broken"], told["folder"]["writable"]) == (0, [], True)
    assert set(told["extras"]) == {"pretrained", "report", "board", "track", "privacy", "flower"}


def test_doctor_tells_what_is_missing_or_broken(tmp_path: Path) -> None:
    """A real process in which torch cannot be imported: a torn one stands before it."""
    (tmp_path / "torch.py").write_text("raise ImportError('torn')")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    done = subprocess.run(
        [sys.executable, "-m", "ssfl", "doctor"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "broken: torch cannot be imported (torn)" in done.stdout
    assert done.stderr == ""


def completed(*words: str, cwd: Path) -> list[str]:
    environment = os.environ | {
        "_SSFL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ssfl"], capture_output=True, text=True, env=environment, cwd=cwd, check=True
    )
    return done.stdout.split()


def test_the_shell_completes_verbs_settings_and_runs(tmp_path: Path) -> None:
    for name in ("runs/one", "runs/two", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/one/config.toml").write_text("")
    (tmp_path / "other/ssfl.toml").write_text("")
    assert completed("ssfl", "res", cwd=tmp_path) == ["resume"]
    assert completed("ssfl", "run", "--set", "split.use", cwd=tmp_path)[0] == "split.users="
    assert completed("ssfl", "run", "--set", "run.engine=v", cwd=tmp_path) == ["run.engine=vmap"]
    assert completed("ssfl", "resume", "runs/", cwd=tmp_path) == ["runs/one", "runs/two/"]
    assert completed("ssfl", "run", "o", cwd=tmp_path) == ["own", "other/"]
    assert completed("ssfl", "run", "other/", cwd=tmp_path) == ["other/ssfl.toml"]
