"""The network, the data and the method of examples/own/ in a real federation: two sites over the loopback."""

import re
from pathlib import Path

import pytest

from documents import ROOT
from ssfl.deploy.images import Loaded
from ssfl.errors import ConfigError, DataError
from ssfl.runs import folder
from stage import SHORT, Stage, free_port

OWN = ROOT / "examples/own"
CODE = [word for name in ("vit.py", "adamatch.py") for word in ("--with", OWN / name)]


@pytest.mark.slow
def test_own_network_data_and_method_in_a_real_federation(tmp_path: Path) -> None:
    stage, port = Stage(tmp_path), free_port()
    own = [word for one in [
        f"model.name={OWN / 'vit.py'}:make", f"method.name={OWN / 'adamatch.py'}:AdaMatch", "data.size=32",
        *(one for one in SHORT if not one.startswith("method.")),
    ] for word in ("--set", one)]  # fmt: skip
    try:
        centre = stage.ssfl(
            "serve", "serve", "--data", f"{OWN / 'data.py'}:labelled", "--insecure", "--sites", 2, "--port",
            port, "--out", tmp_path / "run", *own,
        )  # fmt: skip
        stage.until("serve", "listening")
        join = [
            "join", f"127.0.0.1:{port}", "--data", f"{OWN / 'data.py'}:unlabelled", "--insecure",
            "--device", "cpu", "--threads", 1,
        ]  # fmt: skip
        stage.ssfl("a", *join, "--name", "a", *CODE)
        other = tmp_path / "other" / "adamatch.py"
        other.parent.mkdir()
        other.write_text((OWN / "adamatch.py").read_text() + "# another digest\n")
        changed = stage.ssfl("changed", *join, "--name", "b", *CODE[:2], "--with", other)
        assert stage.ended(changed) == 2
        assert "adamatch.py" in stage.said("changed").splitlines()[-1]
        stage.until("serve", "adamatch.py:AdaMatch")  # the centre is told which file
        stage.ssfl("b", *join, "--name", "b", *CODE)
        assert stage.ended(centre) == 0, stage.said("serve")
    finally:
        for process in stage.started:
            process.kill()
    events = list(folder.read_events(tmp_path / "run"))
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["returned"] for event in rounds] == [[0, 1]] * 3
    assert re.search(r"1[ ,]?300 images", stage.said("a"))


def test_a_function_that_returns_something_else_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def colour(): return np.zeros((5, 9, 9, 3), np.uint8)\n"
        "def words(): return 'images'\n"
        "def fails(): raise OSError('no scanner')\n"
        "number = 3\n"
    )
    assert Loaded(f"{file}:colour").read((3, 8, 8), 255, print).shape == (5, 3, 8, 8)
    with pytest.raises(DataError):
        Loaded(f"{file}:colour").read((1, 8, 8), 255, print)
    for name in ("words", "fails", "number", "none"):
        with pytest.raises(ConfigError):
            Loaded(f"{file}:{name}")
