"""Every peer, by its name in the YAML file; and whether it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from baselines.endpoints import llama_cpp, lmdeploy, lorax, ours, sglang, tensorrt_llm, tgi, vllm
from baselines.endpoints.peer import Peer

PEERS: dict[str, Peer] = {
    "ours": ours.PEER,
    "vllm": vllm.PEER,
    "tensorrt_llm": tensorrt_llm.PEER,
    "sglang": sglang.PEER,
    "lmdeploy": lmdeploy.PEER,
    "lorax": lorax.PEER,
    "llama_cpp": llama_cpp.PEER,
    "tgi": tgi.PEER,
}
_ASK_S = 60.0
_ASK = """
from importlib import metadata, util
if util.find_spec({module!r}) is None:
    raise SystemExit(1)
try:
    print(metadata.version({package!r}))
except metadata.PackageNotFoundError:
    pass  # it runs from its sources
"""


class NotInstalled(RuntimeError):
    """The message says what to install."""


def installed_version(peer: Peer, program: str, env: Mapping[str, str]) -> str:
    """The version of the package that `program`, a Python, has; "" where it does not say, or `program` is the peer's executable.

    Raises NotInstalled.
    """
    if peer.executable:
        if not shutil.which(program):
            raise NotInstalled(f"not installed: there is no {program}; it comes with {peer.install}")
        return ""
    ask = _ASK.format(module=peer.package.replace("-", "_"), package=peer.package)
    try:
        asked = subprocess.run([program, "-c", ask], env={**os.environ, **env}, capture_output=True, text=True, timeout=_ASK_S)
    except OSError as error:
        raise NotInstalled(f"not installed: cannot run {program}: {error.strerror}; {peer.install}") from None
    if asked.returncode:
        raise NotInstalled(f"not installed: {program} has no package {peer.package}; {peer.install}")
    return asked.stdout.strip()
