"""The TileRT adapter over the pinned wheel: its stub engine, its ROCm engine on a made-up device, the names we use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve.engine import tilert_engine
from serve.engine.base import Admission, EngineFull, EngineLost, LayerKV, SamplingParams, StepOutput
from serve.engine.kv_rows import index_keys, latent_rows
from serve.engine.speculative import AcceptanceCounters, Speculation
from serve.engine.tilert_engine import (
    Plan,
    TilertEngine,
    create_tilert_engine,
    tilert_sampling,
)
from serve.engine.tilert_rows import rotated, tilert_layers
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.decode_rig import rig

pytestmark = pytest.mark.usefixtures("wheel")

LAYERS, FULL, MTP_LAYER = 7, (0, 1, 2, 6), 7
LATENT, ROTARY, KEYS = WIDTHS = (32, 8, 16)
GREEDY = SamplingParams(max_tokens=6, temperature=0)
MTP = Speculation("mtp", 3)


def rows_of(tokens: int, *, mtp: bool, dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    """Random rows of glm5-tiny's layers."""
    random = torch.Generator().manual_seed(tokens)

    def rows(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, generator=random).to(dtype)

    layers = []
    for layer in range(LAYERS + mtp):
        planes = {"latent": rows(LATENT), "rope": rows(ROTARY)}
        if layer in (*FULL, MTP_LAYER):
            planes["index_k"] = rows(KEYS)
        layers.append(LayerKV(layer, planes))
    return layers


def admission(seq_id: int, kv: list[LayerKV], sampling: SamplingParams = GREEDY, first: int = 5) -> Admission:
    prompt = list(range(1, 1 + len(next(iter(kv[0].planes.values())))))
    return Admission(seq_id, prompt, first, sampling, iter(kv))


