"""The compile cache: keeps the GPU code that torch and Triton have compiled, so that later runs start faster.
It can be saved as one file and loaded on another machine.

It is the folder `compile` inside the cache folder (see `cache.py`). There is one entry for each combination
of versions of torch, Python and ssfl's kernels. torch and Triton check for themselves whether compiled code
fits the device, the settings and the source code. But they do not compare the gradient code of ssfl's own
operators. So the entry's name contains a checksum of that code.

**The cached files are code that will be executed.** So the cache is used only if no other user can write to
it. A saved file is loaded only by a person's command, never because a config names it.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ssfl.core import cache, plain_files
from ssfl.errors import SsflError, warn_user

VARIABLES = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}
"""The two parts of the cache, torch's Inductor and Triton, each with the environment variable that names its
folder."""
HEAD = "ssfl-compile-cache.json"
FORMAT = 1
MOST_FILES, MOST_BYTES = 500_000, 16 << 30
"""Limits against harmful archives: an archive with more files, or with more bytes when unpacked, is not
loaded. A real one is far smaller: a few hundred files and a few ten megabytes."""
GROUP = re.compile(r"__grp__.+\.json")
"""Matches the names of the files in which Triton lists the files of a kernel by absolute path. These paths
must be changed when files are copied."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
"""Matches the file and folder names that are allowed in the cache. Others are not saved, and are refused when
an archive is loaded."""
BAD = (
    zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError
)  # fmt: skip
"""The exceptions that reading a damaged archive may raise."""
_chosen: dict[str, str] = {}
"""For "inductor" and "triton": the folder that `use` wrote into the environment variable (see `VARIABLES`).
If the variable still has this value, ssfl chose the folder, not the user; `_own` checks this."""


class Copied(NamedTuple):
    """The result of `save` or `load`: the number of files, and their total size in bytes. After `load`,
    `known` says how many of the files were in the cache already; after `save` it is 0."""

    files: int
    bytes: int
    known: int = 0


def versions() -> dict[str, str]:
    """Returns the versions of torch, of Python and of ssfl's kernels. A saved cache can be loaded only where
    all three are equal."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {"torch": metadata.version("torch"), "python": python, "kernels": kernels()}


@lru_cache(maxsize=1)
def kernels() -> str:
    """Returns a checksum (12 hexadecimal digits) of the source code of ssfl's GPU operators and kernels. It
    serves as their version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].joinpath("models", "kernels").glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def folder() -> Path:
    """Returns the folder of the cache entry that belongs to the installed versions of torch, Python and
    ssfl's kernels."""
    return cache.root().resolve() / "compile" / "-".join(f"{name}-{one}" for name, one in versions().items())


def parts() -> dict[str, Path]:
    """Returns the folders in which torch (under the name "inductor") and Triton ("triton") keep compiled
    code. Each is the user's choice or the cache's default."""
    return {part: Path(_own(part) or folder() / part).absolute() for part in VARIABLES}


def _own(part: str) -> str | None:
    """Returns the folder that the user chose for a part ("inductor" or "triton") by its environment variable;
    None if the user chose none.

    When torch's compiler is imported, torch itself sets these variables to a folder in /tmp. Such a value is
    not the user's choice.
    """
    value = os.environ.get(VARIABLES[part])
    if value is None or value == _chosen.get(part):
        return None
    by_torch = str(Path(tempfile.gettempdir(), "torchinductor_"))
    return None if os.path.abspath(value).startswith(by_torch) else value


def use() -> None:
    """Tells torch and Triton to keep compiled code in ssfl's cache, by setting their environment variables. A
    folder that the user chose stays in use."""
    places = {part: str(place) for part, place in parts().items() if _own(part) is None}
    if not places:
        return
    try:
        _make_private()
        os.utime(folder())  # records the time of use, for `cache.trim`
    except OSError as error:
        warn_user(f"{_not_stored(error)}, else the next run compiles again")
        return
    _chosen.update(places)
    os.environ.update({VARIABLES[part]: place for part, place in places.items()})


