"""One choice of a Generate call: the engine's outputs for it in, stream messages out."""

from __future__ import annotations

import time

import grpc

from inference.v1 import generate_pb2 as pb
from inference_service.messages import Finish, Output, Submit, TokenLogprobs
from inference_service.rpc.errors import RpcError, invalid
from inference_service.telemetry.clock import to_unix_ns
from inference_service.text.assembler import Assembler, Piece
from inference_service.text.tokenizer import Tokenizer

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORTED,
}


class Choice:
    """A choice in flight. Times are CLOCK_MONOTONIC nanoseconds, 0 while something has not happened."""

    def __init__(self, index: int, submit: Submit, assembler: Assembler, tokenizer: Tokenizer) -> None:
        self.index = index
        self.submit = submit
        self.finish: Finish | None = None
        """How it ended; None while it goes on."""
        self.stop_string = ""
        self.scheduled_ns = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.preemptions = 0
        self.engine_first_ns = 0
        self.engine_last_ns = 0
        self.first_delta_ns = 0
        """When the first output was handed to gRPC: the server's TTFT."""
        self.last_delta_ns = 0
        self.said: list[str] | None = None
        """The answer's text so far; None: telemetry is not to have it."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._assembler = assembler
        self._tokenizer = tokenizer

    @property
    def has_last_message(self) -> bool:
        """Whether it has ended, and in a way that has one."""
        return self.finish is not None and self.finish.reason in _REASONS

    @property
    def is_acceptable(self) -> bool:
        """Whether all is known that Accepted says, or will ever be."""
        if self.has_last_message:
            return True
        scored = self.submit.prompt_logprobs < 0 or len(self._prompt_logprobs) == len(self.submit.token_ids) - 1
        return scored and bool(self.scheduled_ns)

    @property
    def error(self) -> RpcError | None:
        """The status that ends the whole call, where this choice has ended in a way that has no last message."""
        finish = self.finish
        if finish is None or finish.reason in _REASONS:
            return None
        if finish.reason == "deadline":
            return RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the call's deadline passed")
        if finish.reason == "duplicate":
            return RpcError(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_IN_FLIGHT", "request_id: it is in flight", field="request_id")
        grammar = self.submit.grammar
        field = f"structured_output.{grammar.kind}" if grammar else "structured_output"
        # Also where it turns out late, such as when no token can spell what must come next.
        return invalid(field, finish.error)

    def accepted(self, request_id: str) -> pb.GenerateResponse:
        """The call's first message, which choice 0 gives."""
        ids = self.submit.token_ids
        accepted = pb.Accepted(
            request_id=request_id, prompt_tokens=len(ids), cached_tokens=self.cached_tokens, seed=self.submit.sampling.seed
        )
        if self.submit.prompt_logprobs >= 0:
            accepted.prompt_logprobs.add()
            for token_id, at in zip(ids[1:], self._prompt_logprobs, strict=False):
                self._fill(accepted.prompt_logprobs.add(), token_id, at)
        return pb.GenerateResponse(accepted=accepted)

    def deltas(self, outputs: list[tuple[int, Output]]) -> list[pb.GenerateResponse]:
        """The messages that carry these outputs; however many steps they come from, they make one delta, and one more at the end."""
        ids: list[int] = []
        times: list[int] = []
        logprobs: list[TokenLogprobs] | None = [] if self.submit.logprobs >= 0 else None
        finish: Finish | None = None
        end_ns = 0
        for time_ns, output in outputs:
            if output.scheduled_ns:
                self.scheduled_ns, self.cached_tokens = output.scheduled_ns, output.cached_tokens
            for token_id in output.token_ids:
                ids.append(token_id)
                times.append(time_ns)
            if logprobs is not None:
                logprobs += output.logprobs or []
            if output.prompt_logprobs:
                self._prompt_logprobs += output.prompt_logprobs
            if output.preemptions:
                self.preemptions = output.preemptions
            if output.finish is not None:
                finish, end_ns = output.finish, time_ns
                break
        piece = self._assembler.push(ids, times, logprobs) if ids else None
        pieces = [piece]
        if piece is not None and piece.stop:
            # What came after the stop string does not count, not even an end.
            times = times[: len(times) - piece.unused]
        elif finish is not None:
            pieces.append(self._assembler.finish())
            if finish.stop_token_id >= 0:
                times = [*times, end_ns]
        self._note_tokens(times)
        self.finish = finish
        return self._streamed(pieces)

    def finished(self, cached_tokens: int) -> list[pb.GenerateResponse]:
        """The choice's last message, once it has ended in a way that has one. `cached_tokens` are the request's."""
        if self.finish is None or self.finish.reason not in _REASONS:
            return []
        finished = pb.Finished(
            index=self.index,
            reason=_REASONS[self.finish.reason],
            usage=pb.Usage(prompt_tokens=len(self.submit.token_ids), cached_tokens=cached_tokens, completion_tokens=self.completion_tokens),
            timings=pb.Timings(
                queued_unix_ns=to_unix_ns(self.submit.arrival_ns),
                scheduled_unix_ns=_unix_or_0(self.scheduled_ns),
                first_token_unix_ns=_unix_or_0(self.engine_first_ns),
                last_token_unix_ns=_unix_or_0(self.engine_last_ns),
                preemptions=self.preemptions,
            ),
        )
        if self.stop_string:
            finished.stop_string = self.stop_string
        elif self.finish.stop_token_id >= 0:
            finished.stop_token_id = self.finish.stop_token_id
        return [pb.GenerateResponse(finished=finished)]

    def _note_tokens(self, times: list[int]) -> None:
        if times:
            self.completion_tokens += len(times)
            self.engine_first_ns = self.engine_first_ns or times[0]
            self.engine_last_ns = times[-1]

    def _streamed(self, pieces: list[Piece | None]) -> list[pb.GenerateResponse]:
        """Deltas of what the new tokens make certain. A stop string among it ends the choice, whatever the engine says."""
        deltas = []
        for piece in pieces:
            if piece is None:
                continue
            if piece.stop:
                self.stop_string, self.finish = piece.stop, Finish("stop")
            if piece.token_ids or piece.text:
                deltas.append(self._delta(piece))
        return deltas

    def _delta(self, piece: Piece) -> pb.GenerateResponse:
        self.last_delta_ns = time.monotonic_ns()
        self.first_delta_ns = self.first_delta_ns or self.last_delta_ns
        # Filled in place, which costs half of what keyword arguments do: this runs for every streamed message.
        response = pb.GenerateResponse()
        delta = response.delta
        if self.index:
            delta.index = self.index
        delta.token_ids.extend(piece.token_ids)
        delta.text = piece.text
        if self.said is not None:
            self.said.append(piece.text)
        delta.token_times_unix_ns.extend([to_unix_ns(at) for at in piece.times_ns])
        if piece.logprobs:
            for token_id, at in zip(piece.token_ids, piece.logprobs, strict=True):
                self._fill(delta.logprobs.add(), token_id, at)
        return response

    def _fill(self, logprobs: pb.TokenLogprobs, token_id: int, at: TokenLogprobs) -> None:
        logprobs.chosen.CopyFrom(self._logprob(token_id, at.chosen))
        logprobs.top.extend([self._logprob(other, value) for other, value in zip(at.top_ids, at.top, strict=True)])

    def _logprob(self, token_id: int, value: float) -> pb.Logprob:
        return pb.Logprob(token_id=token_id, token=self._tokenizer.token_text(token_id), logprob=value)


def _unix_or_0(monotonic_ns: int) -> int:
    return to_unix_ns(monotonic_ns) if monotonic_ns else 0
