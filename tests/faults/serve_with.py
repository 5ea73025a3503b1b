"""`python -m tests.faults.serve_with ENGINE serve ...`: the command line with another module as the engine's process.

A process that dies is always taken for one that had been healthy, so that tests need not wait ever longer.
"""

from __future__ import annotations

import sys

from inference_service import cli
from inference_service.rpc import backoff, engine_host

if __name__ == "__main__":
    backoff.HEALTHY_S = 0.0
    engine_host.COMMAND = [sys.executable, "-m", sys.argv.pop(1)]
    cli.main()
