"""The prefill/decode router and its command line: ``python -m serve.pd_router``.

One request: ``Router.generate`` reads it, ``serve.router.placement`` finds a prefill and a decode with room,
``first_token`` is hop 1, ``stream`` is hop 2, whose bytes ``serve.router.relay`` splices through. A hand-off that ends
without decode's answer is taken back by ``abandon``. Everything about HTTP, health and JSON is one call down, in
``serve.router``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import resource
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import orjson
import uvloop

from serve.handoff.client import abort as abort_handoff
from serve.openai import RequestError, answer_from_prefill, read_first_token
from serve.router.body import Generation
from serve.router.envelope import WISH, EnvelopeDecode, read_envelope
from serve.router.errors import BackendLost, BackendSilent
from serve.router.exchange import Exchange
from serve.router.fleet import Backend, Decode, Fleet
from serve.router.hop import hop_request
from serve.router.ledger import PromptLedger
from serve.router.listener import HttpServer, Limits
from serve.router.placement import Placement
from serve.router.relay import Relay, passed_headers
from serve.router.sessions import IDLE_S, MAX_SESSIONS, Session, Sessions, session_of
from serve.router.stages import RouterMetrics, StageLog, StageRecord
from serve.router.upstream import Collected

log = logging.getLogger("baton.router")

MAX_PREFILL_ANSWER_BYTES = 64 * 1024 * 1024
ABORT_TIMEOUT_S = 2.0
MAX_ABORTS_AT_ONCE = 256
SHUTDOWN_GRACE_S = 2.0
# A decode that answers its probes may take this many deadlines for an answer that is not streamed.
PATIENCE = 10
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class Router:
    """Answers clients from a fleet of prefill and decode servers."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        model: str,
        deadline_s: float,
        stage_log: StageLog | None = None,
        envelope: bool = False,
        sessions: Sessions | None = None,
    ) -> None:
        self.fleet = fleet
        self.envelope = envelope
        self.model = model
        self.deadline_s = deadline_s
        self.stage_log = stage_log or StageLog(None)
        self.sessions = sessions or Sessions()
        self.placement = Placement(fleet, self.sessions)
        self.metrics = RouterMetrics(fleet, self.sessions)
        self.ledger = PromptLedger()
        self._aborts: set[asyncio.Task[None]] = set()
        self._started_s = int(time.time())
        self._routes = {
            "/health": ("GET", self.health),
            "/v1/models": ("GET", self.models),
            "/server_info": ("GET", self.server_info),
            "/metrics": ("GET", self.show_metrics),
            "/v1/completions": ("POST", self.generate),
            "/v1/chat/completions": ("POST", self.generate),
        }

    async def handle(self, exchange: Exchange) -> None:
        """Any request of a client."""
        request = exchange.request
        method, serve = self._routes.get(request.path, ("", None))
        if serve is None:
            exchange.respond_error(
                RequestError(f"There is no {request.path[:200]} here.", status=404, code="not_found")
            )
        elif request.method != method and (request.method, method) != ("HEAD", "GET"):
            error = RequestError(f"{request.path} takes {method} only.", status=405, code="method_not_allowed")
            exchange.respond_json(405, error.body(), [(b"allow", method.encode())])
        else:
            await serve(exchange)

    async def generate(self, exchange: Exchange) -> None:
        """One generation request, from its body to its last byte and its stage record."""
        request = exchange.request
        request_id = _request_id(request.header(b"x-request-id"))
        exchange.extra_headers.append((b"x-request-id", request_id.encode()))
        record = StageRecord(request_id, request.began, request.began_epoch_s)
        record.session_id = session_of(request)
        session = self.sessions.turn(record.session_id)
        record.turn = None if session is None else session.turns
        try:
            await self.serve(exchange, Generation.parse(request.path, request.body), session, record)
        except RequestError as error:
            _end_with(exchange, error, record)
        except asyncio.CancelledError:
            if not exchange.gone:
                _end_with(exchange, RequestError("The router is stopping.", status=503, code="router_stopping"), record)
            record.status = 499 if exchange.gone else 503
            raise
        finally:
            record.ended = time.monotonic()
            self.stage_log.write(record)
            self.metrics.observe(record)

    async def serve(
        self, exchange: Exchange, generation: Generation, session: Session | None, record: StageRecord
    ) -> None:
        """Two tries: a backend found dead before the client got a byte is replaced once, if there is another."""
        dead: Backend | None = None
        while True:
            two_hops = generation.max_tokens != 1 or self.envelope
            prefill, decode = await self.placement.choose(session, dead, two_hops=two_hops)
            try:
                if decode is None:
                    await self.prefill_only(exchange, generation, prefill, record)
                elif self.envelope:
                    await self.pass_envelope(exchange, generation, prefill, decode, record)
                else:
                    await self.hand_off(exchange, generation, prefill, decode, record)
                return
            except BackendLost as lost:
                lost.backend.lost(str(lost))
                spare = any(one.healthy for one in self.fleet.peers(lost.backend))
                if exchange.started or dead is not None or not spare:
                    raise RequestError(lost.where, status=502, code=f"{lost.backend.role}_unavailable") from None
                dead = lost.backend
                self.metrics.retries.labels(dead.role).inc()
                log.warning("request %s is tried again: %s", record.request_id, lost.where)
            except BackendSilent as silent:
                silent.backend.suspect()
                raise RequestError(silent.where, status=504, code=f"{silent.backend.role}_timeout") from None

    async def prefill_only(
        self, exchange: Exchange, generation: Generation, prefill: Backend, record: StageRecord
    ) -> None:
        """One token: hop 1's answer is the client's answer."""
        answer = await self.first_token(exchange, prefill, generation.prefill_body(None), record)
        if answer.status == 200:
            self.answer(exchange, generation, answer, record)
        else:
            self.pass_on(exchange, answer, record)

    async def hand_off(
        self, exchange: Exchange, generation: Generation, prefill: Backend, decode: Decode, record: StageRecord
    ) -> None:
        """Hop 1 and hop 2. However it ends, no hand-off is left waiting at the decode."""
        handoff_id = uuid.uuid4().hex
        names = {"handoff_id": handoff_id, "request_id": record.request_id}
        record.handoff_id, record.decode = handoff_id, decode.url
        control = decode.control
        reason = "the client left"
        with decode.lease():
            try:
                wish = {**names, "decode_control": control, "deadline_s": self.deadline_s}
                if record.session_id is not None:
                    wish["session_id"] = record.session_id
                answer = await self.first_token(exchange, prefill, generation.prefill_body(wish), record)
                if answer.status != 200:
                    reason = f"prefill answered {answer.status}"
                    self.pass_on(exchange, answer, record)
                    return
                first = read_first_token(generation.endpoint, answer.body)
                record.prompt_tokens = len(first.prompt_token_ids)
                self.note_prompt(record, first.prompt_token_ids)
                if first.finish_reason != "length":
                    reason = f"the first token ended the answer ({first.finish_reason})"
                    self.answer(exchange, generation, answer, record)
                    return
                taken = {
                    **names,
                    "prompt_token_ids": first.prompt_token_ids,
                    "first_token_id": first.token_id,
                    **({} if first.cached_tokens is None else {"cached_tokens": first.cached_tokens}),
                }
                status = await self.stream(exchange, generation, decode, generation.decode_body(taken), record)
                reason = "" if status == 200 else f"decode answered {status}"
            except (BackendLost, BackendSilent, RequestError) as error:
                reason = str(error)
                raise
            finally:
                if reason:
                    self.abandon(control, handoff_id, reason)

    async def pass_envelope(
        self, exchange: Exchange, generation: Generation, prefill: Backend, decode: Decode, record: StageRecord
    ) -> None:
        """Both hops for engines that find each other: what prefill answers tells decode where the KV cache is."""
        record.decode = decode.url
        with decode.lease():
            answer = await self.first_token(exchange, prefill, generation.prefill_body(WISH, ids=False), record)
            if answer.status != 200:
                self.pass_on(exchange, answer, record)
                return
            body = generation.decode_body(read_envelope(answer.body))
            await self.stream(exchange, generation, decode, body, record)

    def note_prompt(self, record: StageRecord, prompt_token_ids: Sequence[int]) -> None:
        """How much of a session's prompt was sent before; only where records are kept, for it costs a look at all."""
        if record.session_id is None or not self.stage_log.is_open:
            return
        prefill, sent, done = record.prefill, record.prefill_sent, record.prefill_done
        if prefill is not None and sent is not None and done is not None:
            known = self.ledger.note(record.session_id, prefill, prompt_token_ids, sent, done)
            record.session_shared_tokens, record.seen_tokens = known

    async def first_token(self, exchange: Exchange, prefill: Backend, body: bytes, record: StageRecord) -> Collected:
        """Hop 1: prefill's whole answer, whatever its status. Raises BackendLost, BackendSilent."""
        answer = Collected(MAX_PREFILL_ANSWER_BYTES)
        record.prefill = prefill.url
        record.prefill_sent = time.monotonic()
        with prefill.lease():
            try:
                async with asyncio.timeout(self.deadline_s):
                    await prefill.call(hop_request(exchange.request, record.request_id, prefill, body), answer)
            except TimeoutError:
                silent = BackendSilent(f"it did not answer within {self.deadline_s:g} s")
                silent.backend = prefill
                raise silent from None
        record.prefill_done = time.monotonic()
        return answer

    async def stream(
        self, exchange: Exchange, generation: Generation, decode: Decode, body: bytes, record: StageRecord
    ) -> int:
        """Hop 2: decode's answer on its way to the client; returns its status. Raises BackendLost, BackendSilent."""
        relay = Relay(
            exchange,
            stream=generation.stream,
            silence_s=self.deadline_s,
            patience_s=self.deadline_s * PATIENCE,
            alive=lambda: decode.answers_probes(self.deadline_s),
        )
        record.decode_sent = time.monotonic()
        try:
            await decode.call(hop_request(exchange.request, record.request_id, decode, body), relay)
        finally:
            record.decode_first_byte = relay.first_byte
            record.first_write, record.last_write = relay.first_write, relay.last_write
            relay.close()
        record.status = relay.status
        return relay.status

    def answer(self, exchange: Exchange, generation: Generation, hop_1: Collected, record: StageRecord) -> None:
        """The client's answer from hop 1 alone: one token was wanted, or the first one was the end."""
        content_type, body = answer_from_prefill(generation.endpoint, generation.fields, hop_1.body)
        record.status, record.first_write = 200, time.monotonic()
        record.last_write = record.first_write
        exchange.respond(200, body, [(b"content-type", content_type.encode())])

    def pass_on(self, exchange: Exchange, hop_1: Collected, record: StageRecord) -> None:
        """Prefill's refusal, with its own words and Retry-After."""
        exchange.respond(hop_1.status, hop_1.body, passed_headers(hop_1.headers))
        record.status = hop_1.status

    def abandon(self, control: str, handoff_id: str, reason: str) -> None:
        """Tells the decode, in the background, that nobody will come for this hand-off."""
        if len(self._aborts) >= MAX_ABORTS_AT_ONCE:
            log.warning("hand-off %s is left to its deadline: too many aborts are under way", handoff_id)
            return
        self.metrics.abandoned.inc()
        task = asyncio.get_running_loop().create_task(_abort(control, handoff_id, reason))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def settle(self, timeout_s: float) -> None:
        """Waits for the aborts under way."""
        if self._aborts:
            await asyncio.wait(set(self._aborts), timeout=timeout_s)

    async def health(self, exchange: Exchange) -> None:
        missing = [
            role
            for role, backends in (("prefill", self.fleet.prefills), ("decode", self.fleet.decodes))
            if not any(one.healthy for one in backends)
        ]
        if missing:
            backends = [one for one in self.fleet.all if one.role in missing]
            what = "; ".join(f"{one.role} {one.url}: {one.reason}" for one in backends)
            message = f"No healthy {' and no healthy '.join(missing)} server. {what}"
            exchange.respond_error(RequestError(message, status=503, code=f"{missing[0]}_unavailable"))
        else:
            exchange.respond_json(200, b'{"status":"ok"}')

    async def models(self, exchange: Exchange) -> None:
        card = {"id": self.model, "object": "model", "created": self._started_s, "owned_by": "baton"}
        exchange.respond_json(200, orjson.dumps({"object": "list", "data": [card]}))

    async def server_info(self, exchange: Exchange) -> None:
        info = {
            "role": "router",
            "model": self.model,
            "prefill": [one.snapshot() for one in self.fleet.prefills],
            "decode": [one.snapshot() for one in self.fleet.decodes],
            "sessions": self.sessions.snapshot(),
        }
        exchange.respond_json(200, orjson.dumps(info))

    async def show_metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self.metrics.page(), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])


