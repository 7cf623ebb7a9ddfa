"""The command that continues a run: it is printed where it works, once, and it works as it is printed."""

import inspect
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ssfl as package
from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.errors import RunError
from ssfl.runs import folder, resuming, surroundings

Call = Callable[..., tuple[int, str, str]]
Make = Callable[..., Config]
FILE = "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
SHORT = [
    word
    for setting in ("federation.rounds=3", "federation.period=2", "run.checkpoint_every=1", "run.device=cpu")
    for word in ("--set", setting)
]


def unfinished(out: Path) -> None:
    """As if the run had been stopped after its last checkpoint."""
    (out / "summary.json").unlink()
    (out / "model.safetensors").rename(out / folder.UNFINISHED)


def printed(message: str) -> list[str]:
    """The words of the one command of `ssfl` that a message names."""
    [command] = re.findall(r"`(ssfl (?:resume|serve) [^`]*)`", message)
    return shlex.split(command)[1:]


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process forget which code was typed, as a new one would."""
    return lambda: monkeypatch.setattr(outside, "_trusted", set())


def test_the_command_names_the_code_of_the_run(ssfl: Call, forget: Callable[[], None]) -> None:
    Path("my code.py").write_text(FILE)
    out = Path("a run")
    assert ssfl("run", *SHORT, "--set", "model.name=my code.py:make", "--out", str(out))[0] == 0
    expected = (out / "model.safetensors").read_bytes()
    code, _, err = ssfl("run", *SHORT, "--out", str(out))
    assert code == 2
    assert "`ssfl" not in err  # it is finished: there is nothing to continue
    unfinished(out)
    forget()
    for call in (["run", *SHORT, "--out", str(out)], ["export", str(out), "m", "--with", "my code.py"]):
        words = printed(ssfl(*call)[2])  # an error, and a warning
        assert words == ["resume", str(out), "--with", "my code.py"]
    forget()
    assert ssfl(*words, "--quiet")[0] == 0
    assert (out / "model.safetensors").read_bytes() == expected


def test_a_run_without_a_model_names_its_code_too(ssfl: Call, forget: Callable[[], None]) -> None:
    Path("mine.py").write_text(FILE)
    assert ssfl("run", *SHORT, "--set", "model.name=mine.py:make", "--out", "run")[0] == 0
    unfinished(Path("run"))
    Path("run", folder.UNFINISHED).unlink()
    forget()
    code, _, err = ssfl("export", "run", "digits")
    assert code == 2
    assert ssfl(*printed(err), "--quiet")[0] == 0


def test_what_cannot_be_continued_has_no_command(ssfl: Call) -> None:
    broken = [*SHORT, "--set", "train.lr=1000", "--set", "train.warmup=0", "--set", "model.norm=none",
              "--set", "federation.period=16", "--out", "run"]  # fmt: skip
    assert ssfl("run", *broken)[0] == 3
    with pytest.raises(RunError) as caught:
        folder.require_free(Path("run"))
    assert (caught.value.key, caught.value.value, caught.value.fix) == ("--out", "run", None)
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/config.toml").write_text("[")
    assert folder.continuing(Path("empty")) is None
    assert folder.continuing(Path("damaged")) is None


def test_an_error_in_the_run_for_comparison_names_one_command_for_the_whole_run(ssfl: Call) -> None:
    out = Path("run")
    assert ssfl("run", *SHORT, "--set", "run.baseline=true", "--out", str(out))[0] == 0
    expected = (out / "model.safetensors").read_bytes()
    unfinished(out)
    shutil.rmtree(out / "baseline" / "checkpoints")
    obstacle = out / "baseline" / folder.UNFINISHED
    obstacle.unlink(missing_ok=True)
    obstacle.mkdir()  # its checkpoint cannot be written
    code, _, err = ssfl("resume", str(out), "--quiet")
    assert code == 2
    assert str(obstacle) in err
    assert printed(err) == ["resume", str(out)]
    obstacle.rmdir()
    assert ssfl(*printed(err), "--quiet")[0] == 0
    assert (out / "model.safetensors").read_bytes() == expected


def test_a_damaged_run_for_comparison_is_played_again(ssfl: Call) -> None:
    out = Path("run")
    assert ssfl("run", *SHORT, "--set", "run.baseline=true", "--out", str(out))[0] == 0
    expected = [(out / name).read_bytes() for name in ("model.safetensors", "baseline/model.safetensors")]
    unfinished(out)
    unfinished(out / "baseline")
    for file in (out / "baseline" / "checkpoints").iterdir():
        file.write_bytes(b"damaged")
    assert ssfl("resume", str(out), "--quiet")[0] == 0
    assert [
        (out / name).read_bytes() for name in ("model.safetensors", "baseline/model.safetensors")
    ] == expected


def test_objects_from_python_are_named_with_the_files_beside_them(quick: Make, tmp_path: Path) -> None:
    config = quick()
    config = replace(config, model=replace(config.model, name="mine.py:make"))
    config = replace(config, data=replace(config.data, name=outside.IN_MEMORY))
    line = resuming.command(config, tmp_path)
    passed: dict[str, object] = {}
    eval(
        line,
        {"ssfl": type("", (), {"resume": lambda path, **more: passed.update(more, path=path)}), "data": 1},
    )
    assert passed == {"path": str(tmp_path), "model": "mine.py:make", "data": 1}
    assert set(passed) <= set(inspect.signature(package.resume).parameters)


@pytest.mark.parametrize("ranks", [("1", "1"), ("3", "3"), ("4", "2")])
def test_torchrun_is_named_in_its_own_processes(
    ranks: tuple[str, str], quick: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick()
    config = replace(config, run=replace(config.run, engine="dist"))
    assert resuming.command(config, tmp_path) == f"ssfl resume {tmp_path}"  # works with one process, too
    monkeypatch.setenv("WORLD_SIZE", ranks[0])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks[1])
    before = {"1": "", "3": "torchrun --nproc-per-node 3 -m ", "4": "torchrun ... -m "}[ranks[0]]
    assert resuming.command(config, tmp_path) == f"{before}ssfl resume {tmp_path}"


def test_memory_that_is_too_small_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert surroundings.is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    assert not surroundings.is_out_of_memory(caught.value)


def served(tmp_path: Path, config: Config, **saved: object) -> list[str]:
    (tmp_path / resuming.SERVE).write_text(
        json.dumps({f"--{key.replace('_', '-')}": v for key, v in saved.items()})
    )
    config = replace(config, run=replace(config.run, engine="sites"))
    return shlex.split(resuming.command(config, tmp_path))


def test_a_centre_is_continued_with_the_options_that_it_was_started_with(quick: Make, tmp_path: Path) -> None:
    begun = ["ssfl", "serve", "--resume", str(tmp_path)]
    assert served(tmp_path, quick(), keys="my keys", port=8444) == [
        *begun,
        "--keys",
        "my keys",
        "--port",
        "8444",
    ]
    assert served(tmp_path, quick(), insecure=True, sites=2) == [*begun, "--insecure", "--sites", "2"]
    # what no centre writes is not repeated, and the keys are asked for
    assert served(tmp_path, quick(), keys=3, port="1; rm", with_=["evil.py"]) == [*begun, "--keys", "FOLDER"]
    (tmp_path / resuming.SERVE).write_text(json.dumps({resuming.FLOWER: 3}))
    config = replace(quick(), run=replace(quick().run, engine="sites"))
    settings = shlex.split(resuming.command(config, tmp_path))[-1]
    assert tomllib.loads(settings.replace(" ", "\n")) == {"resume": str(tmp_path), "sites": 3}
    (tmp_path / resuming.SERVE).unlink()
    assert shlex.split(resuming.command(config, tmp_path)) == [*begun, "--keys", "FOLDER"]


def test_the_options_of_a_centre_are_those_of_the_command() -> None:
    pytest.importorskip("flwr")
    from ssfl.cli import deploy
    from ssfl.deploy import serving

    defaults = {
        f"--{name.replace('_', '-')}": parameter.default
        for name, parameter in inspect.signature(deploy.serve).parameters.items()
    }
    assert set(resuming.OPTIONS) < set(defaults)
    assert {key: defaults[key] for key in serving.DEFAULTS} == serving.DEFAULTS
    place = serving.Place(None, "127.0.0.1", 8443, 2, 120, 600)
    assert place.options() == {"--insecure": True, "--sites": 2}
    place = serving.Place(Path("keys"), "0.0.0.0", 9, None, 5, 600, 1, True)
    every = {"--keys": "keys", "--port": 9, "--deadline": 5.0, "--quorum": 1, "--share-model": True}
    assert place.options() == every
    assert all(type(value) is resuming.OPTIONS[key] for key, value in every.items())
