"""A decode server in the test's own loop: real receiver, sender and Mooncake; the engine is real or a script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve.decode.model_files import ModelFiles
from serve.decode.service import DecodeService, ServiceConfig
from serve.engine.base import Admission, Capabilities, DecodeEngine, EngineFull, FinishReason, StepOutput
from serve.handoff.layout import KVLayout
from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import Prefix
from serve.handoff.receiver import HandoffReceiver
from serve.handoff.sender import HandoffSender, Outcome
from serve.handoff.transport import Transport

MODEL = "tiny"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = 256
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


def letter(character: str) -> int:
    """Token id of one ASCII character."""
    return ALPHABET.index(character)


def write_model_dir(directory: Path) -> Path:
    """A random two-layer Llama and a byte-level tokenizer: what a model directory must hold."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    hidden, heads, kv_heads, head_dim, feed_forward, vocab = 64, 4, 2, 16, 96, 260
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": feed_forward, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "eos_token_id": EOS, "bos_token_id": EOS,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)
    }  # fmt: skip
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (feed_forward, hidden), "mlp.up_proj": (feed_forward, hidden),
            "mlp.down_proj": (hidden, feed_forward),
        }.items():  # fmt: skip
            shapes[f"{prefix}{name}.weight"] = shape
    random = torch.Generator().manual_seed(7)
    save_file({n: torch.randn(s, generator=random) * 0.2 for n, s in shapes.items()}, directory / "model.safetensors")
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return directory


class ScriptedEngine:
    """Says the alphabet from the first token on: after 'c' come 'd', 'e' ... (z is followed by a).

    ``hold()`` makes each step wait for ``allow()``, so that tests decide when time passes. ``break_step`` and
    ``break_admit`` raise in the next call.
    """

    def __init__(self, *, max_batch_size: int = 4, max_model_len: int = 256, kv_capacity_tokens: int = 1024) -> None:
        self.capabilities = Capabilities(max_batch_size, max_model_len, kv_capacity_tokens, local_prefill=True)
        self.sequences: dict[int, list[int]] = {}
        self.limits: dict[int, Admission] = {}
        self.injected: dict[int, int] = {}
        self.break_step: list[Exception] = []
        self.break_admit: list[Exception] = []
        self.per_step = 1
        self._permits: threading.Semaphore | None = None

    def hold(self) -> None:
        self._permits = threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        assert self._permits is not None
        self._permits.release(steps)

    def let_go(self) -> None:
        """Ends a hold, so that the server's end need not wait for a step."""
        if self._permits is not None:
            self._permits.release(10_000)

    def admit(self, admission: Admission) -> None:
        if self.break_admit:
            raise self.break_admit.pop()
        if len(self.sequences) >= self.capabilities.max_batch_size:
            raise EngineFull("no place")
        rows = [rows for layer in admission.kv for rows in layer.planes.values()]
        self.injected[admission.seq_id] = sum(int(row.numel()) for row in rows)
        self.sequences[admission.seq_id] = [admission.first_token_id]
        self.limits[admission.seq_id] = admission

    def prefill(self, seq_id: int, prompt_token_ids: Any, sampling: Any) -> StepOutput:
        self.sequences[seq_id] = [letter("a")]
        self.limits[seq_id] = Admission(seq_id, prompt_token_ids, letter("a"), sampling, iter(()))
        return StepOutput(seq_id, (letter("a"),))

    def step(self) -> list[StepOutput]:
        if self._permits is not None and not self._permits.acquire(timeout=20):
            raise TimeoutError("the test allowed no step")
        if self.break_step:
            raise self.break_step.pop()
        return [self._next(seq_id, tokens) for seq_id, tokens in self.sequences.items() if tokens]

    def release(self, seq_id: int) -> None:
        self.sequences.pop(seq_id, None)

    def _next(self, seq_id: int, tokens: list[int]) -> StepOutput:
        sampling = self.limits[seq_id].sampling
        new: list[int] = []
        reason: FinishReason | None = None
        while reason is None and len(new) < self.per_step:
            token = letter("a") + (tokens[-1] - letter("a") + 1) % 26
            tokens.append(token)
            new.append(token)
            if token in sampling.stop_token_ids:
                reason = "stop"
            elif len(tokens) >= sampling.max_tokens:
                reason = "length"
        return StepOutput(seq_id, tuple(new), reason, drafted=self.per_step - 1, accepted=len(new) - 1)


