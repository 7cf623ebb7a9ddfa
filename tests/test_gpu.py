"""On a GPU: the same draws and views as on the CPU, the same rounds, the same bytes after a resume."""

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssfl
from ssfl import methods
from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.engines.vmap import Vmap
from ssfl.engines.work import positions
from ssfl.errors import SsflWarning
from ssfl.runs import assemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
Make = Callable[..., Config]


def test_draws_and_batches_are_bit_equal() -> None:
    keys = torch.arange(1000) * 12345 + draws.key(1, "strong")
    assert torch.equal(draws.bits(keys.cuda(), 7).cpu(), draws.bits(keys, 7))
    users, sizes = torch.arange(50), torch.arange(50) * 3 + 1
    ours = positions(5, users, sizes, 100, 64)
    assert torch.equal(positions(5, users.cuda(), sizes.cuda(), 100, 64).cpu(), ours)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_float64_rounds_are_the_cpus(quick: Make, engine: str, norm: str) -> None:
    settings = [f"run.engine={engine}", f"model.norm={norm}", "train.precision=float64", "train.lr=0.05",
                "method.threshold=0.105"]  # fmt: skip
    rows, masks = [], []
    for device in ("cpu", "cuda"):
        sim = assemble.make(quick(f"run.device={device}", *settings))
        state = sim.initial()
        for _ in range(4):
            state, events = sim.play(state)
            masks.append(events[0]["user_mask_rate"])
        rows.append(state.average.cpu())
    told = torch.tensor(masks, dtype=torch.float64)
    assert torch.allclose(told[:4], told[4:], rtol=1e-12, atol=0)  # a mean may be rounded otherwise
    assert sum(masks[3]) > 0
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 1e-6


@pytest.mark.parametrize("name", ["anchored", "semifl", "fl2", "cbafed", "fedprox", "rscfed", "freematch"])
def test_methods_that_look_before_they_train_do_on_a_gpu_as_on_a_cpu(quick: Make, name: str) -> None:
    settings = [f"method.name={name}", "run.engine=vmap", "train.precision=float64", "federation.dropout=0.3"]
    if hasattr(methods.find(name), "threshold"):
        settings.append("method.threshold=0.105")
    rows = []
    for device in ("cpu", "cuda"):
        sim = assemble.make(quick(f"run.device={device}", *settings))
        state = sim.initial()
        for _ in range(3):
            state, events = sim.play(state)
        assert events[0]["mask_rate"] > 0
        rows.append(state.average.cpu())
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 1e-6


@pytest.mark.parametrize("name", ["alternate", "anchored", "semifl"])
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_users_with_different_numbers_of_steps_do_on_a_gpu_as_on_a_cpu(
    quick: Make, name: str, compiled: str
) -> None:
    """Also inside the recorded step: rounds whose longest user differs share one recording."""
    settings = [f"method.name={name}", "run.engine=vmap", "train.precision=float64", "model.norm=batch",
                "method.threshold=0.105", "federation.local_epochs=0.5", "federation.participants=3",
                "split.scheme=dirichlet", "split.alpha=1", "train.momentum_policy=user",
                "train.server_batch_size=20", "train.server_steps=4"]  # fmt: skip
    rows, steps = [], []
    for device in ("cpu", "cuda"):
        how = [f"run.device={device}", f"run.compile={compiled if device == 'cuda' else 'false'}"]
        sim = assemble.make(quick(*how, *settings))
        state = sim.initial()
        for _ in range(4):
            state, events = sim.play(state)
            steps.append(events[0]["steps"])
        rows.append(state.average.cpu())
    assert steps[:4] == pytest.approx(steps[4:])
    assert len(set(steps[:4])) > 1
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 1e-6


@pytest.mark.parametrize("settings", [["method.name=grouping"], ["method.name=crl-gn", "run.users_at_once=2"],
                                      ["method.name=grouping", "federation.head_start=0.3"],
                                      ["method.name=grouping", "method.server_replicas=true",
                                       "federation.dropout=0.5"]])  # fmt: skip
def test_a_server_that_trains_next_to_the_users_gives_the_same_bytes(
    quick: Make, settings: list[str]
) -> None:
    rows = []
    for beside in (True, False):
        sim = assemble.make(quick("run.device=cuda", "run.engine=vmap", *settings))
        assert isinstance(sim.engine, Vmap)
        assert sim.engine.side is not None
        if not beside:
            sim.engine.side = None
        state = sim.initial()
        for _ in range(6):
            state, _ = sim.play(state)
        rows.append(torch.cat([state.streams.flatten(), state.average, state.momentum.flatten()]).cpu())
    assert torch.equal(*rows)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_same_bytes_again_and_after_a_resume(quick: Make, tmp_path: Path, engine: str) -> None:
    config = quick(f"run.engine={engine}", "run.device=cuda", "run.checkpoint_every=2", "federation.rounds=6")
    first, second = (ssfl.run(config, tmp_path / name).path for name in ("a", "b"))
    model = (first / "model.safetensors").read_bytes()
    assert (second / "model.safetensors").read_bytes() == model
    for name in ("summary.json", "model.safetensors"):
        (second / name).unlink()
    sorted((second / "checkpoints").iterdir())[-1].unlink()
    ssfl.resume(second)
    assert (second / "model.safetensors").read_bytes() == model


