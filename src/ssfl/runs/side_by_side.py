"""Plays the runs of a contest or of a paper's table: one after another, or several at the same time, each in
a process of its own. The results are the same."""

import os
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol, TypeVar

from ssfl.config.loading import from_dict
from ssfl.config.settings import Config
from ssfl.config.writing import to_toml
from ssfl.core import machine, outside, plain_files
from ssfl.errors import RunError, SsflError, SsflWarning, Stopped, warn_user, with_class
from ssfl.runs import display, train
from ssfl.runs.round_loop import Interrupted, SweepInterrupted
from ssfl.signals import Terminated

Item = TypeVar("Item")
Made = TypeVar("Made")


class Runner(Protocol):
    """Plays runs: one after another, or several at the same time."""

    def each(self, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """Yields the result of `function` for each of the items, in their order. The function plays runs, and
        may call `each` again."""

    def play(self, config: Config, path: Path, started: Callable[[], None]) -> None:
        """Plays the run in the folder `path`, from its start or from its last checkpoint. Calls `started`
        when it begins. Raises `Stopped` if Ctrl-C or SIGTERM came, perhaps in its last round."""


class InTurn:
    """Plays one run after another in this process, and shows the progress of each unless `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def each(self, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        return map(function, items)

    def play(self, config: Config, path: Path, started: Callable[[], None]) -> None:
        started()
        try:
            result = display.watched(lambda report: train.begin_or_resume(config, path, report), self.quiet)
        except Interrupted as stopped:
            raise SweepInterrupted(stopped.round, stopped.by) from None
        if result.stopped is not None and result.stopped_by is not None:
            raise SweepInterrupted(result.stopped, result.stopped_by)


class SideBySide:
    """Plays `jobs` runs at the same time. Each of so many worker processes plays one run after another, and
    gets an equal part of the CPU cores. The processes are started when they are needed."""

    def __init__(self, jobs: int) -> None:
        self.workers = [_Worker() for _ in range(jobs)]
        self.idle: queue.Queue[_Worker] = queue.Queue()
        for worker in self.workers:
            self.idle.put(worker)
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        """Why all runs must stop: the first error of a run, or the signal that stopped this command."""

    def each(self, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        # a thread for each item; it only waits for the workers, so many threads do no harm
        todo = list(items)
        with ThreadPoolExecutor(max(1, len(todo))) as threads:
            futures = [threads.submit(function, item) for item in todo]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException as error:
                raise self.stop(error) from None
        return iter([future.result() for future in futures])

    def play(self, config: Config, path: Path, started: Callable[[], None]) -> None:
        worker = self.idle.get()
        try:
            worker.start()  # first, so that `stop` either ends it or is noticed below
            if self.error is not None:
                raise self.error
            started()
            worker.play(config, path)
        except EOFError:
            if self.error is not None:
                raise self.error from None
            raise RunError(
                f"the process that played {path} was ended from outside, perhaps for want of memory: repeat "
                "the command, with fewer --jobs"
            ) from None
        finally:
            self.idle.put(worker)

    def stop(self, error: BaseException) -> BaseException:
        """Lets all workers save and end, because of an error of this command or of one of its runs. A second
        signal ends them at once. Returns the error for which they were first asked to stop."""
        with self.lock:
            if (
                self.error is not None
            ):  # they have been asked already, and a second signal would end them at once
                return self.error
            self.error = error
        processes = [worker.process for worker in self.workers if worker.process is not None]
        try:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
        except BaseException:
            for process in processes:
                process.kill()
            raise
        return error

    def close(self) -> None:
        """Ends the worker processes, which have nothing left to do."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            if worker.process is not None:
                worker.process.join()


@contextmanager
def runner(jobs: int, quiet: bool) -> Iterator[Runner]:
    """Yields a runner that plays `jobs` runs at the same time. `quiet` hides the progress of single runs."""
    if jobs == 1:
        yield InTurn(quiet)
        return
    beside, before = SideBySide(jobs), os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // jobs)))  # for torch in the workers
    try:
        yield beside
    except (KeyboardInterrupt, Terminated) as error:
        beside.stop(error)
        by = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        raise _stopped(by) from None
    finally:
        beside.close()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


def _stopped(by: int) -> Stopped:
    return Stopped("stopped and saved; run the same command to continue", by)


class _Worker:
    """A worker process, as this process sees it."""

    def __init__(self) -> None:
        self.spawn = get_context("spawn")
        self.connection, self.theirs = self.spawn.Pipe()
        self.process: SpawnProcess | None = None

    def start(self) -> None:
        """Starts the process, unless it has been started."""
        if self.process is None:
            process = self.spawn.Process(target=_work, args=(self.theirs, outside.trusted()))
            process.start()
            self.theirs.close()
            self.process = process

    def play(self, config: Config, path: Path) -> None:
        """Plays a run and waits for its end. Repeats the warnings and raises the error of the run. Raises
        EOFError if the process has ended."""
        assert self.process is not None
        try:
            self.connection.send((to_toml(config), path))
            # the process is watched too, because a fork of it could hold the other end of the pipe
            if self.connection not in wait_for([self.connection, self.process.sentinel]):
                raise EOFError
            told, error = self.connection.recv()
        except (OSError, EOFError):
            raise EOFError from None
        for message in told:
            warn_user(message)
        if error is not None:
            raise error


def _work(connection: Connection, code: Iterable[str]) -> None:
    """What a worker process does: it plays the runs that it is sent, until there are no more or a signal
    stops it. `code` are the
    files and modules that a person typed in this command."""
    # In its own process group, Ctrl-C and signals to the group of the command do not arrive here. The command
    # passes them on, once.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in code:
        outside.trust(name)
    while True:
        try:
            text, path = connection.recv()
        except EOFError:
            return
        told, error = _played(text, path)
        connection.send((told, error))
        if isinstance(error, Stopped):
            return


def _end_with_parent() -> None:
    """Waits until the command ends, however it ends. Then lets this worker process save and end."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    time.sleep(1)  # usually the worker has ended by itself by then
    os.kill(os.getpid(), signal.SIGTERM)


def _played(text: str, path: Path) -> tuple[list[str], SsflError | None]:
    """Plays a run. Returns its warnings, and the error that ended it, or None."""
    error: SsflError | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SsflWarning)
        try:
            result = train.begin_or_resume(from_dict(plain_files.parse_toml(text.encode())), path)
            if result.stopped_by is not None:
                error = _stopped(result.stopped_by)
        except Interrupted as stopped:
            error = _stopped(stopped.by)
        except SsflError as failure:
            error = failure
        except Exception as failure:
            traceback.print_exc()
            error = RunError(f"{path}: {with_class(failure)}")
    return [str(one.message) for one in caught if issubclass(one.category, SsflWarning)], error