def run_to_end(engine: TilertEngine) -> tuple[list[int], list[StepOutput]]:
    outputs: list[StepOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += engine.step()
    return [token for output in outputs for token in output.token_ids], outputs


# ---- the stub engine of the wheel ----


async def test_a_handed_off_request_is_decoded_by_the_wheels_stub(tmp_path: Path, transports: Any) -> None:
    model = tmp_path / "model"
    write_checkpoint(model, CONFIGS["glm_moe_dsa"], seed=1)
    made: list[TilertEngine] = []

    def make() -> TilertEngine:
        made.append(
            create_tilert_engine(
                profile="glm5", model_dir=model, weights_dir=model, max_model_len=64, speculation=None, stub=True
            )
        )
        return made[0]

    kept: dict[tuple[str, int], torch.Tensor] = {}

    def send(plane: str, layer: int) -> Any:
        rows = kept[plane, layer] = torch.randn(5, {"latent": LATENT, "rope": ROTARY, "index_k": KEYS}[plane])
        return rows.numpy().view("uint8")

    async with rig(model, transports, tmp_path / "stages.jsonl", make) as server:
        injected: list[Any] = []
        stub = made[0]._engine
        inject = stub.inject
        stub.inject = lambda request: (injected.append(clone(request)), inject(request))
        params = await server.handoff([1, 2, 3, 4, 5], first=7, rows=send)
        status, answer = await server.completion(params, return_token_ids=True, max_tokens=8, temperature=0)
        assert (status, answer["choices"][0]["token_ids"]) == (200, [7, 11, 22, 33])
        assert answer["choices"][0]["finish_reason"] == "stop"
        params = await server.handoff([1, 2, 3, 4, 5], first=7, rows=send)
        _, answer = await server.completion(params, return_token_ids=True, max_tokens=3, temperature=0)
        assert answer["choices"][0]["token_ids"] == [7, 11, 22] and answer["choices"][0]["finish_reason"] == "length"
        params = await server.handoff([1, 2, 3, 4, 5], first=7)
        status, refusal = await server.completion(params, max_tokens=3, temperature=0.5, seed=1)
        assert status == 400 and "TileRT has no seed" in refusal["error"]["message"]
        info = await server.until(lambda info: info["free"] == info["capacity"])
        server.service.count_acceptance(StepOutput(1, (), "stop", drafted=30, accepted=15, steps=10))
        _, counted = await server.get("/server_info")
        metrics = server.service.metrics.render().decode()
    assert (info["engine"], info["max_batch_size"], info["acceptance"]["mode"]) == ("tilert-stub", 1, "none")
    counted = counted["acceptance"]
    assert (counted["steps"], counted["mean_length"], counted["per_position"]) == (10, 2.5, [])
    assert "baton_drafted_steps_total 10.0" in metrics and "baton_accepted_at_position_total{" not in metrics
    assert_injected(injected[-1].layers, kept)
    assert [injected[-1].seq_len, injected[-1].last_prompt_token, injected[-1].first_token_id] == [5, 5, 7]


def clone(request: Any) -> Any:
    layers = [tuple(rows.clone() for rows in layer) for layer in request.layers]
    return SimpleNamespace(**{**vars(request), "layers": layers})


def assert_injected(layers: list[Any], kept: dict[tuple[str, int], torch.Tensor]) -> None:
    from tilert.pd_vllm.profiles.mla_nsa import _hadamard

    for layer, (keys, latent, rope) in enumerate(layers):
        own = max(full for full in (*FULL, MTP_LAYER) if full <= layer)
        assert torch.equal(latent, kept["latent", layer].bfloat16()) and torch.equal(
            rope, kept["rope", layer].bfloat16()
        )
        torch.testing.assert_close(keys, _hadamard(kept["index_k", own]).bfloat16(), atol=0.02, rtol=0.01)


def test_indexer_keys_are_rotated_as_the_wheels_own_conversion_rotates_those_of_vllm() -> None:
    from tilert.pd_vllm.profiles.mla_nsa import KI_PAGE_BYTES, PAGE_SIZE, MlaNsaProfile

    keys_TD = torch.randn(PAGE_SIZE, 128)
    scale_T1 = keys_TD.abs().amax(1, keepdim=True) / 448
    quantized_TD = (keys_TD / scale_T1).to(torch.float8_e4m3fn)
    page = torch.cat((quantized_TD.view(torch.uint8).flatten(), scale_T1.flatten().view(torch.uint8)))
    assert len(page) == KI_PAGE_BYTES
    kept_TD = (quantized_TD.float() * scale_T1).bfloat16()  # what both rotate: quantizing is not what is compared here
    theirs = MlaNsaProfile._dequant_ki(page[None], PAGE_SIZE, tiled=False)
    torch.testing.assert_close(rotated(kept_TD).bfloat16(), theirs)
    torch.testing.assert_close(rotated(rotated(keys_TD)), keys_TD)
    with pytest.raises(ValueError, match="power of two"):
        rotated(torch.zeros(1, 24))


def test_quantized_rows_mean_what_they_mean_to_the_wheel() -> None:
    from tilert.pd_vllm.profiles.mla_nsa import KV_BYTES_FP8, MLA_BPT_FP8, MlaNsaProfile

    rows = latent_rows("fp8", 512, 64, torch.float32, interleaved=False)
    keys = index_keys("fp8", 128, 64, torch.float32, interleaved=False)
    assert rows.elements == MLA_BPT_FP8
    quantized, indexed = torch.zeros(70, rows.elements, dtype=torch.uint8), torch.zeros(70, 132, dtype=torch.uint8)
    rows.write(torch.randn(70, 576), quantized)
    keys.write(torch.randn(70, 128), indexed)
    ((_, (index, latent, rope), own),) = tilert_layers(
        [LayerKV(0, {"rows": quantized, "index_k": indexed})], (512, 64, 128)
    )
    assert own and torch.equal(latent, MlaNsaProfile._dequant_kv(quantized[:, :KV_BYTES_FP8], 70))
    assert torch.equal(rope, quantized[:, KV_BYTES_FP8:].contiguous().view(torch.bfloat16))
    pages = torch.zeros(2, 64 * 132, dtype=torch.uint8)  # values of 64 tokens, then their scales
    for token in range(70):
        page, at = divmod(token, 64)
        pages[page, 128 * at : 128 * at + 128] = indexed[token, :128]
        pages[page, 64 * 128 + 4 * at : 64 * 128 + 4 * at + 4] = indexed[token, 128:]
    theirs = MlaNsaProfile._dequant_ki(pages, 70, tiled=False)
    torch.testing.assert_close(index, theirs, atol=0.03, rtol=0.01)


def test_the_server_starts_with_the_stub_and_names_what_is_missing(
    wheel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, CONFIGS["glm_moe_dsa"], seed=1)
    argv = [sys.executable, "-m", "serve.decode_server", "--model", str(tmp_path), "--served-model-name", "m"]
    argv += ["--port", "0", "--engine", "tilert-stub", "--max-model-len", "64"]
    path = os.pathsep.join([str(wheel_dir), str(Path(__file__).parents[3])])
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    try:
        assert server.stdout is not None and server.stdout.readline().startswith("ready ")
    finally:
        server.terminate()
        assert server.wait(10) == 0
    with pytest.raises(ValueError, match=r"profile glm5_2 does not run on this torch"):
        create_tilert_engine(
            profile="glm5.3", model_dir=tmp_path, weights_dir=tmp_path, max_model_len=64, speculation=MTP
        )
    with pytest.raises(ValueError, match="simulates acceptance on ROCm only"):
        simulated = Speculation("mtp", 3, simulated_length=2.99)
        create_tilert_engine(
            profile="glm5", model_dir=tmp_path, weights_dir=tmp_path, max_model_len=64, speculation=simulated
        )
    with pytest.raises(ValueError, match="cannot serve num_mtp=5"):
        create_tilert_engine(
            profile="glm5",
            model_dir=tmp_path,
            weights_dir=tmp_path,
            max_model_len=64,
            speculation=Speculation("mtp", 5),
        )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(wheel_dir)])
    with pytest.raises(ValueError, match=r"pip install tilert==0.1.6.post3"):
        create_tilert_engine(
            profile="glm5", model_dir=tmp_path, weights_dir=tmp_path, max_model_len=64, speculation=None, stub=True
        )


