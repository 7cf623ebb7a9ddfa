"""Measures the time of one training step of all users on this machine, and the least work that a step needs.

  python -m benchmarks.steps [--only NAME ...] [--users C ...] [--device D] [--leave GB] [--profile]
                             [--json FILE]

A step trains on B = 64 images of each of C users. It consists of the choice of images, the weak view and its
forward pass, the strong view with forward and backward pass, and the optimizer. It is timed on the host over
whole rounds of 16 steps, including the wait for the device. `--profile` then shows in which kernels the time
of the users' steps, of the server's steps and of an evaluation is spent.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import report
from benchmarks.jobs import Job, draw_images
from ssfl.config.loading import load_config
from ssfl.models.building import network_of
from ssfl.runs import assemble
from ssfl.runs.result import device_name
from ssfl.runs.surroundings import reproducible
from ssfl.simulate.simulation import Simulation


@dataclass(frozen=True)
class Case:
    """One line of the table: a network, its images, the number of users and the engine."""

    model: str
    norm: str
    shape: tuple[int, ...]
    classes: int
    users: int
    engine: str = "vmap"
    settings: tuple[str, ...] = ()


VIT = f"{Path(__file__).parents[1] / 'examples' / 'own' / 'vit.py'}:make"
CASES = {
    "cnn-47": Case("cnn", "none", (28, 28), 47, 47),
    "cnn-10": Case("cnn", "none", (28, 28), 47, 10),
    "resnet18-10": Case("resnet18", "group", (32, 32, 3), 10, 10),
    "resnet18-bn-10": Case("resnet18", "batch", (32, 32, 3), 10, 10),
    "wrn-bn-10": Case("wide_resnet", "batch", (32, 32, 3), 10, 10),
    "resnet18-470": Case(
        "resnet18", "group", (32, 32, 3), 10, 470, settings=("train.momentum_policy=reset",)
    ),
    "cnn-47-float32": Case("cnn", "none", (28, 28), 47, 47, settings=("train.precision=float32",)),
    "cnn-47-not-compiled": Case("cnn", "none", (28, 28), 47, 47, settings=("run.compile=false",)),
    "cnn-47-loop": Case("cnn", "none", (28, 28), 47, 47, engine="loop"),
    "vit-10": Case(VIT, "none", (32, 32), 10, 10),
    "vit-10-loop": Case(VIT, "none", (32, 32), 10, 10, engine="loop"),
}
STEPS, BATCH, IMAGES = 16, 64, 20_000


def make(case: Case, device: str, folder: Path) -> Simulation:
    """Returns a simulation of the paper's round with random images, ready to run. The speed does not depend
    on the images' content."""
    job = Job("", "", (), 0, IMAGES, case.shape, case.classes)
    folder.mkdir(exist_ok=True)
    data = folder / "random.npz"
    if not data.exists():
        draw_images(job, folder)
    compiled = str(case.engine == "vmap" and device != "cpu").lower()
    return assemble.make(
        load_config(
            "emnist",
            [
                f"data.path={data}", f"model.name={case.model}", f"model.norm={case.norm}",
                f"split.users={case.users}", f"federation.participants={case.users}",
                f"split.server_labels={10 * case.classes}", "method.name=crl-gn",
                f"train.batch_size={BATCH}", f"federation.period={STEPS}", "federation.rounds=100",
                f"run.engine={case.engine}", f"run.device={device}", f"run.compile={compiled}",
                *case.settings,
            ],
        )
    )  # fmt: skip


