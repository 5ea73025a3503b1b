"""The ports: who is heard on which, and with which services."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc

from inference.v1 import inference_pb2_grpc
from inference_service.config import Config, Server
from inference_service.rpc.admin import HOST, AdminServicer, NoDrain, add_admin_services, add_reflection
from inference_service.rpc.auth import Authentication, load_tokens
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import OnRefused
from inference_service.rpc.lifecycle import Lifecycle
from inference_service.rpc.malformed import Registrar
from inference_service.rpc.tls import server_credentials

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16 << 10
"""Of a call's metadata, names and values together; HTTP/2 servers commonly take 8 to 16 KiB."""
ANY_HOST = "::"


class ServeError(RuntimeError):
    """The server could not start."""


@dataclass(frozen=True)
class Listener:
    """The started servers of a process."""

    address: str
    """HOST:PORT of the API."""
    servers: list[grpc.aio.Server]

    async def stop(self, grace_s: float) -> None:
        """Stop them; what is in flight after `grace_s` seconds is cancelled."""
        await asyncio.gather(*(server.stop(grace_s) for server in self.servers))


async def listen(
    config: Config,
    servicer: inference_pb2_grpc.InferenceServiceServicer,
    lifecycle: Lifecycle,
    engine: EngineClient,
    on_refused: OnRefused,
    reuse_port: bool = False,
) -> Listener:
    """Bind the ports and start to serve. Ports are bound before the model is loaded, so that a taken one is known at once.

    With `reuse_port` other processes may bind them too, and the kernel spreads connections among all of these.
    Raises ServeError for a taken port, ConfigError for a certificate or a file of tokens that cannot be used.
    """
    security, ports = config.security, config.server
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if security.tokens_file:
        interceptors.append(Authentication(load_tokens(Path(security.tokens_file), config.limits), on_refused))
    # What ends the service for all is none of those things that a client's token is good for.
    if ports.admin_port is not None or security.tokens_file:
        interceptors.append(NoDrain())
    credentials = server_credentials(security) if security.tls_certificate else None
    api = _server(ports, reuse_port, interceptors)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, Registrar(api, on_refused))
    health_pb2_grpc.add_HealthServicer_to_server(lifecycle.health, Registrar(api))
    if ports.admin_port is None:
        add_reflection(api)
    servers, address = [api], _bind(api, "port", ports.host, ports.port, credentials)
    if ports.admin_port is not None:
        admin = _server(ports, reuse_port)
        add_admin_services(admin, servicer, lifecycle, AdminServicer(config.model.load_format, engine, lifecycle))
        log.info("admin on %s", _bind(admin, "admin_port", HOST, ports.admin_port))
        servers.append(admin)
    if ports.health_port is not None:
        health = _server(ports, reuse_port)
        health_pb2_grpc.add_HealthServicer_to_server(lifecycle.health, Registrar(health))
        log.info("health on %s", _bind(health, "health_port", ANY_HOST, ports.health_port))
        servers.append(health)
    lifecycle.publish()
    for server in servers:
        await server.start()
    return Listener(address, servers)


def _server(ports: Server, reuse_port: bool, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    keepalive_ms = round(1000 * ports.keepalive_s)
    options = [
        # On by default, it would let a second server bind the same port in silence.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", ports.max_message_mib * 2**20),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # A peer that has vanished without a word is known by this alone, also where nothing is sent; and clients may ask likewise.
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # The one is how long sent bytes may stay unacknowledged by TCP, the other how long a ping may stay unanswered.
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        # The windows it opens are for what nobody reads yet, too: each call could have the server hold a whole request.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", keepalive_ms),
        ("grpc.enable_channelz", int(ports.admin_port is not None)),
    ]
    with _threads_that_do_not_preempt():
        return grpc.aio.server(interceptors=interceptors, options=options)


def _bind(server: grpc.aio.Server, key: str, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> str:
    """The address that was bound, whose port is another one where `port` is 0."""
    host = f"[{host}]" if ":" in host else host
    address = f"{host}:{port}"
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServeError(f"server.{key}: cannot listen on {address}: {error}") from None
    return f"{host}:{port}"


@contextmanager
def _threads_that_do_not_preempt() -> Iterator[None]:
    """Threads that begin here let a running one go on when they are woken.

    gRPC's completion thread is woken for every message written. Where it takes the core from the event loop each time, a message costs
    half as much again; like this it finds the completions of a whole step at once.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
