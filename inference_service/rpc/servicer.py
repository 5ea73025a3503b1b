"""The API's methods. Generate admits, validates and traces; Generation (generation.py) streams."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from statistics import fmean
from typing import Any

import grpc

from inference.v1 import generate_pb2, inference_pb2_grpc, info_pb2
from inference_service import __version__
from inference_service.config import Config
from inference_service.messages import ExpertSample, Ready, Submit
from inference_service.rpc.admission import Admission, Ticket
from inference_service.rpc.caller import of_caller
from inference_service.rpc.choice import Choice
from inference_service.rpc.client_limits import Client, Clients
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import RpcError, invalid
from inference_service.rpc.forks import fork
from inference_service.rpc.generation import Generation
from inference_service.rpc.large_messages import LargeMessages
from inference_service.rpc.lifecycle import Lifecycle
from inference_service.rpc.load_meter import LoadMeter
from inference_service.rpc.recorder import Recorder
from inference_service.rpc.validation import RequestReader, count_choices, is_request_id
from inference_service.telemetry.clock import to_unix_ns
from inference_service.telemetry.tracing import Metadata
from inference_service.text.assembler import Assembler
from inference_service.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
TELL_S = 5.0
"""How long a client has to take a status."""
FOREVER_S = 10 * 365 * 86400.0
"""A deadline beyond this is none: its nanoseconds would not fit in 64 bits."""
ROUNDED_BY, EARLY_NS = 100, 20_000_000
"""A call that is cancelled so shortly before its deadline, by share and in nanoseconds, has ended by it: timeouts travel rounded up."""
REFUSED_BEFORE = "grpc-previous-rpc-attempts"
"""The metadata key by which gRPC says that it tries again."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model."""

    def __init__(
        self, config: Config, model: str, tokenizer: Tokenizer, engine: EngineClient, lifecycle: Lifecycle, recorder: Recorder
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._engine = engine
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._reader: tuple[Ready, RequestReader] | None = None
        """With the engine that it is for: one started anew may have found room for more pages, or fewer."""
        self._large = LargeMessages()
        self._meter = LoadMeter()
        self._started_ns = time.monotonic_ns()
        self._generations: dict[str, tuple[Generation, asyncio.Task[None] | None]] = {}
        self._clients = Clients(config.limits)
        self._admission = Admission(config)
        engine.on_step.append(self._admission.follow)
        self._stuck: set[str] = set()

    # --- Generate ---

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Context) -> None:
        """See inference.proto."""
        arrival_ns = time.monotonic_ns()
        remaining_s = context.time_remaining()
        deadline_ns = arrival_ns + int(remaining_s * 1e9) if remaining_s is not None and remaining_s < FOREVER_S else 0
        metadata = context.invocation_metadata() or ()
        # One that is refused stands in no span or log, whatever it is.
        request_id = request.request_id if is_request_id(request.request_id) else uuid.uuid4().hex
        trace = self._recorder.begin(metadata, request_id, arrival_ns)
        generation: Generation | None = None
        error: RpcError | None = None
        code = message = ""
        self._lifecycle.entered()
        try:
            with self._clients.call(metadata) as client, self._enter(request, client, deadline_ns, metadata) as ticket:
                generation = await self._admit(request, request_id, ticket, arrival_ns, deadline_ns)
                await generation.run(context)
            code = "OK"
        except RpcError as raised:
            error, code, message = raised, raised.code.name, raised.message
        except asyncio.CancelledError:
            error = self._cut_off(of_caller(request_id))
            code, message = (error.code.name, error.message) if error else ("CANCELLED", "the client cancelled")
            if error is None:
                # gRPC ends a call at its deadline by the same means; the client's, which it tells rounded up, comes a little before.
                if deadline_ns and time.monotonic_ns() >= deadline_ns - (deadline_ns - arrival_ns) // ROUNDED_BY - EARLY_NS:
                    code, message = "DEADLINE_EXCEEDED", "the call's deadline passed"
                raise
        except Exception as raised:
            log.exception("request %s failed", request_id)
            error = RpcError(grpc.StatusCode.INTERNAL, "INTERNAL", f"{type(raised).__name__} in the server")
            code, message = error.code.name, error.message
        finally:
            if generation is not None:
                del self._generations[of_caller(request_id)]
            self._lifecycle.left()
            self._recorder.end(trace, request, request_id, code, message=message, error=error, generation=generation)
        if error is not None:
            await _tell(error, context)

    def _enter(
        self, request: generate_pb2.GenerateRequest, client: Client | None, deadline_ns: int, metadata: Metadata
    ) -> AbstractContextManager[Ticket]:
        """A place for a request, or an RpcError that says why there is none."""
        if refusal := self._lifecycle.refusal():
            raise refusal
        ticket = Ticket(
            count_choices(request, self._admission.max_in_flight),
            request.priority,
            client,
            deadline_ns / 1e9 if deadline_ns else inf,
            request.stopping.min_tokens,
            request.stopping.max_tokens or inf,
            again=any(key == REFUSED_BEFORE for key, _ in metadata),
        )
        return self._admission.request(ticket)

    async def _admit(
        self, request: generate_pb2.GenerateRequest, request_id: str, ticket: Ticket, arrival_ns: int, deadline_ns: int
    ) -> Generation:
        """A registered generation, or an RpcError that says why there is none."""
        submit = await self._large.read(request, self._request_reader().read, request, self._engine.next_key(), arrival_ns, deadline_ns)
        if of_caller(request_id) in self._generations:
            raise RpcError(
                grpc.StatusCode.ALREADY_EXISTS, "REQUEST_IN_FLIGHT", f"request_id: {request_id!r} is in flight", field="request_id"
            )
        choices = self._choices(request, submit, ticket.choices)
        self._admission.commit(ticket, [choice.submit for choice in choices], self._ready())
        generation = Generation(request_id, choices, self._engine)
        self._generations[of_caller(request_id)] = (generation, asyncio.current_task())
        self._recorder.admitted(generation)
        return generation

    def _choices(self, request: generate_pb2.GenerateRequest, submit: Submit, count: int) -> list[Choice]:
        skip_special_tokens = _or_true(request.output, "skip_special_tokens")
        choices = []
        for index, each in enumerate([submit, *fork(submit, [self._engine.next_key() for _ in range(1, count)])]):
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
            assembler = Assembler(detokenizer, request.stopping.stop, each.min_tokens)
            choices.append(Choice(index, each, assembler, self._tokenizer))
        return choices

    def _request_reader(self) -> RequestReader:
        ready = self._ready()
        if self._reader is None or self._reader[0] is not ready:
            self._reader = ready, RequestReader(self._model, self._tokenizer, ready, self._config.limits.max_prompt_tokens)
        return self._reader[1]

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
        """Note how many tokens there were, and how many requests have ended. To be called now and then."""
        self._meter.note(time.monotonic(), self._engine.output_tokens)
        self._admission.measure()

    # --- the other methods ---

    async def Abort(self, request: generate_pb2.AbortRequest, context: Context) -> generate_pb2.AbortResponse:
        """See inference.proto."""
        generation, _ = self._generations.get(of_caller(request.request_id), (None, None))
        if generation is not None:
            generation.abort()
        found = generation is not None
        if not found and self._config.server.workers > 1:
            found = await self._engine.abort_by_id(of_caller(request.request_id))
        return generate_pb2.AbortResponse(found=found)

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        """See inference.proto."""
        try:
            with self._limited(context):
                ids = await self._large.read(request, self._request_reader().prompt_ids, request, _or_true(request, "add_special_tokens"))
        except RpcError as error:
            await error.abort(context)
        return generate_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: generate_pb2.DetokenizeRequest, context: Context) -> generate_pb2.DetokenizeResponse:
        """See inference.proto."""
        try:
            with self._limited(context):
                text = await self._large.read(request, self._decode, request)
        except RpcError as error:
            await error.abort(context)
        return generate_pb2.DetokenizeResponse(text=text)

    @contextmanager
    def _limited(self, context: Context) -> Iterator[None]:
        """A call that takes no place in the queue, but costs work for which its client has limits. Raises RpcError."""
        with self._clients.call(context.invocation_metadata()) as client:
            if client:
                client.check()
                client.pay_requests(1)
            yield

    def _decode(self, request: generate_pb2.DetokenizeRequest) -> str:
        vocab_size, ids = self._ready().vocab_size, list(request.token_ids)
        if ids and max(ids) >= vocab_size:
            raise invalid("token_ids", f"id {max(ids)} is outside the vocabulary of {vocab_size}")
        return self._tokenizer.decode(ids, skip_special_tokens=_or_true(request, "skip_special_tokens"))

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
        load, ready, admission = self._engine.load, self._engine.ready, self._admission
        first_token_s = admission.first_token_s() if ready else None
        return info_pb2.GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            pages_used=load.pages_used,
            pages_cached=load.pages_cached,
            pages_total=ready.pages if ready else 0,
            output_tokens_per_s=self._meter.rate(),
            draining=self._lifecycle.draining,
            experts=_expert_loads(self._engine.experts),
            waiting_prompt_tokens=load.waiting_tokens,
            in_flight=admission.in_flight,
            max_in_flight=admission.max_in_flight,
            max_requests=self._config.batch.max_requests,
            pages_committed=admission.pages,
            requests_per_s=admission.ended_per_s,
            estimated_ttft_ms=None if first_token_s is None else first_token_s * 1000,
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


async def _tell(error: RpcError, context: Context) -> None:
    """End a call with a status, which travels behind what its client has still to take; one that takes nothing is not waited for."""
    try:
        async with asyncio.timeout(TELL_S):
            await error.abort(context)
    except TimeoutError:
        raise asyncio.CancelledError from None


def _or_true(message: Any, field: str) -> bool:
    return bool(getattr(message, field)) if message.HasField(field) else True
