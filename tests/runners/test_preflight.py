"""The registry of findings, its page, the command, and the table of failures that they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.verdict import Reason, ReasonCode
from configs.load import load_matrix
from runners.cli import run
from runners.expand import expand
from runners.finding import Finding
from runners.memory import plan_memory
from runners.outcome import JobCode, Outcome
from runners.preflight import CHECKS, REGISTRY, Context, errors, run_checks, runtime
from runners.preflight.command import markdown
from runners.preflight.registry import declare
from serve.handoff.protocol import HandoffCode, HandoffError
from tests.configs.recipes import gpu_entry, local_entry, space, write_matrix
from tests.runners.jobs import REPO
from tests.runners.recipe_faults import pegainfer, tilert

MATRICES = ("configs/local.yaml", "configs/nvidia.yaml", "configs/amd.yaml")

# The 66 failures that brought five systems up by trial and error, in the order of their table: what finds each now.
# Rows whose cause lies in people or in one program alone name the check that stands for it.
ROWS: dict[int, tuple[str, ...]] = {
    1: ("slurm-no-job-id",),
    2: ("env-missing",),
    3: ("env-foreign",),
    4: ("env-unresolved", "reference-unknown"),
    5: ("weights-missing", "weights-size"),
    6: ("memory-over",),
    7: ("memory-kv-budget",),
    8: ("memory-staging-outside",),
    9: ("memory-conversion-peak",),
    10: ("kv-stride-unknown",),
    11: ("kv-float16",),
    12: ("block-size-implicit",),
    13: ("context-below-trace", "context-above-model"),
    14: ("rdma-fork-unsafe",),
    15: ("draft-depth-conflict",),
    16: ("converted-weights-stale",),
    17: ("golden-mode-missing", "golden-curve-missing"),
    18: ("value-none",),
    19: ("golden-curve-provisional",),
    20: ("eval-simulated", "verdict-simulated-acceptance"),
    21: ("image-not-imported",),
    22: ("readiness-over-limit",),
    23: ("rdma-registration-limit", "huge-pages-off"),
    24: ("huge-pages-partial",),
    25: ("gpu-runtime-missing",),
    26: ("populate-write-missing",),
    27: ("patch-version-mismatch",),
    28: ("output-dir-unsafe",),
    29: ("hf-home-ephemeral",),
    30: ("trace-not-the-models", "trace-unknown-model"),
    31: ("row-not-ingested",),
    32: ("selection-empty",),  # no label starts a run here; what is selected is run, and nothing selected is an error
    33: ("personal-path",),
    34: ("gpu-memory-busy",),
    35: ("prefill-without-mtp",),
    36: ("role-images-equal", "package-missing"),
    37: ("model-retired", "patch-without-waiver", "waiver-incomplete"),
    38: ("flock-unsupported", "disk-short", "conversion-unfinished"),
    39: ("rdma-device-missing", "rdma-port-inactive", "rdma-gid-missing", "memlock-limited"),
    40: ("job-name-collision",),
    41: ("escape-seed-unpaired",),
    42: ("parser-seed-mismatch",),
    43: ("draft-depth-unpaired",),
    44: ("prefill-not-layer-split",),
    45: ("health-generates",),
    46: ("weights-duplicate-tensor",),
    47: ("kv-dtype-unpaired",),
    48: ("context-not-explicit",),
    49: ("port-ephemeral", "port-not-bindable"),
    50: ("nccl-version",),
    51: ("mnnvl-allreduce", "gin-without-nic"),
    52: ("host-pool-short",),
    53: ("verify-rows-over",),
    54: ("handoff-protocol-error",),
    55: ("draft-fingerprint-unequal",),
    56: ("gpu-foreign-process",),
    57: ("expert-transport-auto", "handoff-short-write"),
    58: ("senders-with-host-buffer", "senders-unpaired"),
    59: ("shared-staging", "handoff-stale-generation"),
    60: ("nixl-with-shards",),
    61: ("connector-drops-eos",),
    62: ("verdict-empty-content",),
    63: ("readiness-path-unknown",),
    64: ("itl-coalesced",),
    65: ("eval-missing",),
    66: ("graphs-hide-layers",),
}


def test_every_row_of_the_table_has_a_code() -> None:
    assert sorted(ROWS) == list(range(1, 67))
    assert [code for codes in ROWS.values() for code in codes if code not in REGISTRY] == []


def test_every_code_says_what_it_means_and_is_found_by_something() -> None:
    assert len(REGISTRY) >= 80
    assert all(entry.code == code and len(entry.description) > 10 for code, entry in REGISTRY.items())
    found_by_checks = {code for entry in CHECKS for code in entry.codes}
    assert found_by_checks <= set(REGISTRY)
    with pytest.raises(ValueError, match="two codes"):
        declare("disk-short", "error", "login", "again")


def test_the_page_is_current() -> None:
    page = REPO / "docs" / "findings.md"
    assert page.read_text() == markdown(), "run `baton preflight --list --markdown > docs/findings.md`"


def test_the_list_has_every_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "--list", "--json"]) == 0
    listed = [json.loads(line)["code"] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(REGISTRY)


def test_a_finding_reads_as_one_sentence_and_a_fix() -> None:
    text = str(Finding("code", "error", "where", "what", "do this"))
    assert text == "error: code: where: what\n  fix: do this"


@pytest.mark.parametrize("name", MATRICES)
def test_shipped_recipes_have_no_static_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    found = run_checks(Context(expand(load_matrix(name)), Path("results")), ("static",))
    # Twins with the bundled decode are planned before it can carry them out; nothing else may be wrong with them.
    assert [finding for finding in errors(found) if finding.code != "not-in-this-version"] == []
    assert all(finding.where.startswith(("configs/", "docs/", "patches/")) for finding in found)


def test_the_command_names_line_and_fix_and_exits_64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = local_entry()
    data["prefil"] = {}
    path = write_matrix(tmp_path, data)
    assert run(["preflight", "--config", str(path), "--json"]) == 64
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert record["code"] == "unknown-key" and "matrix.yaml:" in record["where"] and record["severity"] == "error"


def test_the_command_runs_one_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_matrix(tmp_path, gpu_entry())
    assert run(["preflight", "--config", str(path), "--phase", "static", "--json"]) == 64
    codes = [json.loads(line)["code"] for line in capsys.readouterr().out.splitlines()]
    assert "image-unset" in codes and "slurm-missing" not in codes
    assert run(["preflight", "--config", str(path), "--phase", "runtime"]) == 64
    assert "runtime" in capsys.readouterr().err


def test_all_codes_of_verdicts_handoffs_and_jobs_are_registered() -> None:
    for reason in ReasonCode:
        found = runtime.of_reason(Reason(code=reason, message="m"), "point")
        assert found.code == f"verdict-{reason.value.replace('_', '-')}" and found.fix and found.phase == "runtime"
    for code in HandoffCode:
        found = runtime.of_handoff(HandoffError(code, "m"), "decode-0")
        assert found.code == f"handoff-{code.value.replace('_', '-')}" and found.fix
    for end in JobCode:
        ended = runtime.of_outcome(Outcome("failed", end, "m", (), process="prefill-0", node=1))
        assert (ended is None) == (end == JobCode.COMPLETED)
        if ended is not None:
            assert ended.code == f"job-{end.value.replace('_', '-')}" and ended.where == "prefill-0 on node 1"


def test_every_end_of_a_job_is_provoked_where_jobs_run() -> None:
    files = [path for folder in ("runners", "slurm") for path in (REPO / "tests" / folder).rglob("test_*.py")]
    text = "\n".join(path.read_text() for path in files if path != Path(__file__))
    told = {code: rf"JobCode\.{code.name}\b|\"{code.value}\"" for code in JobCode}
    assert [code.name for code, pattern in told.items() if not re.search(pattern, text)] == []


@pytest.mark.parametrize("kind", [ReasonCode, HandoffCode])
def test_runtime_codes_are_provoked_where_they_arise(kind: type[ReasonCode | HandoffCode]) -> None:
    folder = {ReasonCode: "benchmarks", HandoffCode: "serve"}[kind]  # type: ignore[index]
    text = "\n".join(path.read_text() for path in (REPO / "tests" / folder).rglob("test_*.py"))
    missing = [code.name for code in kind if code.name not in text and f'"{code.value}"' not in text]
    assert missing == [], "a code that no test provokes"


SIZES = st.sampled_from((1, 2, 4, 8, 16))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from((local_entry, gpu_entry, tilert, lambda: tilert("sglang"), pegainfer)),
    context=st.none() | st.integers(1, 1 << 21),
    tp=SIZES,
    ep=SIZES,
    conc=st.integers(1, 4096),
    precision=st.sampled_from(("fp4", "int4", "fp8", "bf16", "fp32")),
    kv_dtype=st.sampled_from(("bfloat16", "float32", "fp8", "float16")),
    offset=st.integers(0, 64),
)
def test_what_loads_plans_or_says_why_not(
    tmp_path: Path,
    start: object,
    context: int | None,
    tp: int,
    ep: int,
    conc: int,
    precision: str,
    kv_dtype: str,
    offset: int,
) -> None:
    data = start()  # type: ignore[operator]
    if context is not None:
        data["max-model-len"] = context + offset
    data["precision"] = precision
    data.setdefault("handoff", {})["kv-dtype"] = kv_dtype
    space(data)["conc-list"] = [conc]
    for role in ("prefill", "decode", "aggregated"):
        if role in space(data):
            space(data)[role].update({"tp": tp, "ep": ep})
    findings = collect_findings(write_matrix(tmp_path, data))
    assert all(finding.message and finding.fix and finding.code in REGISTRY for finding in findings)


def collect_findings(path: Path) -> list[Finding]:
    from runners.preflight.command import collect

    found = collect(path, (), Path("results"), ("static",))
    if errors(found):
        return found
    for spec in expand(load_matrix(path)):
        assert plan_memory(spec).tables, "a job without errors is planned"
    return found
