"""The order of the packages: each imports only from those above it, and no import goes in a circle.

Imports inside functions and under TYPE_CHECKING count as well.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import ssfl

ROOT = Path(ssfl.__file__).parent
ORDER = [
    "signals", "errors", "core", "federation", "methods", "config", "data", "models", "engines", "simulate",
    "runs", "report", "board", "paper", "contest", "deploy", "cli",
]  # fmt: skip
"""From the bottom up."""
DOORS = ["__init__", "__main__", "averaging", "diversity", "schedule", "split", "augment"]
"""Where people come in: these may import anything, and nothing of the package imports them."""


def modules() -> dict[str, Path]:
    """Every module by its name; packages are called after their folder, `ssfl` itself "__init__"."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return names


MODULES = modules()


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that a module imports by name."""
    targets = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are written in full"
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in wanted:
            if name.split(".")[0] == "ssfl":
                parts = name.split(".")[1:]
                inner = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
                targets.add(next((one for one in inner if one in MODULES), "__init__"))
    return frozenset(targets - {module})


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_place() -> None:
    assert {room(module) for module in MODULES} <= {*ORDER, *DOORS}


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) not in DOORS])
def test_imports_come_from_above(module: str) -> None:
    allowed = ORDER[: ORDER.index(room(module)) + 1]
    wrong = sorted(name for name in imports(module) if room(name) not in allowed)
    assert not wrong, f"{module} may not import {', '.join(wrong)}"


def test_no_import_goes_in_a_circle() -> None:
    """Importing a module also runs the __init__.py of its package."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        package = module.rpartition(".")[0]
        for name in sorted(imports(module) | ({package} if package else set())):
            visit(name, (*path, module))
        done.add(module)

    for module in MODULES:
        if module not in DOORS:
            visit(module, ())


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


PACKAGES = [name for name, path in MODULES.items() if path.name == "__init__.py" and name != "__init__"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_for_and_which_file_to_open_first(package: str) -> None:
    path = MODULES[package]
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    files = re.findall(r"`(\w+\.py)`", text)
    assert files, f"{package}/__init__.py names no file"
    for name in files:
        assert (path.parent / name).is_file() or (ROOT / name).is_file(), f"{package}: there is no {name}"
