"""Certificates of a job's nodes: a CA of the job's own, and one certificate a node.

A node's certificate names the job as its organization and the node as its common name; peers let in whoever has one of
this CA and this job. Keys are EC P-256 and never leave the folder that they are made in, which only its owner reads.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ckptkit.errors import StoreError, UsageError

_CLOCKS = datetime.timedelta(hours=1)
"""How far clocks of nodes may differ."""


def make_ca(folder: str, job: str, *, days: float = 365) -> None:
    """Write `ca.pem` and `ca.key` into a folder, which is made where it is missing. Raises UsageError where there is one already."""
    if os.path.exists(os.path.join(folder, "ca.key")):
        raise UsageError(f"{folder} holds a CA already; nodes would not know a new one", file=folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(job, f"ckptkit cache of {job}")
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    made = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _make_folder(folder)
    _write(folder, "ca.key", _pem_key(key))
    _write(folder, "ca.pem", made.public_bytes(serialization.Encoding.PEM))


def make_cert(folder: str, node: str, hosts: Sequence[str], *, days: float = 90) -> tuple[str, str]:
    """Write `<node>.pem` and `<node>.key`, signed by the folder's CA, and give their paths.

    Args:
        hosts: Host names and IP addresses under which peers reach the node.

    Raises:
        UsageError: there is no CA in the folder.
        StoreError: a file cannot be read or written.
    """
    try:
        with open(os.path.join(folder, "ca.pem"), "rb") as file:
            ca = x509.load_pem_x509_certificate(file.read())
        with open(os.path.join(folder, "ca.key"), "rb") as file:
            ca_key = serialization.load_pem_private_key(file.read(), None)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} holds no CA; make one with `ckptkit cache certs ca`", file=folder
        ) from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder}: its CA cannot be read ({error})", file=folder) from error
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    job = ca.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value
    key = ec.generate_private_key(ec.SECP256R1())
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        _builder(_name(str(job), node), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(both, critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts] or [x509.DNSName(node)]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    _write(folder, f"{node}.key", _pem_key(key))
    _write(folder, f"{node}.pem", made.public_bytes(serialization.Encoding.PEM))
    return os.path.join(folder, f"{node}.pem"), os.path.join(folder, f"{node}.key")


def days_left(path: str) -> float:
    """Days until a certificate expires; negative after that. Raises StoreError where it is none."""
    try:
        with open(path, "rb") as file:
            ends = x509.load_pem_x509_certificate(file.read()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read as a certificate ({error})", file=path) from error
    return (ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    start = min(now - _CLOCKS, now + datetime.timedelta(days=days) - _CLOCKS)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(job: str, common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, job),
            x509.NameAttribute(NameOID.COMMON_NAME, common[:64]),
        ]
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {folder}: {error.strerror}", file=folder) from error


def _write(folder: str, name: str, content: bytes) -> None:
    path = os.path.join(folder, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600 if name.endswith(".key") else 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}", file=path) from error
