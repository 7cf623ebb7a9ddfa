"""Code from outside the package: `FILE.py:name` or `package.module:name`, wherever a name is accepted.

A path is imported only if a person typed it in this process (`--set`, `--with`, a Python call). Run folders,
model cards and a centre's terms name a path and its digest, and nothing is imported because of them.
"""

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ssfl.errors import ConfigError, SsflError

IN_MEMORY = "in memory"
"""The name of what was passed as a Python object."""
_trusted: set[str] = set()
"""Resolved files and dotted module names that a person typed in this process."""
_loaded: dict[Path, tuple[str, ModuleType]] = {}
"""Files that were imported, with the digest they had then."""


def is_path(name: str | None) -> bool:
    """Whether a name is an import path and not the name of something in the package."""
    return name is not None and (":" in name or name.endswith(".py"))


def is_outside(name: str | None) -> bool:
    """Whether a recorded name stands for something that did not come with the package."""
    return is_path(name) or name == IN_MEMORY


def trust(name: str) -> None:
    """Record that a person typed this name: `FILE.py:name`, `FILE.py` or `package.module:name`."""
    module = _module(name)
    _trusted.add(str(Path(module).resolve()) if module.endswith(".py") else module)


def is_trusted(name: str) -> bool:
    """Whether a person typed this name, or its file, in this process."""
    module = _module(name)
    return is_path(name) and _is_trusted(module, _file(module))


def supply(files: Iterable[str | Path]) -> None:
    """Record the files and modules that a person typed after `--with`, which must exist."""
    for given in files:
        file = _file(str(given))
        if file is None:
            raise ConfigError(
                f"--with {given}: there is no such file or module", key="--with", value=str(given)
            )
        trust(str(given))


def load(name: str, key: str) -> Any:
    """The object that an import path names; `key` is the setting that holds it, for messages."""
    module, wanted = _module(name), _attribute(name)
    said = f"{key} = {name!r}"
    if not wanted:
        raise ConfigError(
            f"{said} names no object: write {module}:NAME", key=key, value=name, fix=f"{key}={module}:NAME"
        )
    found = _import(module, require(name, key), key, name)
    try:
        return getattr(found, wanted)
    except AttributeError:
        close = difflib.get_close_matches(wanted, [n for n in vars(found) if not n.startswith("_")], 1)
        hint = f": did you mean {close[0]}?" if close else ": check the name"
        raise ConfigError(
            f"{said}: {module} has no {wanted!r}{hint}",
            key=key,
            value=name,
            fix=f"{key}={module}:{close[0]}" if close else None,
        ) from None


def called(name: str, key: str) -> Any:
    """What the function that an import path names returns; it takes no arguments."""
    function, said = load(name, key), f"{key} = {name!r}"
    if not callable(function):
        raise ConfigError(f"{said} is a {type(function).__name__}: name a function", key=key, value=name)
    try:
        return function()
    except SsflError as error:
        raise ConfigError(f"{said}: {error}", key=key, value=name) from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{said}: it raised {type(error).__name__}: {reason}", key=key, value=name
        ) from error


def require(name: str, key: str) -> Path:
    """The file of an import path, which must exist and have been typed by a person in this process."""
    module = _module(name)
    file = _file(module)
    if not _is_trusted(module, file):
        given = module if not module.endswith(".py") else file or "FILE.py"
        raise ConfigError(
            f"{key} = {name!r} is code from outside, which is imported only if you name it in this command: "
            f"add --with {given}",
            key=key,
            value=name,
            fix=f"--with {given}",
        )
    if file is None:
        raise ConfigError(
            f"{key} = {name!r}: there is no file or module {module}: check the path", key=key, value=name
        )
    return file


def supplied(name: str) -> str:
    """What a command needs after `--with` for a recorded path."""
    return _module(name)


def digest(name: str) -> str:
    """The SHA-256 of a module's text and of the modules that it imports from its own folder or package.

    Line ends are normalised. Nothing is imported.
    """
    module = _module(name)
    file = _file(module)
    if file is None:
        raise ConfigError(f"there is no file or module {module}: check the path")
    total = hashlib.sha256()
    for part, source in sorted(_sources(module, file).items()):
        text = source.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        total.update(f"{part} {len(text)}\n".encode() + text)
    return total.hexdigest()


def _module(name: str) -> str:
    """The part of a path before the colon."""
    return name if name.endswith(".py") else name.rpartition(":")[0] or name


def _attribute(name: str) -> str:
    """The part of a path after the colon."""
    return "" if name.endswith(".py") else name.rpartition(":")[2]


def _file(module: str) -> Path | None:
    """The file of a module, found without importing anything; None if there is none.

    A file that a person typed stands for a path of the same file name, wherever that was.
    """
    if module.endswith(".py"):
        file = Path(module).resolve()
        if str(file) in _trusted and file.is_file():
            return file
        same = sorted(t for t in _trusted if t.endswith(".py") and Path(t).name == file.name)
        found = [Path(t) for t in same if Path(t).is_file()]
        return found[0] if len(found) == 1 else file if file.is_file() else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    for folder in spec.submodule_search_locations or ():
        inside = _beside(Path(folder), ".".join(rest))
        if inside is not None:
            return inside
    return None


def _is_trusted(module: str, file: Path | None) -> bool:
    if module.endswith(".py"):  # a file that is missing is told as missing if it was typed
        return str(file or Path(module).resolve()) in _trusted
    return module in _trusted


def _sources(module: str, file: Path) -> dict[str, Path]:
    """A module's file and those that it imports from its own folder or package, by module name."""
    inside = not module.endswith(".py")
    start = module if inside else file.stem
    top = start.partition(".")[0]
    found: dict[str, Path] = {start: file}
    waiting = [start]
    while waiting:
        current = waiting.pop()
        for name in _imports(current, found[current]):
            if name in found or (inside and name.partition(".")[0] != top):
                continue
            source = _file(name) if inside else _beside(file.parent, name)
            if source is not None:
                found[name] = source
                waiting.append(name)
    return found


def _beside(folder: Path, name: str) -> Path | None:
    """The file of a module that lies in a folder."""
    place = folder.joinpath(*name.split("."))
    for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None


def _imports(module: str, file: Path) -> Iterator[str]:
    """The names of modules that a file imports, and of the packages that they are in."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)) if all(parts[: i + 1]))


def _import(module: str, file: Path, key: str, name: str) -> ModuleType:
    """The module; a file that has changed since is imported again."""
    now = digest(module)
    if file in _loaded and _loaded[file][0] == now:
        return _loaded[file][1]
    try:
        if not module.endswith(".py"):
            found = importlib.import_module(module)
        else:
            found = _from_file(file, {n: f for n, f in _sources(module, file).items() if f != file})
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{key} = {name!r}: importing it raised {type(error).__name__}: {reason}", key=key, value=name
        ) from error
    _loaded[file] = now, found
    return found


def _from_file(file: Path, siblings: dict[str, Path]) -> ModuleType:
    """A module from a file, which finds the modules beside it first."""
    for name, source in siblings.items():
        known = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.modules and (known is None or Path(known).resolve() != source.resolve()):
            raise ConfigError(
                f"{file} imports {source}, but another module is called {name!r}: rename it", value=name
            )
        if file in _loaded:  # it has changed since, or one of these has
            sys.modules.pop(name, None)
    name = f"_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(found)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(file.parent))
    return found
