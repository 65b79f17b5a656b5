"""One job as one sbatch script that people can read, change and run: no Baton on the login node, no submitit.

The nodes need what the job needs anyway: the repository's folder and its Python environment, which measure the points.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.point import MODULES
from configs.job import JobSpec, ProcessSpec
from runners import points
from runners.bindings import bind_folders, ports_per_node
from runners.containers import wrap
from runners.expand import job_id
from runners.plan import folders, mask
from runners.prepare import guarded, needed
from runners.roles import START_ORDER
from runners.submit import SubmitError, directive, sbatch_directives
from runners.weights import model_dir, staging_command


def script(spec: JobSpec, output_dir: Path) -> str:
    """The text of the script; every run of it gets a folder of its own, ``output_dir``/export-<Slurm job id>.

    Raises SubmitError for a site without Slurm."""
    if spec.cluster_profile["executor"] != "slurm":
        raise SubmitError(f"cluster {spec.cluster} has no Slurm to submit a script to; choose one with --cluster")
    return "\n".join(_lines(_bound(spec, output_dir))) + "\n"


def variable(process: ProcessSpec, kind: str, port: str = "") -> str:
    """Shell variable of a process's host or port: HOST_decode_0, PORT_decode_0_http."""
    words = (kind, process.name, port) if port else (kind, process.name)
    return "_".join(words).replace("-", "_").replace(".", "_")


def _bound(spec: JobSpec, output_dir: Path) -> JobSpec:
    """References become shell variables, which the script sets."""
    run_dir = output_dir.absolute() / "export-JOBID"
    bound = bind_folders(
        spec,
        run_id="export-JOBID",
        job_id=job_id(spec),
        run_dir=run_dir,
        model_dir=model_dir(spec),
        created_at="CREATED",
    )
    assert bound.run is not None
    late = {f"host:{p.name}": f"%{variable(p, 'HOST')}%" for p in spec.processes}
    late |= {f"port:{p.name}:{port}": f"%{variable(p, 'PORT', port)}%" for p in spec.processes for port in p.ports}
    run = bound.run.model_copy(update={"bindings": bound.run.bindings | late})
    return bound.model_copy(update={"run": run})


