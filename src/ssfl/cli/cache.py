"""`ssfl cache`: save, load or delete the code that was compiled for a GPU."""

from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.verbs import Verbs

app = typer.Typer(
    name="cache",
    cls=Verbs,
    help="Save, load or delete the code compiled for a GPU (the compile cache). A run that finds its code in "
    "the cache does not compile it again. The cache also works on another machine with the same kind of GPU "
    "and the same versions of torch, Triton, Python and ssfl.\n\nExample: ssfl cache save compiled.zip",
    no_args_is_help=True,
)


@app.command()
def save(file: Annotated[Path, typer.Argument(help="The file to write.")]) -> None:
    """Save the compiled GPU code as one file.

    Example: ssfl cache save compiled.zip
    """
    from ssfl.core import compile_cache
    from ssfl.runs.text import printable

    saved = compile_cache.save(file)
    print(
        f"saved {saved.files:,} files of compiled code ({saved.bytes / 1e6:,.1f} MB) as "
        f"{printable(str(file))}"
    )


@app.command()
def load(file: Annotated[Path, typer.Argument(help="A file that `ssfl cache save` wrote.")]) -> None:
    """Load compiled GPU code from a file. Only load files you trust: later runs execute this code.

    Example: ssfl cache load compiled.zip
    """
    from ssfl.core import compile_cache

    loaded = compile_cache.load(file)
    print(
        f"loaded {loaded.files:,} files of compiled code ({loaded.bytes / 1e6:,.1f} MB); {loaded.known:,} "
        "of them were already in the compile cache"
    )


@app.command()
def clear() -> None:
    """Delete the compiled GPU code; the next run compiles again.

    Example: ssfl cache clear
    """
    from ssfl.core import cache, compile_cache
    from ssfl.runs.text import printable

    folders = compile_cache.clear()
    print(f"deleted the compile cache in {printable(str(cache.root() / 'compile'))}")
    for place in folders:
        print(
            f"did not delete {printable(str(place))}: an environment variable names this folder, so it may "
            "hold other files. Delete it yourself if you do not need it"
        )
