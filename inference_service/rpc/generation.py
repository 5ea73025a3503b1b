"""One Generate call after its admission: engine outputs in, stream messages out."""

from __future__ import annotations

import time

import grpc

from inference.v1 import generate_pb2 as pb
from inference_service.messages import Finish, Output, Submit, TokenLogprobs
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import RpcError
from inference_service.telemetry.clock import to_unix_ns
from inference_service.text.assembler import Assembler, Piece
from inference_service.text.tokenizer import Tokenizer

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORTED,
}


class Generation:
    """A request in flight. Times are CLOCK_MONOTONIC nanoseconds, 0 while something has not happened."""

    def __init__(self, request_id: str, submit: Submit, assembler: Assembler, tokenizer: Tokenizer, engine: EngineClient) -> None:
        self.request_id = request_id
        self.submit = submit
        self.finish: Finish | None = None
        """How it ended; None while it goes on."""
        self.stop_string = ""
        self.scheduled_ns = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.engine_first_ns = 0
        self.engine_last_ns = 0
        self.first_delta_ns = 0
        """When the first output was handed to gRPC: the server's TTFT."""
        self.last_delta_ns = 0
        self.writing_since = 0
        """When the write that is going on began; 0: none is."""
        self._accepted = False
        self._assembler = assembler
        self._tokenizer = tokenizer
        self._engine = engine

    async def run(self, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]) -> None:
        """Stream the answer. Raises RpcError when the engine is lost or the deadline passes."""
        stream = self._engine.submit(self.submit)
        try:
            while self.finish is None:
                for response in self._responses(await stream.take()):
                    self.writing_since = time.monotonic_ns()
                    await context.write(response)
                    self.writing_since = 0
            if self.finish.reason == "deadline":
                raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the call's deadline passed")
        finally:
            self._engine.release(self.submit.key, ended=self.finish is not None and not self.stop_string)

    def abort(self) -> None:
        """End the request at its client's wish: its stream ends with FINISH_REASON_ABORTED."""
        self._engine.abort(self.submit.key)

    def _responses(self, outputs: list[tuple[int, Output]]) -> list[pb.GenerateResponse]:
        """The messages that carry these outputs; however many steps they come from, they make one delta."""
        ids: list[int] = []
        times: list[int] = []
        logprobs: list[TokenLogprobs] | None = [] if self.submit.logprobs >= 0 else None
        finish: Finish | None = None
        for time_ns, output in outputs:
            if output.scheduled_ns:
                self.scheduled_ns, self.cached_tokens = output.scheduled_ns, output.cached_tokens
            for token_id in output.token_ids:
                ids.append(token_id)
                times.append(time_ns)
            if logprobs is not None:
                logprobs += output.logprobs or []
            if output.finish is not None:
                finish = output.finish
                if finish.stop_token_id >= 0:
                    self.completion_tokens += 1
                    self._note_tokens(time_ns, time_ns)
                break
        if ids:
            self.completion_tokens += len(ids)
            self._note_tokens(times[0], times[-1])
        responses: list[pb.GenerateResponse] = []
        if not self._accepted and (self.scheduled_ns or (finish is not None and finish.reason == "abort")):
            responses.append(self._accept())
        responses += self._deltas(ids, times, logprobs, finish)
        if self.finish is not None and self.finish.reason in _REASONS:
            responses.append(self._finished(self.finish))
        return responses

    def _note_tokens(self, first_ns: int, last_ns: int) -> None:
        self.engine_first_ns = self.engine_first_ns or first_ns
        self.engine_last_ns = last_ns

    def _deltas(
        self, ids: list[int], times: list[int], logprobs: list[TokenLogprobs] | None, finish: Finish | None
    ) -> list[pb.GenerateResponse]:
        """Deltas of what the new tokens make certain. A stop string among it ends the request, whatever the engine says."""
        self.finish = finish
        pieces = [self._assembler.push(ids, times, logprobs) if ids else None]
        if finish is not None:
            pieces.append(self._assembler.finish())
        deltas = []
        for piece in pieces:
            if piece is None:
                continue
            if piece.stop:
                self.stop_string = piece.stop
                self.completion_tokens -= piece.unused
                self.finish = Finish("stop", preemptions=finish.preemptions if finish else 0)
            if piece.token_ids or piece.text:
                deltas.append(self._delta(piece))
        return deltas

    def _delta(self, piece: Piece) -> pb.GenerateResponse:
        self.last_delta_ns = time.monotonic_ns()
        self.first_delta_ns = self.first_delta_ns or self.last_delta_ns
        # Filled in place, which costs half of what keyword arguments do: this runs for every streamed message.
        response = pb.GenerateResponse()
        delta = response.delta
        delta.token_ids.extend(piece.token_ids)
        delta.text = piece.text
        delta.token_times_unix_ns.extend([to_unix_ns(at) for at in piece.times_ns])
        if piece.logprobs:
            for token_id, at in zip(piece.token_ids, piece.logprobs, strict=True):
                delta.logprobs.add(
                    chosen=self._logprob(token_id, at.chosen),
                    top=[self._logprob(other, value) for other, value in zip(at.top_ids, at.top, strict=True)],
                )
        return response

    def _logprob(self, token_id: int, value: float) -> pb.Logprob:
        return pb.Logprob(token_id=token_id, token=self._tokenizer.token_text(token_id), logprob=value)

    def _accept(self) -> pb.GenerateResponse:
        self._accepted = True
        return pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=self.request_id,
                prompt_tokens=len(self.submit.token_ids),
                cached_tokens=self.cached_tokens,
                seed=self.submit.sampling.seed,
            )
        )

    def _finished(self, finish: Finish) -> pb.GenerateResponse:
        finished = pb.Finished(
            reason=_REASONS[finish.reason],
            usage=pb.Usage(
                prompt_tokens=len(self.submit.token_ids), cached_tokens=self.cached_tokens, completion_tokens=self.completion_tokens
            ),
            timings=pb.Timings(
                queued_unix_ns=to_unix_ns(self.submit.arrival_ns),
                scheduled_unix_ns=_unix_or_0(self.scheduled_ns),
                first_token_unix_ns=_unix_or_0(self.engine_first_ns),
                last_token_unix_ns=_unix_or_0(self.engine_last_ns),
                preemptions=finish.preemptions,
            ),
        )
        if self.stop_string:
            finished.stop_string = self.stop_string
        elif finish.stop_token_id >= 0:
            finished.stop_token_id = finish.stop_token_id
        return pb.GenerateResponse(finished=finished)


def _unix_or_0(monotonic_ns: int) -> int:
    return to_unix_ns(monotonic_ns) if monotonic_ns else 0