def _lines(spec: JobSpec) -> Iterator[str]:
    yield "#!/bin/bash"
    for index, component in enumerate(sbatch_directives(spec)):
        if index:
            yield "#SBATCH hetjob"
        shown = {name: value for name, value in component.items() if name != "signal"}
        yield from (directive(name, value) for name, value in shown.items())
    yield f"# {spec.key}: {spec.model} on {spec.cluster}, {spec.num_nodes} node(s). Written by `baton export`."
    yield f"# recipe {spec.config_file}, fingerprint {spec.fingerprint}"
    yield "set -euo pipefail"
    yield ""
    yield "# --- the nodes, their addresses, and free ports on each of them"
    yield f"PYTHON={shlex.quote(spec.resolve('@python@'))}"
    yield f"REPO={shlex.quote(spec.resolve('@repo@'))}"
    yield _nodes(spec)
    yield 'address() { scontrol -o show node "$1" | tr " " "\\n" | sed -n "s/^NodeAddr=//p"; }'
    yield "on_node() { # on_node INDEX SRUN-OPTION... COMMAND...: one step on one node"
    yield "  local index=$1; shift"
    yield '  srun --overlap --nodes=1 --ntasks=1 --nodelist="${NODES[$index]}" ${GROUPS_OF[$index]} \\'
    yield '    --kill-on-bad-exit=1 --unbuffered --cpu-bind=none --mem=0 "$@"'
    yield "}"
    yield from _ports(spec)
    yield ""
    yield "# --- the run's folder, in the form that `baton report` reads"
    assert spec.run is not None
    run_dir, name = Path(spec.run.run_dir), spec.run.job_id
    yield f"RUN={shlex.quote(str(run_dir.parent))}/export-$SLURM_JOB_ID"
    yield f"JOB=$RUN/{shlex.quote(name)}"
    relative = sorted(
        str(Path(folder).relative_to(spec.job_dir())) for folder in folders(spec) if _inside(spec, folder)
    )
    yield "mkdir -p " + " ".join(f'"$JOB"/{shlex.quote(folder)}' for folder in dict.fromkeys(["logs", *relative]))
    yield "fill() { # puts addresses, ports and this job's folder into what it reads"
    yield '  sed -e "s/export-JOBID/export-$SLURM_JOB_ID/g" -e "s/CREATED/$(date -u +%Y-%m-%dT%H:%M:%S+00:00)/" \\'
    for process in spec.processes:
        yield "    " + " ".join(f'-e "s/%{name}%/${name}/g"' for name in _variables(process)) + " \\"
    yield "    -"
    yield "}"
    yield "fill >\"$JOB/spec.json\" <<'SPEC'"
    yield json.dumps(spec.model_dump(mode="json", by_alias=True), indent=1, sort_keys=True)
    yield "SPEC"
    yield ""
    yield "# --- whatever happens, what was started is ended"
    yield "declare -A PIDS=()"
    yield "stop() {"
    yield "  local status=$?; trap - EXIT TERM INT USR2"
    yield '  kill "${PIDS[@]}" 2>/dev/null || true'
    yield '  for _ in {1..100}; do [ -n "$(jobs -rp)" ] || break; sleep 0.1; done'
    yield '  kill -9 "${PIDS[@]}" 2>/dev/null || true; exit $status'
    yield "}"
    yield "trap stop EXIT; trap 'exit 143' TERM INT USR2"
    yield ""
    staging = staging_command(spec)
    if staging:
        yield "# --- weights"
        yield staging
        yield ""
    ordered = sorted(spec.processes, key=lambda process: START_ORDER.index(process.role))
    if needed(ordered):
        yield "# --- what roles need on their nodes: made once, found there the next time"
        yield f"mkdir -p {shlex.quote(spec.resolve('@converted@'))}"
        for process in ordered:
            yield from _preparation(spec, process)
        yield ""
    yield "# --- roles, decode first and the router last"
    for process in ordered:
        yield from _role(spec, process)
    yield ""
    yield "# --- all of them answer, and none has died, before anything is measured"
    yield 'alive() { for role in "${!PIDS[@]}"; do kill -0 "${PIDS[$role]}" 2>/dev/null ||'
    yield '  { echo "$role has ended; its last lines:" >&2; tail -n 20 "$JOB/logs/$role.log" >&2; exit 1; }; done; }'
    yield "ready() { # ready ROLE URL SECONDS"
    yield "  local deadline=$((SECONDS + $3))"
    yield "  local ask='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)'"
    yield '  until "$PYTHON" -c "$ask" "$2" 2>/dev/null; do'
    yield '    alive; ((SECONDS < deadline)) || { echo "$1 is not ready within $3 s" >&2; exit 1; }; sleep 0.5'
    yield "  done"
    yield "}"
    for process in sorted(spec.processes, key=lambda process: process.role == "router"):
        asked = spec.process(process.readiness.process or process.name)
        url = (
            f"http://${variable(asked, 'HOST')}:${variable(asked, 'PORT', process.readiness.port)}"
            f"{process.readiness.path}"
        )
        yield f'ready {process.name} "{url}" {int(process.readiness.timeout_s)}'
    yield ""
    yield 'cd "$JOB"; export PYTHONPATH=$REPO; failed=0'
    yield "# --- real greedy generations through the front door: canary.json holds their tokens"
    yield '"$PYTHON" -m runners.canary --spec "$JOB/spec.json"'
    yield "alive"
    yield ""
    yield "# --- the points; each writes points/<id>/result.json with a verdict"
    for point in spec.points:
        arguments = f'--spec "$JOB/spec.json" --point {shlex.quote(point.id)}'
        limit_s = int(points.deadline_s(spec, point))
        yield f'timeout {limit_s} "$PYTHON" -m {MODULES[point.scenario]} {arguments} \\'
        yield f'  >"$JOB/logs/point-{point.id}.log" 2>&1 || failed=1'
        yield "alive"
    yield ""
    yield "# --- rows.json and report.md; the exit status says whether every point was produced and is valid"
    yield '"$PYTHON" -m benchmarks.report "$RUN"'
    yield "exit $failed"


