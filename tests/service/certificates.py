"""An authority of the tests' own, and certificates that it has signed; made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True)
class Certificate:
    """A PEM certificate and its key."""

    certificate: Path
    key: Path


def make_authority(directory: Path, name: str = "authority") -> Certificate:
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl("req", "-x509", *KEY, "-subj", f"/CN={name}", "-days", "2", "-keyout", made.key, "-out", made.certificate)
    return made


def sign(authority: Certificate, directory: Path, name: str) -> Certificate:
    """A certificate for a server at 127.0.0.1 or localhost, or for a client."""
    made, request, extensions = (
        Certificate(directory / f"{name}.pem", directory / f"{name}.key"),
        directory / f"{name}.csr",
        directory / "san",
    )
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    _openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
    signer: list[str | Path] = ["-CA", authority.certificate, "-CAkey", authority.key, "-CAcreateserial"]
    _openssl("x509", "-req", *signer, "-days", "2", "-extfile", extensions, "-in", request, "-out", made.certificate)
    return made


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
