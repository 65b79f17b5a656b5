"""Our MTP layer against transformers' MtpModel: its rows, its drafts, and iterated, its drafts' drafts.

transformers builds an MtpModel for deepseek_v3. For glm_moe_dsa, whose MTP weights it ignores, the same MtpModel is
built over its own GlmMoeDsaDecoderLayer, which takes a mask and returns a pair where DeepSeek's does neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM, GlmMoeDsaForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from serve.engine.models.base import Span
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import create_engine
from serve.weights.tiny import CONFIGS, write_checkpoint

PROMPT = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(4)).tolist()
CLASSES = {"deepseek_v3": DeepseekV3ForCausalLM, "glm_moe_dsa": GlmMoeDsaForCausalLM}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "glm, all tokens read": ("glm_moe_dsa", {"index_topk": 128}),
    "glm, sparse, each iteration chooses": ("glm_moe_dsa", {"index_topk": 16, "index_share_for_mtp_iteration": False}),
    "glm, sparse, iterations share the choice": ("glm_moe_dsa", {"index_topk": 16}),
}


class Reference:
    """transformers' model and MTP layer, and the layer's cache."""

    def __init__(self, directory: Path, name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        ignored = [rf"model\.layers\.{config['num_hidden_layers']}\..*"]
        monkeypatch.setattr(CLASSES[name], "_keys_to_ignore_on_load_unexpected", ignored)
        self.main = CLASSES[name].from_pretrained(directory, dtype=torch.float32).eval()
        if name == "glm_moe_dsa":
            told = {"num_mtp_layers": 1, "mtp_layer_types": ["indexed_attention"], "mtp_mlp_layer_types": ["sparse"]}
            for field, value in told.items():
                setattr(self.main.config, field, value)
        self.mtp = MtpModel.from_pretrained(self.main).eval()
        self.cache = MtpCache(config=self.mtp.config)
        self.layer, self.block = self.mtp.layers[0], self.mtp.layers[0].mtp_block
        self.chosen_1NK: torch.Tensor | None = None
        self.shared_11K: torch.Tensor | None = None
        if name == "glm_moe_dsa":
            monkeypatch.setattr(self.block, "forward", self._glm_block(self.block.forward))
            self.mtp.create_masks_for_mtp_layer = lambda *_: {"attention_mask": None}
        self.layer.register_forward_hook(lambda module, inputs, output: setattr(self, "hidden_1NE", output))

    def _glm_block(self, forward: Any) -> Any:
        def unpacked(hidden_1NE: torch.Tensor, **more: Any) -> torch.Tensor:
            count, before = hidden_1NE.shape[1], self.cache.get_seq_length()
            more["attention_mask"] = torch.ones(1, 1, count, before + count, dtype=torch.bool).tril(before)
            output, self.chosen_1NK = forward(hidden_1NE, prev_topk_indices=self.shared_11K, **more)
            return output

        return unpacked

    def share_choice(self) -> None:
        """From now on the last token's choice and the newest row are looked at."""
        self.block.self_attn.indexer = None
        assert self.chosen_1NK is not None
        newest = torch.full((1, 1, 1), self.cache.get_seq_length(), dtype=self.chosen_1NK.dtype)
        self.shared_11K = torch.cat((self.chosen_1NK[:, -1:], newest), dim=-1)

    def draft(self, token_ids: list[int], hidden_1NE: torch.Tensor, start: int) -> torch.Tensor:
        """logits_V of the token after ``token_ids``, which follow positions start..; transformers counts from there."""
        positions_1N = torch.arange(start + 1, start + 1 + len(token_ids))[None]
        _, logits_11V, _ = self.mtp(torch.tensor([token_ids]), hidden_1NE, None, positions_1N, self.cache)
        return logits_11V[0, 0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_rows_and_drafts_are_those_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = CASES[case]
    config = {**CONFIGS[name], **changes}
    write_checkpoint(tmp_path, config, seed=5)
    reference = Reference(tmp_path, name, config, monkeypatch)
    engine = create_engine(tmp_path, "float32", 1, 256, 256, 1, speculation=Speculation("mtp", 3))
    model, length = engine._model, len(PROMPT) - 1
    cache = model.open_cache(engine._kv.allocate(80))
    expected_1NE = reference.main.model(torch.tensor([PROMPT[:-1]])).last_hidden_state
    expected_V = reference.draft(PROMPT[1:], expected_1NE, 0)

    # The MTP layer takes the prompt in two parts, as chunked prefill gives it.
    hidden_NE = model.forward(torch.tensor(PROMPT[:-1]), [Span(cache, 0, length)])
    model.draft(torch.tensor(PROMPT[1:41]), hidden_NE[:40], [Span(cache, 0, 40)], None)
    spans = [Span(cache, 40, length - 40)]
    hidden_NE, carried = model.draft(torch.tensor(PROMPT[41:]), hidden_NE[40:], spans, None)

    assert error(model.logits(hidden_NE[-1:])[0], expected_V) < 1e-4
    if "share" in case:
        reference.share_choice()
    for step in range(2):
        token = int(expected_V.argmax())
        expected_V = reference.draft([token], reference.hidden_1NE[:, -1:], length + step)
        span = Span(cache, length + step, 1)
        hidden_NE, carried = model.draft(torch.tensor([token]), hidden_NE[-1:], [span], carried)
        assert error(model.logits(hidden_NE)[0], expected_V) < 1e-4
        if "share" in case:
            break  # the choice of a second iteration that shares is ours to define
    latent = model.extract(cache, config["num_hidden_layers"], 0, length).planes["latent"]
    assert error(latent, reference.cache.layers[0].keys[0, 0, :length]) < 1e-4
