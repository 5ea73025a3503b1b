"""A network that fails: a TCP proxy in front of a server, which delays, stops, cuts and resets as it is told to.

with toxic(server) as proxy:
    channel = grpc.insecure_channel(proxy.address)
    proxy.stall()                    # nothing passes any more, and nobody is told
"""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.service.conftest import RunningServer

AT_ONCE = 1 << 16


class ToxicProxy:
    """Forwards until it is told otherwise. What it is told holds for all connections, also those to come."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.piece = AT_ONCE
        """Bytes that are forwarded together."""
        self.delay_s = 0.0
        """Before each piece."""
        self.upstream_bytes = self.downstream_bytes = 1 << 40
        """How much each direction of a connection lets through; then the connection is cut."""
        self.resets = False
        """Whether it is cut by RST."""
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def stall(self) -> None:
        """Forward nothing, and leave everything open: as when the peer's machine has lost its power."""
        self._flows.clear()

    def cut(self) -> None:
        """Close all connections."""
        for end in list(self._open):
            self._cut(end)

    def close(self) -> None:
        self._closed = True
        self._flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            for source, sink, most in ((client, server, self.upstream_bytes), (server, client, self.downstream_bytes)):
                threading.Thread(target=self._pump, args=(source, sink, most), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (data := source.recv(min(self.piece, most))):
                time.sleep(self.delay_s)
                self._flows.wait()
                sink.sendall(data)
                most -= len(data)
        self._cut(source)
        self._cut(sink)

    def _cut(self, end: socket.socket) -> None:
        self._open.discard(end)
        with suppress(OSError):
            if self.resets:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Wakes the thread that reads from it; else it would not really be closed.
            end.shutdown(socket.SHUT_RD if self.resets else socket.SHUT_RDWR)
            end.close()


@contextmanager
def toxic(server: RunningServer) -> Iterator[ToxicProxy]:
    """A proxy in front of the server's port."""
    host, _, port = server.address.rpartition(":")
    proxy = ToxicProxy((host, int(port)))
    try:
        yield proxy
    finally:
        proxy.close()


def through(proxy: ToxicProxy, server: RunningServer) -> RunningServer:
    """The server, as it is reached through the proxy."""
    return dataclasses.replace(server, address=proxy.address)
