"""The keys of a federation: keys and certificates for the centre, and a public and a private key for each
site.

A keys folder holds the centre's key and certificate for TLS (`centre.key`, `centre.crt`). It also holds those
of the authority that signed this certificate (`ca.key`, `ca.crt`). For every site the folder holds two files.
`NAME.pub` is the public key (ECDSA P-384) with which the site's signatures are checked. `NAME.site` has the
site's private key, and the authority's certificate, by which the site recognises the centre. Give NAME.site
to the site in a way you trust, then delete it here. Keep all other files.
"""

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ssfl.core import plain_files
from ssfl.deploy import certificates
from ssfl.deploy.certificates import PEM
from ssfl.errors import SsflError

LARGEST = 1 << 20
"""The largest size of a key file, in bytes."""
SOON = 30
"""The centre warns if a certificate expires within this many days."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""The pattern that a site's name must match."""
NAME_RULE = "at most 63 letters a-z and A-Z, digits, '-', '_' and '.', with a letter or digit first"
RESERVED = ("ca", "centre")
"""Names that a site may not have, because the centre's own files use them."""
NEW_KEYS = "`ssfl keys init --dir NEW --host HOST` and `ssfl keys add NAME --dir NEW` for each site"


@dataclass(frozen=True)
class SiteKey:
    """The content of a .site file, with which a site connects to the centre."""

    name: str
    private: ec.EllipticCurvePrivateKey
    authority: bytes
    """The PEM certificate of the authority that signed the centre's certificate. The site trusts only this
    authority."""


