"""The decode server: takes a KV cache that a prefill engine computed and streams the tokens that follow.

    python -m serve.decode_server --model DIR --served-model-name NAME --host 127.0.0.1 --port 8200 --control-port 8201

Prints ``ready http://host:port`` when it serves. Exit status: 0 after SIGTERM or SIGINT, 1 when it could not start,
3 when the engine failed for good.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from typing import Any

    from aiohttp import web

    from serve.decode.service import DecodeService
    from serve.engine.base import DecodeEngine
    from serve.engine.speculative import Speculation

log = logging.getLogger("serve.decode_server")

EXIT_START_FAILED = 1
EXIT_ENGINE_FAILED = 3
BACKLOG = 1024
CLOSE_TIMEOUT_S = 2.0
KV_DTYPES = ("float32", "bfloat16", "fp8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m serve.decode_server", description=__doc__.splitlines()[0])
    p.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="directory with config.json, weights, tokenizer"
    )
    p.add_argument("--served-model-name", required=True, metavar="NAME", help="name that requests must use")
    p.add_argument("--host", default="127.0.0.1", help="address to bind and to advertise (default %(default)s)")
    p.add_argument("--port", type=_port, default=8200, help="HTTP port, 0 for any (default %(default)s)")
    p.add_argument("--control-port", type=_port, default=0, help="hand-off control port, 0 for any (default)")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and compute")
    p.add_argument(
        "--kv-dtype", default=None, choices=KV_DTYPES, help="KV on the wire, fp8 also in the cache (default: --dtype)"
    )
    p.add_argument(
        "--engine",
        default="bundled",
        choices=["bundled", "tilert", "tilert-stub"],
        help="what generates: this project, TileRT, or TileRT's stub (default %(default)s)",
    )
    p.add_argument("--tilert-profile", default="glm5", help="TileRT's name of the model (default %(default)s)")
    p.add_argument("--tilert-weights", type=Path, metavar="DIR", help="converted checkpoint (default: --model)")
    p.add_argument("--device", default="cpu", help="torch device of the engine (default %(default)s)")
    p.add_argument(
        "--step",
        default="auto",
        choices=["auto", "eager", "fused"],
        help="fused: captured CUDA graphs (GLM-5, DeepSeek-V3), compiled for a CPU (Llama); "
        "auto: where the device and the model allow it",
    )
    p.add_argument("--threads", type=_positive, default=2, help="CPU threads of the engine (default %(default)s)")
    add_ranks_argument(p)
    p.add_argument(
        "--max-batch-size", type=_positive, default=8, help="sequences decoded at once (default %(default)s)"
    )
    p.add_argument("--max-model-len", type=_positive, default=2048, help="context, in tokens (default %(default)s)")
    p.add_argument("--kv-capacity-tokens", type=_positive, default=None, help="default: batch size x model length")
    p.add_argument("--draft-depth", type=_natural, default=0, help="draft tokens a step, 0 to 7 (default: no drafts)")
    p.add_argument("--spec-method", default="mtp", choices=["mtp", "ngram"], help="how drafts are proposed")
    p.add_argument(
        "--simulate-acceptance-length",
        type=_length,
        default=None,
        metavar="L",
        help="force this mean acceptance length, right or wrong (throughput only; evals are refused)",
    )
    p.add_argument("--queue-depth", type=_natural, default=16, help="requests that may wait (default %(default)s)")
    p.add_argument("--pool-bytes", type=_positive, default=1 << 28, help="receive pool, in bytes (default %(default)s)")
    p.add_argument(
        "--held-prefix-tokens",
        type=_natural,
        default=0,
        metavar="N",
        help="tokens whose KV may stay in the pool for the next turn of their session (default: none)",
    )
    p.add_argument("--transport", default="mooncake", choices=["mooncake", "nixl"])
    p.add_argument("--protocol", default="tcp", help="of the transport: tcp, rdma, ucx (default %(default)s)")
    p.add_argument("--handoff-deadline-s", type=_seconds, default=60.0, help="longest wait for a KV cache or a place")
    p.add_argument("--quarantine-s", type=_seconds, default=60.0, help="how long an aborted slot is kept from reuse")
    p.add_argument("--step-deadline-s", type=_seconds, default=120.0, help="longest wait for a decode step")
    p.add_argument("--stage-log", type=Path, default=None, metavar="PATH", help="append one JSON line a request")
    p.add_argument("--allow-local-prefill", action="store_true", help="also serve requests that have no hand-off")
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return p


def add_ranks_argument(p: argparse.ArgumentParser) -> None:
    """--tensor-parallel-size, of both servers."""
    p.add_argument(
        "--tensor-parallel-size",
        "--tp-size",
        type=_positive,
        default=1,
        metavar="N",
        help="spread the model over N devices, or N processes on a CPU (default %(default)s)",
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the server until a signal or the engine's end; returns the exit status."""
    options = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(serve(options))
    return status


