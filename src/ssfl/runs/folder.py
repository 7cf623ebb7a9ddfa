"""Reads and writes the files of a run folder: resolved config, events, split, model and summary.
`checkpoints.py` writes the checkpoints.

All files are safetensors, JSON or TOML. Each file is written completely or not at all. The exception is
events.jsonl, to which lines are appended.
"""

import fcntl
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ssfl.config import first_release
from ssfl.config.loading import from_dict
from ssfl.config.settings import Config
from ssfl.config.writing import to_toml
from ssfl.core import outside, plain_files
from ssfl.core.events import Event
from ssfl.core.version import VERSION
from ssfl.errors import ConfigError, DamagedRun, DivergedError, FolderInUse, RunError, Stopped, one_line
from ssfl.runs import resuming

UNFINISHED = "unfinished.safetensors"
"""The name of the file with the model of the last checkpoint. It is deleted when the run is finished."""
WALL_CLOCK = ("seconds", "left", "phases", "memory", "wire_up", "wire_down")
"""The names of event fields that hold times, memory use or network traffic. Two runs with the same results
may differ in these fields, so comparisons of runs ignore them."""
FAILURE = "failed.json"
OUTSIDE = "outside.json"
CONDITIONS = ("engine", "users_at_once", "device", "threads", "compile")
"""Settings of [run] that may have other values when a run is resumed, for example on another machine. If one
has changed, the user gets a warning, because the last digits of the results may then differ."""


