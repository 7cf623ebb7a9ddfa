"""What is installed: the lock files agree with the package, and wheel and sdist run by themselves."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from waiting import ended

ROOT = Path(__file__).parents[1]
LOCKS = {"demo": "report", "dev": "dev"}
"""The lock files, and which extra each is for."""
DATA = ("py.typed", "config/presets/quickstart.toml", "report/report.css", "board/board.js")


@dataclass
class Locked:
    """One line of a lock file."""

    version: str
    marker: Marker | None
    hashes: list[str] = field(default_factory=list)


def read_lock(name: str) -> dict[str, list[Locked]]:
    """The packages of a lock file; some have a version for each of several machines."""
    found: dict[str, list[Locked]] = {}
    for line in (ROOT / f"requirements-{name}.lock").read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            head, *hashes = line.split("--hash=")
            asked = Requirement(head)
            [exact] = asked.specifier
            assert exact.operator == "=="
            found.setdefault(canonicalize_name(asked.name), []).append(
                Locked(exact.version, asked.marker, [one.strip() for one in hashes])
            )
    return found


def asked_for(extra: str) -> list[Requirement]:
    """The requirements of the package with an extra, those of extras that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked, left, seen = list(map(Requirement, project["dependencies"])), [extra], set[str]()
    while left:
        name = left.pop()
        seen.add(name)
        for requirement in map(Requirement, project["optional-dependencies"][name]):
            if requirement.name == "ssfl":
                left += requirement.extras - seen
            else:
                asked.append(requirement)
    return asked


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_all_that_is_asked_for_with_hashes(name: str) -> None:
    """`make lock` writes it anew."""
    locked = read_lock(name)
    fixed = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]]
    for requirement in [*asked_for(LOCKS[name]), *(one for one in fixed if name == "dev")]:
        if requirement.name == "torch":
            continue  # by version alone: its builds differ by device
        versions = [one.version for one in locked[canonicalize_name(requirement.name)]]
        assert versions, requirement
        assert all(requirement.specifier.contains(version) for version in versions), requirement
    assert {"torch", "triton"}.isdisjoint(locked)
    assert not [package for package in locked if package.startswith("nvidia")]
    for package, each in locked.items():
        for one in each:
            assert one.hashes, package
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in one.hashes), package


def test_the_lock_files_agree_and_name_no_index() -> None:
    demo, dev = read_lock("demo"), read_lock("dev")
    for package, each in demo.items():
        assert {one.version for one in each} == {one.version for one in dev[package]}, package
    for name in LOCKS:
        assert "://" not in (ROOT / f"requirements-{name}.lock").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of what git would check in here, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    copy, out = folder / "copy", folder / "dist"
    copy.mkdir()
    for name in ("src", "tests", "docs", "examples", "benchmarks", "results"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    build = (
        "import sys; from setuptools import build_meta; "
        "print(getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2]))"
    )

    def make(kind: str, source: Path) -> Path:
        command = [sys.executable, "-c", build, kind, str(out)]
        process = subprocess.Popen(command, cwd=source, stdout=subprocess.DEVNULL)
        assert ended(process) == 0
        return next(out.glob("*.tar.gz" if kind == "sdist" else "*.whl"))

    sdist = make("sdist", copy)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    return sdist, make("wheel", source)


@pytest.mark.slow
def test_wheel_and_sdist_have_the_package_and_its_data(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    own = ROOT / "src" / "ssfl"
    files = {
        str(file.relative_to(own)) for file in own.rglob("*") if file.is_file() and file.suffix != ".pyc"
    }
    assert set(DATA) <= files
    with zipfile.ZipFile(wheel) as archive:
        inside = {name.removeprefix("ssfl/") for name in archive.namelist() if name.startswith("ssfl/")}
    assert inside == files
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/ssfl/{name}" for name in files} <= names
    beside = {"LICENSE", "README.md", "Makefile", "constraints.txt", "tests/conftest.py"}
    assert beside | {f"requirements-{name}.lock" for name in LOCKS} <= names


@pytest.mark.slow
@pytest.mark.parametrize("which", ["sdist", "wheel"])
def test_the_quickstart_runs_where_only_the_package_is(
    which: str, built: tuple[Path, Path], tmp_path: Path
) -> None:
    """An empty environment, into which the other packages of this one are linked: they are large."""
    venv.create(tmp_path / "empty", with_pip=True, symlinks=True)
    bin = tmp_path / "empty" / "bin"
    [packages] = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    others = sysconfig.get_path("purelib")
    if which == "sdist":  # setuptools builds it; nothing else is there yet
        for part in ("setuptools", "_distutils_hack"):
            shutil.copytree(Path(others) / part, packages / part, dirs_exist_ok=True)
    package = built[which == "wheel"]
    install = [bin / "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet", package]
    process = subprocess.Popen(list(map(str, install)), cwd=tmp_path)
    assert ended(process) == 0
    (packages / "others.pth").write_text(f"{others}\n")  # after the package: its own ssfl comes first
    around = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    where = [str(bin / "python"), "-c", "import ssfl; print(ssfl.__file__)"]
    told = subprocess.run(where, cwd=tmp_path, env=around, capture_output=True, text=True, check=True)
    assert Path(told.stdout.strip()).is_relative_to(packages)
    for command in (
        ["ssfl", "run", "--set", "federation.rounds=3", "--out", "run"],
        ["ssfl", "report", "run"],
    ):
        process = subprocess.Popen([str(bin / command[0]), *command[1:]], cwd=tmp_path, env=around)
        assert ended(process) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
