"""Code from outside: imported only if a person typed its path, and compared by its text."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssfl.core import outside
from ssfl.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test starts as a new process would, in an empty folder."""
    monkeypatch.setattr(outside, "_trusted", set())
    monkeypatch.setattr(outside, "_loaded", {})
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        sys.modules.pop(name)


def test_names_of_the_package_are_no_paths() -> None:
    assert not any(outside.is_path(name) for name in (None, "cnn", "resnet18", "crl-gn"))
    assert all(outside.is_path(name) for name in ("mine.py:make", "a.b:make", "mine.py", "../x/mine.py:A"))


def test_a_typed_file_is_loaded_with_the_modules_beside_it() -> None:
    Path("mine.py").write_text("from beside import number\ndef make():\n    return number\n")
    Path("beside.py").write_text("number = 3\n")
    outside.trust("mine.py:make")
    assert outside.load("mine.py:make", "model.name")() == 3
    assert outside.load("mine.py:make", "model.name") is outside.load("mine.py:make", "model.name")
    Path("beside.py").write_text("number = 45\n")
    assert outside.load("mine.py:make", "model.name")() == 45
    assert str(Path.cwd()) not in sys.path


def test_nothing_is_imported_that_nobody_typed(tmp_path: Path) -> None:
    Path("mine.py").write_text("from pathlib import Path\nPath('ran').touch()\nmake = 1\n")
    with pytest.raises(ConfigError) as caught:
        outside.load("mine.py:make", "model.name")
    assert (caught.value.key, caught.value.value) == ("model.name", "mine.py:make")
    assert caught.value.fix == f"--with {Path('mine.py').resolve()}"
    outside.digest("mine.py:make")
    with pytest.raises(ConfigError) as caught:
        outside.load("xml.dom:Node", "model.name")
    assert caught.value.fix == "--with xml.dom"
    assert not Path("ran").exists()
    outside.supply(["mine.py"])
    assert outside.load("mine.py:make", "model.name") == 1
    assert outside.load("elsewhere/mine.py:make", "model.name") == 1  # the folder of a run names the file


def test_a_package_is_loaded_and_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ours/deep").mkdir(parents=True)
    Path("ours/__init__.py").write_text("")
    Path("ours/deep/__init__.py").write_text("")
    Path("ours/deep/net.py").write_text("from ..parts import make\nfrom . import __doc__\nimport json\n")
    Path("ours/parts.py").write_text("def make():\n    return 7\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    first = outside.digest("ours.deep.net:make")
    assert "ours" not in sys.modules
    Path("ours/parts.py").write_text("def make():\n    return 78\n")
    assert outside.digest("ours.deep.net:make") != first
    outside.trust("ours.deep.net:make")
    assert outside.load("ours.deep.net:make", "model.name")() == 78


def test_the_digest_is_of_the_text_and_of_what_it_imports_from_its_folder() -> None:
    Path("mine.py").write_bytes(b"import beside\nimport os\nx = 1\n")
    Path("beside.py").write_bytes(b"y = 1\n")
    Path("other.py").write_bytes(b"z = 1\n")
    first = outside.digest("mine.py:x")
    Path("mine.py").write_bytes(b"import beside\r\nimport os\r\nx = 1\r\n")
    Path("other.py").write_bytes(b"z = 2\n")
    assert outside.digest("mine.py:y") == first
    Path("beside.py").write_bytes(b"y = 2\n")
    assert outside.digest("mine.py:x") != first


@pytest.mark.parametrize(
    ("name", "text", "cause", "fix"),
    [
        ("none.py:make", None, None, None),
        ("no.such.package:make", None, None, None),
        ("mine.py", "", None, "model.name=mine.py:NAME"),
        ("mine.py:make", "def maker(): ...", None, "model.name=mine.py:maker"),
        ("mine.py:make", "1/0", ZeroDivisionError, None),
        ("mine.py:make", "def make(:", SyntaxError, None),
        ("mine.py:make", "raise SystemExit(3)", SystemExit, None),
        ("mine.py:make", "import no_such_package", ModuleNotFoundError, None),
    ],
)
def test_every_mistake_is_one_line(
    name: str, text: str | None, cause: type[BaseException] | None, fix: str | None
) -> None:
    if text is not None:
        Path("mine.py").write_text(text)
    outside.trust(name)
    with pytest.raises(ConfigError) as caught:
        outside.load(name, "model.name")
    error = caught.value
    assert (error.key, error.value, error.fix) == ("model.name", name, fix)
    assert isinstance(error.__cause__, cause or type(None))
    assert name in str(error)
    assert "\n" not in str(error)


def test_a_module_beside_the_file_may_not_be_called_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ssfl_json", sys.modules["sys"])
    Path("mine.py").write_text("import ssfl_json as json")
    Path("ssfl_json.py").write_text("")
    outside.trust("mine.py:make")
    with pytest.raises(ConfigError) as caught:
        outside.load("mine.py:make", "model.name")
    assert caught.value.value == "ssfl_json"


def test_with_names_a_file_that_exists() -> None:
    with pytest.raises(ConfigError) as caught:
        outside.supply(["none.py"])
    assert (caught.value.key, caught.value.value) == ("--with", "none.py")
