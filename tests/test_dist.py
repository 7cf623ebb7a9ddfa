"""Users spread over the processes of torchrun: the same training, whatever their number; one rank lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ssfl
from ssfl.config.loading import load_config
from ssfl.errors import ConfigError
from ssfl.runs import folder
from waiting import finished, wait_until

SETTINGS = [
    "run.device=cpu", "train.precision=float64", "federation.rounds=5", "federation.period=2",
    "train.batch_size=16", "method.threshold=0.3", "run.checkpoint_every=1",
]  # fmt: skip
GROUPED = [
    "method.name=grouping", "federation.groups=3", "train.momentum_policy=slot", "run.diversity_every=2",
    "federation.dropout=0.5", "method.threshold=0.3",
]  # fmt: skip


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def torchrun(ranks: int, *more: str) -> list[str]:
    """A command for so many ranks; without --standalone, all torchruns of a machine want port 29500."""
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*head, "-m", "ssfl", *more]


def alike(one: Path, two: Path) -> None:
    a, b = (folder.read_model(path / "model.safetensors")[0] for path in (one, two))
    assert max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b) < 1e-6
    for x, y in zip(folder.read_events(one), folder.read_events(two), strict=True):
        assert x.get("returned") == y.get("returned")
        assert x.get("user_mask_rate") == pytest.approx(y.get("user_mask_rate"))
        assert x.get("user_loss") == pytest.approx(y.get("user_loss"))
        assert x.get("gradient_l2_squared") == pytest.approx(y.get("gradient_l2_squared"))


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """Runs of the loop with given settings, each played once."""
    home = tmp_path_factory.mktemp("loops")

    def played(settings: list[str]) -> Path:
        out = home / settings[0]
        if not out.exists():
            ssfl.run(load_config("quickstart", [*SETTINGS, *settings, "run.engine=loop"]), out)
        return out

    return played


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, GROUPED, id="2"),
        pytest.param(1, GROUPED, id="1", marks=pytest.mark.slow),
        pytest.param(3, GROUPED, id="3", marks=pytest.mark.slow),
        pytest.param(3, ["model.norm=batch"], id="anchored, 3", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_trains_as_the_loop_does(
    ranks: int, settings: list[str], loops: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    """With three groups and half of ten users returning, some ranks have nobody in some rounds."""
    spread = tmp_path / "spread"
    shared = words(*SETTINGS, *settings, "run.engine=dist")
    call = torchrun(ranks, "run", *shared, "--quiet", "--out", str(spread))
    told = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, told.stderr
    loop = loops(settings)
    alike(spread, loop)
    masks = [event["mask_rate"] for event in folder.read_events(loop) if "mask_rate" in event]
    assert 0 < sum(masks) / len(masks) < 1


@pytest.mark.slow
def test_a_lost_rank_stops_the_run_with_a_good_checkpoint_and_another_number_goes_on(tmp_path: Path) -> None:
    shared = words(*SETTINGS, "federation.rounds=40", "run.engine=dist")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(
        torchrun(1, "run", *shared, "--quiet", "--out", str(whole)), check=True, capture_output=True
    )
    process = subprocess.Popen(
        torchrun(3, "run", *shared, "--quiet", "--out", str(broken)), stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: list(broken.glob("checkpoints/*")), "no checkpoint was written")
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    _, told = finished(process)
    assert process.returncode != 0
    assert "ssfl resume" in told
    assert folder.read_summary(broken) is None
    again = subprocess.run(torchrun(2, "resume", str(broken), "--quiet"), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("ranks was 3 and is now 2") == 1
    alike(broken, whole)


def rank_of(parent: int, rank: int) -> int:
    """The process of a rank, among torchrun's children."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"torchrun has no rank {rank}")


@pytest.mark.parametrize("method", ["easgd", "overlap-sgd", "fedmatch"])
def test_methods_whose_state_is_the_users_own_are_refused(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"method.name={method}", "run.engine=dist"])
    assert (caught.value.key, caught.value.value) == ("run.engine", "dist")
    assert caught.value.fix == "run.engine=auto"
    assert method in str(caught.value)
