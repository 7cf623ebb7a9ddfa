"""The compile cache: where it lies, who may write to it, and how it travels as one file."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from conftest import Call
from ssfl.core import cache, compile_cache
from ssfl.errors import SsflError, SsflWarning

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and no folder chosen by the user."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_chosen", {})
    return tmp_path / "cache"


def filled() -> dict[str, bytes]:
    """Files as torch and Triton write them, in the cache; returns those that are worth keeping."""
    kernel = compile_cache.parts()["triton"] / "ABC"
    kept = {
        "inductor/aotautograd/a1/x": b"graph",
        "inductor/ab/cab.py": b"code",
        "triton/ABC/k.cubin": b"\0\1",
        "triton/ABC/__grp__k.json": json.dumps(
            {"child_paths": {"k.cubin": str(kernel / "k.cubin")}}
        ).encode(),
    }
    for name, content in {**kept, "inductor/locks/a.lock": b"", "triton/ABC/tmp.pid_1": b"half"}.items():
        path = compile_cache.parts()[name.partition("/")[0]] / name.partition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (kernel / "link").symlink_to("/etc/passwd")
    return kept


def test_torch_and_triton_compile_into_a_folder_of_the_user_alone(place: Path) -> None:
    compile_cache.use()
    for name in VARIABLES:
        assert Path(os.environ[name]).is_relative_to(place / "compile")
    assert stat.S_IMODE((place / "compile").stat().st_mode) == 0o700
    assert stat.S_IMODE(compile_cache.folder().stat().st_mode) == 0o700


def test_a_folder_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLES[0], str(tmp_path / "mine"))
    compile_cache.use()
    assert os.environ[VARIABLES[0]] == str(tmp_path / "mine")
    assert compile_cache.parts()["inductor"] == tmp_path / "mine"
    assert Path(os.environ[VARIABLES[1]]) == compile_cache.folder() / "triton"


def test_the_folder_that_torch_sets_by_itself_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch's compiler sets the variables, and that may happen before a run begins."""
    default = Path(tempfile.gettempdir(), "torchinductor_somebody")
    monkeypatch.setenv(VARIABLES[0], str(default))
    monkeypatch.setenv(VARIABLES[1], str(default / "triton" / "0"))
    compile_cache.use()
    assert os.environ[VARIABLES[0]] == str(compile_cache.folder() / "inductor")
    assert os.environ[VARIABLES[1]] == str(compile_cache.folder() / "triton")


def test_another_cache_folder_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_cache.use()
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "other"))
    compile_cache.use()
    assert Path(os.environ[VARIABLES[0]]).is_relative_to(tmp_path / "other")


def test_a_folder_that_others_can_write_to_is_not_used(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o777)
    with pytest.warns(SsflWarning, match="SSFL_CACHE"):
        compile_cache.use()
    assert VARIABLES[0] not in os.environ


def test_what_others_could_have_written_is_deleted(place: Path) -> None:
    """torch makes the folder again with the user's umask if it is deleted while a run compiles."""
    planted = compile_cache.folder() / "inductor" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("code of somebody else")
    compile_cache.folder().chmod(0o775)
    compile_cache.use()
    assert not planted.exists()
    assert stat.S_IMODE(compile_cache.folder().stat().st_mode) == 0o700
    assert VARIABLES[0] in os.environ


def test_the_default_folder_is_closed_to_others(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other parts of the cache make it with the user's umask, which may be generous."""
    monkeypatch.delenv("SSFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.root().mkdir()
    cache.root().chmod(0o775)
    compile_cache.use()
    assert stat.S_IMODE(cache.root().stat().st_mode) == 0o755
    assert Path(os.environ[VARIABLES[0]]).is_relative_to(tmp_path / "ssfl")


def test_other_kernels_have_another_entry(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not compare the code of an operator's gradient, so an update must not find the old one."""
    before = compile_cache.folder()
    monkeypatch.setattr(compile_cache, "kernels", lambda: "another")
    assert compile_cache.folder() != before


def test_a_linked_cache_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "link"))
    compile_cache.use()
    assert (tmp_path / "scratch" / "compile").is_dir()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path / "scratch")


def test_it_counts_as_a_part_of_the_cache() -> None:
    kept = filled()
    assert [entry for _, size, entry in cache.entries() if size > len(kept)] == [compile_cache.folder()]


def test_it_is_saved_as_one_file_and_loaded_elsewhere(ssfl: Call, tmp_path: Path) -> None:
    kept = filled()
    code, out, _ = ssfl("cache", "save", "compiled.zip")
    assert (code, "4 files" in out) == (0, True)
    assert stat.S_IMODE(Path("compiled.zip").stat().st_mode) == 0o600
    assert str(tmp_path).encode() not in Path("compiled.zip").read_bytes()
    before = compile_cache.folder()
    os.environ["SSFL_CACHE"] = str(tmp_path / "other")
    assert ssfl("cache", "load", "compiled.zip")[0] == 0
    after = compile_cache.folder()
    assert after != before
    found = {path.relative_to(after).as_posix(): path for path in after.rglob("*") if path.is_file()}
    assert found.keys() == kept.keys()
    for name, path in found.items():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes() == kept[name].replace(str(before).encode(), str(after).encode())
    assert "4 of them" in ssfl("cache", "load", "compiled.zip")[1]
    assert ssfl("cache", "clear")[0] == 0
    assert not after.exists()
    assert before.exists()


def test_nothing_to_save_is_said_in_one_line(ssfl: Call) -> None:
    code, out, err = ssfl("cache", "save", "compiled.zip")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert not Path("compiled.zip").exists()


