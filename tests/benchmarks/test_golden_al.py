"""A curve is measured on a real decode server: what it counts is what the file says, and what a plan finds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks import speculation
from benchmarks.acceptance import Load, Refused, generated_prompts, measure, read_prompts, standard_error
from benchmarks.golden_al import main, merged, parser
from benchmarks.speculation import Drafting, SpeculationError, difference
from benchmarks.stages import Acceptance
from configs.curve import CurveError, read_curve
from runners.golden import GoldenError, lookup

REPO = Path(__file__).parents[2]
NAME = "baton/glm5-tiny"
LOAD = Load("thinking-off", output_tokens=16, conc=4, temperature=0.0, request_timeout_s=60, min_steps=40)
COUNTED = Acceptance(steps=100, drafted=300, accepted=150, accepted_at=(90, 50, 10))


@contextmanager
def server(program: str, *options: str) -> Iterator[str]:
    argv = [sys.executable, "-m", program, "--port", "0", *options]
    process = subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), f"{argv} ended with {process.poll()}"
        yield line.removeprefix("ready ").strip()
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def tiny_glm() -> Path:
    """The generated checkpoint of the key glm5-tiny, where a sweep stages it, too."""
    out = REPO / ".cache" / "weights" / "glm5-tiny-float32"
    command = [sys.executable, "-m", "serve.weights.tiny", "--model", "glm_moe_dsa", "--out", str(out), "--seed", "5"]
    subprocess.run(command, cwd=REPO, check=True, timeout=60)
    return out


def decode(model: Path, *options: str) -> tuple[str, ...]:
    shared = ("--model", str(model), "--served-model-name", NAME, "--max-model-len", "512", "--threads", "1")
    return ("serve.decode_server", *shared, "--allow-local-prefill", *options)


@pytest.fixture(scope="module")
def drafting(tiny_glm: Path) -> Iterator[str]:
    with server(*decode(tiny_glm, "--draft-depth", "2")) as url:
        yield url


@pytest.fixture(scope="module")
def simulating(tiny_glm: Path) -> Iterator[str]:
    with server(*decode(tiny_glm, "--draft-depth", "3", "--simulate-acceptance-length", "2.99")) as url:
        yield url


def measured(url: str, folder: Path, *options: str) -> int:
    shared = ("--url", url, "--model-prefix", "glm5tiny", "--thinking", "thinking-off", "--output-tokens", "16")
    return main([*shared, "--problems", "6", "--min-steps", "40", "--output-dir", str(folder), *options])


@pytest.fixture(scope="module")
def curve_file(drafting: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured once, with what the server counted beside it."""
    folder = tmp_path_factory.mktemp("curves")
    before = speculation.read(drafting)
    assert measured(drafting, folder) == 0
    counted = difference(before, speculation.read(drafting))
    (folder / "counted.json").write_text(json.dumps(asdict(counted)))
    return folder / "glm5tiny_mtp.yaml"


def test_a_measured_length_is_what_the_server_counted_and_what_a_plan_finds(curve_file: Path) -> None:
    counted = json.loads((curve_file.parent / "counted.json").read_text())
    golden = lookup("glm5tiny", "mtp", "thinking-off", 2, curve_file.parent)
    assert golden.target_length == round(1 + counted["accepted"] / counted["steps"], 2) and not golden.provisional
    curve = read_curve(curve_file)
    cell = curve.measurements["thinking-off"][2]
    assert cell.drafted == 2 * cell.steps and cell.prompts == 6
    assert [cell.steps, cell.accepted] == [counted["steps"], counted["accepted"]] and len(cell.per_position) == 2
    origin = curve.provenance
    assert (origin.status, origin.output_tokens, origin.date is None) == ("measured", 16, False)
    assert NAME in origin.source and origin.versions.keys() == {"baton-bench", "bundled"}
    assert origin.dataset == "gsm8k-format-synthetic (6 prompts, seed 0)"
    assert "the model may have no such mode" in origin.note  # its template has no switch
    with pytest.raises(GoldenError, match="no thinking-off length for draft depth 3; it has: 2"):
        lookup("glm5tiny", "mtp", "thinking-off", 3, curve_file.parent)


def test_a_curve_that_says_other_than_was_counted_is_refused(curve_file: Path, tmp_path: Path) -> None:
    length = read_curve(curve_file).curves["thinking-off"][2]
    path = tmp_path / curve_file.name
    path.write_text(curve_file.read_text().replace(f"{{2: {length:.2f}}}", "{2: 2.50}"))
    with pytest.raises(CurveError, match=r"length 2.5 is not what was counted"):
        read_curve(path)


def test_a_length_is_added_to_its_own_curve_and_replaced_only_when_told(curve_file: Path) -> None:
    new = read_curve(curve_file)
    text = curve_file.read_text().replace("{2:", "{1:").replace("\n    2:\n", "\n    1:\n")
    old = new.model_validate(YAML(typ="safe").load(text))
    both = merged(old, new, replace=False)
    assert both.curves["thinking-off"].keys() == both.measurements["thinking-off"].keys() == {1, 2}
    with pytest.raises(Refused, match="depth 2 already; --replace"):
        merged(both, new, replace=False)
    assert merged(both, new, replace=True) == both
    origin = new.provenance.model_copy(update={"dataset": "another"})
    with pytest.raises(Refused, match="another provenance, dataset"):
        merged(old, new.model_copy(update={"provenance": origin}), replace=True)


