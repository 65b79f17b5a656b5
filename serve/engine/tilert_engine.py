"""TileRT behind the decode server: the engine of the tilert wheel, fed with the KV that our own hand-off received.

TileRT decodes one sequence at a time, from a call that blocks until the sequence ends and tells every token as it
comes. So a sequence gets a thread, and a step is whatever tokens it has told since the last one. The wheel's servers,
wire format and router are not used: only its engine interface (tilert.pd_vllm.engine_iface) and its model profiles.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from serve.engine.base import (
    Admission,
    Capabilities,
    EngineFull,
    EngineLost,
    FinishReason,
    SamplingParams,
    StepOutput,
)
from serve.engine.speculative import Speculation
from serve.engine.tilert_rows import LayerRows, tilert_layers

log = logging.getLogger(__name__)

PINNED_VERSION = "0.1.6.post3"
ROCM_PROFILE = "glm5_2"  # the others run on CUDA
AR_STEPS = 8  # as the wheel's own server builds its engines
ROCM_MIN_SEQ_LEN = 2048  # its sparse attention rejects a shorter cache
PAGE_TOKENS = 64
STOP_TIMEOUT_S = 120.0
# The CUDA sampler treats more as no limit, and the ROCm one knows none; both without a word.
MAX_TOP_K = 255


@dataclass(frozen=True)
class Plan:
    """What TileRT's profile demands of the rows. ``layers`` are the allowed counts; empty and None: anything.

    ``widths`` are R, P and D of the model, which the bytes of a quantized row do not tell.
    """

    widths: tuple[int, int, int]
    layers: tuple[int, ...] = ()
    key_layers: tuple[int, ...] | None = None
    device: torch.device | None = None
    max_top_k: int = MAX_TOP_K


class TilertEngine:
    """See DecodeEngine. ``engine`` is one of the wheel's (its PDEngine protocol).

    Acceptance is known to TileRT as the mean of a whole sequence only; it is told with the sequence's last step.
    """

    def __init__(
        self, engine: Any, *, max_model_len: int, plan: Plan, speculation: Speculation | None, name: str
    ) -> None:
        self._engine, self._plan, self._speculation = engine, plan, speculation
        self._running: _Running | None = None
        extra = {"engine": name}
        if speculation is not None:
            simulated = speculation.simulated_length
            extra |= {
                "acceptance": "real" if simulated is None else "simulated",
                "draft_method": speculation.method,
                "draft_depth": str(speculation.depth),
            }
            extra |= {} if simulated is None else {"target_length": f"{simulated:g}"}
        self.capabilities = Capabilities(
            max_batch_size=1,
            max_model_len=max_model_len,
            kv_capacity_tokens=max_model_len,
            speculative=speculation is not None,
            extra=extra,
        )

    def admit(self, admission: Admission) -> None:
        """See DecodeEngine. Raises ValueError also for sampling that TileRT would ignore and rows it cannot take."""
        from tilert.pd_vllm.profiles.mla_nsa import ConvertedRequest

        if self._running is not None:
            raise EngineFull("TileRT decodes one sequence at a time")
        sampling = tilert_sampling(admission.sampling, self._plan.max_top_k)
        tokens = len(admission.prompt_token_ids)
        if tokens + admission.sampling.max_tokens > self.capabilities.max_model_len:
            raise ValueError(
                f"prompt {tokens} + max_tokens {admission.sampling.max_tokens} is more than the model length "
                f"{self.capabilities.max_model_len}"
            )
        request = ConvertedRequest(
            rid=str(admission.seq_id),
            seq_len=tokens,
            last_prompt_token=int(admission.prompt_token_ids[-1]),
            first_token_id=admission.first_token_id,
            sampling=sampling,
            layers=self._checked(tilert_layers(admission.kv, self._plan.widths, self._plan.device)),
        )
        self._engine.inject(request)
        self._running = _Running(self._engine, admission, sampling)

    def prefill(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> StepOutput:
        """TileRT takes a prompt's KV from elsewhere. Raises ValueError."""
        raise ValueError("TileRT does not prefill; send the request through the router")

    def step(self) -> list[StepOutput]:
        """See DecodeEngine: waits for a token, and takes all that are there. Raises what TileRT raised."""
        running = self._running
        return [] if running is None or running.finished else [running.take(self._speculation)]

    def release(self, seq_id: int) -> None:
        """See DecodeEngine: a sequence that still runs is stopped. Raises EngineLost when TileRT does not stop."""
        running = self._running
        if running is None or running.seq_id != seq_id:
            return
        running.stop()
        self._engine.reset()
        self._running = None

    def _checked(self, layers: list[tuple[int, LayerRows, bool]]) -> list[LayerRows]:
        plan = self._plan
        if [layer for layer, _, _ in layers] != list(range(len(layers))):
            raise ValueError("the hand-off skips a layer; TileRT takes them all")
        if plan.layers and len(layers) not in plan.layers:
            wanted = " or ".join(map(str, plan.layers))
            raise ValueError(
                f"KV of {len(layers)} layers came, this TileRT engine has {wanted}; draft by MTP on both sides or none"
            )
        own = tuple(layer for layer, _, own_keys in layers if own_keys)
        wanted_keys = None if plan.key_layers is None else tuple(k for k in plan.key_layers if k < len(layers))
        if wanted_keys is not None and own != wanted_keys:
            raise ValueError(f"indexer keys came for layers {own}, this TileRT engine takes those of {wanted_keys}")
        return [rows for _, rows, _ in layers]