# ---- the wheel's ROCm engine, its device made up ----


class Device:
    """What RocmGlm52EngineAdapter drives: two ranks' caches in plain memory, and two tokens a verified step."""

    def __init__(self, says: list[int], max_seq_len: int = 64) -> None:
        self.num_mtp, self.n_layers, self.npes = 3, LAYERS, 2
        self.args = SimpleNamespace(max_seq_len=max_seq_len)
        plain = [torch.zeros(1, max_seq_len, width) for _ in range(LAYERS + 1) for width in (LATENT, ROTARY)]
        keys = [torch.zeros(1, max_seq_len, KEYS) for _ in (*FULL, MTP_LAYER)]
        self._caches = [[*plain[: 2 * LAYERS], *keys], [*plain]]
        self._says, self._told, self._steps = says, [], []
        self.position, self.sampling = -1, ()

    accepted_count = property(lambda self: len(self._told))
    step_count = property(lambda self: len(self._steps))

    def reset_sequence(self) -> None:
        self.position = -1

    def set_cur_pos(self, position: int) -> None:
        self.position = position

    def update_sampling(self, *sampling: Any) -> None:
        self.sampling = sampling

    def seed_draft(self, last: int, first: int) -> None:
        self.seed = first

    def mtp_n(self, steps: int) -> int:
        new = self._says[len(self._told) : len(self._told) + 2 * steps]
        self._told += new
        self._steps += [2] * (len(new) // 2)
        return len(new)

    def accepted_tokens(self, start: int) -> list[int]:
        return self._told[start:]

    def accepted_step_counts(self, start: int) -> list[int]:
        return self._steps[start:]


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[TilertEngine, Device]]]:
    """TileRT's ROCm adapter over a Device, behind our engine."""
    from tilert.pd_vllm.profiles.glm5_rocm_engine import RocmGlm52EngineAdapter

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    before = set(threading.enumerate())

    def make(says: list[int], **options: Any) -> tuple[TilertEngine, Device]:
        device = Device(says)
        theirs = RocmGlm52EngineAdapter(SimpleNamespace(decode_layer=device, stop_token_ids={99}), True, ar_steps=2)
        theirs._inject_mode = "legacy"  # the others copy between devices
        plan = Plan(WIDTHS, layers=(LAYERS + 1,), key_layers=(*FULL, MTP_LAYER), max_top_k=0)
        return TilertEngine(theirs, max_model_len=32, plan=plan, speculation=MTP, name="tilert", **options), device

    yield make
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name == "tilert-decode"]
    assert not left, "a sequence was not released: its thread would take a core from every later test"