def test_a_server_that_simulates_or_steps_too_little_writes_nothing(
    drafting: str, simulating: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(simulating, tmp_path) == 1
    assert "simulates acceptance" in capsys.readouterr().err
    assert measured(drafting, tmp_path, "--min-steps", "5000") == 1
    assert "fewer than --min-steps 5000" in capsys.readouterr().err
    assert measured(f"{drafting}/nothing", tmp_path) == 75
    assert list(tmp_path.iterdir()) == []


def test_what_is_simulated_is_told_and_kept_from_evaluations(drafting: str, simulating: str) -> None:
    def ask(url: str, purpose: dict[str, str]) -> tuple[int, Any]:
        body = {"model": NAME, "prompt": "ten plus two is", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), purpose)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["code"]

    evaluation = {"X-Baton-Purpose": "eval"}
    assert ask(drafting, evaluation)[0] == 200
    assert ask(simulating, evaluation) == (409, "acceptance_simulated")
    before = speculation.read(simulating)
    assert ask(simulating, {})[0] == 200
    counted = difference(before, speculation.read(simulating))
    assert before[0].mode == "simulated"
    assert counted.mean_length == pytest.approx(2.99, rel=0.01)
    assert counted.per_position[0] == 1.0 and len(counted.per_position) == 2  # never a third draft


def test_a_router_is_measured_at_its_decode_servers(drafting: str) -> None:
    options = ("--model", NAME, "--prefill", "http://127.0.0.1:9", "--decode", drafting)
    with server("serve.pd_router", *options) as router:
        assert speculation.read(router) == speculation.read(drafting)


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        ({"mode": None}, "does not say whether its acceptance is real"),
        ({"mode": "none"}, "does not draft"),
        ({"draft_depth": None}, "give --method and --draft-depth"),
        ({"method": "guess"}, "draft method 'guess' has no curves"),
    ],
)
def test_a_server_whose_drafts_are_not_known_is_refused(reading: dict, reason: str, monkeypatch) -> None:
    known = Drafting("http://a", COUNTED, model=NAME, mode="real", method="mtp", draft_depth=3)
    monkeypatch.setattr(speculation, "read", lambda url: [replace(known, **reading)])
    with pytest.raises(Refused, match=reason):
        measure("http://a", generated_prompts(1, 0), LOAD)


def test_no_drafts_other_users_and_backward_counters_are_no_measurement() -> None:
    from benchmarks.acceptance import _check

    with pytest.raises(Refused, match="no draft was proposed"):
        _check(Acceptance(0, 0, 0), 100, 4, 3, LOAD)
    with pytest.raises(Refused, match=r"3\.00 drafts a step are more than the draft depth 2"):
        _check(COUNTED, 1000, 4, 2, LOAD)
    with pytest.raises(Refused, match="made 250 tokens, 200 of them for this measurement"):
        _check(COUNTED, 200, 4, 3, LOAD)
    _check(COUNTED, 240, 4, 3, LOAD)  # the last steps of four requests may have made twelve tokens too many
    later = Drafting("http://a", replace(COUNTED, accepted=149))
    twice = Drafting("http://a", Acceptance(200, 600, 300, (180, 100, 20)))
    assert difference([Drafting("http://a", COUNTED)], [twice]) == COUNTED
    with pytest.raises(SpeculationError, match="other servers answer"):
        difference([Drafting("http://b", COUNTED)], [twice])
    with pytest.raises(SpeculationError, match="went backwards"):
        difference([Drafting("http://a", COUNTED)], [later])


def test_vllms_counters_are_read_by_its_names() -> None:
    page = (
        "# TYPE vllm:spec_decode_num_drafts counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 60.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 40.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0e+01\n'
    )
    assert speculation.parse(page, "http://a") == COUNTED
    with pytest.raises(SpeculationError, match="counts no drafts"):
        speculation.parse("vllm:num_requests_running 0.0\n", "http://a")


def test_the_standard_error_is_that_of_the_lengths() -> None:
    lengths = [1] * 10 + [2] * 40 + [3] * 40 + [4] * 10  # accepted at 1: 90, 2: 50, 3: 10
    mean = sum(lengths) / 100
    expected = (sum((length - mean) ** 2 for length in lengths) / 100 / 100) ** 0.5
    assert standard_error(COUNTED) == pytest.approx(expected)


def test_prompts_are_named_by_their_bytes_and_bad_lines_by_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"messages": [{"role": "user"}]}) + "\n")
    prompts = read_prompts(path, "mine")
    assert prompts.dataset.startswith("mine (2 prompts, sha256 ") and prompts.conversations[0][0]["content"] == "hello"
    path.write_text('{"prompt": "hello"}\n{"text": "hello"}\n')
    with pytest.raises(Refused, match="line 2 has neither messages nor prompt"):
        read_prompts(path, "mine")


def test_the_documented_command_is_one_of_this_program() -> None:
    page = (REPO / "docs" / "acceptance.md").read_text()
    (command,) = re.findall(r"^python -m benchmarks\.golden_al (.*)$", page, re.MULTILINE)
    given = parser().parse_args(shlex.split(command))
    assert given.url == ["http://127.0.0.1:8200"] and given.dataset == "SPEED-Bench coding"
    assert f"({given.min_steps:,})" in page