def init(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """Creates a keys folder with the keys and certificates of the centre and of the authority that signs the
    centre's certificate. `hosts` are the names or addresses by which sites will reach the centre. Returns the
    created files. Raises if one of them exists."""
    files = [folder / name for name in ("ca.key", "ca.crt", "centre.key", "centre.crt")]
    _require_free(
        files,
        f"to add a host to the centre's certificate, use `ssfl keys init --dir {quote(str(folder))} --host "
        f"HOST`: the .site files stay valid. To make everything anew, also each .site file, use {NEW_KEYS}",
    )
    names = [certificates.host_name(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    root, authority = certificates.new_authority()
    centre = certificates.new_key()
    certificate = certificates.for_centre(centre.public_key(), names, root.subject, authority)
    private = certificates.private_pem
    contents = [private(authority), root.public_bytes(PEM), private(centre), certificate]
    for file, content in zip(files, contents, strict=True):
        _write(file, content)
    return files


def add_hosts(folder: Path, hosts: Sequence[str]) -> None:
    """Replaces the centre's certificate by one that is also valid for these names or addresses.

    The centre's key and the authority stay the same, so all .site files stay valid.
    """
    new = [certificates.host_name(host) for host in dict.fromkeys(hosts)]
    check_dates(folder)
    file = folder / "centre.crt"
    old = certificates.read(_read(file, ""))
    authority = certificates.read_private(_read(folder / "ca.key", ""))
    names = [] if old is None else certificates.names_in(old)
    if old is None or authority is None or not names:
        raise SsflError(
            f"{folder} has another centre.crt or ca.key than `ssfl keys init` made: restore them from a "
            f"backup, or make new keys with {NEW_KEYS}"
        )
    everyone = [*names, *(name for name in new if name not in names)]
    fresh = folder / "centre.crt.new"
    fresh.unlink(missing_ok=True)
    _write(fresh, certificates.for_centre(old.public_key(), everyone, old.issuer, authority))
    fresh.replace(file)


def add(folder: Path, name: str) -> Path:
    """Creates a key for a new site. Returns the path of the NAME.site file, which must be given to the
    site."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise SsflError(
            f"{name!r} cannot be the name of a site: use {NAME_RULE}, and not 'ca' or 'centre'", value=name
        )
    authority = _read(folder / "ca.crt", _init(folder))
    key = certificates.new_key()
    secret = key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    site = folder / f"{name}.site"
    if (folder / f"{name}.pub").exists():
        raise SsflError(
            f"{name} already has a key in {folder}: choose another name, or replace its key with `ssfl keys "
            f"replace {name} --dir {quote(str(folder))}`",
            value=name,
        )
    _require_free([site], "move it, or use another --dir")
    parts = {"private_key": secret.decode(), "authority": authority.decode()}
    text = "".join(f'{part} = """\n{pem}"""\n' for part, pem in parts.items())
    _write(site, f'name = "{name}"\n{text}'.encode())
    _write(folder / f"{name}.pub", public + f" {name}\n".encode())
    return site


def sites(folder: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Returns the public key of every site in a keys folder, by name and sorted by name."""
    public = {}
    for file in sorted(folder.glob("*.pub"), key=lambda file: file.stem):
        try:
            key = serialization.load_ssh_public_key(_read(file, ""))
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise SsflError(
                f"{file} is not a public key made by `ssfl keys add`: restore or remove it, or make a new "
                f"key with `ssfl keys replace {quote(file.stem)} --dir {quote(str(folder))}`"
            )
        public[file.stem] = key
    return public


def revoke(folder: Path, name: str) -> None:
    """Deletes a site's key. A running centre then excludes the site, from its next round on."""
    if not (folder / f"{name}.pub").is_file():
        others = ", ".join(sorted(file.stem for file in folder.glob("*.pub"))) or "no site"
        raise SsflError(
            f"{folder} has no key for {name!r}: it has keys for {others}; choose one of these, or another "
            "folder with --dir",
            value=name,
        )
    for file in (folder / f"{name}.pub", folder / f"{name}.site"):
        file.unlink(missing_ok=True)


def replace(folder: Path, name: str) -> Path:
    """Replaces a site's key by a new one. Returns the path of the new NAME.site file, which must be given to
    the site."""
    revoke(folder, name)
    return add(folder, name)


def check_dates(folder: Path) -> str:
    """Raises if a certificate in the keys folder is not valid today, because every site would refuse the
    connection. Returns a warning if one expires in the next `SOON` days, and "" otherwise."""
    warning = ""
    for file in (folder / "ca.crt", folder / "centre.crt"):
        read = _read_certificate(file)
        first, last = read.not_valid_before_utc, read.not_valid_after_utc
        if not first <= datetime.now(UTC) <= last:
            raise SsflError(
                f"the certificate {file} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}, but not today: "
                f"check the clock, or make new keys with {NEW_KEYS}, and send each site its new file"
            )
        if not warning and last - datetime.now(UTC) < timedelta(days=SOON):
            warning = (
                f"the certificate {file} expires on {last:%Y-%m-%d}: before that day, make new keys with "
                f"{NEW_KEYS}, and send each site its new file"
            )
    return warning


def described(folder: Path) -> list[str]:
    """Returns lines of text about a keys folder: each site with a key, and for which hosts and until when the
    centre's certificate is valid."""
    authority, centre = (_read_certificate(folder / name) for name in ("ca.crt", "centre.crt"))
    last = min(authority.not_valid_after_utc, centre.not_valid_after_utc)
    try:
        warning = check_dates(folder)
    except SsflError as error:  # a certificate has expired; the rest is still worth showing
        warning = str(error)
    hosts = ", ".join(str(name.value) for name in certificates.names_in(centre)) or "no host"
    unsent = "  (its .site file is still here: send it to the site over a secure channel, then delete it)"
    public = sites(folder)
    none = f"no site has a key yet: make one with `ssfl keys add NAME --dir {quote(str(folder))}`"
    return [
        *([] if public else [none]),
        *(f"{name}{unsent if (folder / f'{name}.site').exists() else ''}" for name in public),
        f"the centre's certificate {'is' if last >= datetime.now(UTC) else 'was'} valid for {hosts}, until "
        f"{last:%Y-%m-%d}",
        *([f"warning: {warning}"] if warning else []),
    ]


def _read_certificate(file: Path) -> x509.Certificate:
    """Returns a certificate of a keys folder. Raises if the file is none."""
    certificate = certificates.read(_read(file, _init(file.parent)))
    if certificate is None:
        raise SsflError(
            f"{file} is not a certificate: restore it from a backup, or make new keys with {NEW_KEYS}"
        )
    return certificate


def _init(folder: Path) -> str:
    """Returns advice for an error message: the command that creates this keys folder."""
    return f"make it with `ssfl keys init --dir {quote(str(folder))} --host HOST`"


def read_site(file: Path) -> SiteKey:
    """Returns the content of a .site file. Raises if it is not a valid site file."""
    try:
        fields = tomllib.loads(_read(file, "ask the operator of the centre for this file").decode())
        key = serialization.load_ssh_private_key(fields["private_key"].strip().encode() + b"\n", None)
        name, authority = str(fields["name"]), str(fields["authority"]).strip().encode()
        whole = NAME.fullmatch(name) and certificates.read(authority) is not None
        if isinstance(key, ec.EllipticCurvePrivateKey) and whole:
            return SiteKey(name, key, authority)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm):
        pass
    raise SsflError(
        f"{file} is not a site file made by `ssfl keys add`: ask the operator of the centre to send it again"
    )


def _require_free(files: Sequence[Path], advice: str) -> None:
    """Raises if one of the files exists, so that no key is overwritten. `advice` says what to do then."""
    for file in files:
        if file.exists():
            raise SsflError(f"{file} exists already and is not overwritten: {advice}")


def _write(file: Path, content: bytes) -> None:
    """Writes a new file that only its owner may read. Raises if the file exists."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as stream:
            stream.write(content)
    except OSError as error:
        raise SsflError(f"cannot write {file}: {error.strerror}") from error


def _read(file: Path, hint: str) -> bytes:
    """Returns the content of a key file. Raises with `hint` if it cannot be read."""
    try:
        return plain_files.read(file, LARGEST)
    except OSError as error:
        raise SsflError(f"cannot read {file}: {error.strerror}" + (f"; {hint}" if hint else "")) from error