@dataclass
class Rig:
    """A running server and the prefill side of its hand-offs."""

    service: DecodeService
    url: str
    client: aiohttp.ClientSession
    sender: HandoffSender
    layout: KVLayout
    outcomes: dict[str, Outcome]
    arrived: threading.Condition
    stage_log: Path
    prompts: dict[str, list[int]] = field(default_factory=dict)

    async def handoff(self, prompt: str | list[int] = "ab", *, first: str | int = "c", **kwargs: Any) -> dict[str, Any]:
        """Sends random (or given) KV for a prompt, waits for its commit, and returns the body's kv_transfer_params."""
        params = self.params(prompt, first=first)
        self.send(params, **kwargs)
        outcome = await self.outcome(params["handoff_id"])
        assert outcome.committed, outcome
        return params

    def params(self, prompt: str | list[int] = "ab", *, first: str | int = "c") -> dict[str, Any]:
        """kv_transfer_params for a hand-off that is not sent yet."""
        ids = [letter(c) for c in prompt] if isinstance(prompt, str) else prompt
        first_id = letter(first) if isinstance(first, str) else first
        name = uuid.uuid4().hex
        return {"handoff_id": name, "request_id": name, "prompt_token_ids": ids, "first_token_id": first_id}

    def send(
        self,
        params: dict[str, Any],
        *,
        rows: Any = None,
        tokens: int | None = None,
        finish: bool = True,
        session: str | None = None,
    ) -> None:
        """Stages and commits the rows of every plane-layer: ``rows(plane, layer) -> [T, row_bytes] uint8``."""
        count = tokens or len(params["prompt_token_ids"])
        control = self.service.receiver.control_address
        digests = digest_chain(params["prompt_token_ids"])
        prefix = Prefix(session=session, digests=digests) if session is not None else None
        self.sender.open(params["handoff_id"], params["request_id"], control, count, 20.0, prefix=prefix)
        random = np.random.default_rng(0)
        for plane, layer in self.layout.blocks():
            block = rows(plane.name, layer) if rows else random.integers(0, 256, (count, plane.row_bytes), np.uint8)
            self.sender.stage(params["handoff_id"], plane.name, layer, 0, block)
        if finish:
            self.sender.finish(params["handoff_id"])

    async def outcome(self, handoff_id: str) -> Outcome:
        """How the sender says a hand-off ended."""

        def wait() -> Outcome:
            with self.arrived:
                assert self.arrived.wait_for(lambda: handoff_id in self.outcomes, timeout=20)
                return self.outcomes[handoff_id]

        return await asyncio.to_thread(wait)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """(status, decoded JSON) of a POST."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.client.post(self.url + path, data=data, **kwargs) as response:
            return response.status, orjson.loads(await response.read())

    async def completion(self, params: dict[str, Any], **body: Any) -> tuple[int, Any]:
        """A JSON completion for a hand-off."""
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "x", "kv_transfer_params": params, **body})

    async def stream(self, path: str, body: Any) -> tuple[int, list[bytes]]:
        """(status, network chunks) of a POST."""
        async with self.client.post(self.url + path, data=orjson.dumps(body)) as response:
            return response.status, [chunk async for chunk, _ in response.content.iter_chunks()]

    async def get(self, path: str) -> tuple[int, Any]:
        """(status, decoded JSON) of a GET."""
        async with self.client.get(self.url + path) as response:
            return response.status, orjson.loads(await response.read())

    async def until(self, condition: Callable[[dict[str, Any]], bool], deadline_s: float = 10) -> dict[str, Any]:
        """/server_info once it fulfils the condition."""
        end = time.monotonic() + deadline_s
        while True:
            _, info = await self.get("/server_info")
            if condition(info):
                return info
            assert time.monotonic() < end, info

    async def engine_settled(self) -> None:
        """Returns once the engine thread has done every command that was queued before."""
        await asyncio.wrap_future(self.service.engine._submit(lambda: None, heavy=False))

    def stages(self) -> list[dict[str, Any]]:
        """The stage log's records."""
        return [orjson.loads(line) for line in self.stage_log.read_bytes().splitlines()]


@asynccontextmanager
async def rig(
    model_dir: Path,
    transports: tuple[Transport, Transport],
    stage_log: Path,
    make_engine: Callable[[], DecodeEngine],
    *,
    kv_dtype: str = "float32",
    mtp_layers: int = 0,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Brings a server up on free ports and takes it down again."""
    model = ModelFiles.read(model_dir)
    layout = KVLayout.from_config(model.config, kv_dtype, mtp_layers=mtp_layers)
    receiver = HandoffReceiver(
        layout,
        transports[0],
        host="127.0.0.1",
        control_port=0,
        pool_bytes=1 << 22,
        quarantine_s=5,
        max_slots=64,
        held_prefix_tokens=1000,
    )
    config = ServiceConfig(
        model_name=MODEL,
        stage_log=stage_log,
        dtype="float32",
        **{"queue_depth": 4, "handoff_deadline_s": 10.0, "step_deadline_s": 20.0, **options},
    )
    service = DecodeService(config, model, receiver, layout.sha256(), make_engine)
    await service.start()
    runner = web.AppRunner(service.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    outcomes: dict[str, Outcome] = {}
    arrived = threading.Condition()

    def done(outcome: Outcome) -> None:
        with arrived:
            outcomes[outcome.handoff_id] = outcome
            arrived.notify_all()

    sender = HandoffSender(layout, transports[1], staging_bytes=1 << 22, on_done=done)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            yield Rig(service, f"http://127.0.0.1:{port}", client, sender, layout, outcomes, arrived, stage_log)
    finally:
        sender.close()
        await service.close(4)
        await runner.cleanup()
