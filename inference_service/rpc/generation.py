"""One Generate call after its admission: its choices on one stream, from their submission to the last one's end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import grpc

from inference.v1 import generate_pb2 as pb
from inference_service.messages import Output
from inference_service.rpc.caller import of_caller
from inference_service.rpc.choice import Choice
from inference_service.rpc.engine_client import EngineClient


class Generation:
    """A call in flight; `choices` has one for each answer, at least one."""

    def __init__(self, request_id: str, choices: list[Choice], engine: EngineClient) -> None:
        self.request_id = request_id
        self.choices = choices
        self.writing_since = 0
        """When the write that is going on began, in CLOCK_MONOTONIC nanoseconds; 0: none is."""
        self._by_key = {choice.submit.key: choice for choice in choices}
        """Those that have not ended."""
        self._accepted = False
        self._engine = engine

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, which choice 0 computes for all."""
        return self.choices[0].cached_tokens

    async def run(self, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]) -> None:
        """Stream the answers. Raises RpcError when the engine is lost or the deadline passes."""
        stream = self._engine.submit(of_caller(self.request_id), [choice.submit for choice in self.choices])
        try:
            while self._by_key:
                for response in self._responses(await stream.take()):
                    self.writing_since = time.monotonic_ns()
                    try:
                        await context.write(response)
                    except grpc.aio.InternalError:
                        # The connection is gone, and gRPC has yet to cancel the call.
                        raise asyncio.CancelledError from None
                    self.writing_since = 0
                for choice in self.choices:
                    if error := choice.error:
                        raise error
        finally:
            self._engine.release(list(self._by_key), ended=False)

    def abort(self) -> None:
        """End the choices at their client's wish: those that have not ended do with FINISH_REASON_ABORTED."""
        self._engine.abort(list(self._by_key))

    def _responses(self, outputs: list[tuple[int, Output]]) -> list[pb.GenerateResponse]:
        responses: list[pb.GenerateResponse] = []
        for choice, its_outputs in self._by_choice(outputs):
            deltas = choice.deltas(its_outputs)
            # An answer that its grammar permits to be empty alone ends before anything is computed, in whichever choice comes first.
            if not self._accepted and (self.choices[0].is_acceptable or choice.has_last_message):
                self._accepted = True
                responses.append(self.choices[0].accepted(self.request_id))
            responses += deltas
            if choice.finish is not None:
                del self._by_key[choice.submit.key]
                self._engine.release([choice.submit.key], ended=not choice.stop_string)
                responses += choice.finished(self.cached_tokens)
        return responses

    def _by_choice(self, outputs: list[tuple[int, Output]]) -> Iterable[tuple[Choice, list[tuple[int, Output]]]]:
        """The outputs of each choice that has not ended."""
        if len(self.choices) == 1:
            return [(self.choices[0], outputs)]
        taken: dict[int, list[tuple[int, Output]]] = {}
        for time_ns, output in outputs:
            if output.key in self._by_key:
                taken.setdefault(output.key, []).append((time_ns, output))
        return [(self._by_key[key], its_outputs) for key, its_outputs in taken.items()]