def wait() -> None:
    """Waits until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    case: Case, device: str, folder: Path, rounds: int, ballast: int, profiled: bool = False
) -> dict[str, Any]:
    """Returns the times of one case: milliseconds of a step of all users, of a step of the server, of a whole
    round and of an evaluation. Also returns the seconds of the first round, the peak GPU memory, and the
    least work (`floor`).

    `ballast` is the number of bytes that were allocated to make the GPU's memory smaller. With `profiled`,
    the result also has the kernels of each part of a round.
    """

    def timed(action: Callable[[], Any]) -> list[float]:
        spent = []
        for _ in range(rounds):
            wait()
            start = time.perf_counter()
            action()
            wait()
            spent.append(time.perf_counter() - start)
        return [1000 * seconds for seconds in spent]

    with reproducible():
        sim = make(case, device, folder)
        state = sim.initial()
        start = time.perf_counter()
        state, _ = sim.play(state)
        wait()
        first = time.perf_counter() - start

        def play() -> None:
            nonlocal state
            state, _ = sim.play(state)

        played = timed(play)
        cohort = sim.plan.cohort(1)
        part = slice(0, sim.config.run.users_at_once)
        users, server = sim.plan.users_work(1, cohort).of(part), sim.plan.server_work(1)
        rows = state.streams[list(cohort.streams[part])]
        rest = torch.zeros_like(rows[:, : sim.layout.weights])
        parts: dict[str, Callable[[], Any]] = {
            "users": lambda: sim.engine.train(rows, rest, users),
            "server": lambda: sim.engine.train(state.average[None], rest[:1], server),
            "evaluation": lambda: sim.evaluate(state),
        }
        together, alone, evaluation = map(timed, parts.values())
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        spent = {name: kernels(part) for name, part in parts.items()} if profiled else None
    slices = case.users / len(rows)
    result = {
        "model": case.model, "norm": case.norm, "users": case.users, "engine": case.engine,
        "users_at_once": sim.config.run.users_at_once,
        "precision": sim.config.train.precision, "compiled": sim.config.run.compile,
        "step_ms": slices * statistics.median(together) / STEPS,
        "step_ms_all": [slices * t / STEPS for t in together],
        "server_step_ms": statistics.median(alone) / STEPS, "round_ms": statistics.median(played),
        "evaluation_ms": statistics.median(evaluation), "first_round_s": first,
        **floor(case, sim),
    }  # fmt: skip
    if peak is not None:
        result["gpu_memory_gb"] = (peak - ballast) / 1e9
        torch.cuda.reset_peak_memory_stats()
    return result | ({"kernels": spent} if spent else {})


def kernels(part: Callable[[], Any], repeats: int = 3) -> list[dict[str, Any]]:
    """Returns the kernels that run in a part of a round, those that take the most time first: the name, the
    milliseconds in one execution of the part, and how often the kernel is called in it. On a CPU, these are
    torch's operations.

    The profiler makes small kernels a little slower, so the sum is not exactly the time of the part.
    """
    part()
    wait()
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            part()
        wait()
    device = "CUDA" if gpu else "CPU"
    rows = [
        {
            "kernel": event.key,
            "ms": (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1000 / repeats,
            "calls": event.count / repeats,
        }
        for event in seen.key_averages()
        if event.device_type.name == device
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def floor(case: Case, sim: Simulation) -> dict[str, float]:
    """Returns the least work of a step of all users: its arithmetic in 10^9 operations ("gigaflop"), and the
    memory traffic of weights and activations in 10^9 bytes ("gigabyte").

    Weights are read twice and written once in bfloat16, gradients are written and read, and the optimizer
    reads and writes float32 weights and momentum. Activations that the backward pass needs are written and
    read once; the weak pass writes and reads as many.
    """
    network = network_of(sim.config, sim.dataset).train()
    one = torch.zeros(1, *sim.dataset.shape)
    kept: dict[int, int] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.numel()
        return saved

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved),
    ):
        logits = network(one, torch.tensor(0))
        forward = counter.get_total_flops()
        logits.sum().backward()
    for parameter in network.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    images = case.users * BATCH
    return {
        "gigaflop": (counter.get_total_flops() + forward) * images / 1e9,
        "gigabyte": (case.users * sim.layout.weights * 26 + images * sum(kept.values()) * 2 * 4) / 1e9,
    }


def main() -> None:
    """Runs the command: measures the chosen cases, and prints and writes the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description="Measure the time of a step."
    )
    parser.add_argument("--only", nargs="+", default=["cnn-47", "cnn-10", "resnet18-10", "cnn-47-loop"])
    parser.add_argument("--users", nargs="+", type=int, help="each case with each of these numbers of users")
    parser.add_argument("--rounds", type=int, default=7, help="the number of timed rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--leave", type=float, help="leave only this many GB of the GPU's memory free")
    parser.add_argument("--profile", action="store_true", help="show which kernels take the time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ballast = torch.empty(0, dtype=torch.int8)
    if options.leave:  # fills memory, as if the GPU had less of it
        much = int(torch.cuda.mem_get_info()[0] - 1e9 * options.leave)
        ballast = torch.empty(much, dtype=torch.int8, device="cuda")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            for users in options.users or [CASES[name].users]:
                case = replace(CASES[name], users=users)
                place = Path(folder) / "x".join(map(str, case.shape))
                row = {"name": name} | measure(
                    case, options.device, place, options.rounds, len(ballast), options.profile
                )
                rows.append(row)
                print(
                    f"{name:20} C={users:<4} {row['step_ms']:8.3f} ms/step  "
                    f"server {row['server_step_ms']:.3f}  round {row['round_ms']:.1f} ms  "
                    f"evaluation {row['evaluation_ms']:.1f} ms  "
                    f"first round {row['first_round_s']:.0f} s  {row['gigaflop']:.0f} GFLOP  "
                    f"{row['gigabyte']:.2f} GB  memory {row.get('gpu_memory_gb', 0):.1f} GB",
                    flush=True,
                )
                for part, spent in row.get("kernels", {}).items():
                    print(f"  {part}: {sum(one['ms'] for one in spent):.2f} ms under the profiler")
                    for one in spent[:10]:
                        print(f"  {one['ms']:10.2f} ms  {one['calls']:7.0f} calls  {one['kernel'][:80]}")
    if options.json:
        where = {"device": device_name(torch.device(options.device)), "torch": torch.__version__}
        report.save(options.json, report.circumstances("benchmarks.steps") | where | {"rows": rows})


if __name__ == "__main__":
    main()
