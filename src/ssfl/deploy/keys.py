"""The keys of a federation: keys and certificates for the centre, and a public and a private key for each
site.

A keys folder holds the centre's key and certificate for TLS (`centre.key`, `centre.crt`). It also holds those
of the authority that signed this certificate (`ca.key`, `ca.crt`). For every site the folder holds two files.
`NAME.pub` is the public key (ECDSA P-384) with which the site's signatures are checked. `NAME.site` has the
site's private key, and the authority's certificate, by which the site recognises the centre. Give NAME.site
to the site in a way you trust, then delete it here. Keep all other files.
"""

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ssfl.core import plain_files
from ssfl.errors import SsflError

LARGEST = 1 << 20
"""The largest size of a key file, in bytes."""
YEARS = 5
"""For how many years a new certificate is valid."""
SOON = 30
"""The centre warns if a certificate expires within this many days."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""The pattern that a site's name must match."""
NAME_RULE = "at most 63 letters a-z and A-Z, digits, '-', '_' and '.', with a letter or digit first"
RESERVED = ("ca", "centre")
"""Names that a site may not have, because the centre's own files use them."""
PEM = serialization.Encoding.PEM
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
    names = [_host(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    authority, centre = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _called("ssfl federation")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    certificate = _centre_certificate(centre.public_key(), names, issuer, authority)
    contents = [_private(authority), root.public_bytes(PEM), _private(centre), certificate]
    for file, content in zip(files, contents, strict=True):
        _write(file, content)
    return files


def add_hosts(folder: Path, hosts: Sequence[str]) -> None:
    """Replaces the centre's certificate by one that is also valid for these names or addresses.

    The centre's key and the authority stay the same, so all .site files stay valid.
    """
    new = [_host(host) for host in dict.fromkeys(hosts)]
    check_dates(folder)
    file = folder / "centre.crt"
    try:
        old = x509.load_pem_x509_certificate(_read(file, ""))
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        authority = serialization.load_pem_private_key(_read(folder / "ca.key", ""), None)
    except (ValueError, TypeError, x509.ExtensionNotFound, UnsupportedAlgorithm):
        authority = None
    if authority is None or not isinstance(authority, ec.EllipticCurvePrivateKey):
        raise SsflError(
            f"{folder} has another centre.crt or ca.key than `ssfl keys init` made: restore them from a "
            f"backup, or make new keys with {NEW_KEYS}"
        )
    everyone = [*names, *(name for name in new if name not in names)]
    fresh = folder / "centre.crt.new"
    fresh.unlink(missing_ok=True)
    _write(fresh, _centre_certificate(old.public_key(), everyone, old.issuer, authority))
    fresh.replace(file)


def add(folder: Path, name: str) -> Path:
    """Creates a key for a new site. Returns the path of the NAME.site file, which must be given to the
    site."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise SsflError(
            f"{name!r} cannot be the name of a site: use {NAME_RULE}, and not 'ca' or 'centre'", value=name
        )
    authority = _read(folder / "ca.crt", _init(folder))
    key = ec.generate_private_key(ec.SECP384R1())
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


class WatchedFleet(Protocol):
    """The fields of a `Fleet` that `Watch` uses."""

    names: list[str]
    left_out: set[str]

    @property
    def tell(self) -> Callable[[str], None]: ...


@dataclass
class Watch:
    """Applies changes of the keys folder while a federation runs. `known` has the public keys that were
    applied last."""

    folder: Path
    known: dict[str, ec.EllipticCurvePublicKey]
    without: set[str]
    """The names of sites of this run that have no key now."""
    fleet: WatchedFleet
    renew: Callable[[str, ec.EllipticCurvePublicKey | None], None]
    """Called with a site's name and its new key, or with None if the key was removed. From then on, the port
    accepts only the new key. With None, the site can no longer connect."""
    _seen: list[tuple[str, int]] = field(default_factory=list)
    """The names and modification times of the key files when `look` last applied them."""

    def look(self) -> None:
        """Applies the changes in the folder since the last call: keys that were replaced, removed or added.
        If the folder cannot be read, prints why and leaves the changes to the next call."""
        try:
            seen = sorted((file.name, file.stat().st_mtime_ns) for file in self.folder.glob("*.pub"))
            if seen == self._seen:
                return
            now = sites(self.folder)
        except (SsflError, OSError) as error:  # the folder is probably being changed right now
            self.fleet.tell(f"the changed keys were not applied, and the previous keys stay in use: {error}")
            return
        self._apply(now)
        self._seen = seen  # if the port could not be reached, the next call tries again

    def _apply(self, now: dict[str, ec.EllipticCurvePublicKey]) -> None:
        """Applies the differences between the `known` keys and `now`, the keys that are in the folder now.

        If a site of this run has a new key, the port accepts that key from now on. If its key was removed,
        the site is excluded. For a site that is not in this run, only a line is printed that says how it can
        join.
        """
        for name in sorted(now.keys() | self.known.keys()):
            key, before = now.get(name), self.known.get(name)
            if key == before:
                continue
            if name not in self.fleet.names:
                if before is None:
                    self.fleet.tell(
                        f"{name} is a new site: to let it join, stop the centre with Ctrl-C and continue "
                        "with `ssfl serve --resume RUN --keys FOLDER`"
                    )
                continue
            self.renew(name, key)
            if key is None:
                self.known.pop(name)
                self.without.add(name)
                self.fleet.left_out.add(name)
                self.fleet.tell(f"{name} is excluded from now on: its key was revoked")
            else:
                self.known[name] = key
                if name in self.without:
                    self.fleet.left_out.discard(name)
                self.without.discard(name)
                self.fleet.tell(f"the key of {name} was replaced: its old key is no longer accepted")
        self.known = now


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
    try:
        names = centre.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = ", ".join(str(name.value) for name in names)
    except x509.ExtensionNotFound:
        hosts = "no host"
    unsent = "  (its .site file is still here: send it to the site over a secure channel, then delete it)"
    public = sites(folder)
    none = f"no site has a key yet: make one with `ssfl keys add NAME --dir {quote(str(folder))}`"
    return [
        *([] if public else [none]),
        *(f"{name}{unsent if (folder / f'{name}.site').exists() else ''}" for name in public),
        f"the centre's certificate is valid for {hosts}, until {last:%Y-%m-%d}",
        *([warning] if warning else []),
    ]


def _read_certificate(file: Path) -> x509.Certificate:
    """Returns a certificate of a keys folder. Raises if the file is none."""
    try:
        return x509.load_pem_x509_certificate(_read(file, _init(file.parent)))
    except ValueError:
        raise SsflError(
            f"{file} is not a certificate: restore it from a backup, or make new keys with {NEW_KEYS}"
        ) from None


def _init(folder: Path) -> str:
    """Returns advice for an error message: the command that creates this keys folder."""
    return f"make it with `ssfl keys init --dir {quote(str(folder))} --host HOST`"


def read_site(file: Path) -> SiteKey:
    """Returns the content of a .site file. Raises if it is not a valid site file."""
    try:
        fields = tomllib.loads(_read(file, "ask the operator of the centre for this file").decode())
        key = serialization.load_ssh_private_key(fields["private_key"].strip().encode() + b"\n", None)
        x509.load_pem_x509_certificate(fields["authority"].strip().encode())
        name, authority = str(fields["name"]), str(fields["authority"]).strip().encode()
        if isinstance(key, ec.EllipticCurvePrivateKey) and NAME.fullmatch(name):
            return SiteKey(name, key, authority)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm):
        pass
    raise SsflError(
        f"{file} is not a site file made by `ssfl keys add`: ask the operator of the centre to send it again"
    )


def _host(host: str) -> x509.GeneralName:
    """Returns a host name or an IP address in the form that a certificate needs. Raises if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise SsflError(
            f"--host {host!r} is not a host name or an IP address: leave out the port and https://"
        )
    return x509.DNSName(host)


def _called(name: str) -> x509.Name:
    """Returns an X.509 name with this text as its common name, for a certificate."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: CertificatePublicKeyTypes
) -> x509.CertificateBuilder:
    """Returns an unsigned certificate for this public key. It is valid from yesterday on, for `YEARS`
    years."""
    start = datetime.now(UTC) - timedelta(days=1)  # the clocks of machines differ
    return x509.CertificateBuilder(
        issuer, subject, key, x509.random_serial_number(), start, start + timedelta(days=365 * YEARS)
    )


def _centre_certificate(
    public: CertificatePublicKeyTypes,
    names: Sequence[x509.GeneralName],
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
) -> bytes:
    """Returns the centre's certificate for these names, signed by the authority, as PEM text."""
    known_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _certificate(_called("ssfl centre"), issuer, public)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(known_by, critical=False)
        .sign(authority, hashes.SHA384())
        .public_bytes(PEM)
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Returns a private key as PEM text, without a password."""
    content: bytes = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return content


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