class Small(nn.Module):
    """Attention, batch normalisation, dropout and a frozen part, as modules from outside have them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 16, 2, 2), nn.BatchNorm2d(16)).requires_grad_(False)
        self.conv, self.norm = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.trunk(x))).flatten(2).mT
        return self.fc(self.block(x).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_guards_evaluation_is_the_plain_one_within_bfloat16(quick: Make, engine: str) -> None:
    sim = assemble.make(
        quick(f"run.engine={engine}", "model.norm=batch", "train.precision=bfloat16", "run.device=cuda")
    )
    state = sim.initial()
    for _ in range(3):
        state, _ = sim.play(state)
    places, labels = sim._server_places(None)
    plain = sim.score(state.average, sim.pool.images[places], labels)
    for most in (None, 30, None):
        again = sim.server_score(state.average, most)
    assert abs(again.loss - plain.loss) < 0.02 * plain.loss
    assert math.isfinite(sim.server_score(1000 * state.average).loss)
    assert abs(again.accuracy - plain.accuracy) <= 0.05


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_module_from_outside_does_on_a_gpu_as_on_a_cpu(quick: Make, engine: str) -> None:
    settings = [f"run.engine={engine}", "train.precision=float64", "method.threshold=0.105"]
    rows = []
    for device in ("cpu", "cuda"):
        sim = assemble.make(quick(f"run.device={device}", *settings), Small)
        state = sim.initial()
        for _ in range(3):
            state, _ = sim.play(state)
        rows.append(state.average.cpu())
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 1e-6


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_module_from_outside_runs_inside_the_graph(quick: Make, precision: str) -> None:
    config = quick("run.device=cuda", "run.engine=vmap", "run.compile=false", f"train.precision={precision}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SsflWarning)
        sim = assemble.make(config, Small)
        state, _ = sim.play(sim.initial())
    assert isinstance(sim.engine, Vmap)
    assert all(recorded.graph is not None for recorded in sim.engine._recorded.values())
    assert bool(state.average.isfinite().all())


def test_views_without_kernels_are_made_by_compiled_code(quick: Make) -> None:
    """A part that cannot be compiled would be announced by a warning."""
    settings = ["run.device=cuda", "run.engine=vmap", "run.compile=true", "data.views=semifl"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SsflWarning)
        sim = assemble.make(quick(*settings))
        state, _ = sim.play(sim.initial())
    assert bool(state.average.isfinite().all())


FIRST_ROUND = """
import hashlib, json, sys, time
import torch
from ssfl.config.loading import load_config
from ssfl.runs import assemble
from ssfl.runs.surroundings import reproducible
from torch._dynamo.utils import counters

torch.zeros(1, device="cuda")
with reproducible():
    sim = assemble.make(load_config("quickstart", sys.argv[1:]))
    state = sim.initial()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        state, _ = sim.play(state)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 3))
digest = hashlib.sha256(state.average.cpu().numpy().tobytes()).hexdigest()
print(json.dumps({"digest": digest, "rounds": seconds, **counters["inductor"], **counters["aot_autograd"]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", [("small", "none"), ("resnet18", "group"), ("resnet18", "batch")])
def test_a_warm_and_a_copied_compile_cache_give_the_same_bytes(
    network: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m pytest -m slow tests/test_gpu.py -k compile_cache` prints the seconds of each."""
    settings = ["run.device=cuda", "run.engine=vmap", "run.compile=true", "federation.rounds=4",
                "federation.period=4", "train.batch_size=32", f"model.name={network[0]}",
                f"model.norm={network[1]}"]  # fmt: skip

    def called(cache: str, *words: str) -> str:
        places = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
        env = {name: value for name, value in os.environ.items() if name not in places}
        done = subprocess.run(
            [sys.executable, *words],
            env=env | {"SSFL_CACHE": str(tmp_path / cache), "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def trained(cache: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(called(cache, "-c", FIRST_ROUND, *settings).splitlines()[-1])
        return told

    (tmp_path / "one").mkdir(mode=0o700)
    cold, warm = trained("one"), trained("one")
    saved = called("one", "-m", "ssfl", "cache", "save", str(tmp_path / "compiled.zip"))
    called("two", "-m", "ssfl", "cache", "load", str(tmp_path / "compiled.zip"))
    copied, again = trained("two"), trained("three")
    with capsys.disabled():
        print(f"\n{'-'.join(network)}: {saved.strip()}")
        for name, run in (("cold", cold), ("warm", warm), ("copied", copied), ("cold again", again)):
            cached = {key: count for key, count in run.items() if "cache" in key}
            print(f"  {name:10} rounds of {run['rounds']} s, {cached}")
    assert cold["digest"] == warm["digest"] == copied["digest"] == again["digest"]
    for run in (warm, copied):
        assert run["fxgraph_cache_hit"] > 0
        assert run.get("fxgraph_cache_miss", 0) == run.get("fxgraph_cache_bypass", 0) == 0
        assert run.get("autograd_cache_miss", 0) == run.get("autograd_cache_bypass", 0) == 0
    kernels = [path for path in (tmp_path / "two" / "compile").rglob("*.cubin") if "triton" in path.parts]
    assert kernels
