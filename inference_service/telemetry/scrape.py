"""/metrics over HTTP, on threads of its own: the event loop takes no part in it."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

DUAL_STACK = socket.has_dualstack_ipv6()
ALL_ADDRESSES = "::" if DUAL_STACK else "0.0.0.0"
SILENT_S = 5.0
"""A connection that says nothing for so long is closed, and its thread ends."""

log = logging.getLogger(__name__)


class ScrapeServer:
    """Answers until it is closed."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        """`port` 0: any free one. Raises OSError when it is taken."""
        self._server = make_server(ALL_ADDRESSES, port, make_wsgi_app(registry), _Server, _Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Within a second; answers that are being written are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6 if DUAL_STACK else socket.AF_INET

    def server_bind(self) -> None:
        """Without the name of this host, which the base class asks the DNS for."""
        if DUAL_STACK:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape from %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
