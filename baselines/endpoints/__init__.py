"""The servers under comparison: a small file for each peer, which makes its command, and what starts, finds and stops them."""

from baselines.endpoints.peers import PEERS
from baselines.endpoints.server import EndpointError, Server, is_ready

__all__ = ["PEERS", "EndpointError", "Server", "is_ready"]
