"""`ssfl keys`, `ssfl serve` and `ssfl join`: the commands of a federation on several machines."""

import ipaddress
import signal
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ssfl.cli.verbs import Sets, Verbs, With
from ssfl.deploy import require_flower
from ssfl.errors import ConfigError, Stopped
from ssfl.signals import Terminated

app = typer.Typer()
keys_app = typer.Typer(
    cls=Verbs,
    help="Make the keys of a federation on several machines."
    "\n\nExample: ssfl keys init --host fl.example.org",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")
KeysFolder = Annotated[Path, typer.Option("--dir", help="The keys folder.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No keys and no encryption: only for a test on one machine.")
]


@keys_app.command("init")
def keys_init(
    folder: KeysFolder = Path("keys"),
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host name or address at which sites reach the centre; repeatable."),
    ] = None,
) -> None:
    """Make a keys folder with the centre's certificate. If the folder exists, --host adds a host to the
    certificate.

    Example: ssfl keys init --host fl.example.org
    """
    require_flower()
    from ssfl.deploy import keys

    if host and (folder / "ca.key").exists():
        keys.add_hosts(folder, host)
        print(
            f"the centre's certificate in {folder} is now also for {', '.join(host)}; all .site files stay "
            "valid. A running centre uses it after it is stopped and continued"
        )
        return
    keys.init(folder, host or [])
    if not host:
        print(
            "the centre's certificate is only for sites on this machine (localhost): for other machines, run "
            f"`ssfl keys init --dir {quote(str(folder))} --host HOST`"
        )
    print(
        f"made the centre's keys in {folder}; next, run `ssfl keys add NAME --dir {quote(str(folder))}` for "
        "each site"
    )


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="The site's name.")], folder: KeysFolder = Path("keys")
) -> None:
    """Make a key for a new site, in a file to send to the site.

    Example: ssfl keys add hospital-a
    """
    require_flower()
    from ssfl.deploy import keys

    print(f"send {keys.add(folder, name)} to {name} over a secure channel, then delete it here")


@keys_app.command("list")
def keys_list(folder: KeysFolder = Path("keys")) -> None:
    """List the sites with a key, and the hosts and the expiry date of the centre's certificate.

    Example: ssfl keys list
    """
    require_flower()
    from ssfl.deploy import keys

    print("\n".join(keys.described(folder)))


@keys_app.command("replace")
def keys_replace(
    name: Annotated[str, typer.Argument(help="The site's name.")], folder: KeysFolder = Path("keys")
) -> None:
    """Replace the key of a site by a new one, also while the centre is running.

    Example: ssfl keys replace hospital-a
    """
    require_flower()
    from ssfl.deploy import keys

    print(f"send {keys.replace(folder, name)} to {name} over a secure channel, then delete it here")


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="The site's name.")], folder: KeysFolder = Path("keys")
) -> None:
    """Revoke the key of a site, so that the site can no longer take part. This also works while the centre is
    running.

    Example: ssfl keys revoke hospital-a
    """
    require_flower()
    from ssfl.deploy import keys

    keys.revoke(folder, name)
    print(f"the key of {name} is revoked: the centre no longer accepts this site")


