"""The certificates of a federation (X.509): one for the centre, by which sites recognise it, and one for the
authority that signs it."""

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ssfl.errors import SsflError

YEARS = 5
"""For how many years a new certificate is valid."""
PEM = serialization.Encoding.PEM


def new_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns the certificate and the private key of a new authority."""
    key, name = new_key(), _called("ssfl federation")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return certificate, key


def new_key() -> ec.EllipticCurvePrivateKey:
    """Returns a new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def for_centre(
    public: CertificatePublicKeyTypes,
    names: Sequence[x509.GeneralName],
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
) -> bytes:
    """Returns the certificate of the centre's `public` key as PEM text. It is valid for these names. `issuer`
    is the name of the authority, and `authority` its private key."""
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


def host_name(host: str) -> x509.GeneralName:
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


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Returns a private key as PEM text, without a password."""
    content: bytes = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return content


def read(content: bytes) -> x509.Certificate | None:
    """Returns a certificate from PEM text, or None if the text is no certificate."""
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        return None


def names_in(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Returns the host names and IP addresses that a certificate is valid for."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def read_private(content: bytes) -> ec.EllipticCurvePrivateKey | None:
    """Returns a private key from PEM text, or None if the text is no key of the kind that `new_key`
    makes."""
    try:
        key = serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


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
