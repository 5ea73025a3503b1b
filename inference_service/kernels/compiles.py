"""Counts what is compiled in this process: while a server runs it should be nothing, since a request that meets it waits for seconds."""

from __future__ import annotations

import logging
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

log = logging.getLogger(__name__)


class CompileCounter:
    """Kernels that Triton compiles, or loads from its cache, modules that FlashInfer builds or loads, and graphs of torch.compile.

    It counts from when it is made to the end of the process, and warns of each kernel and module.
    """

    def __init__(self) -> None:
        self._kernels, self._graphs_before = 0, _torch_graphs()
        if find_spec("triton"):
            self._watch_triton()
        if find_spec("flashinfer"):
            self._watch_flashinfer()

    @property
    def count(self) -> int:
        return self._kernels + _torch_graphs() - self._graphs_before

    def add(self, what: str) -> None:
        self._kernels += 1
        log.warning("compiled or loaded after the start: %s", what)

    def _watch_triton(self) -> None:
        from triton import knobs

        before = knobs.runtime.jit_post_compile_hook

        def compiled(**details: Any) -> Any:
            self.add(f"Triton's {details['repr']}")
            return before(**details) if before else None

        knobs.runtime.jit_post_compile_hook = compiled

    def _watch_flashinfer(self) -> None:
        from flashinfer.jit.core import JitSpec

        build_and_load = JitSpec.build_and_load

        def built(spec: Any, *args: Any, **kwargs: Any) -> Any:
            self.add(f"FlashInfer's {spec.name}")
            return build_and_load(spec, *args, **kwargs)

        JitSpec.build_and_load = built


@cache
def compile_counter() -> CompileCounter:
    """The one of this process; it begins with the first call."""
    return CompileCounter()


def _torch_graphs() -> int:
    """Graphs that torch.compile has made; its modules are slow to import, and not there where nobody uses it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0
