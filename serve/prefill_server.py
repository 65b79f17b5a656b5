"""The bundled prefill server: computes a prompt, hands its KV cache to a decode server, answers the first token.

    python -m serve.prefill_server --model DIR --served-model-name NAME --host 127.0.0.1 --port 8100

For models that vLLM does not run on the machine at hand. It speaks hop 1 as vLLM does: completions and chat with
max_tokens 1, return_token_ids and kv_transfer_params. Prints ``ready http://host:port`` when it serves. Exit status: 0
after SIGTERM or SIGINT, 1 when it could not start.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from serve.decode_server import (
    KV_DTYPES,
    _exit_now,
    _natural,
    _port,
    _positive,
    _seconds,
    _version,
    add_ranks_argument,
    serve_until_stopped,
)

if TYPE_CHECKING:
    from serve.prefill.service import PrefillService


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m serve.prefill_server", description=__doc__.splitlines()[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR", help="config.json, weights, tokenizer")
    p.add_argument("--served-model-name", required=True, metavar="NAME", help="name that requests must use")
    p.add_argument("--host", default="127.0.0.1", help="address to bind and to advertise (default %(default)s)")
    p.add_argument("--port", type=_port, default=8100, help="HTTP port, 0 for any (default %(default)s)")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and compute")
    p.add_argument(
        "--kv-dtype", default=None, choices=KV_DTYPES, help="KV on the wire, fp8 also in the cache (default: --dtype)"
    )
    p.add_argument("--device", default="cpu", help="torch device (default %(default)s)")
    p.add_argument("--threads", type=_positive, default=2, help="CPU threads (default %(default)s)")
    add_ranks_argument(p)
    p.add_argument("--max-model-len", type=_positive, default=2048, help="longest prompt, in tokens")
    p.add_argument("--chunk-tokens", type=_positive, default=512, help="tokens of one chunk (default %(default)s)")
    p.add_argument("--queue-depth", type=_positive, default=256, help="requests inside at once (default %(default)s)")
    p.add_argument("--staging-bytes", type=_positive, default=1 << 28, help="KV that waits to be sent, in bytes")
    p.add_argument("--transport", default="mooncake", choices=["mooncake", "nixl"])
    p.add_argument("--protocol", default="tcp", help="of the transport: tcp, rdma, ucx (default %(default)s)")
    p.add_argument("--handoff-deadline-s", type=_seconds, default=60.0, help="longest time a hand-off may take")
    p.add_argument("--spec-method", default="mtp", choices=["mtp", "ngram"], help="how decode drafts")
    p.add_argument("--draft-depth", type=_natural, default=0, help="with mtp: drafts to propose after the first token")
    p.add_argument("--stage-log", type=Path, default=None, metavar="PATH", help="append one JSON line a request")
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the server until a signal; returns the exit status."""
    options = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_until_stopped(options, lambda: start(options)))


async def start(options: argparse.Namespace) -> PrefillService:
    """Reads the model, opens the transport. Raises ValueError, OSError, HandoffError."""
    from serve.decode.model_files import ModelFiles
    from serve.engine.models.base import DecoderModel
    from serve.engine.parallel import Parallel, device_of, known_device
    from serve.engine.ranked_model import load_on_ranks
    from serve.engine.ranks import settings_of
    from serve.engine.speculative import Speculation
    from serve.engine.torch_engine import load_model
    from serve.handoff.layout import KVLayout
    from serve.handoff.sender import HandoffSender
    from serve.handoff.transport import create_transport
    from serve.handoff.vllm_worker import HandoffStreamer, StageLog
    from serve.prefill.service import PrefillConfig, PrefillService
    from serve.prefill.worker import PrefillWorker

    known_device(options.device)
    model = ModelFiles.read(options.model)
    mtp = options.draft_depth > 0 and options.spec_method == "mtp"
    speculation = Speculation("mtp", options.draft_depth) if mtp else None
    kv_dtype = options.kv_dtype or options.dtype
    layout = KVLayout.from_config(model.config, kv_dtype, mtp_layers=int(mtp))
    transport = create_transport(options.transport, options.host, options.protocol)
    transport.start(options.host)
    opened: list[HandoffStreamer] = []

    def load_part(parallel: Parallel) -> DecoderModel:
        device = device_of(options.device, parallel.rank, parallel.size)
        return load_model(
            options.model,
            options.dtype,
            options.max_model_len,
            options.threads,
            device,
            speculation,
            kv_dtype,
            parallel,
        )

    def load() -> PrefillWorker:
        ranks = options.tensor_parallel_size
        device = device_of(options.device, 0, ranks)
        settings = settings_of(
            options.model, options.dtype, options.max_model_len, options.threads, speculation, kv_dtype
        )
        worker = PrefillWorker(
            load_on_ranks(ranks, settings, options.device, load_part),
            speculation,
            max_model_len=options.max_model_len,
            chunk_tokens=options.chunk_tokens,
            device=device,
        )
        streamer = HandoffStreamer(
            layout,
            worker.make_layers(kv_dtype),
            lambda on_done: HandoffSender(
                layout, transport, staging_bytes=options.staging_bytes, device=str(device), on_done=on_done
            ),
            StageLog(options.stage_log) if options.stage_log is not None else None,
        )
        opened.append(streamer)
        worker.stream_to(streamer)
        return worker

    def close() -> None:
        for streamer in opened:
            streamer.close()
        transport.close()

    config = PrefillConfig(
        model_name=options.served_model_name,
        max_model_len=options.max_model_len,
        queue_depth=options.queue_depth,
        handoff_deadline_s=options.handoff_deadline_s,
        version=_version(),
        layout_sha256=layout.sha256(),
    )
    service = PrefillService(config, model, load, close)
    await service.start()
    return service


if __name__ == "__main__":
    _exit_now(main())
