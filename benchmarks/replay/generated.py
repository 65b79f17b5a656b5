"""The hermetic corpora: coding-agent sessions drawn by aiperf's generator (`aiperf synthesize agentic-code`).

The generator ships inside aiperf and needs no network; the same seed and numbers give the same sessions. Layers of a
prompt: tools and system prompt (all sessions), repository (a group of sessions), first files (one session), then what
every turn adds. Gaps are a mixture: most turns answer a tool call and come fast, the others wait for a person.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from configs.job import AgentXPoint

TIMEOUT_S = 300.0
_Config = dict[str, Any]


def _config(
    *, turn: tuple[int, int], answer: int, head: int, repository: int, files: int, turns: int, context: int, block: int
) -> _Config:
    """Numbers in tokens; ``turn`` is (median, most) of what a turn adds."""
    median, most = turn
    return {
        "new_tokens_per_turn": {"mean": 1.2 * median, "median": median, "min": 16, "max": most},
        "generation_length": {"mean": answer, "median": answer, "min": 4, "max": answer},
        "inter_turn_delay": {
            "agentic_fraction": 0.7,
            "agentic_delay": {"mean": 150, "median": 100},
            "human_delay": {"mean": 500, "median": 400},
            "max": 1000,
        },
        "turns": {"mean": turns, "median": turns, "min": turns - 1, "max": turns + 2},
        "max_prompt_tokens": context,
        "block_size": block,
        "cache": {
            "layer1_tokens": head,
            "layer1_5_tokens": repository,
            "layer2": {"mean": 1.2 * files, "median": files, "min": 32, "max": 2 * files},
            "layer1_5_groups": {"num_groups": 3, "zipf_alpha": 0.6},
        },
    }


# location of a generated corpus -> the generator's configuration; None is the generator's own (200k contexts).
GENERATORS: dict[str, _Config | None] = {
    "aiperf-agentic-code": None,
    "aiperf-agentic-code-2k": _config(
        turn=(50, 128), answer=8, head=256, repository=128, files=96, turns=3, context=1600, block=32
    ),
    "aiperf-agentic-code-1k": _config(
        turn=(32, 64), answer=12, head=128, repository=64, files=48, turns=4, context=800, block=32
    ),
}
DEFAULT_SESSIONS = 393  # as many as the public corpus has
# Between the medians of the two kinds of gaps, of the small corpora and of the generator's own.
FAST_TURN_S = {"aiperf-agentic-code": 5.0}
DEFAULT_FAST_TURN_S = 0.2


def generate(point: AgentXPoint, work_dir: Path) -> tuple[Path, int]:
    """(mooncake JSONL under ``work_dir``, tokens of a block). Raises CorpusError when the generator fails."""
    from benchmarks.replay.corpus import MOONCAKE_BLOCK_TOKENS, CorpusError

    if point.corpus.location not in GENERATORS:
        raise CorpusError(f"unknown generator {point.corpus.location!r}; there is {', '.join(sorted(GENERATORS))}")
    config = GENERATORS[point.corpus.location]
    count = point.sessions or DEFAULT_SESSIONS
    argv = [sys.executable, "-m", "aiperf", "synthesize", "agentic-code"]
    argv += ["--num-sessions", str(count), "--seed", str(point.seed)]
    target = work_dir / "corpus.jsonl"
    with tempfile.TemporaryDirectory(prefix="baton-corpus-") as temporary:
        if config is not None:
            path = Path(temporary) / "generator.json"
            path.write_text(json.dumps(config))
            argv += ["--config", str(path)]
        ended = subprocess.run(
            [*argv, "--output", temporary],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        made = list(Path(temporary).glob("*/dataset.jsonl"))
        if ended.returncode or len(made) != 1:
            last = (ended.stderr or ended.stdout).strip().splitlines()[-1:] or ["no output"]
            raise CorpusError(f"aiperf synthesize ended with status {ended.returncode}: {last[0][:300]}")
        fast_s = FAST_TURN_S.get(point.corpus.location, DEFAULT_FAST_TURN_S)
        target.write_text("".join(_marked(line, fast_s) for line in made[0].read_text().splitlines()))
    return target, MOONCAKE_BLOCK_TOKENS if config is None else int(config["block_size"])


def _marked(line: str, fast_s: float) -> str:
    """The generator draws gaps from two kinds of turns and does not say which: the fast ones answer a tool call."""
    row = json.loads(line)
    row["tool_result"] = "delay" in row and row["delay"] < 1e3 * fast_s
    return json.dumps(row) + "\n"