class _Running:
    """One sequence inside TileRT, on a thread of its own."""

    def __init__(self, engine: Any, admission: Admission, sampling: dict[str, Any]) -> None:
        self.seq_id, self.finished = admission.seq_id, False
        self._engine, self._sampling = engine, admission.sampling
        self._told: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self._outputs = 0
        call = {
            "first_token_id": admission.first_token_id,
            "max_tokens": admission.sampling.max_tokens,
            "sampling": sampling,
            "on_token": self._told.put,
            "cancel_event": self._cancel,
        }
        self._thread = threading.Thread(target=self._decode, args=(call,), name="tilert-decode", daemon=True)
        self._thread.start()

    def take(self, speculation: Speculation | None) -> StepOutput:
        """The tokens told since the last call, at least one or the end."""
        new: list[int] = []
        reason: FinishReason | None = None
        item = self._told.get()
        while reason is None:
            if isinstance(item, BaseException):
                self.finished = True
                raise RuntimeError(f"TileRT failed: {item}") from item
            reason = self._ended() if item is None else self._took(int(item), new)
            if reason is None:
                try:
                    item = self._told.get_nowait()
                except queue.Empty:
                    if new:
                        break
                    item = self._told.get()
        if reason is None:
            return StepOutput(self.seq_id, tuple(new))
        self.finished = True
        self.stop()
        steps, drafted, accepted = self._acceptance(speculation)
        return StepOutput(self.seq_id, tuple(new), reason, drafted, accepted, steps)

    def stop(self) -> None:
        """Ends the thread. Raises EngineLost when it does not end."""
        self._cancel.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineLost(f"TileRT did not stop within {STOP_TIMEOUT_S:g} s")

    def _decode(self, call: dict[str, Any]) -> None:
        try:
            self._engine.decode(**call)
        except BaseException as error:
            self._told.put(error)
        else:
            self._told.put(None)

    def _took(self, token: int, new: list[int]) -> FinishReason | None:
        self._outputs += 1
        if self._outputs == 1:
            return None  # prefill's, which TileRT repeats
        new.append(token)
        if token in self._sampling.stop_token_ids:
            return "stop"
        return "length" if self._outputs >= self._sampling.max_tokens else None

    def _ended(self) -> FinishReason:
        """TileRT leaves out the token that it stops at."""
        return "stop" if self._engine.last_stats.get("finish_reason") == "stop" else "length"

    def _acceptance(self, speculation: Speculation | None) -> tuple[int, int, int]:
        """Steps, drafted and accepted tokens of the whole sequence, from the mean that TileRT keeps."""
        stats = self._engine.last_stats
        steps = int(stats.get("mtp_verify_calls", 0))
        if speculation is None or not steps:
            return 1, 0, 0
        return steps, steps * speculation.depth, round(steps * (float(stats["mtp_accept_mean"]) - 1))


def tilert_sampling(sampling: SamplingParams, max_top_k: int = MAX_TOP_K) -> dict[str, Any]:
    """What the wheel's engines read. Raises ValueError for what they would ignore, since that is another output."""
    greedy = sampling.temperature == 0
    ignored = {
        "min_p": sampling.min_p > 0 and not greedy,
        "seed": sampling.seed is not None and not greedy,
        "top_k": sampling.top_k > max_top_k and not greedy,
    }
    if any(ignored.values()):
        names = ", ".join(name for name, given in ignored.items() if given)
        raise ValueError(f"TileRT has no {names}" + (f" (top_k up to {max_top_k})" if ignored["top_k"] else ""))
    told: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    told |= {"ignore_eos": True} if sampling.ignore_eos else {}
    return told | ({"top_k": sampling.top_k} if sampling.top_k > 0 else {})


