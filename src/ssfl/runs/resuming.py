"""Makes the command that continues a run, to show it in messages. `folder.continuing` says whether a run can
be continued."""

from pathlib import Path
from shlex import join, quote
from typing import Any

from ssfl.config.settings import Config
from ssfl.core import outside, plain_files
from ssfl.engines import dist

SERVE = "serve.json"
"""The name of a file in the run folder. It has the options of `ssfl serve` with which the run was started or
continued."""
FLOWER = "flwr"
"""A key in serve.json. Its value is the number of sites, if the run was started with `flwr run` instead of
`ssfl serve`."""
OPTIONS = {
    "--keys": str, "--insecure": bool, "--sites": int, "--host": str, "--port": int, "--quorum": int,
    "--deadline": float, "--patience": float, "--share-model": bool,
}  # fmt: skip
"""The options of `ssfl serve` that may be in serve.json, with their types. Others are not repeated in the
command that continues a run."""


def command(config: Config, path: Path) -> str:
    """Returns the command that continues the run in a folder. If the run uses an object that was passed from
    Python, it is a line of Python instead."""
    names = {"model": config.model.name, "data": config.data.name, "method": config.method.name}
    if outside.IN_MEMORY in names.values():
        return f"ssfl.resume({str(path)!r}{''.join(_arguments(names))})"
    recorded = [name for name in names.values() if name is not None and outside.is_path(name)]
    code = "".join(f" --with {quote(file)}" for file in dict.fromkeys(map(outside.supplied, recorded)))
    if config.run.engine == "sites":
        return _serving(path, code)
    return f"{_launcher(config)}ssfl resume {quote(str(path))}{code}"


def _arguments(names: dict[str, str | None]) -> list[str]:
    """Returns the further arguments of a call of `ssfl.resume` as text: objects that must be passed again,
    and import paths."""
    objects = {"model": "make", "data": "data", "method": "method"}
    passed = []
    for key, name in names.items():
        if name == outside.IN_MEMORY:
            passed.append(f", {key}={objects[key]}")
        elif outside.is_path(name) and key != "method":
            passed.append(f", {key}={name!r}")
    return passed


def _launcher(config: Config) -> str:
    """Returns the part of the command that starts torchrun, if this process was started by it."""
    if config.run.engine != "dist" or dist.ranks() == 1:
        return ""
    here = dist.local_ranks()
    options = f"--nproc-per-node {here}" if here == dist.ranks() else "..."  # several machines: as before
    return f"torchrun {options} -m "


def _serving(path: Path, code: str) -> str:
    """Returns the command that continues a federation of real sites, with the options of `ssfl serve` that it
    was started with."""
    try:
        saved: Any = plain_files.parse_json(plain_files.read(path / SERVE, plain_files.CONFIG))
    except (OSError, ValueError):
        saved = None
    saved = saved if isinstance(saved, dict) else {}
    if type(sites := saved.get(FLOWER)) is int:
        settings = f'resume="{path.absolute()}" sites={sites}'
        return f"flwr run APP NAME --stream --run-config {quote(settings)}"
    words: list[str] = []
    for option, kind in OPTIONS.items():
        value = saved.get(option)
        if type(value) is kind and value is not False:
            words += [option] if value is True else [option, f"{value:g}" if kind is float else str(value)]
    known = {"--keys", "--insecure"} & set(words)
    return f"ssfl serve --resume {quote(str(path))} {join(words) if known else '--keys FOLDER'}{code}"