def _request_id(given: bytes | None) -> str:
    return given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _end_with(exchange: Exchange, error: RequestError, record: StageRecord) -> None:
    """Answers with the error, as an event where a stream has begun, and then without [DONE]."""
    record.status = error.status
    if not exchange.started:
        exchange.respond_error(error)
    elif not exchange.finished:
        exchange.close_after()
        exchange.write((b"" if exchange.at_event_boundary else b"\n\n") + error.event(), last=True)


async def _abort(control: str, handoff_id: str, reason: str) -> None:
    try:
        await abort_handoff(control, handoff_id, reason[:500], ABORT_TIMEOUT_S)
    except Exception as error:
        log.info("abort of hand-off %s at %s: %s", handoff_id, control, error)


async def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    try:
        envelope = arguments.handoff == "envelope"
        fleet = Fleet(arguments.prefill, arguments.decode, EnvelopeDecode if envelope else Decode)
        stage_log = StageLog(arguments.stage_log)
    except (ValueError, OSError) as error:
        print(f"pd_router: {error}", file=sys.stderr)
        return 1
    router = Router(
        fleet,
        model=arguments.model,
        deadline_s=arguments.deadline_s,
        stage_log=stage_log,
        envelope=envelope,
        sessions=Sessions(arguments.max_sessions, arguments.session_idle_s),
    )
    server = HttpServer(router.handle, Limits())
    try:
        port = await server.start(arguments.host, arguments.port)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        print(f"pd_router: cannot listen on {where}: {error.strerror}. Choose another --port.", file=sys.stderr)
        return 1
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    fleet.start()
    print(f"ready http://{arguments.host}:{port}", flush=True)
    await stop.wait()
    await server.stop(SHUTDOWN_GRACE_S)
    await router.settle(0.5)
    fleet.close()
    stage_log.close()
    return 0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve.pd_router", description="Route OpenAI requests to prefill and decode.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--model", required=True, help="the served model's name, for /v1/models")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="http://HOST:PORT, repeatable")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="http://HOST:PORT, repeatable")
    parser.add_argument(
        "--deadline-s", type=_positive, default=60.0, help="of hop 1, of silence in hop 2, of a hand-off"
    )
    parser.add_argument(
        "--handoff",
        default="baton",
        choices=["baton", "envelope"],
        help="who finds the KV cache: our decode by a slot, or the engines by what prefill answers (%(default)s)",
    )
    parser.add_argument(
        "--max-sessions", type=_count, default=MAX_SESSIONS, help="conversations remembered (default %(default)s)"
    )
    parser.add_argument(
        "--session-idle-s",
        type=_positive,
        default=IDLE_S,
        help="a conversation is forgotten after (default %(default)g)",
    )
    parser.add_argument("--stage-log", type=Path, metavar="PATH", help="append one JSON line a request")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(argv)


def _count(text: str) -> int:
    value = int(text)
    if not 0 < value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text} is not in [1, {1 << 24}]")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 3600]")
    return value


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # every client may need two more sockets
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
    return uvloop.run(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