def _nodes(spec: JobSpec) -> str:
    components = sbatch_directives(spec)
    if len(components) == 1:
        groups = " ".join(['""'] * spec.num_nodes)
        return f'mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); GROUPS_OF=({groups})'
    lines = ["NODES=(); GROUPS_OF=()"]
    for index in range(len(components)):
        lines.append(
            f'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{index}"); do '
            f'NODES+=("$node"); GROUPS_OF+=("--het-group={index}"); done'
        )
    return "\n".join(lines)


def _ports(spec: JobSpec) -> Iterator[str]:
    ports, counts = spec.cluster_profile["port-range"], ports_per_node(spec)
    yield "free_ports() { # free_ports INDEX COUNT: ports that can be bound on that node"
    yield '  on_node "$1" "$PYTHON" "$REPO/runners/node_probe.py" --address "$(address "${NODES[$1]}")" --ports "$2" \\'
    yield f"    --first {ports['first']} --last {ports['last']} --token /dev/null |"
    yield '    "$PYTHON" -c \'import json, sys; print(*json.load(sys.stdin)["ports"], sep="\\n")\''
    yield "}"
    for node, count in enumerate(counts):
        yield f"mapfile -t FREE < <(free_ports {node} {count})"
        taken = 0
        for process in (process for process in spec.processes if process.node == node):
            found = [f'{variable(process, "HOST")}=$(address "${{NODES[{node}]}}")']
            for port in process.ports:
                found.append(f"{variable(process, 'PORT', port)}=${{FREE[{taken}]}}")
                taken += 1
            yield "; ".join(found)


def _role(spec: JobSpec, process: ProcessSpec) -> Iterator[str]:
    yield _on_node(spec, process, [spec.resolve(part) for part in process.argv])
    yield f'  >"$JOB/logs/{process.name}.log" 2>&1 </dev/null & PIDS[{process.name}]=$!'


def _preparation(spec: JobSpec, process: ProcessSpec) -> Iterator[str]:
    for step in process.prepare:
        yield _on_node(spec, process, guarded(spec, step))
        yield f'  >"$JOB/logs/{process.name}.{step.name}.log" 2>&1 </dev/null'


def _on_node(spec: JobSpec, process: ProcessSpec, argv: Sequence[str]) -> str:
    """A command in the process's image, with its variables, on its node; a redirection follows."""
    env = {**(spec.cluster_profile.get("env") or {}), **mask(spec, process)}
    env |= {key: spec.resolve(value) for key, value in process.env.items()}
    wrapped = wrap(spec, process, argv, env, label="JOBID")
    words = " \\\n  ".join(_flag_lines([_word(spec, part) for part in (*wrapped.srun, *wrapped.argv)]))
    return f'on_node {process.node} --job-name={process.name} --chdir="$JOB" \\\n  {words} \\'


def _flag_lines(words: list[str]) -> list[str]:
    """A flag and its value share a line."""
    lines = words[:1]
    for before, word in itertools.pairwise(words):
        if before.startswith("--") and "=" not in before and not word.startswith("--"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _word(spec: JobSpec, text: str) -> str:
    """One word for the shell, single-quoted but for the variables in it."""
    pieces = [text]
    names = [name for process in spec.processes for name in _variables(process)]
    for name, shown in [(f"%{name}%", f"${{{name}}}") for name in names] + [("export-JOBID", "export-$SLURM_JOB_ID")]:
        pieces = [part for piece in pieces for part in _split(piece, name, shown)]
    return "".join(piece if piece.startswith("\0") else shlex.quote(piece) for piece in pieces if piece).replace(
        "\0", ""
    )


def _split(piece: str, name: str, shown: str) -> list[str]:
    if piece.startswith("\0") or name not in piece:
        return [piece]
    found: list[str] = []
    for index, part in enumerate(piece.split(name)):
        found += ([f'\0"{shown}"'] if index else []) + [part]
    return found


def _variables(process: ProcessSpec) -> list[str]:
    return [variable(process, "HOST"), *(variable(process, "PORT", port) for port in process.ports)]


def _inside(spec: JobSpec, folder: str) -> bool:
    return Path(folder).is_relative_to(spec.job_dir()) and Path(folder) != spec.job_dir()
