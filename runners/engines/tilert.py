"""TileRT: decode and router of its wheel, for vLLM prefill (tilert.pd_vllm) or SGLang prefill (tilert.serve_sglang)."""

from __future__ import annotations

from configs.engine_args import TilertDecodeArgs, TilertRouterArgs
from configs.job import EngineName, PrepareStep, Readiness, RoleName
from runners.engines.base import EngineError, RoleContext, flag, one_node, ready

# Loading takes an hour at most in InferenceX's own scripts; conversion is a step before that.
READY_DECODE_S = 3600.0
READY_ROUTER_S = 300.0
# TileRT knows GLM-5.1 as glm5, and GLM-5.3 by the same layout as GLM-5.2.
PROFILES = {"glm5": "glm5", "glm5.1": "glm5", "glm5.2": "glm5_2", "glm5.3": "glm5_2"}
KV_DTYPES = {"bfloat16": "bf16", "fp8": "fp8_ds_mla"}
VLLM_WIRE_DEPTHS = (3,)
SGLANG_WIRE_DEPTHS = (3, 7)
TENSOR_PARALLEL = 8
# Its servers read tokenizer and chat template from the folder of converted weights.
NO_WEIGHTS = ("-maxdepth", "1", "-type", "f", "!", "-name", "*.safetensors*")


