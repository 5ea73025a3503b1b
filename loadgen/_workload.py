"""The requests of a load test, the very same ones in every run and for every target.

A request depends on (seed, index) alone, never on timing, on the target, on the number of processes or on what was sent before it: process
w of W takes the indices w, w + W, w + 2 W and so on. Only a conversation's later turns hold what the target answered to the earlier ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from inference_service.config import Config
from inference_service.loadtest import Workload as WorkloadConfig
from loadgen._dataset import FilePrompts
from loadgen._synthetic import RandomPrompts
from loadgen._target import Model, Observation, Request, Takes, TargetError

ANY = Takes()


class Prompts(Protocol):
    """Where one part of a workload has its requests from."""

    def request(self, index: int, input_tokens: int | None, output_tokens: int | None, prefix_ids: Sequence[int]) -> Request: ...

    def next_turn(self, request: Request, observation: Observation) -> Request | None: ...


class Workload:
    """Numbered requests of `loadtest.workload` and `loadtest.mixture`."""

    def __init__(self, config: Config, model: Model, takes: Takes = ANY, process: int = 0, processes: int = 1) -> None:
        """Process `process` of `processes`. Raises TargetError, which names the key, where the target cannot do what is asked."""
        loadtest = config.loadtest
        self._seed = loadtest.seed
        self._main = _prompts("loadtest.workload", config, loadtest.workload, model, takes)
        self._parts = [
            (part.share, _prompts(f"loadtest.mixture[{number}].workload", config, part.workload, model, takes))
            for number, part in enumerate(loadtest.mixture)
        ]
        if sum(share for share, _ in self._parts) > 1:
            raise TargetError("loadtest.mixture: the shares are more than 1 together")
        self._indices = count(process, processes)

    def request(
        self, index: int, *, input_tokens: int | None = None, output_tokens: int | None = None, prefix_ids: Sequence[int] = ()
    ) -> Request:
        """The first turn of conversation `index`. What is given goes before the settings: a trace's lengths, and its prefix blocks, of
        which those of the same id have the same tokens, whichever request they are in."""
        return self._part(index).request(index, input_tokens, output_tokens, prefix_ids)

    def next(self) -> Request:
        """The first turn of this process's next conversation."""
        return self.request(next(self._indices))

    def next_turn(self, request: Request, observation: Observation) -> Request | None:
        """What follows on the answer to `request`; None where the conversation is over, or the request did not complete."""
        if observation.failure or observation.cut_off:
            return None
        return self._part(request.index).next_turn(request, observation)

    def _part(self, index: int) -> Prompts:
        if not self._parts:
            return self._main
        drawn = random.Random(f"{self._seed}/part/{index}").random()
        for share, prompts in self._parts:
            if drawn < share:
                return prompts
            drawn -= share
        return self._main


def _prompts(key: str, config: Config, workload: WorkloadConfig, model: Model, takes: Takes) -> Prompts:
    try:
        if workload.exact_output and not takes.exact:
            raise TargetError("loadtest.workload.exact_output: the target cannot be told to ignore end-of-sequence; set it to false")
        made = FilePrompts if workload.file else RandomPrompts
        return made(config, workload, model, takes)
    except TargetError as error:
        raise TargetError(str(error).replace("loadtest.workload", key)) from None