@app.command()
def serve(
    data: Annotated[
        str | None,
        typer.Option(
            help="Your labelled images: a folder with a sub-folder for each class, or FILE.py:FUNCTION."
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="The folder that `ssfl keys init` made. Required, except with --insecure."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="The name of a preset, or a TOML file. Default: own.")
    ] = None,
    sets: Sets = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8443,
    out: Annotated[
        Path | None, typer.Option(help="The run folder to create. Default: runs/centre, then runs/centre-2.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
    sites: Annotated[
        int | None,
        typer.Option(min=1, help="Wait for this many sites at the start. Default: all sites with a key."),
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many sites a round needs. Default: two thirds of those that joined, at least two.",
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="How many seconds a site has to answer.")] = 120,
    patience: Annotated[
        float, typer.Option(min=1, help="Stop after so many seconds without an answer, or without a quorum.")
    ] = 600,
    share_model: Annotated[
        bool, typer.Option("--share-model", help="Allow sites to keep the final model (`ssfl join --keep`).")
    ] = False,
    code: With = None,
    insecure: Insecure = False,
) -> None:
    """Start the centre (the server) of a federation on several machines.

    Example: ssfl serve --data labelled --keys keys"""
    require_flower()
    from ssfl.core import outside, progress
    from ssfl.deploy import serving
    from ssfl.deploy.view import FederationView
    from ssfl.runs.choose import load_config
    from ssfl.runs.folder import next_free

    outside.supply(code or [])
    progress.show(True)
    if insecure == (keys is not None):
        raise ConfigError(
            "give either --keys FOLDER (see `ssfl keys init`), or --insecure for a test on one machine"
        )
    if insecure:
        host = "127.0.0.1"
        tell("--insecure: nothing is encrypted, and everyone on this machine can join")
    if (data is None) == (resume is None):
        raise ConfigError("give either --data FOLDER with your labelled images, or --resume RUN")
    place = serving.Place(keys, host, port, sites, deadline, patience, quorum, share_model)
    loaded = None
    if data is not None:
        named = "name" if outside.is_path(data) else "path"
        loaded = load_config(config or "own", [f"data.{named}={data}", *(sets or [])], sites=True)
    path = resume or out or next_free(Path("runs") / "centre")
    with FederationView() as view:
        result = serving.serve(loaded, path, place, resume is not None, view)
    print(f"{result.score_text}  in {result.path}")
    if result.verdict is not None:
        print(result.verdict)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The address of the centre.")],
    data: Annotated[
        str,
        typer.Option(help="Your images, without labels: a folder, or FILE.py:FUNCTION."),
    ],
    key: Annotated[
        Path | None, typer.Option(help="The key file that you got from the operator of the centre.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name of this site (only with --insecure).")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU cores to use. Default: all.")] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the centre before giving up.")
    ] = 600,
    keep: Annotated[
        Path | None, typer.Option(help="Write the final model to this file, if the centre shares it.")
    ] = None,
    code: With = None,
    insecure: Insecure = False,
) -> None:
    """Join a federation as a site, with your own images.

    Example: ssfl join fl.example.org:8443 --data scans --key a.site"""
    require_flower()
    from ssfl.core import outside, progress
    from ssfl.data import sources
    from ssfl.deploy import images, site
    from ssfl.deploy import keys as keyring
    from ssfl.runs.predict import free_files

    outside.supply(code or [])
    progress.show(True)
    if insecure == (key is not None):
        raise ConfigError(
            "give either --key FILE, which the operator of the centre sends you, or --insecure for a test on "
            "one machine"
        )
    host = _host_of(address)
    if host is None:
        raise ConfigError(
            f"{address!r} is not an address: write HOST:PORT, such as fl.example.org:8443 or "
            "[2001:db8::1]:8443",
            value=address,
        )
    if insecure:
        if not _loopback(host):
            raise ConfigError(f"--insecure is only for a centre on this machine, not for {host}: use --key")
        tell("--insecure: nothing is encrypted")
    opened = None if key is None else keyring.read_site(key)
    called = opened.name if opened else name or _site_name(data)
    if opened is None and not keyring.NAME.fullmatch(called):
        raise ConfigError(
            f"{called!r} cannot be the name of a site: set --name, with {keyring.NAME_RULE}",
            key="--name",
            value=called,
        )
    if keep is not None:
        free_files(keep)
    is_code = outside.is_path(data)
    held = images.Loaded(data) if is_code else images.usable(sources.image_files([Path(data)]), tell)
    try:
        site.join(address, site.Site(called, held, device, threads, tell, keep), opened, patience)
    except (KeyboardInterrupt, Terminated) as stop:
        by = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        raise Stopped("this site has left; the federation continues without it", by) from None


def tell(line: str) -> None:
    """Prints a line and flushes the output, so that a log file has the line at once. If the disk is full, the
    line is lost and the command continues."""
    from ssfl.runs.text import printable

    with suppress(OSError):
        print(printable(line), flush=True)


def _site_name(data: str) -> str:
    """Returns the default name of a site that has no key. `data` is the site's image folder, or FILE.py:NAME
    for a function that returns images. The result is the name of the folder, or the file's name without
    .py."""
    from ssfl.core import outside

    return Path(data.rpartition(":")[0]).stem if outside.is_path(data) else Path(data).absolute().name


def _host_of(address: str) -> str | None:
    """Returns the host in an address HOST:PORT, or None if the text is not such an address."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        return None
    if host.startswith("[") or ":" in host:  # IPv6 needs brackets
        try:
            ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return None
        return host if host[0] + host[-1] == "[]" else None
    return None if any(letter.isspace() or letter in "/@?#[]" for letter in host) else host


def _loopback(host: str) -> bool:
    """Returns whether a host is this machine: localhost or a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