class TilertAdapter:
    """Builds TileRT's decode server and router. One worker is one node of eight GPUs and decodes one sequence."""

    name: EngineName = "tilert"
    roles: frozenset[RoleName] = frozenset(("decode", "router"))

    def ports(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "router":
            return ("http",)
        return ("http", "bootstrap") if _sglang(context) else ("http", "control")

    def prepare(self, context: RoleContext) -> tuple[PrepareStep, ...]:
        if context.role != "decode":
            return ()
        return conversion(
            context, converted(context), sglang=_sglang(context), mtp_model=_decode_args(context).mtp_model
        )

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "router":
            return _sglang_router(context) if _sglang(context) else _vllm_router(context)
        one_node(context, "TileRT")
        if context.worker.gpus_per_worker != TENSOR_PARALLEL:
            raise EngineError(f"{context.name}: TileRT decodes on {TENSOR_PARALLEL} GPUs; set tp: {TENSOR_PARALLEL}.")
        return self._sglang_decode(context) if _sglang(context) else self._vllm_decode(context)

    def env(self, context: RoleContext) -> dict[str, str]:
        env = {"HF_HUB_OFFLINE": "1"}
        if context.role == "router":
            # It needs no GPU and must not open one.
            return env | {"CUDA_VISIBLE_DEVICES": ""}
        args = _decode_args(context)
        if context.handoff.transport == "mooncake" and context.handoff.protocol == "rdma":
            env["RDMAV_FORK_SAFE"] = "1"
        if _sglang(context):
            env |= {} if args.queue_depth is None else {"TILERT_DECODE_QUEUE_DEPTH": str(args.queue_depth)}
            return env | ({"TILERT_GLM_DECODING_CONSTRAINT": "1"} if args.template_constraint else {})
        env |= wire_env(context, args)
        if args.poll_ms is not None:
            if _before_0_1_6(context):
                raise EngineError(f"{context.name}: TileRT 0.1.5 flushes as it likes; leave poll-ms out.")
            env["TILERT_DECODE_POLL_MS"] = str(args.poll_ms)
        acceptance = context.acceptance
        if acceptance.mode == "simulated":
            if not context.on_rocm:
                raise EngineError(f"{context.name}: TileRT simulates acceptance on ROCm only; use acceptance: real.")
            env["TILERT_SIMULATE_ACC_LEN"] = f"{acceptance.target_length:g}"
            env["TILERT_SIMULATE_ACC_METHOD"] = "match-expected"
        return env

    def readiness(self, context: RoleContext) -> Readiness:
        return ready(context, "/health", READY_ROUTER_S if context.role == "router" else READY_DECODE_S)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        depth, sglang = context.acceptance.draft_depth, _sglang(context)
        depths = SGLANG_WIRE_DEPTHS if sglang else VLLM_WIRE_DEPTHS
        if depth not in depths:
            known = " or ".join(map(str, depths))
            raise EngineError(f"{context.name}: TileRT drafts {known} tokens, not {depth}; set draft-depth.")
        if sglang:
            if context.acceptance.mode == "simulated":
                raise EngineError(f"{context.name}: TileRT behind SGLang has no acceptance knob; use acceptance: real.")
            return ("--with-mtp", "--num-mtp", str(depth))
        # 0.1.5 has the one depth built in and no flag for it.
        return ("--with-mtp",) if _before_0_1_6(context) else ("--with-mtp", "--num-mtp", str(depth))

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        return ("@model@",) if context.role == "router" else ("@model@", converted(context))

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return ()

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        return ("tilert",)

    def _vllm_decode(self, context: RoleContext) -> tuple[str, ...]:
        args = _decode_args(context)
        if args.buffer_device == "cpu" and _before_0_1_6(context):
            raise EngineError(f"{context.name}: buffer-device cpu needs TileRT 0.1.6.post1 or later; raise version.")
        return (
            context.python,
            *("-m", "tilert.pd_vllm.decode_server"),
            *("--engine", "tilert"),
            *("--model", profile_of(context)),
            *("--model-weights-dir", converted(context)),
            *("--max-seq-len", str(context.max_model_len)),
            *("--ctrl-port", context.port("control")),
            *("--http-port", context.port()),
            *("--kv-cache-dtype", KV_DTYPES[context.handoff.kv_dtype]),
            *("--transport", context.handoff.transport),
            *(("--pd-buffer-device", "cpu") if args.buffer_device == "cpu" else ()),
            *self.acceptance_argv(context),
        )

    def _sglang_decode(self, context: RoleContext) -> tuple[str, ...]:
        args = _decode_args(context)
        fp8 = context.handoff.kv_dtype == "fp8"
        return (
            context.python,
            *("-m", "tilert.serve_sglang.decode_server"),
            *("--model-weights-dir", converted(context)),
            *("--port", context.port()),
            *("--bootstrap-port", context.port("bootstrap")),
            *("--max-seq-len", str(context.max_model_len)),
            *(("--fp8-kv", "--prefill-fp8-kv") if fp8 else ()),
            *self.acceptance_argv(context),
            *("--transfer-backend", context.handoff.transport),
            *flag("ib-device", ",".join(context.cluster.rdma_devices) or None),
            *flag("reasoning-parser", args.reasoning_parser),
            *flag("tool-call-parser", args.tool_call_parser),
            *flag("glm-special-token-escape-seed", context.escape_seed),
        )


def wire_env(context: RoleContext, args: TilertDecodeArgs) -> dict[str, str]:
    """What both ends of TileRT's hand-off from vLLM must be told alike."""
    if (context.roles["decode"].version or "").startswith("0.1.5"):
        return {}  # one rank sends, and nothing can be said about it
    env = {"TILERT_PD_SENDERS": str(args.senders)}
    if context.handoff.transport == "nixl":
        # Its NIXL transport keeps one device id for all shards.
        env["TILERT_PD_SHARDS"] = "1"
    return env


def profile_of(context: RoleContext) -> str:
    """TileRT's name of the model. Raises EngineError for a model it does not have."""
    prefix = context.model.model_prefix
    if prefix not in PROFILES:
        raise EngineError(f"TileRT has no profile for {context.model.name} ({prefix}); it has: {', '.join(PROFILES)}.")
    return PROFILES[prefix]


def converted(context: RoleContext, version: str | None = None) -> str:
    """Folder of the converted checkpoint. Its name holds all that makes it another one, so a stale one is not used."""
    version = version or context.config.version or "unknown"
    return f"@converted@/{context.model.name}-tilert-{version}-tp8-mtp{context.acceptance.draft_depth}"


def conversion(
    context: RoleContext, target: str, *, sglang: bool = False, mtp_model: str | None = None
) -> tuple[PrepareStep, ...]:
    """Makes the converted folder whole: weights, MTP weights, then what is no weight, then the mark of completion."""
    profile = profile_of(context)
    if profile == "glm5_2" and not context.on_rocm and not sglang:
        model = context.model.name
        raise EngineError(f"{context.name}: on NVIDIA, TileRT takes {model} from SGLang prefill only, not from vLLM.")
    if profile == "glm5_2" and context.on_rocm:
        module: tuple[str, ...] = (context.python, "-m", "tilert.models.glm_5_2_rocm.weight_converter")
        depth = str(context.acceptance.draft_depth)
        commands: list[tuple[str, ...]] = [
            (*module, "--model_dir", "@model@", "--save_dir", target, "--num_mtp", depth)
        ]
    else:
        kind = "glm-5_2" if sglang else "glm-5"
        module = (context.python, "-m", "tilert.models.preprocess.weight_converter", "--model_type", kind)
        commands = [(*module, "--model_dir", "@model@", "--save_dir", target)]
        if mtp_model is not None:
            commands.append((*module, "--model_dir", f"@models@/{mtp_model}", "--save_dir", target, "--append_mtp"))
    done = f"{target}/.complete"
    commands.insert(0, ("mkdir", "-p", target))
    commands.append(("find", "@model@", *NO_WEIGHTS, "-exec", "cp", "-n", "{}", target, ";"))
    return (PrepareStep(name="convert", commands=tuple(commands), creates=done, shared=True),)


def _decode_args(context: RoleContext) -> TilertDecodeArgs:
    config = context.config if context.role == "decode" else context.roles["decode"]
    if not isinstance(config.args, TilertDecodeArgs):
        raise EngineError(f"{context.name}: TileRT's decode server was given the arguments of another engine.")
    return config.args


def _router_args(context: RoleContext) -> TilertRouterArgs:
    if not isinstance(context.config.args, TilertRouterArgs):
        raise EngineError(f"{context.name}: TileRT's router was given the arguments of another engine.")
    return context.config.args


def _sglang(context: RoleContext) -> bool:
    return context.engine_of("prefill") == "sglang"


def _before_0_1_6(context: RoleContext) -> bool:
    return (context.config.version or "").startswith("0.1.5")


def _vllm_router(context: RoleContext) -> tuple[str, ...]:
    args = _router_args(context)
    if len(context.peers["prefill"]) != 1:
        raise EngineError(f"{context.name}: TileRT's router takes one vLLM prefill; set prefill.num-worker: 1.")
    nodes = [f"@host:{name}@:@port:{name}:control@:@port:{name}:http@" for name in context.peers["decode"]]
    later: tuple[str, ...] = ()
    if not _before_0_1_6(context):
        later = (
            *("--model", profile_of(context)),
            *flag("generation-config", args.generation_config),
            *flag("queue-timeout", None if args.queue_timeout_s is None else f"{args.queue_timeout_s:g}"),
            *flag("force-include-usage", args.force_include_usage),
        )
    elif args.generation_config or args.queue_timeout_s is not None or args.force_include_usage:
        raise EngineError(
            f"{context.name}: TileRT 0.1.5 has no generation-config, queue-timeout-s, force-include-usage."
        )
    return (
        context.python,
        *("-m", "tilert.pd_vllm.pd_router"),
        *("--vllm-url", context.url(context.peers["prefill"][0])),
        *("--decode", *nodes),
        *("--host", context.host),
        *("--port", context.port()),
        *("--model-path", "@model@"),
        *("--parser", args.parser),
        *later,
    )


def _sglang_router(context: RoleContext) -> tuple[str, ...]:
    args = _router_args(context)
    if args != TilertRouterArgs():
        raise EngineError(f"{context.name}: the router for SGLang prefill takes no arguments; leave 'args' out.")
    prefills = [(context.url(name), f"@port:{name}:bootstrap@") for name in context.peers["prefill"]]
    return (
        context.python,
        *("-m", "tilert.serve_sglang.pd_router"),
        *(part for url, port in prefills for part in ("--prefill", url, port)),
        *(part for name in context.peers["decode"] for part in ("--decode", context.url(name))),
        *("--host", context.host),
        *("--port", context.port()),
    )
