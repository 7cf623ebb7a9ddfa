"""Runs one contestant (ssfl or another simulator) in its own process, measures its time and memory, and ends
all processes that it started."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.child import home
from benchmarks.jobs import Spec
from benchmarks.machine import Watch, busy
from ssfl.runs import provenance

ROOT = provenance.ROOT
PACKAGES = {"pfl": "pfl", "flower": "flwr"}
"""The Python package that each of the other simulators needs."""
LIMIT = 3600
"""Seconds after which a contestant is stopped."""


def peer(name: str) -> str | None:
    """Returns the name of the other simulator ("peer") in a contestant's name, such as "pfl" for "pfl-2".
    Returns None for ssfl's own engines."""
    return None if home(name) == "ours" else name.partition("-")[0]


def missing(name: str, python: str) -> str | None:
    """Returns the reason why a contestant cannot run on this machine, or None if it can."""
    package = PACKAGES.get(peer(name) or "")
    if package is None:
        return None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([python, "-c", look], cwd=ROOT, env=_environment()).returncode == 0:
        return None
    return f"{package} is not installed (pip install -r benchmarks/requirements-{peer(name)}.txt)"


def run(spec: Spec, python: str, folder: Path, patience: float) -> dict[str, Any]:
    """Runs a contestant. Returns its measurements with its start time and peak memory, or {"failed": reason}.
    It first waits up to `patience` seconds until the machine is idle."""
    result, asked = Path(spec.out), folder / "spec.json"
    result.unlink(missing_ok=True)
    asked.write_text(json.dumps(asdict(spec)), "utf-8")
    processes = spec.contestant.partition("-")[2] if peer(spec.contestant) else ""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [python, *(launch if processes else []), "-m", "benchmarks.child", str(asked)]
    with (folder / f"{spec.contestant}.log").open("w+", encoding="utf-8") as log:
        others, started = busy(patience), time.monotonic()
        child = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=log, stderr=log, start_new_session=True
        )
        watch = Watch(child.pid)
        watch.start()
        try:
            code: int | str = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = f"stopped after {LIMIT} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # ends every process of the contestant's session
            peak = watch.stop()
        log.seek(0)
        tail = log.read().strip().splitlines()[-15:]
    if code != 0 or not result.exists():
        return {"failed": f"exit code {code}", "log": tail}
    measured: dict[str, Any] = json.loads(result.read_text("utf-8"))
    # A single process reports its exact peak. For several processes, it is the largest sampled sum.
    measured["memory"] = max(measured["memory"], peak or 0.0)
    return {"started": started, "others": [others, busy()], **measured}


def _environment() -> dict[str, str]:
    """Returns the environment variables of a contestant. They let any Python interpreter find this
    repository's modules."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