async def serve(
    options: argparse.Namespace, make_engine: Callable[[argparse.Namespace], DecodeEngine] | None = None
) -> int:
    """Starts everything, waits for the end, stops everything. ``make_engine`` replaces the bundled engine (tests)."""
    return await serve_until_stopped(options, lambda: _start(options, make_engine or _engine))


class Service(Protocol):
    """A server's inside, started: what serve_until_stopped() needs of it."""

    engine_dead: asyncio.Event

    def application(self) -> web.Application:
        """Its routes."""

    async def close(self, timeout_s: float) -> bool:
        """Ends it; False when its engine hangs."""


async def serve_until_stopped(options: argparse.Namespace, start: Callable[[], Coroutine[Any, Any, Service]]) -> int:
    """Listens on options.host and port, starts the service, prints the ready line; returns the exit status."""
    import asyncio
    import signal
    import socket

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        # Bound before the weights are read, so that a taken port is told at once; it listens when all is ready.
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        log.error("cannot listen on %s:%s: %s; choose another --port", options.host, options.port, error.strerror)
        return EXIT_START_FAILED
    starting = asyncio.ensure_future(start())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        log.info("stopped while starting")
        return _exit_now(0)
    try:
        service = starting.result()
    except Exception as error:
        log.error("cannot start: %s", error, exc_info=not isinstance(error, (ValueError, OSError)))
        listener.close()
        return _exit_now(EXIT_START_FAILED)
    return await _run(service, listener, stopped)


async def _run(service: Service, listener: Any, stopped: Any) -> int:
    import asyncio

    from aiohttp import web

    # A handler is cancelled when its client goes away: that is what frees the batch place at once.
    runner = web.AppRunner(
        service.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2, keepalive_timeout=75
    )
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=BACKLOG)
    await site.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"ready http://{shown}:{port}", flush=True)
    dead = asyncio.ensure_future(service.engine_dead.wait())
    await asyncio.wait({dead, stopped}, return_when=asyncio.FIRST_COMPLETED)
    status = EXIT_ENGINE_FAILED if dead.done() else 0
    if status:
        # Long enough for /health to be seen failing and for the failed requests' answers to leave.
        await asyncio.wait({stopped}, timeout=1.0)
    await site.stop()
    ended = await service.close(CLOSE_TIMEOUT_S)
    await runner.cleanup()
    if not ended:
        log.warning("the engine is still in a step; leaving it")
        return _exit_now(status)
    return status


