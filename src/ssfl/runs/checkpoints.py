"""Checkpoints of a run: everything that the next round needs, in safetensors files.

A checkpoint is written completely or not at all, and is checked when it is read. The previous one is kept
too, so a damaged file costs only a few rounds.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ssfl.core import plain_files
from ssfl.errors import DamagedRun, RunError
from ssfl.federation import State
from ssfl.runs import folder as runs

FORMAT = "1"
MEMORY = "memory."
"""The prefix of tensor names in a checkpoint file for the tensors in the method's memory (`State.memory`)."""
KEPT = 2
"""How many checkpoints of a run are kept. Older ones are deleted."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round, with the totals of the run so far and the conditions under which it ran."""

    state: State
    totals: dict[str, float]
    """Sums over all rounds so far: seconds, bytes sent up and bytes sent down."""
    conditions: dict[str, str]
    """Everything besides the config that can change the last digits of the results: versions, device, engine,
    threads, and the number of users trained at once."""


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint to checkpoints/round-N.safetensors in the run folder `path`, and deletes all but
    the newest `KEPT`."""
    state = checkpoint.state
    with (path / "events.jsonl").open("rb") as events:
        os.fsync(events.fileno())  # after a crash, no checkpoint may exist without the events before it
    tensors = {"streams": state.streams, "average": state.average, "momentum": state.momentum}
    if len(state.strikes):
        tensors["strikes"] = state.strikes
    for name, tensor in sorted(state.memory.items()):
        tensors[MEMORY + name] = tensor
    tensors = {name: runs.own_copy(tensor) for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "round": str(state.round),
        "config": _digest(path),
        "totals": json.dumps(checkpoint.totals),
        "conditions": json.dumps(checkpoint.conditions),
        "sha256": _hash(tensors),
    }
    folder = path / "checkpoints"
    folder.mkdir(exist_ok=True)
    runs.write_atomic(folder / f"round-{state.round:07d}.safetensors", save(tensors, header))
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT]:
        old.unlink(missing_ok=True)


def newest(path: Path, device: torch.device) -> Checkpoint | None:
    """Returns the newest checkpoint in the run folder `path` that is not damaged, with tensors on `device`;
    None if there are no checkpoints. Raises if all are damaged."""
    files = sorted((path / "checkpoints").glob("round-*.safetensors"), reverse=True)
    broken = []
    for file in files:
        try:
            return _read(file, device)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            broken.append(f"{file.name} ({error})")
    if broken:
        raise DamagedRun(
            f"no checkpoint of {path} can be read: {'; '.join(broken)}; start a new run",
            key="checkpoints",
            value=str(path),
        )
    return None


def require_memory(path: Path, state: State, begun: State) -> None:
    """Raises if the memory in `state`, which was read from a checkpoint, has other tensors than the method
    keeps now. This happens if another version of the method wrote the checkpoint. `begun` is the method's
    initial state, which shows the tensors that it keeps now."""
    for name in sorted(state.memory.keys() ^ begun.memory.keys()):
        if name in state.memory:
            problem = f"has the tensor {name!r}, which this version of the method does not use"
        else:
            problem = f"does not have the tensor {name!r}, which this version of the method needs"
        raise RunError(
            f"the checkpoint of {path} {problem}: use the version that wrote it, or start a new run"
        )


def _read(file: Path, device: torch.device) -> Checkpoint:
    """Returns the checkpoint in a file, with tensors on `device`. Raises if the file is damaged, has another
    format, or belongs to another config."""
    plain_files.require_plain(file)
    with safe_open(file, "pt") as opened:
        header = opened.metadata() or {}
        names = set(opened.keys())
        known = [name for name in ("streams", "average", "momentum", "strikes") if name in names]
        known += sorted(name for name in names if name.startswith(MEMORY))
        tensors = {name: opened.get_tensor(name) for name in known}
    if header["format"] != FORMAT:
        raise DamagedRun(
            f"{file} has checkpoint format {header['format']}, and this version of ssfl reads {FORMAT}: "
            "install the version that wrote it",
            key="format",
            value=header["format"],
        )
    if header["config"] != _digest(file.parent.parent):
        raise DamagedRun(
            f"{file} does not belong to {file.parent.parent / 'config.toml'}, which was changed: "
            "restore the config, or start a new run",
            key="config.toml",
        )
    if header["sha256"] != _hash(tensors):
        raise ValueError("its checksum does not match")
    if not all(bool(tensors[name].isfinite().all()) for name in ("streams", "average", "momentum")):
        raise ValueError("it has numbers that are not finite")
    streams, average, momentum = (tensors[name].to(device) for name in ("streams", "average", "momentum"))
    memory = {n.removeprefix(MEMORY): t.to(device) for n, t in tensors.items() if n.startswith(MEMORY)}
    state = State(int(header["round"]), streams, average, momentum, memory=memory)
    if "strikes" in tensors:
        state = replace(state, strikes=tensors["strikes"])
    return Checkpoint(state, *(plain_files.parse_json(header[name]) for name in ("totals", "conditions")))


def _digest(path: Path) -> str:
    """Returns a hash of the config.toml in the run folder `path`, without the settings that may change when a
    run is resumed. A checkpoint has this hash, so that it is not used with another config."""
    lines = plain_files.read(path / "config.toml", plain_files.CONFIG).decode("utf-8").splitlines()
    lines_kept = [line for line in lines if line.split(" = ")[0] not in (*runs.CONDITIONS, "track")]
    return hashlib.sha256("\n".join(lines_kept).encode()).hexdigest()


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
