"""The pinned tilert wheel still has every name, signature and habit that the adapter and the plan count on."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from serve.engine import tilert_engine
from serve.engine.tilert_engine import MAX_TOP_K, PINNED_VERSION

pytestmark = pytest.mark.usefixtures("wheel")


def engine_classes() -> list[type]:
    from tilert.pd_vllm.engine_iface import PDEngine, StubEngine
    from tilert.pd_vllm.profiles.glm5_rocm_engine import RocmGlm52EngineAdapter
    from tilert.pd_vllm.profiles.mla_nsa import MlaNsaEngineAdapter

    return [PDEngine, StubEngine, MlaNsaEngineAdapter, RocmGlm52EngineAdapter]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_engine_of_the_wheel_has_the_methods_that_are_called() -> None:
    for engine in engine_classes():
        wanted = {"first_token_id", "max_tokens", "sampling", "on_token", "cancel_event"}
        assert wanted <= set(parameters(engine.decode)), engine
        assert parameters(engine.inject) == ["self", "req"] and parameters(engine.reset) == ["self"], engine
    for engine in engine_classes()[1:]:
        source = inspect.getsource(engine)
        assert "self.last_stats" in source and "'finish_reason': " in source, engine
    for engine in engine_classes()[2:]:
        source = inspect.getsource(engine)
        for name in ("self.max_seq_len = ", "'mtp_verify_calls'", "'mtp_accept_mean'", "'stop'"):
            assert name in source, (engine, name)


def test_what_is_injected_is_what_the_wheel_injects() -> None:
    from tilert.pd_vllm.profiles.mla_nsa import ConvertedRequest, MlaNsaProfile

    names = [field.name for field in fields(ConvertedRequest)]
    assert names == ["rid", "seq_len", "last_prompt_token", "first_token_id", "sampling", "layers"]
    # Keys, latent, rope, in this order.
    assert "layers.append((self._dequant_ki(ki_raw, seq, self.ki_tiled), kv, pe))" in inspect.getsource(
        MlaNsaProfile.convert
    )
    for engine in engine_classes()[2:]:
        used = set(re.findall(r"\breq\.(\w+)", inspect.getsource(engine.inject)))
        assert used <= set(names), used


def test_profiles_are_found_and_build_engines_with_the_arguments_that_are_given() -> None:
    from tilert.pd_vllm.profiles import base
    from tilert.pd_vllm.sampling import TOP_K_DISABLED, resolve_top_k

    assert parameters(base.resolve_num_mtp) == ["profile", "requested", "with_mtp"]
    for name, layers, keys in (("glm5", 79, None), ("glm5_2", 79, 22), ("dsv32", 61, None)):
        profile = base.get_profile(name)
        given = ["model_weights_dir", "max_seq_len", "with_mtp", "ar_steps", "num_mtp"]
        assert parameters(profile.build_engine) == given
        assert profile.num_layers == layers and (profile.ki_layer_ids and len(profile.ki_layer_ids)) == keys
        assert base.resolve_num_mtp(profile, 3, with_mtp=True) == 3 == base.resolve_num_mtp(profile, 3, with_mtp=False)
    assert base.get_profile("glm5.3").name == tilert_engine.ROCM_PROFILE
    assert (
        resolve_top_k({"top_k": MAX_TOP_K}) == MAX_TOP_K and resolve_top_k({"top_k": MAX_TOP_K + 1}) == TOP_K_DISABLED
    )


def test_the_plan_names_only_profiles_and_versions_that_there_are() -> None:
    from tilert.pd_vllm.profiles import base

    from runners.engines.tilert import PROFILES

    assert {base.get_profile(name).name for name in PROFILES.values()} == set(PROFILES.values())
    assert metadata.version("tilert") == PINNED_VERSION
    flags = json.loads((Path(__file__).parents[3] / f"runners/engines/flags/tilert-{PINNED_VERSION}.json").read_text())
    assert flags["version"] == PINNED_VERSION


def test_only_the_rocm_library_simulates_acceptance(wheel_dir: Path) -> None:
    knob = {path.name: b"TILERT_SIMULATE_ACC_LEN" in path.read_bytes() for path in wheel_dir.glob("tilert/*.so")}
    assert knob == {"libtilert_dsv32.so": False, "libtilert_glm5.so": False, "libtilert_glm52_rocm.so": True}
    assert b"match-expected" in (wheel_dir / "tilert" / "libtilert_glm52_rocm.so").read_bytes()
