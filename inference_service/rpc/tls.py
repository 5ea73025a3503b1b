"""The server's certificate, and whose clients it takes."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import grpc

from inference_service.config import ConfigError, Security

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamps = tuple[tuple[int, int], ...]


def server_credentials(security: Security) -> grpc.ServerCredentials:
    """TLS as configured. Files that change are read again at the next handshake, so that certificates can be rotated.

    Raises ConfigError, which names the key.
    """
    certificates = Certificates(security)
    renewed = cast(Callable[[], grpc.ServerCertificateConfiguration], certificates.renewed)  # its published type leaves out the None
    return grpc.dynamic_ssl_server_credentials(certificates.configuration, renewed, bool(security.tls_client_ca))


class Certificates:
    """The files' content: checked before it is used, at start and whenever one of the files has changed."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._stamps = self._stamp()
        self.configuration = self._read()

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What to use from now on; None: what was in use. gRPC asks for it at each handshake, on a thread of its own."""
        try:
            stamps = self._stamp()
            if stamps == self._stamps:
                return None
            # What cannot be used is not tried again until it changes: certificate and key may be in the middle of being replaced.
            self._stamps = stamps
            configuration = self._read()
        except ConfigError as error:
            log.warning("%s; the certificate that was read before stays in use", error)
            return None
        log.info("the certificate has changed, and is in use for new connections")
        return configuration

    def _files(self) -> list[tuple[str, str]]:
        keys = ("tls_certificate", "tls_key", "tls_client_ca")
        return [(f"security.{key}", getattr(self._security, key)) for key in keys if getattr(self._security, key)]

    def _stamp(self) -> Stamps:
        return tuple((found.st_mtime_ns, found.st_ino) for key, path in self._files() for found in [_or_fault(key, path, os.stat)])

    def _read(self) -> grpc.ServerCertificateConfiguration:
        content = {key: _or_fault(key, path, lambda each: Path(each).read_bytes()) for key, path in self._files()}
        self._check()
        pair = (content["security.tls_key"], content["security.tls_certificate"])
        return grpc.ssl_server_certificate_configuration([pair], content.get("security.tls_client_ca"))

    def _check(self) -> None:
        """gRPC would take anything here, and then fail each handshake."""
        security, context = self._security, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(security.tls_certificate)
        except ssl.SSLError:
            raise ConfigError(f"security.tls_certificate: {security.tls_certificate} holds no PEM certificate") from None
        try:
            context.load_cert_chain(security.tls_certificate, security.tls_key, password=_refuse_password)
        except (ssl.SSLError, ValueError) as error:
            what = "does not fit the certificate" if "MISMATCH" in str(error) else "holds no PEM key, or an encrypted one"
            raise ConfigError(f"security.tls_key: {security.tls_key} {what}") from None
        if security.tls_client_ca:
            try:
                context.load_verify_locations(security.tls_client_ca)
            except ssl.SSLError:
                raise ConfigError(f"security.tls_client_ca: {security.tls_client_ca} holds no PEM certificate") from None


def _or_fault(key: str, path: str, read: Callable[[str], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}") from None


def _refuse_password() -> NoReturn:
    """Else OpenSSL would ask for it on the terminal."""
    raise ValueError("encrypted")
