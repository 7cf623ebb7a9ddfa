"""Makes the command that continues a run, for messages to the user. `folder.continuing` says whether a run
can be continued."""

from pathlib import Path
from shlex import join, quote
from typing import Any

from ssfl.config.settings import Config
from ssfl.core import outside, plain_files
from ssfl.engines import dist

SERVE = "serve.json"
"""The name of a file in the run folder. It has the options with which `ssfl serve` last started or continued
the run."""
FLOWER = "flwr"
"""A key in serve.json. It is there if the run was started with `flwr run` instead of `ssfl serve`; its value
is the number of sites."""
OPTIONS = {
    "--keys": str, "--insecure": bool, "--sites": int, "--host": str, "--port": int, "--quorum": int,
    "--deadline": float, "--patience": float, "--share-model": bool,
}  # fmt: skip
"""The options of `ssfl serve` that are repeated in the command that continues a run, with the types of their
values."""


def command(config: Config, path: Path) -> str:
    """Returns the command that continues the run in a folder, such as "ssfl resume runs/anchored". If an
    object was passed to the run from Python, no command could pass it again. The result is then a line of
    Python."""
    names = {"model": config.model.name, "data": config.data.name, "method": config.method.name}
    if outside.IN_MEMORY in names.values():
        return f"ssfl.resume({str(path)!r}{''.join(_arguments(names))})"
    recorded = [name for name in names.values() if name is not None and outside.is_path(name)]
    code = "".join(f" --with {quote(file)}" for file in dict.fromkeys(map(outside.supplied, recorded)))
    if config.run.engine == "sites":
        return _serving(path, code)
    return f"{_launcher(config)}ssfl resume {quote(str(path))}{code}"


def _arguments(names: dict[str, str | None]) -> list[str]:
    """Returns texts such as ", data=data": the arguments that follow the folder in a call of `ssfl.resume`.
    There is one argument for each object that was passed from Python. There is also one for each import path
    of a network or of data. `names` maps "model", "data" and "method" to their names in the config."""
    objects = {"model": "make", "data": "data", "method": "method"}
    passed = []
    for key, name in names.items():
        if name == outside.IN_MEMORY:
            passed.append(f", {key}={objects[key]}")
        elif outside.is_path(name) and key != "method":
            passed.append(f", {key}={name!r}")
    return passed


def _launcher(config: Config) -> str:
    """Returns the beginning of the command that starts torchrun, such as "torchrun --nproc-per-node 4 -m ";
    "" if this process was not started by torchrun."""
    if config.run.engine != "dist" or dist.ranks() == 1:
        return ""
    here = dist.local_ranks()
    # on several machines, the user must repeat their own options
    options = f"--nproc-per-node {here}" if here == dist.ranks() else "..."
    return f"torchrun {options} -m "


def _serving(path: Path, code: str) -> str:
    """Returns the command that continues a federation of real sites: `ssfl serve` with the options with which
    it was started, or `flwr run`. `code` is text to append to `ssfl serve`: `--with` options that name files
    with Python code."""
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
