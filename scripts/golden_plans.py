"""Writes the golden plan of every recipe: tests/runners/golden/<matrix>/<key>.txt, after a change that is meant.

.venv/bin/python scripts/golden_plans.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.runners.golden_plans import GOLDEN, MATRICES, golden_plans  # noqa: E402


def main() -> None:
    """Writes what differs, removes what no recipe stands behind."""
    wanted = {GOLDEN / name: text for matrix in MATRICES for name, text in golden_plans(matrix).items()}
    for path in sorted(set(GOLDEN.glob("*/*.txt")) - set(wanted)):
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