def create_tilert_engine(
    *,
    model_dir: Path,
    profile: str,
    weights_dir: Path,
    max_model_len: int,
    speculation: Speculation | None,
    stub: bool = False,
) -> TilertEngine:
    """Loads TileRT's engine of a model profile (glm5, glm5_2, dsv32), or its stub, which says 11, 22, 33.

    ``weights_dir`` is the checkpoint converted for TileRT, ``model_dir`` has its config.json. Raises ValueError when
    the wheel is absent or cannot do what is asked.
    """
    _check_wheel()
    config = json.loads((model_dir / "config.json").read_text())
    try:
        widths = (config["kv_lora_rank"], config["qk_rope_head_dim"], config["index_head_dim"])
    except KeyError as error:
        raise ValueError(f"{model_dir}/config.json has no {error}: TileRT has no engine for such a model") from None
    if stub:
        from tilert.pd_vllm.engine_iface import StubEngine

        if speculation is not None:
            raise ValueError("TileRT's stub engine drafts nothing; leave --draft-depth out")
        return TilertEngine(
            StubEngine(), max_model_len=max_model_len, plan=Plan(widths), speculation=None, name="tilert-stub"
        )
    depth = 0 if speculation is None else speculation.depth
    rocm = getattr(torch.version, "hip", None) is not None
    if speculation is not None:
        _prepare_acceptance(speculation, rocm)
    from tilert.pd_vllm.profiles import base

    found = base.get_profile(profile)
    if (found.name == ROCM_PROFILE) != rocm:
        raise ValueError(f"TileRT's profile {found.name} does not run on this torch ({torch.__version__})")
    with_mtp = depth > 0
    num_mtp = base.resolve_num_mtp(found, depth or 3, with_mtp=with_mtp)
    # It ends a sequence early when a whole step and its drafts would not fit; what is served must fit whole.
    length = -(-(max_model_len + 2 * (depth + 1)) // PAGE_TOKENS) * PAGE_TOKENS
    length = max(length, ROCM_MIN_SEQ_LEN) if rocm else length
    engine = found.build_engine(
        model_weights_dir=str(weights_dir),
        max_seq_len=length,
        with_mtp=with_mtp,
        ar_steps=AR_STEPS,
        num_mtp=num_mtp,
    )
    if engine.max_seq_len < max_model_len:
        raise ValueError(f"--max-model-len {max_model_len}: this TileRT engine has {engine.max_seq_len}")
    plan = Plan(
        widths,
        layers=(found.num_layers,) if with_mtp else (found.num_layers - 1, found.num_layers),
        key_layers=None if found.ki_layer_ids is None else tuple(found.ki_layer_ids),
        # ROCm broadcasts from device to device; CUDA copies from wherever the rows are.
        device=torch.device("cuda:0") if rocm else None,
        max_top_k=0 if rocm else MAX_TOP_K,
    )
    return TilertEngine(engine, max_model_len=max_model_len, plan=plan, speculation=speculation, name="tilert")


def _check_wheel() -> None:
    try:
        version = metadata.version("tilert")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"TileRT is not installed; pip install tilert=={PINNED_VERSION} (Python 3.12, torch 2.11 with CUDA or 2.12 "
            "with ROCm)"
        ) from None
    if version != PINNED_VERSION:
        log.warning("TileRT %s is installed; this was written against %s", version, PINNED_VERSION)


def _prepare_acceptance(speculation: Speculation, rocm: bool) -> None:
    """TileRT's ROCm library reads the length to simulate when it is loaded; its CUDA libraries have no such thing."""
    if speculation.method != "mtp":
        raise ValueError(f"TileRT drafts by MTP, not by {speculation.method}")
    if speculation.simulated_length is None:
        return
    if not rocm:
        raise ValueError("TileRT simulates acceptance on ROCm only; leave --simulate-acceptance-length out")
    os.environ["TILERT_SIMULATE_ACC_LEN"] = f"{speculation.simulated_length:g}"
    os.environ["TILERT_SIMULATE_ACC_METHOD"] = "match-expected"