def _make_private() -> None:
    """Creates the compile cache's folders with access for this user only, since their files will be executed.
    A folder to which others were allowed to write is deleted first. Raises PermissionError if
    another user could still change the files."""
    cache.root().mkdir(parents=True, exist_ok=True, mode=0o700)
    status = cache.root().stat()
    if cache.PLACE not in os.environ and status.st_uid == os.getuid() and status.st_mode & 0o022:
        cache.root().chmod(status.st_mode & 0o755)  # the user's umask allowed others to write
    require_private(cache.root().resolve())
    for place in (folder().parent, folder()):
        with suppress(FileNotFoundError):
            status = os.lstat(place)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o022:
                shutil.rmtree(place)  # others were allowed to write to it, and may have done so
        place.mkdir(exist_ok=True, mode=0o700)
        require_private(place)


def require_private(place: Path) -> None:
    """Raises PermissionError if a folder does not belong to this user or if another user can write to it.
    Such a folder must not hold code that will be executed."""
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(0, "it is not a folder that belongs to you", str(place))
    if status.st_mode & 0o022:
        raise PermissionError(0, "other users can write to it", str(place))


def save(file: Path) -> Copied:
    """Packs the whole compile cache into one archive `file` and returns what was saved. Raises SsflError if
    nothing has been compiled yet."""
    files = [(f"{part}/{name}", path) for part, place in parts().items() for name, path in _files(place)]
    if not files:
        places = " and ".join(str(place) for place in parts().values())
        raise SsflError(f"nothing to save: {places} are empty. Run the experiment once on a GPU.")
    count = total = 0
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name, delete=False) as written:  # mode 0600
        try:
            with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as packed:
                packed.writestr(_member(HEAD), json.dumps({"format": FORMAT, **versions()}))
                for name, path in files:
                    try:
                        content = _with_paths(path.name, path.read_bytes(), None)
                    except (FileNotFoundError, *BAD):  # another process is writing it or has deleted it
                        continue
                    count, total = count + 1, total + len(content)
                    packed.writestr(_member(name), content)
            os.replace(written.name, file)
        except BaseException:
            Path(written.name).unlink(missing_ok=True)
            raise
    return Copied(count, total)


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    """Yields each file in the folder `place` that belongs into a saved cache: its name relative to `place`,
    and its path. Locks, links and unfinished files are left out."""
    for base, folders, names in os.walk(place):
        inside = Path(base).relative_to(place)
        folders[:] = sorted(name for name in folders if name != "locks" and _is_kept(name))
        for name in sorted(filter(_is_kept, names)):
            path = Path(base, name)
            with suppress(FileNotFoundError):  # deleted by another process
                if stat.S_ISREG(os.lstat(path).st_mode):
                    yield (inside / name).as_posix(), path


def _is_kept(name: str) -> bool:
    return NAME.fullmatch(name) is not None and not name.startswith("tmp") and not name.endswith(".lock")


def _member(name: str) -> zipfile.ZipInfo:
    """Returns the header of a file in the archive. It contains no time and no owner, so that saving the same
    cache twice gives identical archives."""
    info = zipfile.ZipInfo(name)
    info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o600) << 16
    return info


def _with_paths(name: str, content: bytes, place: Path | None) -> bytes:
    """Returns the content of a cached file for another folder. In Triton's lists of files, absolute paths are
    replaced; other files are returned unchanged.

    With `place` (when loading), the paths become paths in that folder. Without it (when saving), only the
    file names remain.
    """
    if not GROUP.fullmatch(name):
        return content
    group = plain_files.parse_json(content)
    names = {str(key): Path(str(path)).name for key, path in group["child_paths"].items()}
    group["child_paths"] = {key: str(place / one) if place else one for key, one in names.items()}
    return json.dumps(group).encode()


