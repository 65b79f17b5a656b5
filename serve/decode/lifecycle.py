"""One request from its body to its last byte: take the hand-off, enter the engine, stream, give everything back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from serve.decode.admissions import Ticket
from serve.decode.generation import Finish, Generation, Pieces
from serve.decode.reply import JsonReply, Reply, StreamReply, error_response
from serve.decode.stages import StageRecord, Stopwatch
from serve.engine.base import Admission, EngineFull, StepOutput
from serve.handoff.convert import layer_tensors
from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.receiver import ReceivedSlot
from serve.openai import Answer, Endpoint, GenerationRequest, HandoffParams, RequestError, parse_request

if TYPE_CHECKING:
    from serve.decode.service import DecodeService

log = logging.getLogger(__name__)

BODY_DEADLINE_S = 60.0
# An evaluation says so with each request; only a server that simulates acceptance minds.
PURPOSE_HEADER, EVAL_PURPOSE = "X-Baton-Purpose", "eval"

T = TypeVar("T")


class Lifecycle:
    """Runs one request of a DecodeService. `run` never raises but for a client that is gone."""

    def __init__(self, service: DecodeService, http: web.Request, endpoint: Endpoint, request_id: str) -> None:
        self._service = service
        self._http = http
        self._endpoint = endpoint
        self._headers = {"X-Request-Id": request_id}
        self._record = StageRecord(request_id=request_id)
        self._watch = Stopwatch()
        self._ticket: Ticket | None = None
        self._handoff: HandoffParams | None = None
        self._slot: ReceivedSlot | None = None
        self._injection: Future[None] | None = None
        self._seq_id: int | None = None
        self._reply: Reply | None = None
        self._outcome = "internal_error"
        self._generation: Generation  # set by _begin, once the prompt is known

    async def run(self) -> web.StreamResponse:
        """The response, whatever happens. Raises CancelledError when the client is gone."""
        try:
            return await self._answer()
        except RequestError as error:
            return await self._fail(error)
        except HandoffError as error:
            self._service.metrics.handoff_failures.labels(error.code.value).inc()
            return await self._fail(_handoff_failed(error))
        except asyncio.CancelledError:
            if not self._service.stopping:
                self._outcome = "disconnected"
                raise
            return await self._fail(RequestError("the server is shutting down", status=503, code="shutting_down"))
        except ConnectionError:
            self._outcome = "disconnected"
            return web.Response(status=499)
        except Exception:
            log.exception("request %s failed", self._record.request_id)
            return await self._fail(
                RequestError("internal error, see the server's log", status=500, code="internal_error")
            )
        finally:
            self._give_back()

    async def _answer(self) -> web.StreamResponse:
        request = await self._read()
        if self._handoff is not None:
            pieces, finish = await self._begin_handed_off(request, self._handoff)
        else:
            pieces, finish = await self._begin_here(request)
        assert self._reply is not None
        if finish is None:
            await self._reply.tokens(pieces)
            self._first_token_written()
            pieces, finish = await self._stream()
        self._leave_engine()
        if finish.silent_token_id is not None:
            self._reply.silent_token(finish.silent_token_id)
        response = await self._reply.finish(pieces, self._generation.rest(), finish.reason, finish.stop_reason)
        self._first_token_written()
        self._outcome = self._record.finish_reason = finish.reason
        self._record.status = 200
        return response

    async def _read(self) -> GenerationRequest:
        service = self._service
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                raw = await self._http.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise RequestError(str(error.text), status=413, code="body_too_large") from None
        except TimeoutError:
            raise RequestError("the body did not arrive in time", status=408, code="body_timeout") from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the body cannot be read: {error}", code="invalid_body") from None
        request = parse_request(self._endpoint, raw, max_model_len=service.capabilities.max_model_len)
        self._handoff = request.handoff
        if request.handoff is not None:
            self._record.handoff_id = request.handoff.handoff_id
        if request.model is not None and request.model != service.config.model_name:
            message = f"the model {request.model!r} does not exist; served: {service.config.model_name}"
            raise RequestError(message, status=404, code="model_not_found", param="model")
        if request.handoff is None and service.local_prompt is None:
            raise RequestError(
                "this decode server needs kv_transfer_params: send the request to the router",
                code="handoff_required",
                param="kv_transfer_params",
            )
        if service.engine_dead.is_set():
            raise RequestError("the engine has failed", status=503, code="engine_error")
        if service.simulates and self._http.headers.get(PURPOSE_HEADER, "").strip().lower() == EVAL_PURPOSE:
            raise RequestError(
                "this server simulates acceptance, so its tokens are not the model's: evaluate one without "
                "--simulate-acceptance-length",
                status=409,
                code="acceptance_simulated",
            )
        self._ticket = service.admissions.enter()
        return request

    async def _begin_handed_off(
        self, request: GenerationRequest, handoff: HandoffParams
    ) -> tuple[Pieces, Finish | None]:
        service, record, watch = self._service, self._record, self._watch
        self._begin(request, handoff.prompt_token_ids)
        pieces, finish = self._generation.first(handoff.first_token_id)
        service.metrics.output_tokens.inc()
        if finish is not None:
            return pieces, finish  # needs no KV: _give_back drops the hand-off

        watch.lap_ms()
        slot = self._slot = await service.receiver.take(
            handoff.handoff_id, deadline_s=service.config.handoff_deadline_s
        )
        taken_ms = watch.lap_ms()
        record.verify_ms = slot.timings.get("verify_ms")
        record.wait_commit_ms = round(taken_ms - (record.verify_ms or 0.0), 3)
        record.bytes, record.bytes_saved, record.held_tokens = slot.received_bytes, slot.saved_bytes, slot.held_tokens
        service.metrics.handoff_wait.observe(taken_ms / 1000)
        service.metrics.handoff_bytes.inc(record.bytes)
        service.metrics.handoff_saved_bytes.inc(record.bytes_saved)
        service.metrics.held_tokens_reused.inc(record.held_tokens)
        service.metrics.held_hits.inc(record.held_tokens > 0)
        if slot.tokens != len(handoff.prompt_token_ids):
            raise RequestError(
                f"the hand-off holds {slot.tokens} tokens, prompt_token_ids has {len(handoff.prompt_token_ids)}",
                code="prompt_length_mismatch",
                param="kv_transfer_params.prompt_token_ids",
            )
        await self._admit(slot, await self._place(), handoff)
        record.inject_ms = watch.lap_ms()
        service.metrics.inject.observe(record.inject_ms / 1000)
        return pieces, None

    async def _begin_here(self, request: GenerationRequest) -> tuple[Pieces, Finish | None]:
        service = self._service
        assert service.local_prompt is not None
        prompt_token_ids = await service.local_prompt.token_ids(request)
        self._begin(request, prompt_token_ids)
        seq_id = await self._place()

        def prefill() -> Future[StepOutput]:
            return service.engine.prefill(seq_id, prompt_token_ids, self._generation.sampling)

        output = await self._enter(prefill)
        service.metrics.output_tokens.inc(len(output.token_ids))
        return self._generation.step(output)

    def _begin(self, request: GenerationRequest, prompt_token_ids: Sequence[int]) -> None:
        service = self._service
        self._generation = Generation(request, prompt_token_ids, service.model, service.capabilities)
        answer = Answer(
            self._endpoint,
            request_id=self._record.request_id,
            model=service.config.model_name,
            prompt_token_ids=prompt_token_ids,
            include_usage=request.include_usage,
            continuous_usage_stats=request.continuous_usage_stats,
            return_token_ids=request.return_token_ids,
            cached_tokens=None if request.handoff is None else request.handoff.cached_tokens,
        )
        reply = StreamReply(self._http, answer, self._headers) if request.stream else JsonReply(answer, self._headers)
        self._reply = reply
        self._record.prompt_tokens = len(prompt_token_ids)

    async def _place(self) -> int:
        service = self._service
        assert self._ticket is not None
        deadline_s = service.config.handoff_deadline_s
        await service.admissions.place(self._ticket, self._generation.kv_tokens, deadline_s=deadline_s)
        self._record.admit_wait_ms = self._watch.lap_ms()
        service.metrics.admit_wait.observe(self._record.admit_wait_ms / 1000)
        service.metrics.prompt_tokens.inc(self._record.prompt_tokens)
        seq_id = self._seq_id = service.next_seq_id()
        service.outputs[seq_id] = asyncio.Queue()
        return seq_id

    async def _admit(self, slot: ReceivedSlot, seq_id: int, handoff: HandoffParams) -> None:
        def admit() -> Future[None]:
            self._injection = self._service.engine.admit(
                Admission(
                    seq_id=seq_id,
                    prompt_token_ids=handoff.prompt_token_ids,
                    first_token_id=handoff.first_token_id,
                    sampling=self._generation.sampling,
                    kv=layer_tensors(slot),
                    draft_token_ids=slot.draft_token_ids,
                )
            )
            return self._injection

        await self._enter(admit)
        self._release_slot()

    async def _enter(self, command: Callable[[], Future[T]]) -> T:
        """Has the engine take the sequence; again, after another one left, while it has no room."""
        config, admissions = self._service.config, self._service.admissions
        assert self._ticket is not None
        while True:
            alone = admissions.active == 1
            try:
                async with asyncio.timeout(config.step_deadline_s):
                    return await asyncio.wrap_future(command())
            except TimeoutError:
                raise _engine_stalled(config.step_deadline_s) from None
            except EngineFull as error:
                if alone:
                    raise _engine_failed(error) from error
                await admissions.place_again(self._ticket, deadline_s=config.handoff_deadline_s)
            except ValueError as error:
                raise RequestError(f"the engine refuses the request: {error}") from None
            except Exception as error:
                raise _engine_failed(error) from error

    async def _stream(self) -> tuple[Pieces, Finish]:
        """Writes each step's tokens; returns the last step's, unwritten, and why it was the last."""
        assert self._seq_id is not None and self._reply is not None
        outputs = self._service.outputs[self._seq_id]
        while True:
            try:
                async with asyncio.timeout(self._service.config.step_deadline_s):
                    output = await outputs.get()
            except TimeoutError:
                raise _engine_stalled(self._service.config.step_deadline_s) from None
            if isinstance(output, RequestError):
                raise output
            if self._record.first_step_ms is None:
                self._record.first_step_ms = self._watch.lap_ms()
            self._record.steps += 1
            self._record.drafted += output.drafted
            self._record.accepted += output.accepted
            self._record.count_drafts(output.drafted, output.accepted, output.steps)
            self._service.count_acceptance(output)
            pieces, finish = self._generation.step(output)
            if finish is not None:
                return pieces, finish
            await self._reply.tokens(pieces)

    def _first_token_written(self) -> None:
        if self._record.first_token_ms is None:
            self._record.first_token_ms = self._watch.total_ms()
            self._watch.lap_ms()
            self._service.metrics.ttft.observe(self._record.first_token_ms / 1000)

    async def _fail(self, error: RequestError) -> web.StreamResponse:
        self._outcome = self._record.code = error.code
        self._record.status = error.status
        self._leave_engine()
        if self._reply is None:
            return error_response(error, self._headers)
        try:
            return await self._reply.fail(error)
        except ConnectionError:
            return web.Response(status=499)

    def _leave_engine(self) -> None:
        """Batch place and KV are free from here on, however slowly the client reads the rest."""
        if self._seq_id is not None:
            self._service.outputs.pop(self._seq_id, None)
            self._service.engine.release(self._seq_id)
            self._seq_id = None
        if self._ticket is not None:
            self._service.admissions.leave(self._ticket)

    def _give_back(self) -> None:
        self._leave_engine()
        if self._slot is not None:
            self._release_slot()
        elif self._handoff is not None:
            self._service.spawn(self._service.receiver.abandon(self._handoff.handoff_id, self._outcome))
        if self._reply is not None:
            self._record.output_tokens = self._generation.output_tokens
        self._record.total_ms = self._watch.total_ms()
        self._record.code = self._record.code or (self._outcome if self._record.status is None else None)
        self._service.metrics.requests.labels(self._endpoint.value, self._outcome).inc()
        self._service.stage_log.write(self._record)

    def _release_slot(self) -> None:
        """Gives the slot back, but never under an injection that is reading it."""
        slot, injection = self._slot, self._injection
        if slot is None:
            return
        if injection is None or injection.done() or injection.cancel():
            slot.release()
        else:
            loop = asyncio.get_running_loop()
            injection.add_done_callback(lambda _: loop.call_soon_threadsafe(slot.release))


def _engine_failed(error: BaseException) -> RequestError:
    return RequestError(f"the engine failed: {type(error).__name__}: {error}", status=500, code="engine_error")


def _engine_stalled(deadline_s: float) -> RequestError:
    return RequestError(f"the engine made no step within {deadline_s:g} s", status=504, code="engine_stalled")


def _handoff_failed(error: HandoffError) -> RequestError:
    if error.code is HandoffCode.DEADLINE_EXCEEDED:
        return RequestError(f"the KV cache did not arrive: {error.message}", status=504, code="handoff_timeout")
    return RequestError(f"the hand-off failed: {error.message}", status=502, code=error.code.value)
