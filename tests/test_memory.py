"""What would not fit is refused before it is begun."""

import sys
from pathlib import Path

import pytest
import torch

from ssfl.cli import main
from ssfl.config.loading import load_config
from ssfl.engines import memory
from ssfl.runs import assemble


def test_momentum_per_user_that_does_not_fit_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "free", lambda device: 1 << 20)
    sets = ["federation.rounds=1", "federation.period=1", "run.device=cpu", "run.threads=1"]
    given = [word for setting in sets for word in ("--set", setting)]
    call = ["ssfl", "run", *given, "--quiet", "--out", "run", "--set"]
    monkeypatch.setattr(sys, "argv", [*call, "train.momentum_policy=user"])
    with pytest.raises(SystemExit) as stop:
        main.main()
    told = capsys.readouterr().err
    # 11 rows of 10,026 numbers of 4 bytes, three times: the state, and its bytes twice while it is saved
    assert stop.value.code == 2
    for words in ("train.momentum_policy = 'user'", "10 users", "1.3 MiB", "1.0 MiB", "=reset"):
        assert words in told
    assert told.count("\n") == 1
    assert not Path("run").exists()
    monkeypatch.setattr(sys, "argv", [*call, "train.momentum_policy=slot"])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert "10 participants" in capsys.readouterr().err
    monkeypatch.setattr(
        sys, "argv", [*call, "train.momentum_policy=slot", "--set", "federation.participants=5"]
    )
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 0
    assert Path("run/summary.json").is_file()


def test_free_memory_is_the_machines_or_the_containers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    assert memory.free(cpu) > 0
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:   700 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("200000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 5000\n")
    assert memory.free(cpu) == 700 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    assert memory.free(cpu) == 305_000


@pytest.mark.parametrize(
    ("users", "fit", "expected"), [(10, 100, 10), (470, 300, 235), (470, 100, 94), (7, 3, 3), (5, 0, 1)]
)
def test_users_train_together_in_even_parts_that_fit(
    monkeypatch: pytest.MonkeyPatch, users: int, fit: int, expected: int
) -> None:
    monkeypatch.setattr(memory, "free", lambda device: int(fit * 1000 / 0.7) + 1)
    assert memory.share(users, 1000, torch.device("cpu")) == expected


def test_long_steps_of_a_cpu_go_user_by_user(patterns: Path) -> None:
    def chosen(*settings: str) -> tuple[str, int]:
        common = [f"data.path={patterns}", "split.users=4", "split.server_labels=16", "run.device=cpu"]
        run = assemble.make(load_config("own", [*common, "run.threads=1", *settings])).config.run
        return run.engine, run.users_at_once or 0

    assert chosen("model.name=small", "train.batch_size=16") == ("vmap", 4)
    assert chosen("model.name=cnn", "train.batch_size=16") == ("loop", 4)
    assert chosen("model.name=cnn", "run.engine=vmap", "run.users_at_once=3") == ("vmap", 3)