def crafted(
    name: str, content: bytes, mode: int = stat.S_IFREG | 0o600, head: dict[str, object] | None = None
) -> None:
    """Writes an archive with one file in it."""
    with zipfile.ZipFile("bad.zip", "w") as packed:
        packed.writestr(
            compile_cache.HEAD, json.dumps({"format": 1, **compile_cache.versions(), **(head or {})})
        )
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        packed.writestr(info, content)


@pytest.mark.parametrize(
    "name",
    ["inductor/../../../x", "/etc/x", "inductor//x", "inductor/.x/y", "other/x", "inductor", "inductor/x/",
     "triton/a\\..\\x", "inductor/" + "x/" * 9 + "y", "inductor/" + "x" * 300],
)  # fmt: skip
def test_an_archive_with_other_paths_is_refused(ssfl: Call, place: Path, name: str) -> None:
    crafted(name, b"x")
    code, _, err = ssfl("cache", "load", "bad.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert not place.exists()


def test_an_archive_with_links_is_refused(ssfl: Call, place: Path) -> None:
    crafted("inductor/a/b", b"/etc/passwd", stat.S_IFLNK | 0o777)
    assert ssfl("cache", "load", "bad.zip")[0] == 2
    assert not place.exists()


def test_too_much_is_refused(ssfl: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crafted("inductor/a/b", bytes(2000))
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 1000)
    assert ssfl("cache", "load", "bad.zip")[0] == 2
    assert not place.exists()


@pytest.mark.parametrize(
    "head", [{"torch": "1.0"}, {"python": "2.7"}, {"kernels": "other"}, {"format": 2}, {"torch": None}]
)
def test_an_archive_for_other_versions_is_refused(ssfl: Call, place: Path, head: dict[str, object]) -> None:
    crafted("inductor/a/b", b"x", head=head)
    code, _, err = ssfl("cache", "load", "bad.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert not place.exists()


def test_an_archive_whose_head_is_no_object_is_refused(ssfl: Call, place: Path) -> None:
    with zipfile.ZipFile("bad.zip", "w") as packed:
        packed.writestr(compile_cache.HEAD, "[1]")
    code, _, err = ssfl("cache", "load", "bad.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert not place.exists()


def test_a_list_of_kernels_names_files_beside_it(ssfl: Call) -> None:
    """A crafted list cannot make Triton read a file elsewhere."""
    crafted("triton/ABC/__grp__k.json", json.dumps({"child_paths": {"k": "/etc/../etc/passwd"}}).encode())
    assert ssfl("cache", "load", "bad.zip")[0] == 0
    kernel = compile_cache.parts()["triton"] / "ABC"
    listed = json.loads((kernel / "__grp__k.json").read_text())
    assert listed == {"child_paths": {"k": str(kernel / "passwd")}}


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no archive", b"x" * 1000])
def test_a_file_that_is_no_archive_is_refused(ssfl: Call, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.zip").write_bytes(content)
    code, _, err = ssfl("cache", "load", "bad.zip")
    assert (code, err.count("\n")) == (2, 1)
    assert ssfl("cache", "load", "missing.zip")[0] == 2


def test_a_shared_folder_is_not_loaded_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    compile_cache.save(tmp_path / "compiled.zip")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv(VARIABLES[0], str(tmp_path / "shared"))
    with pytest.raises(SsflError, match=f"{tmp_path / 'shared'} .*{VARIABLES[0]}"):
        compile_cache.load(tmp_path / "compiled.zip")
    assert not any((tmp_path / "shared").iterdir())
    monkeypatch.delenv(VARIABLES[0])
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "shared"))
    with pytest.raises(SsflError, match=f"{tmp_path / 'shared'} .*SSFL_CACHE"):
        compile_cache.load(tmp_path / "compiled.zip")
    assert not any((tmp_path / "shared").iterdir())


SCRIPT = """
import hashlib, json, torch
from torch._dynamo.utils import counters
from ssfl.core import compile_cache
from ssfl.engines import compiling

def loss(x, w):
    return (x @ w).relu().sum(-1).softmax(0).max()

compile_cache.use()
x, w = torch.arange(48.0).view(6, 8) / 50, torch.ones(8, 5, requires_grad=True)
loss = compiling.Compiled(loss)(x, w)
loss.backward()
digest = hashlib.sha256(loss.detach().numpy().tobytes() + w.grad.numpy().tobytes()).hexdigest()
print(json.dumps({"digest": digest, **counters["inductor"], **counters["aot_autograd"]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ to compile for a CPU")
def test_a_second_process_and_another_machine_find_it_compiled(tmp_path: Path) -> None:
    """On a CPU; `test_gpu.py` has the same for whole rounds."""

    def compiled(name: str) -> dict[str, object]:
        env = os.environ | {"SSFL_CACHE": str(tmp_path / name), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "error::ssfl.errors.SsflWarning", "-c", SCRIPT],
            env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    cold, warm = compiled("one"), compiled("one")
    os.environ["SSFL_CACHE"] = str(tmp_path / "one")
    compile_cache.save(tmp_path / "compiled.zip")
    os.environ["SSFL_CACHE"] = str(tmp_path / "two")
    compile_cache.load(tmp_path / "compiled.zip")
    copied = compiled("two")
    assert "autograd_cache_hit" not in cold
    for run in (warm, copied):
        assert run["digest"] == cold["digest"]
        assert (run["autograd_cache_hit"], run.get("fxgraph_cache_miss", 0)) == (1, 0)
