"""Imports code from outside the package, such as a person's own method or network. An import path names it:
`FILE.py:name` or `package.module:name`.

A file or module is imported only if a person typed its name in this process (`--set`, `--with` or a Python
call). Run folders, model cards and the settings that a deployment's server sends also contain import paths,
with a checksum of the code. Such a recorded path alone never causes an import.
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
from shlex import quote
from types import ModuleType
from typing import Any

from ssfl.errors import ConfigError, SsflError, with_class

IN_MEMORY = "in memory"
"""The name that a config records for data, networks and methods that were passed as Python objects and have
no import path."""
_trusted: set[str] = set()
"""The code that may be imported: the absolute paths of files, and the dotted names of modules, that a person
typed in this process."""
_loaded: dict[Path, tuple[str, ModuleType]] = {}
"""The imported modules by file, each with the checksum that its source code had at its import. The checksum
(see `digest`) shows whether the code has changed since then."""


def is_path(name: str | None) -> bool:
    """Returns whether a name is an import path of code outside the package (`FILE.py:name` or
    `package.module:name`), rather than a built-in name."""
    return name is not None and (":" in name or name.endswith(".py"))


def is_outside(name: str | None) -> bool:
    """Returns whether a name in a config refers to something from outside the package: an import path, or "in
    memory" for an object that was passed from Python."""
    return is_path(name) or name == IN_MEMORY


def trust(name: str) -> None:
    """Records that a person typed this name in this process, which allows the import of its file or module.
    The name is `FILE.py`, `FILE.py:name`, `package.module` or `package.module:name`."""
    module = _module(name)
    _trusted.add(str(Path(module).resolve()) if module.endswith(".py") else module)


def trusted() -> list[str]:
    """Returns the files and modules that a person typed in this process."""
    return sorted(_trusted)


def is_trusted(name: str) -> bool:
    """Returns whether a person typed the file or module of this import path in this process. Only then may
    its code be imported."""
    module = _module(name)
    return is_path(name) and _is_trusted(module, _file(module))


def supply(files: Iterable[str | Path]) -> None:
    """Allows the import of the files and modules that a person typed after `--with`. Raises ConfigError if
    one does not exist."""
    for name in map(str, files):
        if _file(name) is None:
            raise ConfigError(
                f"--with {name}: there is no such file or module, check the path", key="--with", value=name
            )
        trust(name)


