"""Every code of the loader has a recipe that is refused with it, and the recipe it was made from loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_matrix
from runners.expand import ExpandError, expand
from runners.preflight import REGISTRY, finding_of_expansion
from runners.preflight.recipe import _CODES, DEFAULT_FIX
from tests.configs.recipes import gpu_entry, local_entry, space, write_matrix
from tests.runners.recipe_faults import BASELINES, FAULTS, load

NOT_LOADED = {"recipe-rule", "engine-refuses", "selection-empty"}  # for rules to come, and for expansion


@pytest.mark.parametrize("start", BASELINES)
def test_what_the_faults_are_planted_in_loads(tmp_path: Path, start: Callable[[], dict[str, Any]]) -> None:
    assert load(lambda: load_matrix(write_matrix(tmp_path, start()))) == []


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_planted_fault_is_found(tmp_path: Path, code: str) -> None:
    found = {finding.code: finding for finding in FAULTS[code](tmp_path)}
    assert code in found, list(found.values())
    finding = found[code]
    assert finding.severity == "error" and finding.message
    assert finding.fix and finding.fix != DEFAULT_FIX, "what to do, in words of its own"
    assert re.search(r"\.yaml(:\d+)?$", finding.where), "file and line of the YAML"


def test_every_code_of_the_loader_has_a_planted_fault() -> None:
    assert set(_CODES) - NOT_LOADED <= set(FAULTS)
    assert set(FAULTS) <= set(REGISTRY)


def test_what_to_write_when_disagg_is_turned_off(tmp_path: Path) -> None:
    data = local_entry() | {"disagg": False}
    found = load(lambda: load_matrix(write_matrix(tmp_path, data)))
    fixes = {finding.fix for finding in found if finding.code.endswith("-mismatch")}
    assert fixes >= {
        "Add roles.aggregated, or write disagg: true.",
        "Remove roles.prefill, or write disagg: true.",
        "Remove kv-p2p-transfer, or write disagg: true.",
        "Write aggregated: {num-worker: 1}, or disagg: true.",
        "Remove decode, or write disagg: true.",
    }


def test_the_line_is_the_keys_own(tmp_path: Path) -> None:
    data = local_entry()
    data["handoff"]["pool-mib"] = 1
    path = write_matrix(tmp_path, data)
    (finding,) = load(lambda: load_matrix(path))
    line = int(finding.where.rpartition(":")[2])
    assert '"pool-mib": 1' in path.read_text().splitlines()[line - 1]


def expansion(folder: Path, data: dict[str, Any]) -> Any:
    matrix = load_matrix(write_matrix(folder, data))
    with pytest.raises(ExpandError) as refused:
        expand(matrix)
    return finding_of_expansion(refused.value)


def test_an_engine_that_cannot_is_a_finding(tmp_path: Path) -> None:
    data = gpu_entry()
    put = {"spec-decoding": "draft_model", "draft-depth": 3}
    space(data).update(put)
    finding = expansion(tmp_path, data)
    assert finding.code == "engine-refuses" and "draft model" in finding.message and "matrix.yaml:" in finding.where


def test_a_missing_curve_is_a_finding(tmp_path: Path) -> None:
    data = gpu_entry()
    worker = {"aggregated": {"num-worker": 1, "tp": 8}, "conc-list": [1], "spec-decoding": "mtp", "draft-depth": 16}
    data["scenarios"] = {
        "agentic-coding": [{"search-space": [worker | {"acceptance": "simulated", "thinking": "thinking-on"}]}]
    }
    finding = expansion(tmp_path, data)
    assert finding.code == "golden-curve-missing" and "depth 16" in finding.message


def test_a_selection_that_selects_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExpandError) as refused:
        expand(load_matrix(write_matrix(tmp_path, gpu_entry())), ("no-such-key",))
    assert finding_of_expansion(refused.value).code == "selection-empty"
