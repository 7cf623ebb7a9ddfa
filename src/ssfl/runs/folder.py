"""The run folder: resolved config, events, split, model, summary; `checkpoints.py` has the rest of it.

safetensors, JSON and TOML alone, each file written whole or not at all.
"""

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ssfl.config import first_release
from ssfl.config.loading import from_dict, to_toml
from ssfl.config.settings import Config
from ssfl.core import outside, plain_files
from ssfl.core.events import Event
from ssfl.core.version import VERSION
from ssfl.errors import ConfigError, DivergedError, RunError, Stopped

UNFINISHED = "unfinished.safetensors"
"""The model of the last checkpoint, until the run is finished."""
WALL_CLOCK = ("seconds", "left", "phases", "memory", "wire_up", "wire_down")
"""Event fields that tell time, memory and what went over wires, and differ between equal runs."""
FAILURE = "failed.json"
OUTSIDE = "outside.json"
CONDITIONS = ("engine", "users_at_once", "device", "threads", "compile")
"""Settings of [run] that may change on resume; the change is told."""


def versions() -> dict[str, str]:
    """What the numbers of a run depend on besides its config."""
    return {"ssfl": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def write_atomic(path: Path, content: bytes) -> None:
    """Write beside, flush to disk, rename: readers see the old file or the new one, never half."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error.strerror}; earlier files are intact: make room or choose "
            "another place"
        ) from error


def create(path: Path, config: Config, parts: dict[str, Any], brought: dict[str, Any] | None = None) -> None:
    """Start a run folder; one that is there already is never touched.

    `brought` tells what came from outside: paths and digests, by section of the config.
    """
    require_free(path)
    try:
        path.mkdir(mode=0o700, parents=True)  # for its owner's eyes: pictures of a report may be in it
        (path / "checkpoints").mkdir()
    except OSError as error:
        raise RunError(
            f"cannot make the run folder {path}: {error.strerror}; choose another --out"
        ) from error
    try:
        write_split(path, parts)
        if brought:
            write_atomic(path / OUTSIDE, _json(brought))
        write_atomic(path / "events.jsonl", b"")
        write_atomic(path / "config.toml", to_toml(config).encode())
    except RunError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write_split(path: Path, parts: dict[str, Any]) -> None:
    """split.json anew."""
    write_atomic(path / "split.json", _json(parts))


def require_same_code(path: Path, section: str, name: str | None) -> None:
    """Refuse code from outside that is not, to the letter, what this run was started with.

    It must have been supplied in this process; nothing is imported.
    """
    if name is None or not outside.is_path(name):
        return
    outside.require(name, f"{section}.name")
    known = _object(path / OUTSIDE).get(section)
    before = known.get("digest") if isinstance(known, dict) else None
    if before is None:
        raise RunError(
            f"{path / OUTSIDE} does not tell the digest of {name}: put it back, or start a new run"
        )
    if before != outside.digest(name):
        raise RunError(
            f"{name}, or a module that it imports from its folder, has changed since {path} was started: "
            "supply it as it was, or start a new run"
        )


def again(path: Path, real: bool = False, names: Mapping[str, str | None] | None = None) -> str:
    """What goes on with a run, here or of a real federation: a command, or a line of Python where something
    was passed from there. `names` are those of the network ("model"), the data and the method."""
    names = names or {}
    objects = {"model": "make", "data": "data", "method": "method"}
    passed = "".join(f", {key}={objects[key]}" for key, name in names.items() if name == outside.IN_MEMORY)
    if passed:
        return f"ssfl.resume({str(path)!r}{passed})"
    files = dict.fromkeys(outside.supplied(name) for name in names.values() if name and outside.is_path(name))
    code = "".join(f" --with {quote(file)}" for file in files)
    return f"ssfl {'serve --resume' if real else 'resume'} {quote(str(path))}{' --keys FOLDER' * real}{code}"


def require_free(path: Path) -> None:
    """Refuse a path that is taken."""
    if path.exists():
        hint = f", or go on with `{again(path)}`" if (path / "config.toml").is_file() else ""
        raise RunError(f"{path} exists already and is not overwritten: choose another --out{hint}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a second process out of the run folder; the lock ends with the process."""
    folder = os.open(path, os.O_RDONLY)
    try:
        for _ in range(10):  # whoever looks whether it is locked holds it for an instant
            if not is_locked(folder, fcntl.LOCK_EX):
                break
            time.sleep(0.05)
        else:
            raise RunError(f"{path} is being trained by another process: wait for it, or stop it first")
        try:
            yield
        finally:  # also for processes that inherited the open folder
            fcntl.flock(folder, fcntl.LOCK_UN)
    finally:
        os.close(folder)


def is_locked(folder: int, kind: int = fcntl.LOCK_SH) -> bool:
    """Whether another process holds the lock of an open run folder; if not, a LOCK_EX is ours from now on."""
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    if kind == fcntl.LOCK_SH:
        fcntl.flock(folder, fcntl.LOCK_UN)
    return False


def is_busy(path: Path) -> bool:
    """Whether another process trains in this run folder."""
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return is_locked(folder)
    finally:
        os.close(folder)


@contextmanager
def told_failures(path: Path) -> Iterator[None]:
    """Keep the error that ends a training, for those who look at the folder afterwards.

    Ctrl-C and SIGTERM are no errors.
    """
    (path / FAILURE).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if not isinstance(error, Stopped):
            line = " ".join(str(error).split()) or type(error).__name__
            with suppress(RunError):  # a full disk may be the very failure
                write_atomic(path / FAILURE, _json({"error": line[:1000], "kind": type(error).__name__}))
        raise


def next_free(base: Path) -> Path:
    """`base`, or `base-2`, `base-3`, ... if it is taken."""
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _known(*folders: Path) -> str:
    """The runs that somebody may have meant: of the folder itself, such as a contest's, or of runs/."""
    found = (
        [str(file.parent) for file in sorted(one.glob("*/config.toml"))] for one in (*folders, Path("runs"))
    )
    known = next(filter(None, found), [])
    return f"; there are {', '.join(known[:5])}" if known else ""


def read_config(path: Path) -> Config:
    """The resolved config of a run folder."""
    if not path.is_dir():
        raise RunError(f"there is no folder {path}{_known()}")
    if not (path / "config.toml").is_file():
        raise RunError(f"{path} is not a run folder: it has no config.toml{_known(path)}")
    try:
        given = _given(path)
        return from_dict(
            first_release.translated(given) if first_release.is_old(given) else given, resolved=True
        )
    except (OSError, ValueError, ConfigError) as error:
        raise RunError(
            f"{path / 'config.toml'} cannot be used ({str(error)[:500]}): put it back as it was, take the "
            "version of ssfl that wrote it, or start a new run"
        ) from error


def _given(path: Path) -> dict[str, Any]:
    """What config.toml of a run says."""
    return plain_files.parse_toml(plain_files.read(path / "config.toml", plain_files.CONFIG))


def require_resumable(path: Path) -> None:
    """Refuse a run that the first release began: its method may have followed other rules."""
    if first_release.is_old(_given(path)):
        raise RunError(f"{path} was begun with ssfl 0.1: finish it with that version, or start a new run")


def append_event(path: Path, event: Event) -> None:
    """Add one line to events.jsonl."""
    try:
        with (path / "events.jsonl").open("ab") as file:
            file.write(json.dumps(event, allow_nan=False).encode() + b"\n")
    except OSError as error:
        raise RunError(f"cannot write {path / 'events.jsonl'}: {error.strerror}: make room") from error


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run, in order; a line torn or damaged by a crash ends them."""
    try:
        lines = plain_files.read(path / "events.jsonl").split(b"\n")
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no events.jsonl") from None
    except OSError as error:
        raise RunError(f"{path / 'events.jsonl'} cannot be read: {error.strerror}") from None
    for line in lines[:-1]:
        try:
            event = plain_files.parse_json(line)
        except ValueError:
            return
        if not isinstance(event, dict) or not isinstance(event.get("round"), int) or "event" not in event:
            return
        yield event


def cut_events(path: Path, rounds: int, counted: bool = False) -> None:
    """Drop what was logged after the given round; where privacy is counted in the events, none may be
    lost."""
    kept = [event for event in read_events(path) if event["round"] <= rounds]
    lost = set(range(1, rounds + 1)) - {event["round"] for event in kept if event["event"] == "round"}
    if counted and lost:
        raise RunError(
            f"{path / 'events.jsonl'} is damaged at round {min(lost)}, and nobody can tell what privacy was "
            "spent: put it back, or start a new run"
        )
    lines = [json.dumps(event).encode() + b"\n" for event in kept]
    write_atomic(path / "events.jsonl", b"".join(lines))


def write_model(path: Path, tensors: dict[str, torch.Tensor], card: dict[str, Any]) -> None:
    """model.safetensors: the averaged model by name, with a card that says how to build it."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(whole, {"card": json.dumps(card)}))


def read_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the card of a model file."""
    try:
        plain_files.require_plain(path)
        with safe_open(path, "pt") as opened:
            card = plain_files.parse_json((opened.metadata() or {})["card"])
            return {name: opened.get_tensor(name) for name in opened.keys()}, card  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} is not a readable model: {str(error)[:500]}") from error


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    write_atomic(path / "summary.json", _json(summary))


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None while it is unfinished or where it is broken."""
    summary = _object(path / "summary.json")
    return summary if isinstance(end_of(summary), float) else None


def end_of(summary: dict[str, Any]) -> Any:
    """The accuracy in a summary: on validation images where test images are never looked at."""
    return summary.get("accuracy", summary.get("validation_accuracy"))


def broke_down(path: Path) -> str | None:
    """Why training broke down here, where it did: the same run would do so again."""
    failure = _object(path / FAILURE)
    return str(failure.get("error")) if failure.get("kind") == DivergedError.__name__ else None


def _object(file: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none, or it is broken."""
    try:
        found = plain_files.parse_json(plain_files.read(file, plain_files.CONFIG))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
