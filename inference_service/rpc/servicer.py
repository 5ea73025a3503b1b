"""The API's methods. Generate admits, validates and traces; Generation (generation.py) streams."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any, ParamSpec, TypeVar

import grpc
from google.protobuf.message import Message

from inference.v1 import generate_pb2, inference_pb2_grpc, info_pb2
from inference_service import __version__
from inference_service.config import Config
from inference_service.messages import ExpertSample, Ready, Submit
from inference_service.rpc.choice import Choice
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import RpcError, invalid
from inference_service.rpc.forks import fork
from inference_service.rpc.generation import Generation
from inference_service.rpc.lifecycle import Lifecycle
from inference_service.rpc.load_meter import LoadMeter
from inference_service.rpc.validation import RequestReader, count_choices
from inference_service.telemetry.clock import to_unix_ns
from inference_service.telemetry.tracing import RequestTrace, Tracing
from inference_service.text.assembler import Assembler
from inference_service.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
P = ParamSpec("P")
T = TypeVar("T")
LARGE_BYTES = 8192
FOREVER_S = 10 * 365 * 86400.0
"""A deadline beyond this is none: its nanoseconds would not fit in 64 bits."""
RETRY_S = 1.0
"""What a client that met a full queue is told to wait: the order of time in which a request ends and another may come."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model."""

    def __init__(
        self, config: Config, model: str, tokenizer: Tokenizer, engine: EngineClient, lifecycle: Lifecycle, tracing: Tracing
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._engine = engine
        self._lifecycle = lifecycle
        self._tracing = tracing
        self._reader: RequestReader | None = None
        self._meter = LoadMeter()
        self._started_ns = time.monotonic_ns()
        self._generations: dict[str, tuple[Generation, asyncio.Task[None] | None]] = {}
        self._admitted = 0
        """Choices of all requests in flight, or being tokenized for it."""
        self._stuck: set[str] = set()

    # --- Generate ---

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Context) -> None:
        """See inference.proto."""
        arrival_ns = time.monotonic_ns()
        remaining_s = context.time_remaining()
        deadline_ns = arrival_ns + int(remaining_s * 1e9) if remaining_s is not None and remaining_s < FOREVER_S else 0
        trace = self._tracing.request(context.invocation_metadata(), arrival_ns)
        request_id = request.request_id or uuid.uuid4().hex
        generation: Generation | None = None
        error: RpcError | None = None
        code = message = ""
        self._lifecycle.entered()
        try:
            generation = await self._admit(request, request_id, arrival_ns, deadline_ns)
            await generation.run(context)
            code = "OK"
        except RpcError as raised:
            error, code, message = raised, raised.code.name, raised.message
        except asyncio.CancelledError:
            error = self._cut_off(request_id)
            code, message = (error.code.name, error.message) if error else ("CANCELLED", "the client cancelled")
            if error is None:
                # gRPC ends a call at its deadline by the same means.
                if deadline_ns and time.monotonic_ns() >= deadline_ns:
                    code, message = "DEADLINE_EXCEEDED", "the call's deadline passed"
                raise
        except Exception as raised:
            log.exception("request %s failed", request_id)
            error = RpcError(grpc.StatusCode.INTERNAL, "INTERNAL", f"{type(raised).__name__} in the server")
            code, message = error.code.name, error.message
        finally:
            if generation is not None:
                del self._generations[request_id]
                self._admitted -= len(generation.choices)
            self._lifecycle.left()
            self._trace(trace, code, message, request_id, generation)
        if error is not None:
            await error.abort(context)

    async def _admit(self, request: generate_pb2.GenerateRequest, request_id: str, arrival_ns: int, deadline_ns: int) -> Generation:
        """A registered generation, or an RpcError that says why there is none."""
        if refusal := self._lifecycle.refusal():
            raise refusal
        limit = self._config.batch.max_requests + self._config.server.max_queue
        count = count_choices(request, limit)
        if self._admitted + count > limit:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"{self._admitted} answers are in flight, of at most {limit}: {count} more is too many",
                retry_s=RETRY_S,
            )
        self._admitted += count
        try:
            submit = await _unblocked(request, self._request_reader().read, request, self._engine.next_key(), arrival_ns, deadline_ns)
            if request_id in self._generations:
                raise RpcError(
                    grpc.StatusCode.ALREADY_EXISTS, "REQUEST_IN_FLIGHT", f"request_id: {request_id!r} is in flight", field="request_id"
                )
            generation = Generation(request_id, self._choices(request, submit, count), self._engine)
        except BaseException:
            self._admitted -= count
            raise
        self._generations[request_id] = (generation, asyncio.current_task())
        return generation

    def _choices(self, request: generate_pb2.GenerateRequest, submit: Submit, count: int) -> list[Choice]:
        skip_special_tokens = _or_true(request.output, "skip_special_tokens")
        choices = []
        for index, each in enumerate([submit, *fork(submit, [self._engine.next_key() for _ in range(1, count)])]):
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
            assembler = Assembler(detokenizer, request.stopping.stop, each.min_tokens)
            choices.append(Choice(index, each, assembler, self._tokenizer))
        return choices

    def _trace(self, trace: RequestTrace, code: str, message: str, request_id: str, generation: Generation | None) -> None:
        end_ns = time.monotonic_ns()
        if generation is None:
            trace.end(code, end_ns=end_ns, message=message, request_id=request_id, model=self._model)
            return
        choices, submit = generation.choices, generation.choices[0].submit
        finishes = [choice.finish for choice in choices if choice.finish is not None]
        tokens = [choice.completion_tokens for choice in choices]
        trace.end(
            code,
            end_ns=end_ns,
            message=message,
            admitted=True,
            scheduled_ns=choices[0].scheduled_ns,
            first_token_ns=min((choice.first_delta_ns for choice in choices if choice.first_delta_ns), default=0),
            last_token_ns=max(choice.last_delta_ns for choice in choices),
            request_id=request_id,
            model=self._model,
            sampling=submit.sampling,
            max_tokens=submit.max_tokens,
            prompt_tokens=len(submit.token_ids),
            cached_tokens=generation.cached_tokens,
            completion_tokens=sum(tokens),
            longest_answer=max(tokens),
            choices=len(choices),
            finish_reasons=[finish.reason for finish in finishes],
            preemptions=sum(choice.preemptions for choice in choices),
        )

    def _request_reader(self) -> RequestReader:
        if self._reader is None:
            self._reader = RequestReader(self._model, self._tokenizer, self._ready())
        return self._reader

    def _ready(self) -> Ready:
        ready = self._engine.ready
        if ready is None:
            raise self._lifecycle.refusal() or AssertionError("not ready, and no reason to refuse")
        return ready

    # --- readers that are stuck ---

    def cut_off_stuck(self) -> None:
        """Cancel the calls whose client has taken no message for too long. To be called now and then."""
        limit_ns = time.monotonic_ns() - int(self._config.server.stuck_reader_s * 1e9)
        for request_id, (generation, task) in self._generations.items():
            if 0 < generation.writing_since < limit_ns and task is not None:
                self._stuck.add(request_id)
                task.cancel()

    def _cut_off(self, request_id: str) -> RpcError | None:
        """The error for a call that cut_off_stuck cancelled; None if somebody else did."""
        if request_id not in self._stuck:
            return None
        self._stuck.discard(request_id)
        return RpcError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "STUCK_READER", f"no message taken for {self._config.server.stuck_reader_s:g} s"
        )

    def measure_load(self) -> None:
        """Note how many tokens there were. To be called now and then."""
        self._meter.note(time.monotonic(), self._engine.output_tokens)

    # --- the other methods ---

    async def Abort(self, request: generate_pb2.AbortRequest, context: Context) -> generate_pb2.AbortResponse:
        """See inference.proto."""
        generation, _ = self._generations.get(request.request_id, (None, None))
        if generation is not None:
            generation.abort()
        return generate_pb2.AbortResponse(found=generation is not None)

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        """See inference.proto."""
        try:
            ids = await _unblocked(request, self._request_reader().prompt_ids, request, _or_true(request, "add_special_tokens"))
        except RpcError as error:
            await error.abort(context)
        return generate_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: generate_pb2.DetokenizeRequest, context: Context) -> generate_pb2.DetokenizeResponse:
        """See inference.proto."""
        try:
            vocab_size = self._ready().vocab_size
            if any(token_id >= vocab_size for token_id in request.token_ids):
                raise invalid("token_ids", f"an id is outside the vocabulary of {vocab_size}")
        except RpcError as error:
            await error.abort(context)
        text = self._tokenizer.decode(list(request.token_ids), skip_special_tokens=_or_true(request, "skip_special_tokens"))
        return generate_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: info_pb2.GetModelInfoRequest, context: Context) -> info_pb2.GetModelInfoResponse:
        """See inference.proto."""
        try:
            ready = self._ready()
        except RpcError as error:
            await error.abort(context)
        defaults = self._tokenizer.sampling_defaults
        return info_pb2.GetModelInfoResponse(
            name=self._model,
            architecture=ready.architecture,
            dtype=ready.dtype,
            parameters=ready.parameters,
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            eos_token_ids=self._tokenizer.eos_token_ids,
            has_chat_template=self._tokenizer.has_chat_template,
            sampling_defaults=info_pb2.SamplingDefaults(
                temperature=defaults.temperature,
                top_k=defaults.top_k,
                top_p=defaults.top_p,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            ),
        )

    async def GetServerInfo(self, request: info_pb2.GetServerInfoRequest, context: Context) -> info_pb2.GetServerInfoResponse:
        """See inference.proto."""
        try:
            ready = self._ready()
        except RpcError as error:
            await error.abort(context)
        batch = self._config.batch
        return info_pb2.GetServerInfoResponse(
            version=__version__,
            device=ready.device,
            device_arch=ready.device_arch,
            started_unix_ns=to_unix_ns(self._started_ns),
            kernels=[info_pb2.KernelChoice(operator=k.operator, backend=k.backend, reason=k.reason) for k in ready.kernels],
            limits=info_pb2.Limits(
                max_requests=batch.max_requests,
                max_step_tokens=batch.step_tokens,
                max_prefill_tokens=ready.prefill_tokens,
                max_queue=self._config.server.max_queue,
                page_size=ready.page_size,
                pages=ready.pages,
            ),
            compiles_since_ready=self._engine.compiles,
            fused_steps=self._engine.fused_steps,
        )

    async def GetLoad(self, request: info_pb2.GetLoadRequest, context: Context) -> info_pb2.GetLoadResponse:
        """See inference.proto."""
        load, ready = self._engine.load, self._engine.ready
        return info_pb2.GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            pages_used=load.pages_used,
            pages_cached=load.pages_cached,
            pages_total=ready.pages if ready else 0,
            output_tokens_per_s=self._meter.rate(),
            draining=self._lifecycle.draining,
            experts=_expert_loads(self._engine.experts),
        )

    async def Drain(self, request: info_pb2.DrainRequest, context: Context) -> info_pb2.DrainResponse:
        """See inference.proto."""
        self._lifecycle.drain()
        return info_pb2.DrainResponse(in_flight=self._lifecycle.in_flight)


def _expert_loads(samples: Iterable[ExpertSample]) -> list[info_pb2.ExpertLoad]:
    """One a batch, the smallest first."""
    counts: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        counts[sample.batch].append(sample.distinct)
    return [info_pb2.ExpertLoad(batch=batch, steps=len(each), distinct_experts=fmean(each)) for batch, each in sorted(counts.items())]


async def _unblocked(message: Message, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Read a message; a large one on a thread, so that the streams of others go on while it is tokenized."""
    if message.ByteSize() < LARGE_BYTES:
        return read(*args, **kwargs)
    return await asyncio.to_thread(read, *args, **kwargs)


def _or_true(message: Any, field: str) -> bool:
    return bool(getattr(message, field)) if message.HasField(field) else True
