"""Stands in for benchmarks.fixed_seq_len in tests: the point's id says what it does. Standard library only."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

REASON = {"code": "zero_tokens", "message": "it was too bad"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--point", required=True)
    options = parser.parse_args()
    folder = options.spec.parent / "points" / options.point
    folder.mkdir(parents=True)
    behaviour = options.point.partition("-")[0]
    if behaviour == "once" and not list(options.spec.parent.glob("raw/earlier/once*")):
        behaviour = "hang"
    if behaviour == "crash":
        print("the last words of a point", file=sys.stderr)
        return 3
    if behaviour == "wait":
        (folder / "hanging").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
    if behaviour == "hang":
        (folder / "hanging").touch()
        time.sleep(600)
    valid = behaviour != "invalid"
    spec = json.loads(options.spec.read_text())
    result = {
        "schema_version": 1,
        "definitions_version": 1,
        "point": options.point,
        "scenario": "fixed-seq-len",
        "fingerprint": spec["fingerprint"],
        "key": spec["key"],
        "verdict": {"valid": valid, "reasons": [] if valid else [REASON]},
        "row": {"conc": 1, "num_gpus": 2, "recipe_fingerprint": spec["fingerprint"]},
        "stages": {},
        "client": {},
        "artifacts": [],
        "started_at": "2026-01-01T00:00:00Z",
        "ended_at": "2026-01-01T00:00:01Z",
    }
    (folder / "progress.json").write_text(json.dumps({"done": 1, "total": 1}))
    (folder / "result.json").write_text(json.dumps(result))
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