def test_rows_land_where_the_rocm_engine_reads_them(rocm: Any) -> None:
    engine, device = rocm([10, 11, 99, 13])
    kv = rows_of(9, mtp=True)
    engine.admit(admission(1, kv))
    tokens, _ = run_to_end(engine)
    assert tokens == [10, 11] and device.position == 9 and device.seed == 5
    for layer in kv:
        held = device._caches[1][2 * layer.layer : 2 * layer.layer + 2]
        for rows, name in zip(held, ("latent", "rope"), strict=True):
            assert torch.equal(rows[0, :9], layer.planes[name].bfloat16().float())
    for slot, layer in enumerate((*FULL, MTP_LAYER)):
        expected = rotated(kv[layer].planes["index_k"]).bfloat16().float()
        assert torch.equal(device._caches[0][2 * LAYERS + slot][0, :9], expected)


def test_a_sequence_ends_at_its_stop_its_length_or_its_own_stop_token(rocm: Any) -> None:
    engine, _ = rocm([10, 11, 99, 13])
    engine.admit(admission(1, rows_of(4, mtp=True)))
    tokens, outputs = run_to_end(engine)
    assert tokens == [10, 11] and outputs[-1].finish_reason == "stop" and engine.step() == []
    engine, device = rocm(list(range(10, 40)))
    engine.admit(admission(1, rows_of(4, mtp=True), SamplingParams(max_tokens=6, temperature=0.5, top_p=0.9)))
    tokens, outputs = run_to_end(engine)
    assert tokens == [10, 11, 12, 13, 14] and outputs[-1].finish_reason == "length"  # the first was prefill's
    assert device.sampling == (True, 0.5, 0.9)
    engine.release(1)
    stop = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=frozenset({23}))
    engine.admit(admission(2, rows_of(4, mtp=True), stop))
    tokens, outputs = run_to_end(engine)
    assert tokens[-1] == 23 and outputs[-1].finish_reason == "stop"


def test_acceptance_comes_in_sum_with_the_last_step(rocm: Any) -> None:
    engine, _ = rocm([*range(10, 18), 99, 99])
    engine.admit(admission(1, rows_of(4, mtp=True), SamplingParams(max_tokens=20, temperature=0)))
    _, outputs = run_to_end(engine)
    last = outputs[-1]
    assert (last.steps, last.drafted, last.accepted) == (5, 15, 5)
    counters = AcceptanceCounters()
    for output in outputs:
        counters.add(output.drafted, output.accepted, output.steps)
    assert (counters.steps, counters.mean_length, counters.per_position) == (5, 2.0, [])


