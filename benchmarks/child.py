"""Runs one contestant alone in this process: `python -m benchmarks.child SPEC.json`. `contest.py` starts
it."""

import importlib
import importlib.metadata
import json
import os
import platform
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks import jobs


def home(contestant: str) -> str:
    """Returns the name of the module that runs a contestant, such as "ours" or "pfl_peer"."""
    if contestant.partition("-")[0] in ("loop", "vmap"):
        return "ours"
    return {"pfl": "pfl_peer", "flower": "flower_peer"}[contestant.partition("-")[0]]


def main() -> None:
    """Runs the contestant that SPEC.json describes, and writes its measurements as JSON."""
    spec = jobs.Spec(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if home(spec.contestant) == "pfl_peer":
        os.environ["PFL_PYTORCH_DEVICE"] = spec.device
    measured: jobs.Measured = importlib.import_module(f"benchmarks.{home(spec.contestant)}").run(spec)
    if int(os.environ.get("RANK", "0")):
        return
    import torch

    measured.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if spec.device != "cpu" and home(spec.contestant) != "flower_peer":
        measured.gpu_memory = torch.cuda.max_memory_allocated() / 2**20
    wanted = {"ours": [], "pfl_peer": ["pfl"], "flower_peer": ["flwr", "ray"]}[home(spec.contestant)]
    measured.versions = {"python": platform.python_version(), "torch": torch.__version__}
    measured.versions |= {name: importlib.metadata.version(name) for name in wanted}
    Path(spec.out).write_text(json.dumps(asdict(measured)), "utf-8")


if __name__ == "__main__":
    main()