def load(name: str, key: str) -> Any:
    """Imports the code of an import path and returns the object that it names, such as a class or a function.
    `key` is the setting that contains the path, for error messages."""
    module_name, attribute = _module(name), _attribute(name)
    if not attribute:
        raise ConfigError(
            f"{key} = {name!r} names no object: write {module_name}:NAME",
            key=key,
            value=name,
            fix=f"{key}={module_name}:NAME",
        )
    module = _import(module_name, require(name, key), key, name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [n for n, what in vars(module).items() if not n.startswith("_") and callable(what)]
        close = difflib.get_close_matches(attribute, public, 1)
        hint = f": did you mean {close[0]}?" if close else ": check the name"
        raise ConfigError(
            f"{key} = {name!r}: {module_name} has no {attribute!r}{hint}",
            key=key,
            value=name,
            fix=f"{key}={module_name}:{close[0]}" if close else None,
        ) from None


def called(name: str, key: str) -> Any:
    """Calls the function that an import path names, without arguments, and returns its result. `key` is the
    setting that contains the path, for error messages. Raises ConfigError if the call fails."""
    function, setting = load(name, key), f"{key} = {name!r}"
    if not callable(function):
        raise ConfigError(
            f"{setting} is of type {type(function).__name__}, not a function: name a function",
            key=key,
            value=name,
        )
    try:
        return function()
    except SsflError as error:
        raise ConfigError(f"{setting}: {error}", key=key, value=name) from error
    except Exception as error:
        raise ConfigError(
            f"{setting}: calling this function raised {with_class(error)}", key=key, value=name
        ) from error


def require(name: str, key: str) -> Path:
    """Returns the file of an import path. Raises ConfigError if the file does not exist, or if no person
    typed this file or module in this process. `key` is the setting that contains the path, for error
    messages."""
    module = _module(name)
    file = _file(module)
    if not _is_trusted(module, file):
        unknown = module.endswith(".py") and file is None
        path = "FILE.py" if unknown else str(file) if module.endswith(".py") else module
        where = f", where FILE.py is the present path of {Path(module).name}" if unknown else ""
        raise ConfigError(
            f"{key} = {name!r} is Python code that is not part of ssfl. Such code is imported only if this "
            f"command names it: add --with {quote(path)}{where}",
            key=key,
            value=name,
            fix=f"--with {quote(path)}",
        )
    if file is None:
        raise ConfigError(
            f"{key} = {name!r}: there is no file or module {module}: check the path", key=key, value=name
        )
    return file


def supplied(name: str) -> str:
    """Returns the word that a person must type after `--with` to allow an import path: its file or its
    module."""
    return _module(name)


def digest(name: str) -> str:
    """Returns the SHA-256 of the source code that an import path names, to check later that the code is the
    same. It covers the module and the modules that it imports from its own folder or package.

    Line ends are normalised. Nothing is imported.
    """
    module = _module(name)
    file = _file(module)
    if file is None:
        raise ConfigError(f"there is no file or module {module}: check the path", value=name)
    total = hashlib.sha256()
    for part, source in sorted(_sources(module, file).items()):
        text = source.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        total.update(f"{part} {len(text)}\n".encode() + text)
    return total.hexdigest()


def _module(name: str) -> str:
    """Returns the file or module of an import path: the part before the colon."""
    return name if name.endswith(".py") else name.rpartition(":")[0] or name


def _attribute(name: str) -> str:
    """Returns the object's name in an import path: the part after the colon. Returns "" if there is none."""
    return "" if name.endswith(".py") else name.rpartition(":")[2]


def _file(module: str) -> Path | None:
    """Returns the source file of `module`, which is a file name ending in .py or a dotted module name.
    Returns None if there is no such file. Nothing is imported.

    A file name that no person typed may be recorded in a run, and the file may have moved since then. If a
    person typed exactly one existing file of the same name in another folder, that file is returned.
    """
    if module.endswith(".py"):
        file = Path(module).resolve()
        if str(file) in _trusted and file.is_file():
            return file
        same_name = [Path(t) for t in sorted(_trusted) if t.endswith(".py") and Path(t).name == file.name]
        existing = [path for path in same_name if path.is_file()]
        return existing[0] if len(existing) == 1 else file if file.is_file() else None
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
    if module.endswith(".py"):  # also true for a file that was typed but is missing: `require` reports that
        return str(file or Path(module).resolve()) in _trusted
    return module in _trusted


def _sources(module: str, file: Path) -> dict[str, Path]:
    """Returns the source files of a module by module name. They are its own file, and those of the modules
    that it imports from its own folder or package. These modules' own imports are followed too. `digest`
    covers all of these files."""
    inside = not module.endswith(".py")
    start = module if inside else file.stem
    top = start.partition(".")[0]
    sources: dict[str, Path] = {start: file}
    waiting = [start]
    while waiting:
        current = waiting.pop()
        for name in _imports(current, sources[current]):
            if name in sources or (inside and name.partition(".")[0] != top):
                continue
            source = _file(name) if inside else _beside(file.parent, name)
            if source is not None:
                sources[name] = source
                waiting.append(name)
    return sources


def _beside(folder: Path, name: str) -> Path | None:
    """Returns the file of the module `name` if it lies in this folder; otherwise None."""
    place = folder.joinpath(*name.split("."))
    for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yields the dotted names of the modules that a source file imports, and of the packages that contain
    them. The file is parsed, not executed."""
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
    """Imports the module in `file` and returns it. `module` is its file name ending in .py, or its dotted
    name. A .py file is imported again if it has changed since its last import. A module with a dotted name is
    imported only once in a process. `key` and `name` (a setting and its value) are for error messages."""
    current_digest = digest(module)
    if file in _loaded and _loaded[file][0] == current_digest:
        return _loaded[file][1]
    try:
        if not module.endswith(".py"):
            imported = importlib.import_module(module)
        else:
            imported = _from_file(file, {n: f for n, f in _sources(module, file).items() if f != file})
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} = {name!r}: importing it raised {with_class(error)}", key=key, value=name
        ) from error
    _loaded[file] = current_digest, imported
    return imported


def _from_file(file: Path, siblings: dict[str, Path]) -> ModuleType:
    """Imports a module from a file and returns it. `siblings` are the files in the same folder that it
    imports, by module name. They are preferred to installed modules of the same names. Raises ConfigError if
    another module with such a name is already loaded."""
    for name, source in siblings.items():
        imported_from = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.modules and (
            imported_from is None or Path(imported_from).resolve() != source.resolve()
        ):
            raise ConfigError(
                f"{file} imports {source}, but a module {name!r} is loaded already: rename {source.name}",
                value=name,
            )
        if file in _loaded:  # the file or one of its siblings has changed since its import
            sys.modules.pop(name, None)
    name = f"_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(file.parent))
    return module