def load(file: Path) -> Copied:
    """Unpacks an archive that `save` wrote into the compile cache, and returns what was loaded. **Use it only
    for archives that a person trusts: they contain code.**

    Raises SsflError and writes nothing if the file is not such an archive. It also does so if other versions
    of torch, Python or ssfl's kernels made the archive. Files that are already in the cache are not
    overwritten.
    """
    try:
        with plain_files.open_plain(file) as opened, zipfile.ZipFile(opened) as packed:
            members = packed.infolist()
            _check(packed, members, file)
            _make_parts()
            known = sum(not _unpack(packed, member) for member in members[1:])
    except BAD as error:
        raise SsflError(f"{file} cannot be read ({error}). Was it written by `ssfl cache save`?") from error
    return Copied(len(members) - 1, sum(member.file_size for member in members[1:]), known)


def _make_parts() -> None:
    """Creates the folders in which torch and Triton keep compiled code. Raises SsflError if another user
    could change one of them."""
    try:
        _make_private()
        for place in parts().values():
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            require_private(place)
    except OSError as error:
        raise SsflError(_not_stored(error)) from error


def _not_stored(error: OSError) -> str:
    """Returns the error message for a folder in which compiled code cannot be stored. It names the
    environment variable that chooses another folder."""
    place = Path(str(error.filename or folder()))
    own = [VARIABLES[part] for part, chosen in parts().items() if chosen == place and _own(part) is not None]
    return (
        f"compiled code cannot be stored in {place} ({error.strerror or error}): set the environment "
        f"variable {(own or [cache.PLACE])[0]} to a folder that only you can write to"
    )


def _check(packed: zipfile.ZipFile, members: list[zipfile.ZipInfo], file: Path) -> None:
    """Raises SsflError or ValueError if an archive must not be unpacked: because of other versions, unsafe
    file names, or too many or too large files."""
    if not members or members[0].filename != HEAD or members[0].file_size > 10_000:
        raise ValueError(f"its first file is not {HEAD}")
    head = plain_files.parse_json(packed.read(members[0]))
    if not isinstance(head, dict):
        raise ValueError(f"its {HEAD} has no versions")
    if head.get("format") != FORMAT:
        raise SsflError(
            f"{file} has format {str(head.get('format'))[:40]}, and this version of ssfl reads {FORMAT}: "
            "save it again with this version"
        )
    if len(members) > MOST_FILES or sum(member.file_size for member in members) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_FILES:,} files or {MOST_BYTES >> 30} GiB")
    for member in members[1:]:
        part, *names = member.filename.split("/")
        plain = stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG)
        plain = plain and member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if part not in VARIABLES or not 1 <= len(names) <= 8 or not plain or not all(map(_is_kept, names)):
            raise ValueError(f"{member.filename[:200]!r} is not a file of a compile cache")
    other = {name: str(head.get(name))[:40] for name in versions()}
    if other != versions():
        described = [
            f"torch {one['torch']}, Python {one['python']} and kernels {one['kernels']} of ssfl"
            for one in (other, versions())
        ]
        raise SsflError(
            f"{file} was saved with {described[0]}, and cannot be used with {described[1]}: save it again "
            "with the same versions"
        )


def _unpack(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    """Writes one file of an archive into the cache. Returns True, or False if the file was there already."""
    part, *names = member.filename.split("/")
    path = parts()[part].joinpath(*names)
    if os.path.lexists(path):
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = _with_paths(path.name, packed.read(member), path.parent)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="tmp.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as written:
            written.write(content)
        os.replace(name, path)  # renamed when complete, because another process may be reading the folder
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return True


def clear() -> list[Path]:
    """Deletes the compiled code of all versions from the cache. Returns the folders that the user chose by
    environment variables, because these are not deleted."""
    place = cache.root() / "compile"
    if place.exists():
        shutil.rmtree(place)
    return [Path(own) for part in VARIABLES if (own := _own(part))]
