"""Machines that are not as they should be: clocks that are hours off, disks that are full."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssfl.runs import folder as runs
from stage import NAMES, Stage, arrivals, checkpoint, config_of, free_port, same, sets, simulated

CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *found) {
    int failed = syscall(SYS_clock_gettime, clock, found);
    if (!failed && clock == CLOCK_REALTIME) found->tv_sec += atol(getenv("CLOCK_AHEAD"));
    return failed;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec, found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
"""What the C library says of the time, shifted. (`faketime` shifts more: Python cannot sleep under it.)"""
HOUR = 3600


@pytest.fixture(scope="session")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes a process believe in another time of day."""
    folder = tmp_path_factory.mktemp("clock")
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("NO COMPILER, clocks are not tested: needs Linux and a C compiler")
    (folder / "clock.c").write_text(CLOCK)
    command = ["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c"]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "clock.so"


@dataclass
class Machine:
    """Starts sites on a machine whose clock is ahead."""

    stage: Stage
    library: Path
    port: int
    folders: Path
    ring: Path

    def join(self, name: str, ahead: int) -> "subprocess.Popen[bytes]":
        return self.stage.start(
            name, sys.executable, "-m", "ssfl", "join", f"127.0.0.1:{self.port}", "--data",
            self.folders / name, "--key", self.ring / f"{name}.site", "--device", "cpu", "--threads", 1,
            LD_PRELOAD=str(self.library), CLOCK_AHEAD=str(ahead),
        )  # fmt: skip


@pytest.mark.slow
def test_sites_take_part_whose_clocks_are_hours_off(
    folders: Path, ring: Path, stage: Stage, shifted: Path
) -> None:
    port, out = free_port(), stage.folder / "run"
    serve = stage.serve(folders, ring, port, *sets())
    elsewhere = Machine(stage, shifted, port, folders, ring)
    joins = {
        name: elsewhere.join(name, ahead)
        for name, ahead in zip(NAMES, (7 * HOUR, -9 * HOUR, 45), strict=True)
    }
    assert stage.ended(serve) == 0, stage.said("serve")
    for name, process in joins.items():
        assert stage.ended(process) == 0, stage.said(name)
    assert [came for _, came in arrivals(out)] == [[0, 1, 2]] * 3
    assert not any("asked_again" in event for event in runs.read_events(out))
    assert same(checkpoint(out), simulated(config_of(folders, []), folders))


@pytest.mark.slow
def test_a_clock_that_is_years_off_is_named(folders: Path, ring: Path, stage: Stage, shifted: Path) -> None:
    port = free_port()
    serve = stage.serve(folders, ring, port, *sets())
    stage.until("serve", "listening")
    elsewhere = Machine(stage, shifted, port, folders, ring)
    behind, ahead = (
        elsewhere.join(name, years * 365 * 24 * HOUR) for name, years in (("bonn", -3), ("calais", 9))
    )
    for name, process in (("bonn", behind), ("calais", ahead)):
        assert stage.ended(process) == 2, stage.said(name)
        assert "clock" in stage.said(name).splitlines()[-1]
        assert "Traceback" not in stage.said(name)
    serve.terminate()
    stage.ended(serve)


@contextmanager
def mounted(place: Path) -> Iterator[bool]:
    """A disk of 8 MiB; whether it could be mounted."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as real:
        if not real:
            pytest.skip("NO SMALL DISK, a site's full disk is not tested: needs root to mount one")
        yield tmp_path / "disk"


def fill(disk: Path) -> Path:
    """Fills a disk to the last byte with one file."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    assert shutil.disk_usage(disk).free == 0
    return filler


@pytest.mark.slow
def test_a_full_disk_stops_the_centre_with_a_checkpoint_and_a_site_goes_on(
    folders: Path, ring: Path, stage: Stage, tmp_path: Path
) -> None:
    """A real one where it can be mounted; elsewhere the file of events is a device that is always full."""
    port, disk, long = free_port(), tmp_path / "disk", ["federation.rounds=12"]
    out, place = disk / "run", ["--keys", ring, "--port", port]
    data = ["--data", folders / "labelled", "--out", out]
    with mounted(disk) as real:
        serve = stage.ssfl("serve", "serve", *data, *place, *sets(*long))
        for name in NAMES:
            stage.join(name, port, folders, ring)
        stage.until("serve", "round 2/12  accuracy")
        if real:
            filler = fill(disk)
        else:
            (out / "events.jsonl").rename(out / "events.kept")
            (out / "events.jsonl").symlink_to("/dev/full")
        assert stage.ended(serve) == 2, stage.said("serve")
        last = stage.said("serve").splitlines()[-1]
        assert os.strerror(errno.ENOSPC) in last
        assert f"ssfl serve --resume {out}" in last
        assert "Traceback" not in stage.said("serve")
        assert checkpoint(out).round >= 1  # that of round 2 is written after its line
        if real:
            filler.unlink()
        else:
            (out / "events.kept").rename(out / "events.jsonl")
        second = stage.ssfl("second", "serve", "--resume", out, *place)
        assert stage.ended(second) == 0, stage.said("second")
        assert [number for number, _ in enumerate(arrivals(out), 1)] == list(range(1, 13))
        assert same(checkpoint(out), simulated(config_of(folders, long), folders))


@pytest.mark.slow
def test_a_full_disk_at_a_site_costs_it_its_model_and_log_and_no_round(
    folders: Path, ring: Path, stage: Stage, small_disk: Path
) -> None:
    """The cache of decoded images, the log of one site and the final model do not fit."""
    port, out = free_port(), stage.folder / "run"
    fill(small_disk)
    serve = stage.serve(folders, ring, port, "--share-model", *sets())
    own = ["join", f"127.0.0.1:{port}", "--device", "cpu", "--threads", 1]
    stage.join("calais", port, folders, ring)
    keeping = stage.start(
        "bonn", sys.executable, "-m", "ssfl", *own, "--data", folders / "bonn", "--key", ring / "bonn.site",
        "--keep", small_disk / "model", SSFL_CACHE=str(small_disk / "cache"),
    )  # fmt: skip
    stage.start(
        "aachen", "sh", "-c", f"exec \"$@\" >>{small_disk}/log 2>&1", "sh", sys.executable, "-m", "ssfl",
        *own, "--data", folders / "aachen", "--key", ring / "aachen.site",
    )  # fmt: skip
    assert stage.ended(serve) == 0, stage.said("serve")
    assert [came for _, came in arrivals(out)] == [[0, 1, 2]] * 3
    assert same(checkpoint(out), simulated(config_of(folders, []), folders))
    assert stage.ended(keeping) == 2, stage.said("bonn")
    last = stage.said("bonn").splitlines()[-1]
    assert os.strerror(errno.ENOSPC) in last
    assert "model.safetensors" in last
    assert "Traceback" not in stage.said("bonn")
    assert not list(small_disk.glob("model*"))
