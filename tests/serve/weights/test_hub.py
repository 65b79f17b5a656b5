"""Downloads from a hub: whole and verified or not at all, continued where they were cut short, each end told apart."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.serve.weights.hub_server import REPOSITORY, REVISION, Hub, hub_server

SMALL = {"config.json": b"{}", "tokenizer.json": b"{}"}


def start(hub: Hub, out: Path, **env: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "serve.weights.hub", "--repository", REPOSITORY, "--revision", REVISION]
    return subprocess.Popen(
        [*argv, "--out", str(out)],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch(hub: Hub, out: Path, **env: str) -> tuple[int, str]:
    """(exit status, stderr)."""
    process = start(hub, out, **env)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_checkpoint_is_fetched_whole_and_then_needs_no_network(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with hub_server({**SMALL, "model.safetensors": b"w" * 1000, "pytorch_model.bin": b"the same again"}) as hub:
        assert fetch(hub, out) == (0, "")
    assert {path.name for path in out.iterdir()} == {*SMALL, "model.safetensors", "provenance.json"}
    assert fetch(hub, out, HF_HUB_OFFLINE="1") == (0, "")  # the server is gone, too


def test_broken_connection_and_killed_process_go_on_where_they_ended(tmp_path: Path) -> None:
    out, content = tmp_path / "model", random.Random(0).randbytes(5 << 20)
    with hub_server({**SMALL, "model.safetensors": content}) as hub:
        hub.stall = "model.safetensors"
        first = start(hub, out)
        assert hub.stalled.wait(30)
        (partial,) = tmp_path.glob("model.partial-*")
        deadline = time.monotonic() + 20
        while (partial / "model.safetensors").stat().st_size < (2 << 20):
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.05)
        first.kill()
        first.communicate()
        assert not out.exists()
        kept = (partial / "model.safetensors").stat().st_size
        hub.stall, hub.cut["model.safetensors"] = None, 1 << 20
        status, said = fetch(hub, out)
        assert (status, "going on" in said) == (0, True), said
        asked = [span for name, span in hub.ranges if name == "model.safetensors"]
    assert asked == [None, f"bytes={kept}-", f"bytes={kept + (1 << 20)}-"]
    assert (out / "model.safetensors").read_bytes() == content
    assert not list(tmp_path.glob("model.partial-*"))


def test_file_that_is_not_what_the_hub_says_is_refused_and_fetched_again(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with hub_server({**SMALL, "model.safetensors": b"w" * 1000}) as hub:
        right = hub.told["model.safetensors"]
        hub.told["model.safetensors"] = "0" * 64
        status, said = fetch(hub, out)
        assert status == 1
        assert f"model.safetensors: its sha256 is {right}, the hub says {'0' * 64}" in said
        assert not out.exists()
        hub.told["model.safetensors"] = right
        assert fetch(hub, out)[0] == 0


def test_each_way_to_have_no_hub_is_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with hub_server({"model.safetensors": b"w"}) as hub:
        assert "HF_HUB_OFFLINE is set" in fetch(hub, out, HF_HUB_OFFLINE="1")[1]
        hub.files.clear()
        assert "has no weights" in fetch(hub, out)[1]
        hub.revision = "f" * 40
        assert "the hub refuses it" in fetch(hub, out)[1]
    assert f"{hub.url} is not reached" in fetch(hub, out)[1]
    assert not list(tmp_path.glob("model*"))