def versions() -> dict[str, str]:
    """Returns the versions of ssfl, torch and Python."""
    return {"ssfl": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file such that other processes see either the old content or the new, never a part of it. The
    content is written to a temporary file, flushed to disk, and renamed."""
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
            f"cannot write {path}: {error.strerror}; what was saved before is not lost. Check that its "
            "folder exists, that you may write to it and that the disk is not full"
        ) from error


def create(path: Path, config: Config, parts: dict[str, Any], brought: dict[str, Any] | None = None) -> None:
    """Creates a run folder with config.toml, split.json and an empty events.jsonl; raises if the folder
    exists. `parts` is the content of split.json, which describes how the images are divided among server and
    users.

    `brought` identifies code from outside the package: import paths and hashes, by section of the config. It
    is written to outside.json. If it is None or empty, that file is not written.
    """
    require_free(path)
    text = to_toml(config).encode()  # may raise, so before anything is written
    try:
        path.mkdir(mode=0o700, parents=True)  # readable only by its owner: a report has pictures in it
        (path / "checkpoints").mkdir()
    except OSError as error:
        raise RunError(
            f"cannot create the run folder {path}: {error.strerror}; choose another --out"
        ) from error
    try:
        write_split(path, parts)
        if brought:
            write_atomic(path / OUTSIDE, _json(brought))
        write_atomic(path / "events.jsonl", b"")
        write_atomic(path / "config.toml", text)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write_split(path: Path, parts: dict[str, Any]) -> None:
    """Writes `parts` to split.json in the run folder `path`. `parts` describes how the images are divided
    among server and users."""
    write_atomic(path / "split.json", _json(parts))


def read_fingerprint(path: Path) -> str:
    """Returns the fingerprint (a hash) of the data with which the run in the folder `path` was started. It is
    read from split.json; raises if this file cannot be used."""
    try:
        return str(plain_files.parse_json(plain_files.read(path / "split.json"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path / 'split.json'} cannot be read: restore it, or start a new run") from None


def require_same_code(path: Path, section: str, name: str | None) -> None:
    """Raises if the code of a network or method from outside the package has changed since the run in the
    folder `path` was started. Also raises if outside.json has no checksum of that code. `section` is "model"
    or "method", and `name` is the name in that section of the config. Only a name that is an import path,
    such as "FILE.py:name", is checked.

    Also raises if the user has not named the code in this process, for example with `--with FILE.py`. An
    import path that is only recorded in a run folder is not trusted, because the folder may come from
    somebody else. Nothing is imported here.
    """
    if name is None or not outside.is_path(name):
        return
    outside.require(name, f"{section}.name")
    known = _object(path / OUTSIDE).get(section)
    before = known.get("digest") if isinstance(known, dict) else None
    if before is None:
        raise RunError(
            f"{path / OUTSIDE} is missing or has no checksum of {name}, so it is unknown whether that code "
            f"has changed: restore {path / OUTSIDE}, or start a new run",
            key=f"{section}.name",
            value=name,
        )
    if before != outside.digest(name):
        raise RunError(
            f"{name}, or a module that it imports from its folder, has changed since {path} was started: "
            "restore it, or start a new run",
            key=f"{section}.name",
            value=name,
        )


def continuing(path: Path) -> str | None:
    """Returns the command that continues the run in a folder. Returns None if there is no readable run, or if
    the run is finished, has diverged or was started with ssfl 0.1."""
    try:
        config = read_config(path)
        require_resumable(path)
    except RunError:
        return None
    over = read_summary(path) is not None or broke_down(path) is not None
    return None if over else resuming.command(config, path)


def require_free(path: Path) -> None:
    """Raises RunError if the path exists, so that no run is overwritten. If there is an unfinished run, the
    message says how to continue it."""
    if path.exists():
        command = continuing(path)
        hint = f", or continue the run with `{command}`" if command else ""
        raise RunError(
            f"{path} already exists and is not overwritten: choose another folder with --out (in Python, "
            f"out=){hint}",
            key="--out",
            value=str(path),
            fix=command,
        )


_LOCKED = set[Path]()
"""The run folders that this process has locked."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks the run folder inside the `with` block, so that no other process trains in it; raises if another
    process has locked it. The lock also ends if the process dies."""
    folder = os.open(path, os.O_RDONLY)
    try:
        for _ in range(10):  # a process that only tests the lock holds it for a moment
            if not is_locked(folder, fcntl.LOCK_EX):
                break
            time.sleep(0.05)
        else:
            whose = "another process: wait until it ends, or stop it"
            if path.resolve() in _LOCKED:
                whose = "this process: call stop() on the ssfl.Federation that trains in it"
            raise FolderInUse(f"{path} is in use by {whose}", value=str(path))
        _LOCKED.add(path.resolve())
        try:
            yield
        finally:  # also for processes that inherited the open folder
            _LOCKED.discard(path.resolve())
            fcntl.flock(folder, fcntl.LOCK_UN)
    finally:
        os.close(folder)


def is_locked(folder: int, kind: int = fcntl.LOCK_SH) -> bool:
    """Returns whether another process has locked a run folder. `folder` is a file descriptor of the folder.

    With `kind` LOCK_SH this is only a test. With LOCK_EX, this process takes the lock if it is free, and
    keeps it.
    """
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    if kind == fcntl.LOCK_SH:
        fcntl.flock(folder, fcntl.LOCK_UN)
    return False


@contextmanager
def recorded_failures(path: Path) -> Iterator[None]:
    """Writes an error that ends the `with` block to failed.json in the run folder, so that `ssfl board` and
    reports can show it.

    A stop by Ctrl-C or SIGTERM is not an error and is not written.
    """
    (path / FAILURE).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if not isinstance(error, Stopped):
            line = one_line(error)
            with suppress(RunError):  # the error may be that the disk is full
                write_atomic(path / FAILURE, _json({"error": line[:1000], "kind": type(error).__name__}))
        raise


def next_free(base: Path) -> Path:
    """Returns the path `base`, or, if that exists, the first of `base-2`, `base-3`, ... that does not
    exist."""
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _known(*folders: Path) -> str:
    """Returns a hint for error messages that names up to five existing runs, such as "; the runs here are
    runs/a, runs/b". The runs are taken from the first of the `folders` that contains a run. If none of the
    `folders` does, they are taken from runs/. Returns "" if no run is found."""
    candidates = (
        [str(file.parent) for file in sorted(one.glob("*/config.toml"))] for one in (*folders, Path("runs"))
    )
    known = next(filter(None, candidates), [])
    more = ", ..." if len(known) > 5 else ""
    return f"; the runs here are {', '.join(known[:5])}{more}" if known else ""


def read_config(path: Path) -> Config:
    """Returns the resolved config of the run in the folder `path`. Raises if `path` is not a run folder, or
    if its config.toml cannot be used. A config that ssfl 0.1 wrote is translated into the present
    settings."""
    if not path.is_dir():
        raise RunError(f"there is no folder {path}{_known()}", value=str(path))
    if not (path / "config.toml").is_file():
        raise RunError(f"{path} is not a run folder: it has no config.toml{_known(path)}", value=str(path))
    try:
        values = first_release.with_new_names(_read_toml(path))
        return from_dict(
            first_release.translated(values) if first_release.is_old(values) else values, resolved=True
        )
    except (OSError, ValueError, ConfigError) as error:
        raise RunError(
            f"{path / 'config.toml'} cannot be used ({str(error)[:500]}): restore it, use the version of "
            "ssfl that wrote it, or start a new run",
            key=getattr(error, "key", None),
            value=getattr(error, "value", None),
        ) from error


def _read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of config.toml in the run folder `path`, as {section: {key: value}}."""
    return plain_files.parse_toml(plain_files.read(path / "config.toml", plain_files.CONFIG))


def require_resumable(path: Path) -> None:
    """Raises if the run in the folder `path` was started with ssfl 0.1. The present version must not continue
    such a run, because its method may have worked differently in 0.1."""
    if first_release.is_old(_read_toml(path)):
        raise RunError(f"{path} was started with ssfl 0.1: finish it with that version, or start a new run")


def append_event(path: Path, event: Event) -> None:
    """Appends one event to events.jsonl in the run folder `path`, as a line of JSON. A number that is not
    finite becomes null."""
    try:
        with (path / "events.jsonl").open("ab") as file:
            file.write(json.dumps(_finite(event), allow_nan=False).encode() + b"\n")
    except OSError as error:
        raise RunError(
            f"cannot write {path / 'events.jsonl'}: {error.strerror}; check that you may write to it and "
            "that the disk is not full"
        ) from error


def _finite(value: Any) -> Any:
    """Returns a JSON value with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events in events.jsonl of the run folder `path`, in order. Stops at the first damaged
    line."""
    try:
        lines = plain_files.read(path / "events.jsonl").split(b"\n")
    except FileNotFoundError:
        raise RunError(
            f"{path} is not a run folder, because it has no events.jsonl: name a folder that a run wrote",
            value=str(path),
        ) from None
    except OSError as error:
        raise RunError(
            f"{path / 'events.jsonl'} cannot be read: {error.strerror}; check that you may read it"
        ) from None
    for line in lines[:-1]:
        try:
            event = plain_files.parse_json(line)
        except ValueError:
            return
        if not isinstance(event, dict) or not isinstance(event.get("round"), int) or "event" not in event:
            return
        yield event


def cut_events(path: Path, rounds: int, counted: bool = False) -> None:
    """Keeps the events of the first `rounds` rounds in events.jsonl and removes all later events. A resumed
    run writes the later events again.

    If `counted` is true, raises if one of the first `rounds` rounds has no "round" event. Runs with
    differential privacy need this check, because the privacy spent is computed from these events.
    """
    events = [event for event in read_events(path) if event["round"] <= rounds]
    lost = set(range(1, rounds + 1)) - {event["round"] for event in events if event["event"] == "round"}
    if counted and lost:
        raise DamagedRun(
            f"{path / 'events.jsonl'} is damaged at round {min(lost)}, so the privacy spent is unknown: "
            "restore it, or start a new run",
            value=min(lost),
        )
    lines = [json.dumps(event).encode() + b"\n" for event in events]
    write_atomic(path / "events.jsonl", b"".join(lines))


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor on the CPU that shares memory with no other. safetensors refuses tensors
    that share memory, such as tied weights."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def write_model(path: Path, tensors: dict[str, torch.Tensor], card: dict[str, Any]) -> None:
    """Writes a model file: the tensors of a model by name, and its model card, which says how to build the
    network."""
    whole = {name: own_copy(tensor) for name, tensor in tensors.items()}
    write_atomic(path, save(whole, {"card": json.dumps(card)}))


def read_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors by name and the model card in a model file. Raises if the file cannot be read or
    has no card."""
    try:
        plain_files.require_plain(path)
        with safe_open(path, "pt") as opened:
            card = plain_files.parse_json((opened.metadata() or {})["card"])
            return {name: opened.get_tensor(name) for name in opened.keys()}, card  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        reason = "it has no model card" if isinstance(error, KeyError) else one_line(error, 500)
        if isinstance(error, SafetensorError):
            reason = "it is damaged, or not a .safetensors file"
        raise RunError(
            f"{path} cannot be read as a model of ssfl ({reason}): use a run folder, or a .safetensors file "
            "that `ssfl export` wrote"
        ) from error


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    write_atomic(path / "summary.json", _json(summary))


def read_summary(path: Path) -> dict[str, Any] | None:
    """Returns the content of summary.json of a finished run. Returns None if the run is unfinished, or if the
    file is damaged or has no accuracy."""
    summary = _object(path / "summary.json")
    return summary if isinstance(end_of(summary), float) else None


def end_of(summary: dict[str, Any]) -> Any:
    """Returns the final accuracy in the summary of a run: on test images or cross-validation folds, otherwise
    on validation images. Returns None if there is no accuracy."""
    return summary.get("accuracy", summary.get("validation_accuracy"))


def broke_down(path: Path) -> str | None:
    """Returns the error message if the training in this folder diverged, otherwise None. Such a run cannot be
    continued, because it would diverge again."""
    failure = _object(path / FAILURE)
    return str(failure.get("error")) if failure.get("kind") == DivergedError.__name__ else None


def _object(file: Path) -> dict[str, Any]:
    """Returns the content of a JSON file as a dict. The dict is empty if the file is missing, damaged or not
    an object."""
    try:
        content = plain_files.parse_json(plain_files.read(file, plain_files.CONFIG))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
