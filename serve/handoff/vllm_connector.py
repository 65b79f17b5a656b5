"""BatonConnector: the prefill side of the hand-off as a vLLM KV connector, for vLLM 0.24 and later.

Loaded by vLLM's ``kv_connector_module_path``. vLLM builds it twice: in the scheduler's process, where it plans
(vllm_schedule.py), and in each worker, where it sends (vllm_worker.py). An exception that leaves any hook would end
the whole engine, so every hook is guarded here, and only here: what goes wrong costs the hand-offs concerned.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from serve.handoff.layout import KVLayout
from serve.handoff.sender import HandoffSender
from serve.handoff.transport import Transport, create_transport
from serve.handoff.vllm_pages import UnsupportedPagesError, indexer_reader, page_reader
from serve.handoff.vllm_schedule import HandoffPlanner, StepPlan
from serve.handoff.vllm_worker import HandoffStreamer, LayerSource, StageLog

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.baton_connector")

Hook = TypeVar("Hook", bound=Callable[..., Any])
LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\.")
INDEXER = ".indexer."


class _WithoutHMA:
    """Stands in for SupportsHMA where vLLM does not have it yet."""


SupportsHMA: Any = getattr(vllm_base, "SupportsHMA", _WithoutHMA)


@dataclass(frozen=True)
class ConnectorConfig:
    """``kv_connector_extra_config``, validated when vLLM starts."""

    transport: str
    protocol: str
    host: str
    staging_bytes: int
    deadline_s: float
    kv_dtype: str
    stage_log: Path | None

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> ConnectorConfig:
        """Raises ValueError naming the field that is missing, unknown or of the wrong type."""
        fields = {
            "transport": str, "protocol": str, "host": str, "kv_dtype": str, "staging_bytes": int, "deadline_s": float,
            "stage_log": str,
        }  # fmt: skip
        if unknown := set(raw) - set(fields):
            raise ValueError(f"kv_connector_extra_config: unknown {sorted(unknown)}; known: {sorted(fields)}")
        values: dict[str, Any] = {}
        for name, kind in fields.items():
            value = raw.get(name)
            if value is None and name == "stage_log":
                continue
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or isinstance(value, bool) or not value:
                raise ValueError(f"kv_connector_extra_config: {name} must be a {kind.__name__}, got {value!r}")
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise ValueError(f"kv_connector_extra_config: {name} must be positive, got {value!r}")
            values[name] = value
        log = values.pop("stage_log", None)
        return cls(stage_log=None if log is None else Path(log), **values)


@dataclass
class BatonMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan on its way from the scheduler to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


def _guarded(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Makes a hook answer ``default()`` instead of raising, and has the connector fail what the error concerns."""

    def guard(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: BatonConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self._hook_failed(hook.__name__, error)
                return default()

        return cast(Hook, call)

    return guard


def _nothing() -> None:
    return None


class BatonConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """kv_producer: sends the KV rows of requests that carry ``kv_transfer_params`` to a decode server.

    Blocks are never held: rows are copied to staging inside the step that computes them. Raises ValueError at start
    for a configuration that it cannot serve.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if not transfer.is_kv_producer or transfer.is_kv_consumer:
            raise ValueError(f"BatonConnector only sends: set kv_role to kv_producer, not {transfer.kv_role!r}")
        self._settings = ConnectorConfig.parse(dict(transfer.kv_connector_extra_config or {}))
        self._logged: set[tuple[str, str]] = set()
        self._planner: HandoffPlanner | None = None
        self._streamer: HandoffStreamer | None = None
        self._transport: Transport | None = None
        _refuse_unsupported(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._planner = HandoffPlanner(self._settings.deadline_s)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted request has lost nothing, its rows were copied in the step that computed them."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: hooks inside a full graph would never run, and every layer would wait for the end of the step."""
        return True

    def _hook_failed(self, hook: str, error: Exception) -> None:
        kind = (hook, type(error).__name__)
        logger.error("%s failed: %s", hook, error, exc_info=None if kind in self._logged else error)
        self._logged.add(kind)
        reason = f"prefill connector, {hook}: {type(error).__name__}: {error}"
        try:
            if self._planner is not None:
                self._planner.give_up(reason)
            if self._streamer is not None:
                self._streamer.fail_step(reason)
        except Exception:
            logger.exception("giving up the hand-offs after a failed %s failed as well", hook)

    # Scheduler side.

    @_guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        if self._planner is not None:
            self._planner.track(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        # vLLM before on_new_request meets a request here first.
        if self._planner is not None:
            self._planner.track(request)
        return 0, False

    @_guarded(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._planner is not None:
            self._planner.track(request)

    @_guarded(BatonMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        return BatonMetadata() if self._planner is None else BatonMetadata(self._planner.plan(scheduler_output))

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._planner is None else self._planner.finished(request)

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._planner is None else self._planner.finished(request)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Builds the sender over vLLM's caches. Raises what makes serving hand-offs impossible: this is the start."""
        self._close_streamer()
        if _tensor_parallel_rank() != 0:
            # MLA latents are the same on every rank: the first one sends for all.
            return
        config = json.loads(_config_path(self._vllm_config.model_config).read_text())
        draft_layers = _count_draft_layers(kv_caches, int(config["num_hidden_layers"]))
        layout = KVLayout.from_config(config, self._settings.kv_dtype, mtp_layers=draft_layers)
        sources = self._sources(layout, kv_caches, int(config["num_hidden_layers"]))
        settings, device = self._settings, str(next(iter(kv_caches.values())).device)
        stage_log = StageLog(settings.stage_log) if settings.stage_log is not None else None
        self._transport = transport = create_transport(settings.transport, settings.host, settings.protocol)
        self._streamer = HandoffStreamer(
            layout,
            sources,
            lambda on_done: HandoffSender(
                layout, transport, staging_bytes=settings.staging_bytes, device=device, on_done=on_done
            ),
            stage_log,
        )
        # vLLM does not call shutdown() on SIGTERM; its worker leaves by SystemExit, which runs this.
        weak = weakref.WeakMethod(self._close_streamer)
        atexit.register(lambda: (close := weak()) is not None and close())
        logger.info(
            "hand-off of %d layers over %s, layout %s, staging %d bytes",
            len(sources), settings.transport, layout.sha256(), settings.staging_bytes,
        )  # fmt: skip

    def _sources(
        self, layout: KVLayout, kv_caches: dict[str, torch.Tensor], model_layers: int
    ) -> dict[str, LayerSource]:
        attention = self._vllm_config.compilation_config.static_forward_context
        groups = {
            name: (index, group.kv_cache_spec.block_size)
            for index, group in enumerate(self._kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        sources = {}
        for name, cache in kv_caches.items():
            layer, indexer = _layer_number(name), INDEXER in name
            if indexer:
                reader = indexer_reader(layout, cache)
            else:
                reader = page_reader(layout, cache, getattr(attention.get(name), "isa", None))
            group, block_tokens = groups[name]
            hooked = layer < model_layers and not indexer
            sources[name] = LayerSource(layer, cache, reader, group, block_tokens, hooked=hooked)
        for plane in (layout.planes[0], layout.planes[-1]):
            indexers = plane.name == "index_k"
            found = sorted(source.layer for name, source in sources.items() if (INDEXER in name) == indexers)
            if found != sorted(plane.layers):
                raise UnsupportedPagesError(
                    f"vLLM keeps {'indexer' if indexers else 'KV'} caches for layers {found}, the layout of "
                    f"{layout.model} wants each of {sorted(plane.layers)} once"
                )
        return sources

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    @_guarded(_nothing)
    def _begin_step(self, metadata: KVConnectorMetadata) -> None:
        if self._streamer is not None and isinstance(metadata, BatonMetadata):
            self._streamer.begin_step(metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded: prefill is the producer."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    @_guarded(_nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._streamer is not None:
            self._streamer.stage_layer(layer_name)

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        if self._streamer is not None:
            self._streamer.end_step()

    @_guarded(_nothing)
    def shutdown(self) -> None:
        self._close_streamer()

    def _close_streamer(self) -> None:
        streamer, self._streamer = self._streamer, None
        if streamer is not None:
            streamer.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


def _refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ValueError for parallelism and attention kinds whose rows this connector would send wrongly."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("BatonConnector: pipeline parallelism splits the layers over ranks; not implemented, use 1")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"BatonConnector: {name} > 1 splits a request's tokens over ranks; not implemented, use 1")
    if parallel.tensor_parallel_size > 1 and not vllm_config.model_config.use_mla:
        raise ValueError(
            "BatonConnector: tensor parallelism splits the KV heads of grouped-query attention over ranks; sending a "
            "rank's heads is not implemented, use --tensor-parallel-size 1 (MLA models may use more)"
        )
    for group in getattr(kv_cache_config, "kv_cache_groups", ()):
        kind = type(group.kv_cache_spec).__name__
        if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
            raise ValueError(
                f"BatonConnector: layers {group.layer_names[0]} ... keep a {kind} cache; only full attention and MLA "
                "keep every token's row"
            )


def _tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _config_path(model_config: Any) -> Path:
    """The checkpoint's own config.json: both sides hash the same file, not vLLM's reading of it."""
    local = Path(model_config.model) / "config.json"
    if local.is_file():
        return local
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model_config.model, "config.json", revision=model_config.revision))


def _layer_number(name: str) -> int:
    match = LAYER_NUMBER.search(name)
    if match is None:
        raise UnsupportedPagesError(f"the KV cache {name!r} names no layer number")
    return int(match.group(1))


def _count_draft_layers(kv_caches: dict[str, torch.Tensor], model_layers: int) -> int:
    """Layers behind the model's own: the multi-token prediction layers that vLLM drafts with."""
    return max(0, max(map(_layer_number, kv_caches), default=0) + 1 - model_layers)
