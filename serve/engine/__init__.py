"""Token generation: the engine contract and the bundled torch engine."""

import os
import sys

# OpenMP reads its policy when torch loads it. By default idle threads spin, and on a machine shared with a prefill
# engine they steal the cores that the working threads wait for: on 2 busy cores (2026-11, SmolLM2 fp32) a step of 8
# sequences took 1.8 s spinning and 0.11 s sleeping. A value that the user sets is kept.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
