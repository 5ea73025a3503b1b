"""How a client reaches a server: in plaintext or over TLS, with a token or without. For our client and the load generator alike."""

from __future__ import annotations

import os
import re

Metadata = tuple[tuple[str, str], ...]

TOKEN_VARIABLE = "INFERENCE_TOKEN"
"""The environment variable that holds a client's token, where none is given otherwise. Command lines are seen by others."""


def split_target(target: str) -> tuple[str, bool]:
    """HOST:PORT of [grpc[s]://]HOST:PORT, and whether TLS is spoken there.

    The server's certificate must be signed by an authority of gRPC's own list, or of the PEM file that the environment variable
    GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
    """
    scheme, separator, address = target.rpartition("://")
    if separator and scheme not in ("grpc", "grpcs"):
        raise ValueError(f"target {target!r}: write HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT")
    return address, scheme == "grpcs"


def authorization(token: str | None = None) -> Metadata:
    """The metadata by which a call proves whose it is. None: by the token of the environment, if it has one."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip() if token is None else token
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"a token ({TOKEN_VARIABLE}) consists of printable ASCII characters without spaces")  # gRPC would quote it
    return (("authorization", f"Bearer {token}"),) if token else ()
