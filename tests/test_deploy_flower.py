"""The same federation under Flower's own commands: SuperLink, SuperNodes and `flwr run`."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from ssfl.runs import folder
from ssfl.runs.predict import predict
from stage import NAMES, SHORT, Stage, checkpoint, config_of, files, free_port, same, simulated
from waiting import wait_until

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower"


@pytest.mark.slow
def test_flowers_own_commands_end_with_the_same_bytes(folders: Path, stage: Stage) -> None:
    programs, port, out = Path(sys.executable).parent, free_port(), stage.folder / "run"
    home = stage.folder / "flower"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    shutil.copytree(EXAMPLE, stage.folder / "app")
    around = {"FLWR_HOME": str(home), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
              "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # fmt: skip
    alone = ["--insecure", "--host", "127.0.0.1"]
    stage.start("link", programs / "flower-superlink", *alone, "--port", port,
                "--disable-runtime-dependency-installation", **around)  # fmt: skip
    stage.until("link", "Uvicorn running")
    for name in NAMES:
        node = f'data="{folders / name}" name="{name}" device="cpu" threads=1'
        stage.start(name, programs / "flower-supernode", *alone, "--superlink", f"127.0.0.1:{port}", "--port",
                    free_port(), "--node-config", node, **around)  # fmt: skip
    settings = " ".join([*SHORT, "federation.rounds=2"])
    asked = f'data="{folders / "labelled"}" out="{out}" sites=3 deadline=300.0 set="{settings}"'
    run = stage.start("run", programs / "flwr", "run", stage.folder / "app", "here", "--stream",
                      "--run-config", asked, **around)  # fmt: skip
    assert stage.ended(run) == 0, stage.said("run")
    # Flower's stream of the log may end before the log and before the run: the run folder tells.
    wait_until(lambda: folder.read_summary(out) is not None, lambda: stage.said("run"), 120, stage.logs)
    rounds = [event for event in folder.read_events(out) if event.get("event") == "round"]
    assert [len(event["returned"]) for event in rounds] == [3, 3]
    assert same(checkpoint(out), simulated(config_of(folders, ["federation.rounds=2"]), folders))
    assert len(predict(out, [folders / "bonn"])) == len(files(folders, "bonn"))
