"""Work in forked processes: compiling kernels on all cores."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ssfl.core import forked
from ssfl.models.kernels.launching import LONG, Later

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def sign(file: Path) -> None:
    file.write_text(str(os.getpid()))


def signed_by(files: list[Path]) -> set[int]:
    return {int(file.read_text()) for file in files}


def test_every_function_runs_once_in_one_of_the_processes(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(7)]
    forked.run([partial(sign, file) for file in files], 3, 60)
    assert len(signed_by(files)) == 3
    assert os.getpid() not in signed_by(files)


def test_an_error_and_a_killed_process_do_not_stop_the_others(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(2)]

    def fail() -> None:
        raise ValueError("wrong")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    # the first process fails and goes on, the second dies, the third works
    forked.run([fail, die, partial(sign, files[0]), partial(sign, files[1])], 3, 60)
    assert all(file.exists() for file in files)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "hangs"

    def hang() -> None:
        sign(file)
        time.sleep(600)

    began = time.monotonic()
    forked.run([hang], 1, 2)
    assert time.monotonic() - began < 60
    (process,) = signed_by([file])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def compiler(cache: Path) -> Callable[[], str]:
    """A stand-in for Triton: compiles slowly and stores the result, or reads what is stored."""

    def compile() -> str:
        if cache.exists():
            return "read"
        time.sleep(2 * LONG)
        sign(cache)
        return "compiled"

    return compile


def test_kernels_are_compiled_by_processes_and_then_read(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(5)]
    later = Later(2)
    futures = [later.submit(compiler(file)) for file in files]
    later.finish()
    assert [future.result() for future in futures] == ["compiled", "read", "read", "read", "read"]
    assert os.getpid() in signed_by(files[:1])
    assert os.getpid() not in signed_by(files[1:])


def test_kernels_in_the_cache_need_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / str(number) for number in range(3)]
    for file in files:
        sign(file)

    def no_process() -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", no_process)
    later = Later(2)
    futures = [later.submit(compiler(file)) for file in files]
    later.finish()
    assert [future.result() for future in futures] == ["read"] * 3


def test_without_the_right_to_start_processes_this_one_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refused)
    later = Later(2)
    futures = [later.submit(compiler(tmp_path / str(number))) for number in range(3)]
    later.finish()
    assert [future.result() for future in futures] == ["compiled"] * 3


def test_nobody_waits_for_kernels_after_ctrl_c(tmp_path: Path) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    later = Later(2)
    futures = [later.submit(stopped), later.submit(compiler(tmp_path / "other"))]
    with pytest.raises(KeyboardInterrupt):
        later.finish()
    later.give_up()
    assert all(isinstance(future.exception(timeout=0), RuntimeError) for future in futures)


def test_a_kernel_that_does_not_compile_says_so_in_its_future() -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    later = Later(2)
    future = later.submit(fail)
    later.finish()
    with pytest.raises(ValueError, match="instruction"):
        future.result()
