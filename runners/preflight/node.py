"""The probe of one node: ``python -m runners.preflight.node --spec spec.json [--node N]``.

Prints one JSON finding a line and exits 1 when one of them is an error. Takes a second, needs no GPU library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from configs.job import JobSpec
from runners.preflight.allocation import judge
from runners.preflight.readings import Readings, read


def main(argv: Sequence[str] | None = None) -> int:
    """The probe of one node."""
    parser = argparse.ArgumentParser(prog="python -m runners.preflight.node", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="spec.json of the job")
    parser.add_argument("--node", type=int, default=0, help="index of this node in the allocation")
    parser.add_argument("--readings", type=Path, help="judge these readings (JSON) instead of reading this node")
    parser.add_argument("--show", action="store_true", help="print the readings instead of judging them")
    parser.add_argument("--report", action="store_true", help="exit 0 whatever is found")
    options = parser.parse_args(argv)
    spec = JobSpec.read(options.spec)
    if options.readings is not None:
        readings = Readings.model_validate_json(options.readings.read_text())
    else:
        readings = read(spec, _ports(spec, options.node))
    if options.show:
        print(readings.model_dump_json())
        return 0
    findings = judge(spec, readings, options.node)
    for finding in findings:
        print(json.dumps(asdict(finding)))
    return 1 if not options.report and any(finding.severity == "error" for finding in findings) else 0


def _ports(spec: JobSpec, node: int) -> list[int]:
    """Ports that the job's processes on this node will bind; none before the job is bound."""
    if spec.run is None:
        return []
    names = [(process.name, port) for process in spec.processes if process.node == node for port in process.ports]
    values = [spec.run.bindings.get(f"port:{name}:{port}") for name, port in names]
    return [int(value) for value in values if value is not None]


if __name__ == "__main__":
    sys.exit(main())
