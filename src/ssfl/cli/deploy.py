"""`ssfl keys`, `ssfl serve` and `ssfl join`."""

import ipaddress
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ssfl.cli.verbs import Sets, Verbs, With
from ssfl.deploy import require_flower
from ssfl.errors import ConfigError, Stopped
from ssfl.signals import Terminated

app = typer.Typer()
keys_app = typer.Typer(
    cls=Verbs,
    help="Keys of a real federation.  Example: ssfl keys init --host fl.example.org",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")
KeysFolder = Annotated[Path, typer.Option("--dir", help="The keys folder.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No keys, no encryption: to try it out on one machine alone.")
]


@keys_app.command("init")
def keys_init(
    folder: KeysFolder = Path("keys"),
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address that sites reach the centre by; repeatable.")
    ] = None,
) -> None:
    """Make the centre's certificate.  Example: ssfl keys init --host fl.example.org"""
    require_flower()
    from ssfl.deploy import keys

    keys.init(folder, host or [])
    print(f"made {folder}; now `ssfl keys add NAME --dir {folder}` for each site")


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="The site's name.")], folder: KeysFolder = Path("keys")
) -> None:
    """Make the key of a site.  Example: ssfl keys add hospital-a"""
    require_flower()
    from ssfl.deploy import keys

    print(f"give {keys.add(folder, name)} to {name} by a way you trust, then delete it here")


@keys_app.command("replace")
def keys_replace(
    name: Annotated[str, typer.Argument(help="The site's name.")], folder: KeysFolder = Path("keys")
) -> None:
    """Make another key for a site, also while the centre runs.  Example: ssfl keys replace hospital-a"""
    require_flower()
    from ssfl.deploy import keys

    print(f"give {keys.replace(folder, name)} to {name} by a way you trust, then delete it here")


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="The site's name.")], folder: KeysFolder = Path("keys")
) -> None:
    """Take a site's key away, also while the centre runs.  Example: ssfl keys revoke hospital-a"""
    require_flower()
    from ssfl.deploy import keys

    keys.revoke(folder, name)
    print(f"{name} has no key any more")


@app.command()
def serve(
    data: Annotated[
        str | None,
        typer.Option(help="Your labelled images: a folder with one for each class, or FILE.py:FUNCTION."),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="The keys folder.")] = None,
    config: Annotated[str | None, typer.Option(help="A preset's name or a TOML file; by itself own.")] = None,
    sets: Sets = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to listen.")] = 8443,
    out: Annotated[Path | None, typer.Option(help="The run folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run folder that was stopped.")] = None,
    sites: Annotated[
        int | None, typer.Option(min=1, help="Wait for so many sites at the start; default: all with keys.")
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sites that a round needs; default: two thirds of those that joined, at least two."
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that sites have for a round.")] = 120,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without any answer until it stops.")] = 600,
    share_model: Annotated[
        bool, typer.Option("--share-model", help="Let sites keep the final model (`ssfl join --keep`).")
    ] = False,
    code: With = None,
    insecure: Insecure = False,
) -> None:
    """Be the centre of a real federation.  Example: ssfl serve --data labelled --keys keys"""
    require_flower()
    from ssfl.core import outside
    from ssfl.deploy import centre
    from ssfl.deploy.view import View
    from ssfl.runs.choose import load_config
    from ssfl.runs.folder import next_free

    outside.supply(code or [])
    if insecure == (keys is not None):
        raise ConfigError("give --keys FOLDER (see `ssfl keys init`), or --insecure on one machine alone")
    if insecure:
        host = "127.0.0.1"
        tell("--insecure: nothing is encrypted and anybody on this machine may join")
    if (data is None) == (resume is None):
        raise ConfigError("give --data FOLDER with your labelled images, or --resume RUN")
    place = centre.Place(keys, host, port, sites, deadline, patience, quorum, share_model)
    loaded = None
    if data is not None:
        named = "name" if outside.is_path(data) else "path"
        loaded = load_config(config or "own", [f"data.{named}={data}", *(sets or [])], sites=True)
    path = resume or out or next_free(Path("runs") / "centre")
    with View() as view:
        result = centre.serve(loaded, path, place, resume is not None, view)
    print(f"{result.told}  in {result.path}")
    if result.verdict is not None:
        print(result.verdict)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the centre is.")],
    data: Annotated[
        str,
        typer.Option(help="Your images, without labels: a folder, or FILE.py:FUNCTION."),
    ],
    key: Annotated[Path | None, typer.Option(help="The site file that the centre's keeper gave you.")] = None,
    name: Annotated[str | None, typer.Option(help="With --insecure, this site's name.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU cores to use, by itself all.")] = None,
    patience: Annotated[float, typer.Option(min=1, help="Seconds to try to reach the centre.")] = 600,
    keep: Annotated[
        Path | None, typer.Option(help="Write the final model here, if the centre shares it.")
    ] = None,
    code: With = None,
    insecure: Insecure = False,
) -> None:
    """Be a site of a real federation.  Example: ssfl join fl.example.org:8443 --data scans --key a.site"""
    require_flower()
    from ssfl.core import outside
    from ssfl.data import sources
    from ssfl.deploy import images, site
    from ssfl.deploy import keys as keyring
    from ssfl.runs.predict import free_files

    outside.supply(code or [])
    if insecure == (key is not None):
        raise ConfigError("give --key FILE from the centre's keeper, or --insecure on one machine alone")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ConfigError(f"{address!r} is no address: write HOST:PORT, such as fl.example.org:8443")
    if insecure:
        if not _loopback(host):
            raise ConfigError(f"--insecure is for this machine alone, not {host}: use --key")
        tell("--insecure: nothing is encrypted")
    opened = None if key is None else keyring.read_site(key)
    called = opened.name if opened else name or _site_name(data)
    if opened is None and not keyring.NAME.fullmatch(called):
        raise ConfigError(
            f"{called!r} cannot be a site's name: give one of a-z, A-Z, 0-9, '.', '_' and '-' with --name"
        )
    if keep is not None:
        free_files(keep)
    own = outside.is_path(data)
    held = images.Loaded(data) if own else images.usable(sources.image_files([Path(data)]), tell)
    try:
        site.join(address, site.Site(called, held, device, threads, tell, keep), opened, patience)
    except (KeyboardInterrupt, Terminated) as stop:
        by = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        raise Stopped("left; the federation goes on without this site", by) from None


def tell(line: str) -> None:
    """A line at once, also into a file; if that is on a full disk the work goes on without the line."""
    from ssfl.runs.text import printable

    with suppress(OSError):
        print(printable(line), flush=True)


def _site_name(data: str) -> str:
    """A site's name without a key: its folder's, or that of the file with its function."""
    from ssfl.core import outside

    return Path(data.rpartition(":")[0]).stem if outside.is_path(data) else Path(data).absolute().name


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
