"""One prefill/decode stack for all tests of this folder: vLLM takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import load_matrix
from runners.bindings import REPO, bind_local
from runners.expand import expand
from tests.e2e.stack import Stack

DEFAULT = "smollm2-135m-fp32-cpu-vllm-baton"
DEADLINE_S = 20


@pytest.fixture(scope="session")
def stack(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The default recipe, with deadlines short enough to wait for. A test that kills a process restarts it."""
    run_dir = tmp_path_factory.mktemp("e2e")
    recipe = (REPO / "configs" / "local.yaml").read_text()
    assert recipe.count("deadline-s: 60") >= 2
    (run_dir / "local.yaml").write_text(recipe.replace("deadline-s: 60", f"deadline-s: {DEADLINE_S}"))
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
