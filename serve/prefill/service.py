"""What the requests of one prefill server share, and its routes: hop 1 as vLLM answers it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.decode.generation import Generation
from serve.decode.local_prompt import LocalPrompt
from serve.decode.model_files import ModelFiles
from serve.decode.reply import error_response
from serve.engine.base import Capabilities, EngineLost
from serve.handoff.protocol import HandoffError
from serve.handoff.vllm_schedule import HandoffParams
from serve.metrics import CONTENT_TYPE
from serve.openai import (
    JSON_CONTENT_TYPE,
    MAX_BODY_BYTES,
    Answer,
    Endpoint,
    GenerationRequest,
    RequestError,
    decode_object,
    parse_request,
)
from serve.prefill.worker import PrefillWorker, Prompt

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(frozen=True)
class PrefillConfig:
    """What the command line decides about requests."""

    model_name: str
    max_model_len: int
    queue_depth: int
    handoff_deadline_s: float
    version: str
    layout_sha256: str


class PrefillService:
    """Shared state on the event loop. ``load`` makes the worker on its thread; ``close_handoff`` ends the sending."""

    def __init__(
        self,
        config: PrefillConfig,
        model: ModelFiles,
        load: Callable[[], PrefillWorker],
        close_handoff: Callable[[], None],
    ) -> None:
        self.config = config
        self.engine_dead = asyncio.Event()
        self._model = model
        self._load = load
        self._close_handoff = close_handoff
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self._local_prompt = LocalPrompt(model.directory, model.tokenizer)
        self._capabilities = Capabilities(1, config.max_model_len, config.max_model_len, local_prefill=True)
        self._prompts: set[Prompt] = set()
        self._created = int(time.time())
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("baton_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        self._prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens, those reused included.", registry=registry)
        self._reused_tokens = Counter(
            "baton_prefix_cache_hits", "Prompt tokens whose rows were there from the prompt before.", registry=registry
        )
        self._seconds = Histogram(
            "baton_prefill_seconds", "Arrival to first token.", buckets=_SECONDS, registry=registry
        )
        Gauge("baton_requests_inside", "Requests running or waiting.", registry=registry).set_function(
            lambda: len(self._prompts)
        )

    async def start(self) -> None:
        """Loads the model. Raises what loading it raises."""
        loop = asyncio.get_running_loop()
        self._worker = await loop.run_in_executor(self._thread, self._load)
        self._worker.watch(lambda error: loop.call_soon_threadsafe(self._on_lost, error))

    def _on_lost(self, error: EngineLost) -> None:
        log.error("the engine cannot go on: %s", error)
        self.engine_dead.set()

    async def close(self, timeout_s: float) -> bool:
        """Ends the thread and the sending; False when a chunk takes longer than ``timeout_s``."""
        for prompt in self._prompts:
            prompt.abandoned.set()
        idle = asyncio.wrap_future(self._thread.submit(lambda: None))
        _, hanging = await asyncio.wait({idle}, timeout=timeout_s)
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self._close_handoff)
        self._thread.shutdown(wait=False, cancel_futures=True)
        return not hanging

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for endpoint in Endpoint:
            app.router.add_post(endpoint.value, self._handler(endpoint))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._server_info)
        return app

    def _handler(self, endpoint: Endpoint) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            given = http.headers.get("X-Request-Id", "")
            request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            headers = {"X-Request-Id": request_id}
            outcome = "disconnected"
            try:
                body = await self._answer(http, endpoint, request_id)
                outcome = "ok"
                return web.Response(body=body, content_type=JSON_CONTENT_TYPE, headers=headers)
            except web.HTTPRequestEntityTooLarge as error:
                outcome = "body_too_large"
                return error_response(RequestError(str(error.text), status=413, code=outcome), headers)
            except RequestError as error:
                outcome = error.code
                return error_response(error, headers)
            except Exception as error:
                log.exception("request %s failed", request_id)
                outcome = "engine_error"
                what = f"prefill failed: {type(error).__name__}: {error}"
                return error_response(RequestError(what, status=500, code=outcome), headers)
            finally:
                self._requests.labels(outcome).inc()

        return handle

    async def _answer(self, http: web.Request, endpoint: Endpoint, request_id: str) -> bytes:
        request, handoff = self._parse(endpoint, await http.read())
        token_ids = await self._local_prompt.token_ids(request)
        generation = Generation(request, token_ids, self._model, self._capabilities)
        if len(self._prompts) >= self.config.queue_depth:
            message = f"{len(self._prompts)} prompts are waiting: try again"
            raise RequestError(message, status=429, code="server_full", retry_after_s=1)
        prompt = Prompt(token_ids, generation.sampling, handoff)
        self._prompts.add(prompt)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, self._worker.run, prompt)
            token_id = await running
        except asyncio.CancelledError:
            prompt.abandoned.set()
            raise
        finally:
            self._prompts.discard(prompt)
        self._prompt_tokens.inc(len(token_ids))
        self._reused_tokens.inc(prompt.reused_tokens)
        self._seconds.observe(time.monotonic() - prompt.arrived_s)
        pieces, finish = generation.first(token_id)
        assert finish is not None
        answer = Answer(
            endpoint,
            request_id=request_id,
            model=self.config.model_name,
            prompt_token_ids=token_ids,
            return_token_ids=request.return_token_ids,
        )
        text = "".join(piece for piece, _ in pieces) + generation.rest()
        document = orjson.loads(answer.body(text, [token_id], finish.reason, finish.stop_reason))
        if handoff is not None:
            document["kv_transfer_params"] = {"handoff_id": handoff.handoff_id, "handoff": "sent"}
        return orjson.dumps(document)

    def _parse(self, endpoint: Endpoint, raw: bytes) -> tuple[GenerationRequest, HandoffParams | None]:
        body = decode_object(raw)
        try:
            handoff = HandoffParams.parse(body.pop("kv_transfer_params", None), self.config.handoff_deadline_s)
        except HandoffError as error:
            raise RequestError(error.message, code=error.code.value, param="kv_transfer_params") from None
        request = parse_request(endpoint, orjson.dumps(body), max_model_len=self.config.max_model_len)
        if request.model is not None and request.model != self.config.model_name:
            message = f"the model {request.model!r} does not exist; served: {self.config.model_name}"
            raise RequestError(message, status=404, code="model_not_found", param="model")
        if request.max_tokens != 1 or request.stream:
            message = "this is a prefill server: it takes max_tokens 1 without stream; send the request to the router"
            raise RequestError(message, code="prefill_only", param="stream" if request.stream else "max_tokens")
        return request, handoff

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.config.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self.config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        if self.engine_dead.is_set():
            return web.json_response({"status": "engine_failed"}, status=503)
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "role": "prefill",
                "engine": "bundled",
                "model": self.config.model_name,
                "version": self.config.version,
                "layout": self.config.layout_sha256,
                "max_model_len": self.config.max_model_len,
                "inside": len(self._prompts),
            }
        )