async def _start(
    options: argparse.Namespace, make_engine: Callable[[argparse.Namespace], DecodeEngine]
) -> DecodeService:
    """Reads the model, loads the engine, opens the receiver. Raises ValueError, OSError, HandoffError."""
    from serve.decode.model_files import ModelFiles
    from serve.decode.service import DecodeService, ServiceConfig
    from serve.engine.parallel import known_device
    from serve.handoff.layout import KVLayout
    from serve.handoff.receiver import HandoffReceiver
    from serve.handoff.transport import create_transport

    known_device(engine_device(options))
    model = ModelFiles.read(options.model)
    speculation = speculation_of(options)
    mtp_layers = int(speculation is not None and speculation.method == "mtp")
    layout = KVLayout.from_config(model.config, options.kv_dtype or options.dtype, mtp_layers=mtp_layers)
    transport = create_transport(options.transport, options.host, options.protocol)
    receiver = HandoffReceiver(
        layout,
        transport,
        host=options.host,
        control_port=options.control_port,
        pool_bytes=options.pool_bytes,
        quarantine_s=options.quarantine_s,
        max_slots=2 * (options.max_batch_size + options.queue_depth),
        held_prefix_tokens=options.held_prefix_tokens,
        device=engine_device(options),
    )
    config = ServiceConfig(
        model_name=options.served_model_name,
        queue_depth=options.queue_depth,
        handoff_deadline_s=options.handoff_deadline_s,
        step_deadline_s=options.step_deadline_s,
        dtype=options.dtype,
        stage_log=options.stage_log,
        allow_local_prefill=options.allow_local_prefill,
        version=_version(),
    )
    service = DecodeService(config, model, receiver, layout.sha256(), lambda: make_engine(options))
    await service.start()
    return service


def _engine(options: argparse.Namespace) -> DecodeEngine:
    if options.engine != "bundled":
        from serve.engine.tilert_engine import create_tilert_engine

        return create_tilert_engine(
            model_dir=options.model,
            profile=options.tilert_profile,
            weights_dir=options.tilert_weights or options.model,
            max_model_len=options.max_model_len,
            speculation=speculation_of(options),
            stub=options.engine == "tilert-stub",
        )
    from serve.engine.torch_engine import create_engine

    return create_engine(
        model_dir=options.model,
        dtype=options.dtype,
        max_batch_size=options.max_batch_size,
        max_model_len=options.max_model_len,
        kv_capacity_tokens=options.kv_capacity_tokens or options.max_batch_size * options.max_model_len,
        threads=options.threads,
        device=options.device,
        speculation=speculation_of(options),
        kv_dtype=options.kv_dtype,
        step=options.step,
        ranks=options.tensor_parallel_size,
    )


def engine_device(options: argparse.Namespace) -> str:
    """Where the engine's KV cache lies: TileRT's in GPUs, its stub's nowhere."""
    return {"tilert": "cuda", "tilert-stub": "cpu"}.get(options.engine, options.device)


def speculation_of(options: argparse.Namespace) -> Speculation | None:
    """What the command line says about drafts. Raises ValueError for a depth or length that cannot be."""
    from serve.engine.speculative import Speculation

    if options.draft_depth == 0:
        if options.simulate_acceptance_length is not None:
            raise ValueError("--simulate-acceptance-length needs --draft-depth: without drafts nothing is accepted")
        return None
    return Speculation(options.spec_method, options.draft_depth, options.simulate_acceptance_length)


def _exit_now(status: int) -> int:
    """Leaves without waiting for a thread that is inside the engine."""
    import os

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("baton-bench")
    except metadata.PackageNotFoundError:
        return "unknown"


def _port(text: str) -> int:
    return _bounded(text, 0, 65535, "a port")


def _positive(text: str) -> int:
    return _bounded(text, 1, 2**48, "a positive integer")


def _natural(text: str) -> int:
    return _bounded(text, 0, 2**31, "zero or a positive integer")


def _bounded(text: str, low: int, high: int, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _seconds(text: str) -> float:
    return _positive_number(text, "a positive number of seconds")


def _length(text: str) -> float:
    return _positive_number(text, "a mean acceptance length")


def _positive_number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


if __name__ == "__main__":
    # Transport libraries take seconds to take themselves down at interpreter exit; nothing of it is needed.
    _exit_now(main())
