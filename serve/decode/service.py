"""What the requests of one decode server share, and the server's routes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from serve.decode.admissions import Admissions
from serve.decode.engine_thread import EngineFailure, EngineThread, StepReport
from serve.decode.lifecycle import Lifecycle
from serve.decode.local_prompt import LocalPrompt
from serve.decode.model_files import ModelFiles
from serve.decode.reply import error_response
from serve.decode.stages import StageLog
from serve.engine.base import DecodeEngine, StepOutput
from serve.engine.speculative import AcceptanceCounters
from serve.handoff.receiver import HandoffReceiver
from serve.metrics import CONTENT_TYPE, DecodeMetrics
from serve.openai import MAX_BODY_BYTES, Endpoint, RequestError

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True)
class ServiceConfig:
    """What the command line decides about requests."""

    model_name: str
    queue_depth: int
    handoff_deadline_s: float
    step_deadline_s: float
    dtype: str
    stage_log: Path | None = None
    allow_local_prefill: bool = False
    version: str = "unknown"


class DecodeService:
    """Shared state on the event loop: engine, receiver, admissions, metrics, the requests inside."""

    def __init__(
        self,
        config: ServiceConfig,
        model: ModelFiles,
        receiver: HandoffReceiver,
        layout_sha256: str,
        make_engine: Callable[[], DecodeEngine],
    ) -> None:
        self.config = config
        self.model = model
        self.receiver = receiver
        self.layout_sha256 = layout_sha256
        self.metrics = DecodeMetrics()
        self.stage_log = StageLog(config.stage_log)
        self.engine = EngineThread(make_engine, on_step=self._on_step, on_failure=self._on_failure)
        self.local_prompt: LocalPrompt | None = None
        self.outputs: dict[int, asyncio.Queue[StepOutput | RequestError]] = {}
        self.requests: set[asyncio.Task[Any]] = set()
        self.stopping = False
        self.engine_dead = asyncio.Event()
        self._seq_ids = itertools.count(1)
        self._background: set[asyncio.Task[None]] = set()
        self.acceptance = AcceptanceCounters()
        self._created = int(time.time())

    async def start(self) -> None:
        """Loads the engine on its thread and starts the receiver. Raises what either raises."""
        engine = await self.engine.start()
        self.capabilities = capabilities = engine.capabilities
        if self.config.allow_local_prefill:
            if not capabilities.local_prefill:
                raise ValueError("--allow-local-prefill: this engine cannot prefill")
            self.local_prompt = LocalPrompt(self.model.directory, self.model.tokenizer)
        self.admissions = Admissions(
            max_batch_size=capabilities.max_batch_size,
            queue_depth=self.config.queue_depth,
            kv_capacity_tokens=capabilities.kv_capacity_tokens,
        )
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("baton_requests_active", "Requests in the engine.", lambda: self.admissions.active),
            ("baton_requests_queued", "Requests waiting.", lambda: self.admissions.queued),
            ("baton_kv_tokens_used", "KV tokens reserved.", lambda: self.admissions.kv_used_tokens),
            ("baton_kv_tokens_capacity", "KV tokens there are.", lambda: capabilities.kv_capacity_tokens),
            (
                "baton_acceptance_length",
                "Mean tokens of a step with drafts: the accepted ones and one more; 0 before the first.",
                lambda: self.acceptance.mean_length or 0.0,
            ),
        ]
        held = self.receiver.held
        gauges += [
            ("baton_held_prefix_sessions", "Sessions whose prompts' rows are held.", lambda: held.stats()["sessions"]),
            ("baton_held_prefix_tokens", "Tokens whose rows are held.", lambda: held.tokens),
            ("baton_held_prefix_evictions", "Held prefixes that made room.", lambda: held.events["evicted"]),
        ]
        for name, text, read in gauges:
            self.metrics.gauge(name, text, read)
        await self.receiver.start()

    async def close(self, timeout_s: float) -> bool:
        """Ends the requests inside with ``shutting_down``, then receiver and engine. False if the engine hangs."""
        self.stopping = True
        for task in self.requests:
            task.cancel()
        if self.requests:
            await asyncio.wait(self.requests, timeout=timeout_s / 2)
        await self.receiver.close()
        ended = await asyncio.to_thread(self.engine.stop, timeout_s / 2)
        self.stage_log.close()
        return ended

    def next_seq_id(self) -> int:
        """A sequence id that was never used."""
        return next(self._seq_ids)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` beside the requests and keeps it alive until it is done."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def count_acceptance(self, output: StepOutput) -> None:
        """Adds a step's drafts to the acceptance figures."""
        self.acceptance.add(output.drafted, output.accepted, output.steps)
        self.metrics.drafted.inc(output.drafted)
        self.metrics.accepted.inc(output.accepted)
        self.metrics.drafted_steps.inc(output.steps if output.drafted else 0)
        for position in range(output.accepted if output.steps == 1 else 0):
            self.metrics.accepted_at.labels(str(position + 1)).inc()

    @property
    def simulates(self) -> bool:
        """Whether the engine accepts drafts to a target length in place of verifying them."""
        return self.capabilities.extra.get("acceptance") == "simulated"

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_objects])
        for endpoint in Endpoint:
            app.router.add_post(endpoint.value, self._generate(endpoint))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._server_info)
        return app

    def _generate(self, endpoint: Endpoint) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
        async def handler(http: web.Request) -> web.StreamResponse:
            task = asyncio.current_task()
            assert task is not None
            self.requests.add(task)
            try:
                given = http.headers.get("X-Request-Id", "")
                request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
                return await Lifecycle(self, http, endpoint, request_id).run()
            finally:
                self.requests.discard(task)

        return handler

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.config.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self.capabilities.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        if self.engine_dead.is_set():
            return _json({"status": "engine_failed"}, status=503)
        return _json({"status": "stopping"}, status=503) if self.stopping else _json({"status": "ok"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _server_info(self, _: web.Request) -> web.Response:
        admissions, capabilities = self.admissions, self.capabilities
        counted = self.acceptance
        target = capabilities.extra.get("target_length")
        return _json(
            {
                "role": "decode",
                "model": self.config.model_name,
                "engine": capabilities.extra.get("engine", "bundled"),
                "version": self.config.version,
                "layout": self.layout_sha256,
                "control": self.receiver.control_address,
                "max_batch_size": admissions.max_batch_size,
                "queue_depth": admissions.queue_depth,
                "capacity": admissions.capacity,
                "active": admissions.active,
                "queued": admissions.queued,
                "free": admissions.free,
                "kv_capacity_tokens": admissions.kv_capacity_tokens,
                "kv_free_tokens": admissions.kv_capacity_tokens - admissions.kv_used_tokens,
                "max_model_len": capabilities.max_model_len,
                "dtype": self.config.dtype,
                "step": capabilities.extra.get("step"),
                "tensor_parallel_size": int(capabilities.extra.get("tensor_parallel_size", 1)),
                "handoff": self.receiver.stats(),
                "acceptance": {
                    "mode": capabilities.extra.get("acceptance", "real" if capabilities.speculative else "none"),
                    "method": capabilities.extra.get("draft_method"),
                    "draft_depth": int(capabilities.extra.get("draft_depth", 0)),
                    "target_length": None if target is None else float(target),
                    "steps": counted.steps,
                    "drafted": counted.drafted,
                    "accepted": counted.accepted,
                    "mean_length": None if counted.mean_length is None else round(counted.mean_length, 4),
                    "per_position": [round(share, 4) for share in counted.per_position],
                },
            }
        )

    def _on_step(self, report: StepReport) -> None:
        self.metrics.steps.observe(report.step_s)
        self.metrics.step_sequences.observe(report.sequences)
        self.metrics.output_tokens.inc(sum(len(output.token_ids) for output in report.outputs))
        for output in report.outputs:
            outputs = self.outputs.get(output.seq_id)
            if outputs is not None:
                outputs.put_nowait(output)

    def _on_failure(self, failure: EngineFailure) -> None:
        what = f"{type(failure.error).__name__}: {failure.error}"
        # Once the thread is gone nobody will answer anybody, whether or not it was in the failed step.
        for seq_id in tuple(self.outputs) if failure.fatal else failure.seq_ids:
            outputs = self.outputs.get(seq_id)
            if outputs is not None:
                outputs.put_nowait(RequestError(f"the engine failed: {what}", status=500, code="engine_error"))
        if failure.fatal and not self.engine_dead.is_set():
            log.error("the engine cannot go on: %s", what)
            self.engine_dead.set()


def _json(document: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


@web.middleware
async def _errors_as_objects(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        code = {404: "unknown_route", 405: "wrong_method"}.get(error.status, "http_error")
        response = error_response(
            RequestError(f"{request.method} {request.path}: {error.reason}", status=error.status, code=code)
        )
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except RequestError as error:
        return error_response(error)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(RequestError("internal error, see the server's log", status=500, code="internal_error"))