def test_rows_that_the_engine_has_no_place_for_are_refused(rocm: Any) -> None:
    engine, _ = rocm([10, 11])
    with pytest.raises(ValueError, match="KV of 7 layers came, this TileRT engine has 8; draft by MTP on both sides"):
        engine.admit(admission(1, rows_of(4, mtp=False)))
    kv = rows_of(4, mtp=True)
    kv[4].planes["index_k"] = kv[0].planes["index_k"]
    with pytest.raises(ValueError, match=r"indexer keys came for layers \(0, 1, 2, 4, 6, 7\)"):
        engine.admit(admission(1, kv))
    with pytest.raises(ValueError, match="layer 0 has planes k, v; TileRT takes latent attention"):
        engine.admit(admission(1, [LayerKV(0, {"k": torch.zeros(4, 2, 16), "v": torch.zeros(4, 2, 16)})]))
    with pytest.raises(ValueError, match="more than the model length 32"):
        engine.admit(admission(1, rows_of(30, mtp=True)))
    engine.admit(admission(1, rows_of(4, mtp=True)))
    with pytest.raises(EngineFull):
        engine.admit(admission(2, rows_of(4, mtp=True)))
    engine.release(1)


# ---- faults, which neither the stub nor a made-up device has ----


class Endless:
    """An engine that goes on until it is cancelled, or does not even listen to that."""

    def __init__(self, *, listens: bool = True, fails: bool = False) -> None:
        self.last_stats: dict[str, Any] = {}
        self.resets, self._listens, self._fails = 0, listens, fails
        self.let_go = threading.Event()

    def inject(self, request: Any) -> None:
        self.request = request

    def decode(self, first_token_id: int, max_tokens: int, sampling: Any, on_token: Any, cancel_event: Any) -> None:
        on_token(first_token_id)
        on_token(8)
        if self._fails:
            raise FloatingPointError("an SM fell over")
        (cancel_event if self._listens else self.let_go).wait(60)

    def reset(self) -> None:
        self.resets += 1


def endless(**how: bool) -> tuple[TilertEngine, Endless]:
    engine = Endless(**how)
    return TilertEngine(engine, max_model_len=64, plan=Plan(WIDTHS), speculation=None, name="tilert"), engine


def test_a_cancelled_sequence_leaves_the_engine_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilert_engine, "STOP_TIMEOUT_S", 5)
    engine, theirs = endless()
    engine.admit(admission(1, rows_of(3, mtp=False)))
    assert engine.step()[0].token_ids == (8,)
    engine.release(7)
    assert theirs.resets == 0
    engine.release(1)
    assert theirs.resets == 1
    engine.admit(admission(2, rows_of(3, mtp=False)))
    assert engine.step()[0].seq_id == 2
    engine.release(2)


def test_a_failure_inside_fails_the_step_and_one_that_does_not_stop_loses_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = endless(fails=True)
    engine.admit(admission(1, rows_of(3, mtp=False)))
    with pytest.raises(RuntimeError, match="TileRT failed: an SM fell over"):
        run_to_end(engine)
    engine.release(1)
    monkeypatch.setattr(tilert_engine, "STOP_TIMEOUT_S", 0.01)
    engine, theirs = endless(listens=False)
    engine.admit(admission(1, rows_of(3, mtp=False)))
    with pytest.raises(EngineLost, match="did not stop within"):
        engine.release(1)
    with pytest.raises(EngineFull):
        engine.admit(admission(2, rows_of(3, mtp=False)))
    theirs.let_go.set()


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        (SamplingParams(9, temperature=0, seed=3, top_k=999, ignore_eos=True), {"ignore_eos": True, "top_k": 999}),
        (SamplingParams(9, temperature=0.7, top_k=40), {"temperature": 0.7, "top_k": 40}),
        (SamplingParams(9, seed=3), "TileRT has no seed"),
        (SamplingParams(9, min_p=0.1), "TileRT has no min_p"),
        (SamplingParams(9, top_k=256, min_p=0.1), r"TileRT has no min_p, top_k \(top_k up to 255\)"),
    ],
)
def test_sampling_that_tilert_would_ignore_is_refused(sampling: SamplingParams, told: Any) -> None:
    if isinstance(told, str):
        with pytest.raises(ValueError, match=told):
            tilert_sampling(sampling)
    else:
        expected = {"temperature": sampling.temperature, "top_p": sampling.top_p, **told}
        assert tilert_sampling(sampling) == expected
